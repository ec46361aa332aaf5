# SPDX-License-Identifier: Apache-2.0
"""The rules of preflight: what is known to fail, on any machine and on this one.

A rule gives a fault with the changes that may remove it, the smallest first. Whether one does, on
this machine and with everything else that the user set, is tried by ``preflight.check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocm_overlay.kernel_arches import tp_sizes
from rocm_overlay.machine import VISIBILITY, Gpu, visible_gpus
from rocm_overlay.memory import GIB, FlagChange, ServerShape, changes_that_fit, changes_that_help, plan
from rocm_overlay.recipe import Recipe
from rocm_overlay.settings import A4W4_VARIABLE, BREAKABLE_VARIABLE, Change, Settings, with_card

# Every workgroup of a persistent launch must be resident: one a compute unit.
KERNEL_COMPUTE_UNITS = 256
KERNEL_MOE_BACKENDS = {
    "gfx950": ("aiter", "aiter_mxfp4_bf16"),
    "gfx942": ("aiter", "aiter_triton_mxfp4_bf16"),
}

GRAPH_MODE_FLAG = "--compilation-config.cudagraph_mode"
# Graph modes without piecewise capture.
WHOLE_GRAPH_MODES = frozenset({"FULL_DECODE_ONLY", "FULL", "NONE"})
# Those with which the kernels are refused, and why.
KERNEL_GRAPH_MODES = {
    "FULL": "its graphs replay a decode step's kernels for batches with prefills too",
    "PIECEWISE": "the kernels run in no piecewise graph",
}


@dataclass(frozen=True)
class Fault:
    """One reason not to start.

    Attributes:
        rule: the rule that found it; two faults of one rule are the same reason.
        flag: the flag or variable.
        changes: what may remove it, the smallest first.
        partial: what helps without being enough.
        alternatives: how many changes are worth naming.
        otherwise: what to do where none of the changes works.
    """

    rule: str
    flag: str
    why: str
    seen: str
    changes: tuple[Change, ...] = ()
    partial: tuple[Change, ...] = ()
    alternatives: int = 1
    otherwise: str = "no single change works here; see recipes list"


def faults(settings: Settings, present: Sequence[Gpu] | None, recipes: Sequence[Recipe]) -> list[Fault]:
    """Every reason why a server with these settings cannot start or run.

    Args:
        present: the machine's GPUs, visible or not; None where the machine is not known.
        recipes: those that may be advised.
    """
    visible = None if present is None else visible_gpus(present, settings.environ)
    settings = with_card(settings, visible or ())
    found = [
        *_memory(settings),
        *_adaptive_verification(settings),
        *_token_budget(settings.shape),
        *_kernels(settings),
        *_graphs(settings),
    ]
    if present is not None and visible is not None:
        found += _machine(settings, present, visible, recipes)
    return found


def _memory(settings: Settings) -> list[Fault]:
    planned = plan(settings.shape)
    if planned.fits:
        return []
    shape = planned.shape
    fitting = [one for one in changes_that_fit(shape) if _kernels_take(one.shape)]
    flag = fitting[0].flag if fitting else "--tensor-parallel-size"
    left = f"{abs(planned.kv_left):.1f} GiB {'below zero' if planned.kv_left < 0 else 'left'}"
    why = (
        f"the KV cache ends {left} on a {shape.card_gib:g} GiB card, "
        f"one request of {shape.max_model_len} tokens needs {planned.kv_needed:.1f}"
    )
    # Of each flag the strongest change, the ones that cost the most memory last.
    strongest = {one.flag: one for one in changes_that_help(shape)}
    ranks = [one for one in changes_that_help(shape) if one.flag == "--tensor-parallel-size"]
    return [
        Fault(
            "memory",
            flag,
            why,
            _shape_value(shape, flag),
            tuple(_change(settings, one) for one in fitting),
            tuple(_change(settings, one) for one in (*ranks[:-1], *strongest.values())),
            otherwise="no change of one or two flags is enough: larger cards, or another recipe",
        )
    ]


def _kernels_take(shape: ServerShape) -> bool:
    """Whether the kernels, where they are on, are built for the ranks."""
    return not shape.monokernel or shape.tensor_parallel in tp_sizes(shape.architecture)


def _change(settings: Settings, one: FlagChange) -> Change:
    return without_kernels(settings) if one.flag == "--monokernel" else Change(words=one.words)


def without_kernels(settings: Settings) -> Change:
    """The change to a server without the persistent kernels; they can also be set in a JSON argument."""
    words = ["--no-monokernel"]
    for key in settings.kernels_in_config:
        words += [f"--kernel-config.{key}", "false" if key == "monokernel" else "null"]
    return Change(words=tuple(words))


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


def _adaptive_verification(settings: Settings) -> list[Fault]:
    if not settings.adaptive_verification:
        return []
    flag = "--speculative-config.enable_adaptive_verification"
    # The base's sparse attention on ROCm replays graphs of one query length only.
    why = "the base cannot verify adaptively on ROCm and stops when graphs are captured"
    return [Fault("adaptive", flag, why, "true", (Change(words=(flag, "false")),))]


def _token_budget(shape: ServerShape) -> list[Fault]:
    if shape.max_num_batched_tokens >= shape.decode_rows:
        return []
    changes = [Change(words=("--max-num-batched-tokens", str(shape.decode_rows)))]
    if fewer := shape.max_num_batched_tokens // (1 + shape.drafts):
        changes.append(Change(words=("--max-num-seqs", str(fewer))))
    why = f"below (1 + {shape.drafts} drafts) x {shape.max_num_seqs} sequences = {shape.decode_rows}"
    seen = str(shape.max_num_batched_tokens)
    return [Fault("budget", "--max-num-batched-tokens", why, seen, tuple(changes), alternatives=2)]


def _kernels(settings: Settings) -> list[Fault]:
    shape = settings.shape
    if not shape.monokernel:
        return []
    off = without_kernels(settings)
    found: list[Fault] = []
    if settings.a4w4 is not None:
        why = "the kernels behind --monokernel read the A8W4 layout, not this one"
        changes = (Change(env=((A4W4_VARIABLE, "0"),)), off)
        found.append(Fault("a4w4", A4W4_VARIABLE, why, settings.a4w4, changes, alternatives=2))
    built = tp_sizes(shape.architecture)
    if not _kernels_take(shape):
        sizes = " and ".join(map(str, built))
        why = f"the kernels behind --monokernel are built for TP {sizes} on {shape.architecture}"
        four, *smaller = (Change(words=("--tensor-parallel-size", str(size))) for size in reversed(built))
        seen, partial = str(shape.tensor_parallel), tuple(smaller)
        found.append(
            Fault("ranks", "--tensor-parallel-size", why, seen, (off, four), partial, alternatives=2)
        )
    for flag, size in settings.other_parallelism.items():
        why = "the kernels behind --monokernel know tensor parallelism only"
        words = (f"--no-{flag}",) if size is None else (f"--{flag}", "1")
        seen = "on" if size is None else str(size)
        found.append(Fault(flag, f"--{flag}", why, seen, (Change(words=words), off), alternatives=2))
    return found + _experts(settings, off) + _kernel_graphs(settings, off)


def _kernel_graphs(settings: Settings, off: Change) -> list[Fault]:
    mode = settings.graph_mode
    if mode not in KERNEL_GRAPH_MODES or (mode not in WHOLE_GRAPH_MODES and _graphs(settings)):
        return []  # or refused with the kernels and without
    change = Change(words=(GRAPH_MODE_FLAG, "FULL_DECODE_ONLY"))
    why = f"{KERNEL_GRAPH_MODES[mode]}, behind --monokernel"
    return [Fault("kernel-graphs", GRAPH_MODE_FLAG, why, mode, (change, off), alternatives=2)]


def _experts(settings: Settings, off: Change) -> list[Fault]:
    wanted = settings.moe_backend in KERNEL_MOE_BACKENDS[settings.shape.architecture]
    why = "the kernels behind --monokernel read AITER's expert layout"
    found: list[Fault] = []
    if not wanted:
        change = Change(words=("--moe-backend", "aiter"))
        found.append(Fault("experts", "--moe-backend", why, settings.moe_backend, (change, off)))
    for name, seen in settings.aiter_off.items():
        found.append(Fault(name, name, why, seen, (Change(env=((name, "1"),)), off)))
    return found


def _graphs(settings: Settings) -> list[Fault]:
    if settings.shape.architecture == "gfx942":
        return _graphs_gfx942(settings)
    held = settings.breakable_graphs
    if settings.graph_mode in WHOLE_GRAPH_MODES or held in (None, "1"):
        return []
    why = f"the model is not compiled, so {settings.graph_mode} graphs exist only as breakable ones"
    changes = (Change(env=((BREAKABLE_VARIABLE, "1"),)), Change(words=(GRAPH_MODE_FLAG, "FULL_DECODE_ONLY")))
    return [Fault("breakable", BREAKABLE_VARIABLE, why, held or "an empty text", changes, alternatives=2)]


def _graphs_gfx942(settings: Settings) -> list[Fault]:
    found: list[Fault] = []
    why = "piecewise capture ends every worker with a segmentation fault on gfx942"
    if settings.graph_mode not in WHOLE_GRAPH_MODES:
        change = Change(words=(GRAPH_MODE_FLAG, "FULL_DECODE_ONLY"))
        found.append(Fault("graphs", GRAPH_MODE_FLAG, why, settings.graph_mode, (change,)))
    # The base turns them on where the variable is unset, and reads anything but 1 as off.
    if settings.breakable_graphs in (None, "1") and settings.graph_mode != "NONE":
        seen = settings.breakable_graphs or "unset, which turns breakable graphs on for this model"
        why = f"breakable graphs are piecewise, and {why}"
        change = Change(env=((BREAKABLE_VARIABLE, "0"),))
        found.append(Fault("breakable", BREAKABLE_VARIABLE, why, seen, (change,)))
    return found


# The machine.


def _machine(
    settings: Settings, present: Sequence[Gpu], visible: Sequence[Gpu], recipes: Sequence[Recipe]
) -> list[Fault]:
    """The server takes the first visible GPUs: what else is in the machine does not matter."""
    wanted, name = settings.recipe.hardware.architecture, settings.recipe.name
    matching = [gpu for gpu in visible if gpu.gfx == wanted]
    others = tuple(Change(recipe=one) for one in fitting_recipes(recipes, visible) if one != name)
    found: list[Fault] = []
    if visible and not matching:
        kinds = ", ".join(sorted({gpu.gfx for gpu in visible}))
        why = f"is for {wanted}, this machine has {kinds}"
        otherwise = f"a recipe of your own for {kinds}, or a machine with {wanted}"
        found.append(Fault("architecture", "--recipe", why, name, others, otherwise=otherwise))
    if len(matching or visible) < settings.gpus:
        found.append(_too_few(settings, present, matching or visible, others))
    elif matching and any(gpu.gfx != wanted for gpu in visible[: settings.gpus]):
        found.append(_order(settings, present, wanted))
    return found + _compute_units(settings, (matching or visible)[: settings.gpus])


def _too_few(
    settings: Settings, present: Sequence[Gpu], usable: Sequence[Gpu], others: tuple[Change, ...]
) -> Fault:
    hiding = tuple(name for name in VISIBILITY if name in settings.environ)
    hidden = len(visible_gpus(present, {})) > len(visible_gpus(present, settings.environ))
    shown = (Change(unset=hiding),) if hidden else ()
    smaller = [("--tensor-parallel-size", str(ranks)) for ranks in (4, 2, 1) if ranks <= len(usable)]
    single = [(f"--{flag}", "1") for flag, size in settings.other_parallelism.items() if size]
    fewer = tuple(Change(words=words) for words in (*single, *smaller))
    needs = f"{settings.gpus} {settings.recipe.hardware.architecture} GPUs"
    otherwise = f"a machine with {needs}: nothing that this recipe can do fits {len(usable)}"
    if not present:
        otherwise = "give the container --device /dev/kfd --device /dev/dri, on a machine with the GPUs"
    return Fault(
        "count",
        "--tensor-parallel-size",
        f"needs {settings.gpus} GPUs, {len(usable)} visible",
        str(settings.shape.tensor_parallel),
        # A recipe for so few GPUs is tuned for them; this one's other values are not.
        (*others, *shown) if (others or shown) and not single else (*fewer, *others, *shown),
        fewer,
        alternatives=2,
        otherwise=otherwise,
    )


def _order(settings: Settings, present: Sequence[Gpu], wanted: str) -> Fault:
    """Another GPU, an integrated one for example, stands before the ones to be used."""
    name = VISIBILITY[1]
    runtime = {VISIBILITY[0]: settings.environ[VISIBILITY[0]]} if VISIBILITY[0] in settings.environ else {}
    order = visible_gpus(present, runtime)
    visible = visible_gpus(present, settings.environ)
    chosen = [str(order.index(gpu)) for gpu in visible if gpu.gfx == wanted][: settings.gpus]
    other = next(gpu for gpu in visible if gpu.gfx != wanted)
    why = f"the server takes the first {settings.gpus} visible GPUs, GPU {other.index} is a {other.gfx}"
    change = Change(env=((name, ",".join(chosen)),))
    return Fault("order", name, why, settings.environ.get(name, "unset"), (change,))


def _compute_units(settings: Settings, used: Sequence[Gpu]) -> list[Fault]:
    kernels = settings.shape.monokernel
    need = f"; the persistent kernels need {KERNEL_COMPUTE_UNITS} resident" if kernels else ""
    for gpu in used:
        if gpu.partitioned:
            units = f"{gpu.compute_units} of {gpu.full_compute_units} compute units"
            why = f"GPU {gpu.index} is a partition, {units}{need}"
            return [Fault("partition", "GPU", why, gpu.gfx, otherwise="set the cards to one partition (SPX)")]
    for gpu in used:
        # Another architecture is refused for what it is.
        known = gpu.gfx == settings.recipe.hardware.architecture
        if kernels and known and gpu.compute_units < KERNEL_COMPUTE_UNITS:
            why = f"GPU {gpu.index} has {gpu.compute_units} compute units{need}"
            return [Fault("units", "--monokernel", why, "on", (without_kernels(settings),))]
    return []


def fitting_recipes(recipes: Sequence[Recipe], gpus: Sequence[Gpu]) -> list[str]:
    """The recipes that these GPUs can run, the ones that use most of the machine first."""
    found = [recipe for recipe in recipes if _fits(recipe, gpus)]
    found.sort(key=lambda recipe: (-recipe.hardware.memory_gib, -recipe.gpus, recipe.name))
    return [recipe.name for recipe in found]


def _fits(recipe: Recipe, gpus: Sequence[Gpu]) -> bool:
    matching = [gpu for gpu in gpus if gpu.gfx == recipe.hardware.architecture]
    return (
        len(matching) >= recipe.gpus
        # A card's driver reports a little less than its nominal size.
        and recipe.hardware.memory_gib * 0.99 <= min(gpu.memory_bytes for gpu in matching) / GIB
        # A lane's or a benchmark's server is not what somebody with the wrong recipe looks for.
        and not recipe.name.startswith(("bench-", "agentx-"))
    )
