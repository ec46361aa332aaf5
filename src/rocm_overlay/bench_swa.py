# SPDX-License-Identifier: Apache-2.0
"""``bench-swa``: launches and GPU time of a step's sliding-window metadata, vLLM's operations against ours.

A DeepSeek-V4.1 decode step with DSpark builds this metadata for seven groups, four of the target and three
of the draft. Each group is built once a step into buffers of the serving size, by vLLM's own operations or
by our one launch, on the GPU that is present. Launches and their GPU times come from a profiler trace, in
which kernels, fills and copies all count. Host time is not part of either figure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_overlay import table
from rocm_overlay.errors import OverlayError
from rocm_overlay.project import Project

if TYPE_CHECKING:
    import torch

TARGET_GROUPS = 4
DRAFT_GROUPS = 3
ROWS = (1, 6, 12, 24, 32, 48)
CONTEXTS = (1 << 10, 32 << 10, 128 << 10, 1 << 20)
ROWS_PER_REQUEST = 6
DRAFT_TOKENS = 5
WINDOW = 128
BLOCK_SIZE = 128
# Of the published servers: --max-num-batched-tokens and --max-num-seqs.
MAX_TOKENS = 16384
MAX_REQUESTS = 256
WARMUP_STEPS = 5
REPORT_NAME = "swa"
VLLM, OURS = "vllm", "ours"


@dataclass(frozen=True)
class Batch:
    """A decode batch of N rows and R requests, as the metadata builder gets it; tensors on one device.

    Rows of a request are consecutive. ``slot_mapping`` is int64 [N], negative for a padded row; the others
    are int32: ``query_start_loc`` [R + 1], ``seq_lens`` [R], ``token_to_req`` [N], ``block_table``
    [>= R, blocks], ``replay_start`` [>= R].
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    block_table: torch.Tensor
    replay_start: torch.Tensor
    block_size: int
    window: int = WINDOW

    @property
    def num_rows(self) -> int:
        return len(self.slot_mapping)


@dataclass(frozen=True)
class Group:
    """A group's persistent buffers for T tokens, W slots a row.

    ``is_valid`` bool [T]; int32: ``indices`` [T, 1, W], ``lens`` [T], ``ragged`` [T * W], ``indptr`` [T + 1].
    """

    noncausal: bool
    is_valid: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor
    ragged: torch.Tensor
    indptr: torch.Tensor

    @classmethod
    def allocate(cls, device: str, width: int, noncausal: bool, max_tokens: int = MAX_TOKENS) -> Group:
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            noncausal=noncausal,
            is_valid=torch.zeros(max_tokens, dtype=torch.bool, device=device),
            indices=zeros(max_tokens, 1, width),
            lens=zeros(max_tokens),
            ragged=zeros(max_tokens * width),
            indptr=zeros(max_tokens + 1),
        )

    @property
    def width(self) -> int:
        return int(self.indices.shape[-1])


def build_with_vllm(batch: Batch, group: Group) -> None:
    """Fill ``group`` with the operations that vLLM's own builder runs for a decode batch."""
    import torch
    from vllm.models.deepseek_v41.amd.rocm import _copy_ragged_to_graph_buffers
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.attention.ops.rocm_aiter_mla_sparse import build_ragged_indices_from_dense

    rows, width = batch.num_rows, group.width
    valid = group.is_valid[:rows]
    torch.ge(batch.slot_mapping, 0, out=valid)
    group.lens[rows:] = 0
    rows_of = {
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "token_to_req_indices": batch.token_to_req,
        "is_valid_token": valid,
        "block_table": batch.block_table,
        "block_size": batch.block_size,
        "num_tokens": rows,
        "token_offset": 0,
    }
    window = (group.indices, group.lens, batch.window, width)
    if group.noncausal:
        sparse_swa._COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL(*window, **rows_of)
    else:
        sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL(
            *window,
            left_visible=group.lens,
            right_visible=group.lens,
            replay_start=batch.replay_start,
            **rows_of,
        )
    dense = group.indices[:rows].view(rows, width)
    compacted = build_ragged_indices_from_dense(dense, group.lens[:rows])
    _copy_ragged_to_graph_buffers(*compacted, group.ragged, group.indptr, rows, width)


def build_with_ours(batch: Batch, group: Group) -> None:
    """Fill ``group`` with the one launch of the overlay."""
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    swa_decode_meta.launch(
        batch.slot_mapping, group.is_valid[: batch.num_rows], group.indices, group.lens, group.ragged,
        group.indptr, batch.query_start_loc, batch.seq_lens, batch.token_to_req, batch.block_table,
        batch.replay_start, batch.num_rows, batch.window, batch.block_size, noncausal=group.noncausal,
    )  # fmt: skip


IMPLEMENTATIONS: dict[str, Callable[[Batch, Group], None]] = {VLLM: build_with_vllm, OURS: build_with_ours}


def serving_batch(device: str, rows: int, context: int, seed: int = 0) -> Batch:
    """A batch of full windows: ``rows`` rows over requests of ``context`` tokens each.

    A request has ``ROWS_PER_REQUEST`` rows, or the largest smaller number that divides ``rows``.
    """
    import torch

    per_request = math.gcd(rows, ROWS_PER_REQUEST) if rows % ROWS_PER_REQUEST == 0 else math.gcd(rows, 4)
    requests = rows // per_request
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-context // BLOCK_SIZE) + 1

    def int32(values: torch.Tensor) -> torch.Tensor:
        return values.to(device=device, dtype=torch.int32)

    return Batch(
        slot_mapping=torch.randint(0, 1 << 30, (rows,), generator=generator).to(device),
        query_start_loc=int32(torch.arange(requests + 1) * per_request),
        seq_lens=int32(torch.full((requests,), context)),
        token_to_req=int32(torch.arange(rows) // per_request),
        block_table=int32(torch.randint(1, 200_000, (MAX_REQUESTS, blocks), generator=generator)),
        replay_start=int32(torch.zeros(MAX_REQUESTS + 1)),
        block_size=BLOCK_SIZE,
    )


def step_groups(device: str) -> list[Group]:
    """The seven groups of a step, each with buffers of its own."""
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    draft_width = get_dspark_swa_index_width(WINDOW, DRAFT_TOKENS)
    target = [Group.allocate(device, WINDOW, noncausal=False) for _ in range(TARGET_GROUPS)]
    return target + [Group.allocate(device, draft_width, noncausal=True) for _ in range(DRAFT_GROUPS)]


@dataclass(frozen=True)
class Measurement:
    """One implementation at one batch shape: launches a step, by name, and GPU microseconds a step."""

    implementation: str
    rows: int
    context: int
    launches: int
    gpu_us: float
    gpu_us_low: float
    gpu_us_high: float
    kernels: dict[str, int]


def device_events(run: Callable[[], None]) -> list[tuple[str, float]]:
    """Names and GPU microseconds of what ``run`` put on the GPU, in order of start, from a trace."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    kept = [
        (event.start_ns(), event.name(), event.duration_ns() / 1e3)
        for event in trace.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    ]
    return [(name, microseconds) for _, name, microseconds in sorted(kept)]


def measure(name: str, batch: Batch, groups: Sequence[Group], context: int, steps: int) -> Measurement:
    """Trace ``steps`` steps of an implementation.

    Raises:
        OverlayError: the trace does not hold the same number of launches for each step.
    """
    build = IMPLEMENTATIONS[name]

    def step() -> None:
        for group in groups:
            build(batch, group)

    def run() -> None:
        for _ in range(steps):
            step()

    for _ in range(WARMUP_STEPS):
        step()
    device_events(step)  # the first trace of a process pays for the profiler's own set-up
    events = device_events(run)
    if not events or len(events) % steps:
        raise OverlayError(
            "the profiler trace is incomplete",
            seen=f"{len(events)} launches in {steps} steps",
            wanted="the same number for each step",
            fix="run the benchmark again with nothing else on the GPU",
        )
    size = len(events) // steps
    chunks = [events[first : first + size] for first in range(0, len(events), size)]
    times = sorted(sum(microseconds for _, microseconds in chunk) for chunk in chunks)
    return Measurement(
        implementation=name,
        rows=batch.num_rows,
        context=context,
        launches=size,
        gpu_us=statistics.median(times),
        gpu_us_low=times[0],
        gpu_us_high=times[-1],
        kernels=dict(Counter(name for name, _ in chunks[-1])),
    )


def measure_all(device: str, rows: Sequence[int], contexts: Sequence[int], steps: int) -> list[Measurement]:
    """Both implementations at every shape, after checking that they agree on it.

    Raises:
        OverlayError: more rows than the kernel takes, a difference between the two, or an incomplete trace.
    """
    require_rows(rows)
    groups = step_groups(device)
    found = []
    for context in contexts:
        for count in rows:
            batch = serving_batch(device, count, context)
            for group in (groups[0], groups[-1]):
                check_agreement(batch, group)
            found += [measure(name, batch, groups, context, steps) for name in IMPLEMENTATIONS]
    return found


def check_agreement(batch: Batch, group: Group) -> None:
    """Build the group both ways and compare all that a reader reads.

    Raises:
        OverlayError: the two differ.
    """
    expected = readable(batch, group, build_with_vllm)
    actual = readable(batch, group, build_with_ours)
    different = [name for name in expected if not expected[name].equal(actual[name])]
    if different:
        raise OverlayError(
            f"our metadata differs from vLLM's at {batch.num_rows} rows",
            seen=", ".join(different),
            wanted="equal values in everything that a reader reads",
            fix="run the tests of tests/device on this machine",
        )


def readable(batch: Batch, group: Group, build: Callable[[Batch, Group], None]) -> dict[str, torch.Tensor]:
    """What a reader reads of ``group`` once ``build`` filled it, from buffers that held rubbish before."""
    rows = batch.num_rows
    group.is_valid.logical_not_()
    for buffer in (group.indices, group.lens, group.ragged, group.indptr):
        buffer.fill_(-7)
    build(batch, group)
    return {
        "is_valid": group.is_valid[:rows].clone(),
        "indices": group.indices[:rows].clone(),
        "lens": group.lens.clone(),
        "indptr": group.indptr[: rows + 1].clone(),
        "ragged": group.ragged[: int(group.indptr[rows])].clone(),
    }


def results(found: Sequence[Measurement], steps: int) -> dict[str, Any]:
    """The measurements with what they were taken on, ready for JSON."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "steps": steps,
        "groups": {"target": TARGET_GROUPS, "draft": DRAFT_GROUPS},
        "window": WINDOW,
        "block_size": BLOCK_SIZE,
        "max_tokens": MAX_TOKENS,
        "measurements": [asdict(one) for one in found],
    }


def _pairs(report: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """vLLM's and our measurement of each shape."""
    by_shape: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for one in report["measurements"]:
        by_shape.setdefault((one["context"], one["rows"]), {})[one["implementation"]] = one
    return [(shape[VLLM], shape[OURS]) for shape in by_shape.values()]


def render(report: dict[str, Any]) -> str:
    """The report as a table, one line a shape."""
    headers = ("context", "rows", "launches vllm", "ours", "us a step vllm", "ours", "ratio")
    lines = [
        (
            theirs["context"], theirs["rows"], theirs["launches"], ours["launches"],
            f"{theirs['gpu_us']:.1f}", f"{ours['gpu_us']:.1f}", f"{ours['gpu_us'] / theirs['gpu_us']:.3f}",
        )
        for theirs, ours in _pairs(report)
    ]  # fmt: skip
    title = f"{report['device']}, torch {report['torch']}, triton {report['triton']}"
    return f"{title}: median of {report['steps']} steps\n{table.render(headers, lines)}"


def plot(report: dict[str, Any], folder: Path, name: str = REPORT_NAME) -> list[Path]:
    """Draw GPU time against rows, one panel a context, as ``name``.png and .svg in ``folder``."""
    import matplotlib

    matplotlib.use("Agg")
    # The same report gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    from matplotlib import pyplot

    contexts = sorted({one["context"] for one in report["measurements"]})
    figure, axes = pyplot.subplots(
        1, len(contexts), figsize=(3.2 * len(contexts), 3.4), sharey=True, squeeze=False
    )
    for axis, context in zip(axes[0], contexts, strict=True):
        for implementation, marker in ((VLLM, "o"), (OURS, "s")):
            points = [
                one
                for one in report["measurements"]
                if (one["context"], one["implementation"]) == (context, implementation)
            ]
            rows = [one["rows"] for one in points]
            label = f"{implementation}: {points[0]['launches']} launches"
            axis.plot(rows, [one["gpu_us"] for one in points], marker=marker, label=label)
            low, high = ([one[f"gpu_us_{end}"] for one in points] for end in ("low", "high"))
            axis.fill_between(rows, low, high, alpha=0.2)
        axis.set(title=f"context {context}", xlabel="rows", ylim=(0, None))
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("GPU time a step, us")
    figure.suptitle(f"SWA decode metadata, 7 groups, {report['device']}")
    figure.tight_layout()
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def use_tree(tree: Path | None) -> None:
    """Have ``import vllm`` find the laid tree, or the given one, unless vLLM is imported already.

    Raises:
        OverlayError: the folder holds no vLLM.
    """
    if "vllm" in sys.modules:
        return
    folder = tree or Project.find().tree
    if (folder / "vllm").is_dir():
        sys.path.insert(0, str(folder))
    elif tree is not None:
        raise OverlayError(
            "no vLLM in the given tree",
            seen=str(folder),
            wanted="a folder that holds vllm/ with the overlay laid over it",
            fix="run make tree, or leave --tree out to use the installed vLLM",
        )


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise OverlayError(
            "bench-swa needs a GPU",
            seen="torch sees none",
            wanted="an AMD or NVIDIA GPU that torch and Triton can use",
            fix="run it on such a machine, or draw an earlier report with --report FILE",
        )


def require_rows(rows: Sequence[int]) -> None:
    """Refuse rows that the kernel of the tree does not take.

    Raises:
        OverlayError: a value above its limit.
    """
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    if max(rows) > swa_decode_meta.MAX_ROWS:
        raise OverlayError(
            "--rows asks for more rows than the kernel takes",
            seen=max(rows),
            wanted=f"1 to {swa_decode_meta.MAX_ROWS}",
            fix="leave the larger values out",
        )


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse sizes that no batch has.

    Raises:
        OverlayError: a value below its least.
    """
    least = {"steps": 1, "rows": 1, "contexts": ROWS_PER_REQUEST}
    for name, smallest in least.items():
        given = getattr(arguments, name)
        lowest = given if isinstance(given, int) else min(given)
        if lowest < smallest:
            raise OverlayError(
                f"--{name} is too small",
                seen=lowest,
                wanted=f"at least {smallest}",
                fix=f"give --{name} a larger value, or leave it out for the default",
            )


def read_report(file: Path) -> dict[str, Any]:
    """An earlier run's report.

    Raises:
        OverlayError: no such file, or one that holds no report.
    """
    try:
        report = json.loads(file.read_text())
        _pairs(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverlayError(
            "--report names no report of this benchmark",
            seen=f"{file}: {type(error).__name__}: {error}",
            wanted="the JSON file that bench-swa writes",
            fix="give the path of such a file, or leave --report out to measure",
        ) from None
    return dict(report)


def run(arguments: argparse.Namespace) -> int:
    """Measure or read a report, print its table, write report and plot into the output folder."""
    check_arguments(arguments)
    folder: Path = arguments.out
    name = REPORT_NAME
    if arguments.report is None:
        _require_gpu()
        use_tree(arguments.tree)
        found = measure_all("cuda", arguments.rows, arguments.contexts, arguments.steps)
        report = results(found, arguments.steps)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    else:
        report, name = read_report(arguments.report), arguments.report.stem
        folder.mkdir(parents=True, exist_ok=True)
    print(render(report))
    try:
        paths = plot(report, folder, name)
    except ModuleNotFoundError as missing:
        report_file = arguments.report or folder / f"{name}.json"
        print(f"no plot: {missing}; draw one elsewhere with --report {report_file}", file=sys.stderr)
    else:
        print("plot: " + ", ".join(map(str, paths)))
    return 0


def register(subparsers: Any) -> None:
    """Add the ``bench-swa`` verb."""
    parser = subparsers.add_parser("bench-swa", help="time the SWA decode metadata, vLLM's against ours")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for report and plot")
    parser.add_argument("--tree", type=Path, help="folder that holds vllm/ (default: build/tree)")
    parser.add_argument("--report", type=Path, help="draw this earlier report, measure nothing")
    parser.add_argument("--steps", type=int, default=50, help="steps in each trace")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.set_defaults(run=run)
