# SPDX-License-Identifier: Apache-2.0
"""``bench-host``: what a step's mono decode costs on the host, vLLM's ``mono_decode.py`` against ours.

A DeepSeek-V4.1 step asks the mono decode once a layer, 40 times: whether it takes the step, and with what
the kernels are to be called. Each side does that in a process of its own, with its own tree's vLLM, for
layers, metadata and caches of the shapes that a server has, and kernels that return at once. What is left is
the host's work. The processes take turns, so that neither side has the machine's better minutes to itself.

The host's work shows in eager steps and in steps that vLLM's path takes. A replayed CUDA graph has none of
it.

A time depends on who else uses the machine. So each side also counts what it does in one step: the bytecodes
and the calls of Python. Those are the same in every run, and hold a commit to the goal without a clock.

A second table says what mono decode takes of the model files that upstream owns: the lines that the base
spends on it, and those that our series adds.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

LAYERS = 40
INDEX_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)
SWA_GROUPS = 4
ROWS = 6
HIDDEN, STREAMS, RECORD, BLOCK, WINDOW = 5120, 4, 584, 128, 128
WARMUP_STEPS = 200
SLICE = 50  # steps of which the median is taken; the fastest slice counts, as the least disturbed one
GOAL = 0.5
VLLM, OURS = "vLLM", "ours"
# What a step is, and what runs of a layer.
CASES = {
    "decode step, whole layers": ("decode", "whole"),
    "decode step, FFN launches": ("decode", "ffn"),
    "prefill step, whole layers": ("prefill", "whole"),
    "prefill step, FFN launches": ("prefill", "ffn"),
}
MODEL_FOLDER = "vllm/models/deepseek_v41/amd"
MODEL_FILES = ("model.py", "vl_model.py", "dspark.py", "rocm.py")
MONO_DECODE = "vllm.models.deepseek_v41.amd.mono_decode"


@dataclass(frozen=True)
class ModelLines:
    """Lines of one upstream model file: what the base spends on mono decode, what our series adds."""

    path: str
    base: int
    added: int


@dataclass(frozen=True)
class Figure:
    """One case's host time of a step, in microseconds: a side's fastest slice of steps."""

    case: str
    vllm_us: float
    ours_us: float

    @property
    def ratio(self) -> float:
        return self.ours_us / self.vllm_us


@dataclass(frozen=True)
class Work:
    """What one step of a case does on the host: bytecodes run, and calls of Python and C functions."""

    case: str
    vllm: tuple[int, int]
    ours: tuple[int, int]

    @property
    def ratio(self) -> float:
        """The larger of ours to vLLM's bytecodes and ours to vLLM's calls."""
        return max(ours / vllm for ours, vllm in zip(self.ours, self.vllm, strict=True))


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench-host``."""
    parser = subparsers.add_parser(
        "bench-host", help="host time of a step's mono decode, ours against vLLM's"
    )
    parser.add_argument("--base", type=Path, help="the folder of the pinned vllm/ (build/base)")
    parser.add_argument("--tree", type=Path, help="the folder of the laid vllm/ (build/tree)")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, and compare with the goal: 0 when every case reaches it, else 1."""
    from rocm_overlay import table
    from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
    from rocm_overlay.project import Project

    if min(arguments.steps, arguments.turns) < 1:
        seen = f"--steps {arguments.steps} --turns {arguments.turns}"
        raise OverlayError("nothing to measure", seen=seen, wanted="at least 1 of each")
    project = Project.find()
    trees = {VLLM: arguments.base or project.base, OURS: arguments.tree or project.tree}
    figures = measure(trees, project.root / "tests" / "harness", arguments.steps, arguments.turns)
    rows = [(one.case, f"{one.vllm_us:.1f}", f"{one.ours_us:.1f}", f"{one.ratio:.2f}") for one in figures]
    print(f"host time of one step of {LAYERS} layers, {ROWS} rows, us (fastest median of {SLICE} steps)\n")
    print(table.render(("case", VLLM, OURS, "ratio"), rows))
    works = count(trees, project.root / "tests" / "harness")
    rows = [(one.case, _pair(one.vllm), _pair(one.ours), f"{one.ratio:.2f}") for one in works]
    print(f"\n{table.render(('bytecodes and calls of the step', VLLM, OURS, 'larger ratio'), rows)}")
    lines = [(one.path, one.base, one.added) for one in model_lines(project.base, project.patches)]
    print(f"\n{table.render(('model file', 'mono lines of the base', 'lines our series adds'), lines)}")
    worst = max(*(one.ratio for one in figures), *(one.ratio for one in works))
    reached = worst <= GOAL
    print(f"\nlargest ratio {worst:.2f}, goal {GOAL}: {'reached' if reached else 'not reached'}")
    return EXIT_OK if reached else EXIT_FAILED_CHECK


def _pair(work: tuple[int, int]) -> str:
    return f"{work[0]} {work[1]}"


def model_lines(base: Path, patches: Path) -> list[ModelLines]:
    """The model files that the base's mono decode is in, or that our series adds a line to.

    Args:
        base: the folder that holds the base's vllm/.
        patches: the folder of our series; every patch of it counts.
    """
    from rocm_overlay.series import load_series

    found = {f"{MODEL_FOLDER}/{name}": 0 for name in MODEL_FILES}
    for patch in load_series(patches).patches:
        for diff in patch.diffs:
            if diff.path in found:
                found[diff.path] += sum(mark == "+" for hunk in diff.hunks for mark, _ in hunk.lines)
    return [
        ModelLines(path, mono_lines((base / path).read_text(encoding="utf-8")), added)
        for path, added in found.items()
    ]


def mono_lines(source: str) -> int:
    """Lines of the statements that name mono decode; a condition on it counts with what it guards."""
    lines: set[int] = set()

    def visit(statements: list[ast.stmt]) -> None:
        for statement in statements:
            bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            heads = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
            nested = any(bodies)
            if any("mono" in ast.unparse(head).lower() for head in (heads if nested else [statement])):
                last: ast.stmt = bodies[0][-1] if nested else statement
                lines.update(range(statement.lineno, (last.end_lineno or last.lineno) + 1))
            for body in bodies:
                visit(body)

    visit(ast.parse(source).body)
    return len(lines)


def measure(trees: dict[str, Path], harness: Path, steps: int, turns: int) -> list[Figure]:
    """Let both sides take turns.

    Args:
        trees: for each side the folder that holds its ``vllm/``.
        harness: the folder of fake_rocm.py.
        steps: steps of a turn.
        turns: turns of each side.

    Raises:
        OverlayError: a tree or the harness is missing, or a side failed.
    """
    times: dict[str, dict[str, list[float]]] = {side: {case: [] for case in CASES} for side in trees}
    for _ in range(turns):
        for side, tree in trees.items():
            for case, value in _turn(side, tree, harness, steps).items():
                times[side][case].append(value)
    return [
        Figure(case, *(min(times[side][case]) for side in (VLLM, OURS))) for case in CASES
    ]  # fmt: skip


def count(trees: dict[str, Path], harness: Path) -> list[Work]:
    """What each side does in a step; the arguments are those of ``measure``."""
    done = {side: _turn(side, tree, harness, 0) for side, tree in trees.items()}
    return [Work(case, *(tuple(done[side][case]) for side in (VLLM, OURS))) for case in CASES]


def _turn(side: str, tree: Path, harness: Path, steps: int) -> dict[str, Any]:
    """One side's answer by case: microseconds of a step, or what a step does where no steps are timed."""
    from rocm_overlay.errors import OverlayError

    for needed, wanted in ((tree / "vllm", "make tree"), (harness / "fake_rocm.py", "run from a checkout")):
        if not needed.exists():
            raise OverlayError(f"bench-host: {side}: {needed} is missing", fix=wanted)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(harness)])}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    child = subprocess.run(
        [sys.executable, __file__, str(steps)], env=environment, capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise OverlayError(f"bench-host: {side} failed", seen=child.stderr[-2000:])
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


# From here on the code runs in a side's own process, where ``vllm`` is that side's.


class _Box(SimpleNamespace):
    """Attributes that can be referred to weakly."""


class _Kernels:
    """Kernels that count their launches and return."""

    def __init__(self) -> None:
        self.launches = 0

    def forward(self, *arguments: Any, **options: Any) -> tuple[None, ...]:
        self.launches += 1
        return (None,)

    def ffn(self, *arguments: Any, **options: Any) -> tuple[None, ...]:
        self.launches += 1
        return (None,)

    def __call__(self, *inputs: Any, **options: Any) -> tuple[None, ...]:
        self.launches += 1
        return (None,)

    def scratch(self, tokens: int) -> None:
        return None

    prepare = scratch


def _decoder_layer(index: int, indexer: Any) -> Any:
    """A decoder layer's modules and attributes as far as the mono decode reads them, modules being
    modules."""
    import torch

    def module(**attributes: Any) -> Any:
        made = torch.nn.Module()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def cache() -> Any:
        return torch.zeros(2, BLOCK, RECORD, dtype=torch.uint8)

    window = module(prefix=f"layers.{index}.window", kv_cache=cache())
    source = module(kv_cache=cache())
    attn = module(
        layer_id=index, compress_ratio=1, swa_cache_layer=window,
        compressed_cache_prefix="layers.2.compressed",
        topk_indices_buffer=torch.zeros(64, 512, dtype=torch.int32),
        indexer=indexer if index in INDEX_SOURCES else None, _compressed_kv_cache=lambda: source.kv_cache,
    )  # fmt: skip
    return module(attn=attn, engram=None, hc_mult=STREAMS)


def _metadata(layers: list[Any], prefills: int) -> dict[str, Any]:
    import torch

    def group() -> Any:
        return SimpleNamespace(
            num_prefills=prefills, num_decodes=1, num_decode_tokens=ROWS, block_size=BLOCK,
            decode_swa_width=WINDOW, decode_swa_indices=torch.zeros(ROWS, 1, WINDOW, dtype=torch.int32),
            decode_swa_lens=torch.zeros(ROWS, dtype=torch.int32),
            token_to_req_indices=torch.zeros(ROWS, dtype=torch.int32),
            slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        )  # fmt: skip

    groups = [group() for _ in range(SWA_GROUPS)]
    named = {layer.attn.swa_cache_layer.prefix: groups[i % SWA_GROUPS] for i, layer in enumerate(layers)}
    compressed = SimpleNamespace(block_size=BLOCK, block_table=torch.zeros(1, 4, dtype=torch.int32))
    return named | {"layers.2.compressed": compressed}


def _vllm_s(module: Any, layers: list[Any], ffn: bool, kernels: _Kernels) -> list[Any]:
    module._mono_runner = lambda *arguments: kernels
    module._max_rows = lambda: module.MAX_ROWS
    module.MonoDecodeLayer.weights = lambda mono, layer: None
    return [module.MonoDecodeLayer(ffn_only=ffn) for _ in layers]


def _ours(module: Any, layers: list[Any], ffn: bool, kernels: _Kernels) -> list[Any]:
    from vllm.models.common.specialized_decode.decode import Launch, LayerPlan

    opened = module.MonoKernels({Launch.WHOLE: kernels, Launch.PART: kernels})
    module.MonoDecode.open_kernels = lambda decode: opened
    module.layer_weights = lambda layer, mono: None
    options = SimpleNamespace(specialized_decode="auto", specialized_decode_strict=False)
    parallel = SimpleNamespace(tensor_parallel_size=4)
    config = _Box(kernel_config=options, parallel_config=parallel)
    decode = module.MonoDecode("target", config, module.KernelBuild(4, module.TARGET_ROUTING, WINDOW))
    monos = []
    for i, layer in enumerate(layers):
        plan = LayerPlan(layer.attn.swa_cache_layer.prefix, i, Launch.PART if ffn else Launch.WHOLE)
        monos.append(module.MonoDecodeLayer(layer, plan, module.TARGET_ROUTING, decode))
        decode.add_layer(plan, monos[-1])
    return monos


def _step(layers: list[Any], monos: list[Any], metadata: dict[str, Any], ffn: bool) -> Callable[[], None]:
    """One step: a new forward context, and every layer's call."""
    import torch
    from vllm.forward_context import ForwardContext, override_forward_context

    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    residual = torch.zeros(ROWS, STREAMS, HIDDEN, dtype=torch.bfloat16)
    mixes = (torch.zeros(ROWS, STREAMS, 1), torch.zeros(ROWS, STREAMS, STREAMS), torch.zeros(ROWS, STREAMS))
    positions = torch.zeros(ROWS, dtype=torch.int64)
    pairs = list(zip(layers, monos, strict=True))

    def run_whole() -> None:
        with override_forward_context(ForwardContext({}, metadata, {})):
            for layer, mono in pairs:
                mono(layer, x, positions, residual, *mixes, None, None)

    def run_ffn() -> None:
        with override_forward_context(ForwardContext({}, metadata, {})):
            for layer, mono in pairs:
                mono.ffn(layer, x, residual, *mixes)

    return run_ffn if ffn else run_whole


def _time_us(step: Callable[[], None], steps: int) -> float:
    for _ in range(WARMUP_STEPS):
        step()
    gc.collect()
    gc.disable()
    medians = []
    for first in range(0, steps, SLICE):
        times = []
        for _ in range(min(SLICE, steps - first)):
            started = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - started)
        medians.append(statistics.median(times))
    gc.enable()
    return min(medians) / 1000


def _work(step: Callable[[], None]) -> tuple[int, int]:
    """The bytecodes that a step runs, and the calls that it makes, once it has settled."""
    counted = {"opcode": 0, "call": 0, "c_call": 0}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counted["opcode"] += 1
        return trace

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            counted[event] += 1

    for watch, watcher in ((sys.settrace, trace), (sys.setprofile, profile)):
        step()
        gc.collect()
        gc.disable()
        watch(watcher)
        try:
            step()
        finally:
            watch(None)
            gc.enable()
    return counted["opcode"], counted["call"] + counted["c_call"]


def _child(steps: int) -> None:
    import importlib

    fake_rocm = importlib.import_module("fake_rocm")

    fake_rocm.install("gfx950")
    import torch

    torch.accelerator.current_device_index = lambda: 0
    torch.set_num_threads(1)
    module = importlib.import_module(MONO_DECODE)
    make = _ours if hasattr(module, "MonoDecode") else _vllm_s
    figures: dict[str, Any] = {}
    for case, (kind, launch) in CASES.items():
        layers = [_decoder_layer(i, object()) for i in range(LAYERS)]
        kernels = _Kernels()
        monos = make(module, layers, launch == "ffn", kernels)
        metadata = _metadata(layers, prefills=1 if kind == "prefill" else 0)
        step = _step(layers, monos, metadata, launch == "ffn")
        step()
        wanted = LAYERS if kind == "decode" else 0
        if kernels.launches != wanted:
            raise RuntimeError(f"{case}: a step launched {kernels.launches} layers, wanted {wanted}")
        figures[case] = _time_us(step, steps) if steps else _work(step)
    print(json.dumps(figures))


if __name__ == "__main__":
    _child(int(sys.argv[1]))
