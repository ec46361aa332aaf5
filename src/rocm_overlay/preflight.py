# SPDX-License-Identifier: Apache-2.0
"""What is known to fail after the weights are read, refused before.

Each refusal names the flag or variable, what it holds, and the smallest change that works. All
that apply are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.machine import Gpu
from rocm_overlay.memory import GIB, MODEL_CONTEXT, MemoryPlan, ServerShape, plan, smallest_change
from rocm_overlay.recipe import Recipe, Value
from rocm_overlay.render import ServeCommand, text_of

# Every workgroup of a persistent launch must be resident: one a compute unit.
KERNEL_COMPUTE_UNITS = 256
KERNEL_TENSOR_PARALLEL = (2, 4)
KERNEL_MOE_BACKENDS = ("aiter", "aiter_mxfp4_bf16")

A4W4_VARIABLE = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
BREAKABLE_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

# Graph modes without piecewise capture. vLLM's default is FULL_AND_PIECEWISE.
WHOLE_GRAPH_MODES = frozenset({"FULL_DECODE_ONLY", "FULL", "NONE"})
DEFAULT_GRAPH_MODE = "FULL_AND_PIECEWISE"

_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Refusal:
    """One reason not to start: the flag or variable, why, what it holds, and what to do."""

    flag: str
    why: str
    seen: str
    change: str

    def __str__(self) -> str:
        return f"{self.flag} {self.seen}: {self.why}. Smallest change: {self.change}"


@dataclass(frozen=True)
class Settings:
    """The settings of a server that preflight judges, as read from its command and environment."""

    shape: ServerShape
    adaptive_verification: bool
    graph_mode: str
    breakable_graphs: str | None
    a4w4: bool
    moe_backend: str
    other_parallelism: tuple[str, ...]
    gpus: int


def read_settings(
    recipe: Recipe, command: ServeCommand, environ: Mapping[str, str], card_gib: float | None = None
) -> Settings:
    """The settings of ``command`` under ``environ`` (the server's whole environment).

    Args:
        card_gib: memory of the machine's smallest card; the recipe's where not known.

    Raises:
        OverlayError: a load-bearing flag is missing or holds what cannot be read.
    """
    values = command.values
    engram = _map(values, "engram-config")
    speculative = _map(values, "speculative-config")
    compilation = _map(values, "compilation-config")
    tensor_parallel = _integer(values, "tensor-parallel-size")
    pipeline = _integer(values, "pipeline-parallel-size", default=1)
    data = _integer(values, "data-parallel-size", default=1)
    others = [f"--data-parallel-size {data}"] if data > 1 else []
    others += ["--enable-expert-parallel"] if values.get("enable-expert-parallel") is True else []
    eager = values.get("enforce-eager") is True
    shape = ServerShape(
        architecture=recipe.hardware.architecture,
        card_gib=recipe.hardware.memory_gib if card_gib is None else card_gib,
        utilization=_number(values, "gpu-memory-utilization"),
        tensor_parallel=tensor_parallel,
        max_model_len=_context(values),
        max_num_batched_tokens=_integer(values, "max-num-batched-tokens"),
        max_num_seqs=_integer(values, "max-num-seqs"),
        drafts=_drafts(speculative),
        # vLLM's default is the host.
        engram_on_host=engram.get("cpu_offload", True) is not False,
        monokernel=values.get("monokernel") is True,
    )
    return Settings(
        shape=shape,
        adaptive_verification=speculative.get("enable_adaptive_verification") is True,
        graph_mode="NONE" if eager else str(compilation.get("cudagraph_mode", DEFAULT_GRAPH_MODE)).upper(),
        breakable_graphs=environ.get(BREAKABLE_VARIABLE),
        a4w4=environ.get(A4W4_VARIABLE, "0").lower() in ("1", "true"),
        moe_backend=str(values.get("moe-backend", "auto")).replace("-", "_"),
        other_parallelism=tuple(others),
        gpus=tensor_parallel * pipeline * data,
    )


def check(settings: Settings) -> list[Refusal]:
    """Every reason why a server with these settings cannot start or run, whatever the machine."""
    return [
        *_memory(plan(settings.shape)),
        *_adaptive_verification(settings),
        *_token_budget(settings.shape),
        *_kernels(settings),
        *_graphs(settings),
    ]


def check_machine(recipe: Recipe, settings: Settings, gpus: Sequence[Gpu], fitting: str) -> list[Refusal]:
    """Every reason why this machine cannot run the recipe.

    Args:
        gpus: the GPUs that the server would see.
        fitting: the names of recipes for this machine's architecture, or "".
    """
    found: list[Refusal] = []
    if len(gpus) < settings.gpus:
        change = (
            f"--tensor-parallel-size {_power_below(len(gpus))}, or a machine with {settings.gpus} GPUs"
            if gpus
            else "give the container --device /dev/kfd --device /dev/dri, on a machine with the GPUs"
        )
        flag = "--tensor-parallel-size"
        seen = f"{settings.shape.tensor_parallel}"
        found.append(Refusal(flag, f"needs {settings.gpus} GPUs, {len(gpus)} visible", seen, change))
    wrong = sorted({gpu.gfx for gpu in gpus} - {recipe.hardware.architecture})
    if wrong:
        change = f"--recipe {fitting}" if fitting else "a recipe of your own for this architecture"
        why = f"is for {recipe.hardware.architecture}, this machine has {', '.join(wrong)}"
        found.append(Refusal("--recipe", why, recipe.name, change))
    parts = [gpu for gpu in gpus if gpu.partitioned]
    if parts:
        whole = parts[0].full_compute_units
        why = f"GPU {parts[0].index} is a partition, {parts[0].compute_units} of {whole} compute units"
        if settings.shape.monokernel:
            why += f"; the persistent kernels need {KERNEL_COMPUTE_UNITS} resident"
        found.append(Refusal("GPU", why, parts[0].gfx, "set the cards to one partition (SPX)"))
    return found


def refuse(recipe: str, refusals: Sequence[Refusal]) -> None:
    """Raise all of ``refusals`` as one error; nothing where there are none.

    Raises:
        CheckFailed: with a line for each refusal.
    """
    if not refusals:
        return
    count = f"{len(refusals)} reasons" if len(refusals) > 1 else "one reason"
    lines = "\n          ".join(f"{refusal.flag} {refusal.seen}: {refusal.why}" for refusal in refusals)
    fixes = "\n          ".join(refusal.change for refusal in refusals)
    raise CheckFailed(f"preflight refuses {recipe} for {count}", seen=lines, fix=fixes)


def _memory(planned: MemoryPlan) -> list[Refusal]:
    if planned.fits:
        return []
    shape = planned.shape
    change = smallest_change(shape)
    flag = change.flag if change else "--tensor-parallel-size"
    left = f"{abs(planned.kv_left):.1f} GiB {'below zero' if planned.kv_left < 0 else 'left'}"
    why = (
        f"the KV cache ends {left} on a {shape.card_gib:g} GiB card, "
        f"one request of {shape.max_model_len} tokens needs {planned.kv_needed:.1f}"
    )
    advice = change.advice if change else "no single flag is enough: larger cards, or another recipe"
    return [Refusal(flag, why, _shape_value(shape, flag), advice)]


def _shape_value(shape: ServerShape, flag: str) -> str:
    return {
        "--gpu-memory-utilization": f"{shape.utilization:g}",
        "--engram-config": '{"cpu_offload":false}',
        "--max-num-batched-tokens": str(shape.max_num_batched_tokens),
        "--monokernel": "on",
        "--max-num-seqs": str(shape.max_num_seqs),
        "--max-model-len": str(shape.max_model_len),
        "--tensor-parallel-size": str(shape.tensor_parallel),
    }[flag]


def _adaptive_verification(settings: Settings) -> list[Refusal]:
    if not settings.adaptive_verification:
        return []
    # The base's sparse attention on ROCm replays graphs of one query length only.
    return [
        Refusal(
            "--speculative-config.enable_adaptive_verification",
            "the base cannot verify adaptively on ROCm and stops when graphs are captured",
            "true",
            "--speculative-config.enable_adaptive_verification false",
        )
    ]


def _token_budget(shape: ServerShape) -> list[Refusal]:
    if shape.max_num_batched_tokens >= shape.decode_rows:
        return []
    fewer = shape.max_num_batched_tokens // (1 + shape.drafts)
    alternative = f", or --max-num-seqs {fewer}" if fewer else ""
    return [
        Refusal(
            "--max-num-batched-tokens",
            f"below (1 + {shape.drafts} drafts) x {shape.max_num_seqs} sequences = {shape.decode_rows}",
            str(shape.max_num_batched_tokens),
            f"--max-num-batched-tokens {shape.decode_rows}{alternative}",
        )
    ]


def _kernels(settings: Settings) -> list[Refusal]:
    shape = settings.shape
    if not shape.monokernel:
        return []
    found: list[Refusal] = []
    if settings.a4w4:
        why = "the kernels behind --monokernel read the A8W4 layout, not this one"
        found.append(Refusal(A4W4_VARIABLE, why, "1", f"unset {A4W4_VARIABLE}, or --no-monokernel"))
    if shape.tensor_parallel not in KERNEL_TENSOR_PARALLEL:
        why = "the kernels behind --monokernel are built for TP 2 and 4"
        change = "--no-monokernel, or --tensor-parallel-size 4"
        found.append(Refusal("--tensor-parallel-size", why, str(shape.tensor_parallel), change))
    for flag in settings.other_parallelism:
        why = "the kernels behind --monokernel know tensor parallelism only"
        found.append(Refusal(flag.split()[0], why, " ".join(flag.split()[1:]) or "on", f"drop {flag}"))
    if shape.architecture == "gfx950" and settings.moe_backend not in KERNEL_MOE_BACKENDS:
        why = "the kernels behind --monokernel read AITER's expert layout"
        found.append(Refusal("--moe-backend", why, settings.moe_backend, "--moe-backend aiter"))
    return found


def _graphs(settings: Settings) -> list[Refusal]:
    if settings.shape.architecture != "gfx942":
        return []
    found: list[Refusal] = []
    why = "piecewise capture ends every worker with a segmentation fault on gfx942"
    if settings.graph_mode not in WHOLE_GRAPH_MODES:
        change = "--compilation-config.cudagraph_mode FULL_DECODE_ONLY"
        found.append(Refusal("--compilation-config.cudagraph_mode", why, settings.graph_mode, change))
    if settings.breakable_graphs != "0" and settings.graph_mode != "NONE":
        seen = settings.breakable_graphs or "unset, which turns breakable graphs on for this model"
        why = f"breakable graphs are piecewise, and {why}"
        found.append(Refusal(BREAKABLE_VARIABLE, why, seen, f"{BREAKABLE_VARIABLE}=0"))
    return found


def with_card(settings: Settings, gpus: Sequence[Gpu]) -> Settings:
    """``settings`` with the memory of the smallest of ``gpus`` in place of the recipe's.

    GPUs of another architecture and partitions are refused for what they are; advice on flags from
    their memory would mislead.
    """
    sizes = [
        gpu.memory_bytes
        for gpu in gpus
        if gpu.gfx == settings.shape.architecture and not gpu.partitioned and gpu.memory_bytes
    ]
    if not sizes:
        return settings
    return replace(settings, shape=replace(settings.shape, card_gib=round(min(sizes) / GIB, 2)))


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _unreadable(flag: str, value: object, wanted: str) -> OverlayError:
    return OverlayError(
        f"--{flag} cannot be read",
        seen=value,
        wanted=wanted,
        fix=f"correct --{flag}, or leave it to the recipe",
    )


def _map(values: Mapping[str, Value], flag: str) -> dict[str, object]:
    value = values.get(flag, {})
    if not isinstance(value, dict):
        raise _unreadable(flag, text_of(value), "a JSON map")
    return value


def _integer(values: Mapping[str, Value], flag: str, default: int | None = None) -> int:
    value = values.get(flag, default)
    if value is None:
        raise _unreadable(flag, "not set", "a number: preflight takes no default that may change")
    readable = _READABLE.fullmatch(str(value)) if not isinstance(value, bool) else None
    if readable is None:
        raise _unreadable(flag, text_of(value), "a whole number, or one such as 16k or 1M")
    number, unit = readable.groups()
    # As vLLM reads them: small letters count in thousands, capital ones in 1024s.
    scaled = float(number) * (_BINARY.get(unit) or _DECIMAL[unit])
    if scaled != int(scaled) or scaled < 1:
        raise _unreadable(flag, text_of(value), "a whole number, 1 or more")
    return int(scaled)


def _number(values: Mapping[str, Value], flag: str) -> float:
    value = values.get(flag)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _unreadable(flag, "not set" if value is None else text_of(value), "a number above 0, at most 1")
    return float(value)


def _context(values: Mapping[str, Value]) -> int:
    return MODEL_CONTEXT if values.get("max-model-len") in ("auto", -1) else _integer(values, "max-model-len")


def _drafts(speculative: Mapping[str, object]) -> int:
    drafts = speculative.get("num_speculative_tokens", 0)
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0:
        raise _unreadable("speculative-config.num_speculative_tokens", drafts, "a whole number, 0 or more")
    return drafts
