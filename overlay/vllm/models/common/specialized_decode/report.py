# SPDX-License-Identifier: Apache-2.0
"""The table that says at start-up which layers run which launch, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.models.common.specialized_decode.decode import LayerPlan, SpecializedDecode

HEADERS = ("launch", "layers", "why not the whole layer")


def launch_table(decode: SpecializedDecode[Any]) -> str:
    """A line for every launch and reason, with the layers that share them."""
    groups: dict[tuple[str, str], list[int]] = {}
    for plan in decode.plans:
        launch = plan.launch.value if plan.launch else "vLLM's path"
        groups.setdefault((launch, plan.why), []).append(plan.index)
    rows = [HEADERS, *((launch, ranges(layers), why) for (launch, why), layers in groups.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    modes = " or ".join(sorted(decode.spec.graph_modes))
    head = (
        f"{decode.spec.name} ({decode.role}): decode steps of 1 to {decode.max_rows} rows, graph mode {modes}"
    )
    return "\n  ".join([head, *lines])


def layers_by_reason(plans: Iterable[LayerPlan]) -> tuple[str, ...]:
    """A line for every reason why layers run none of the kernels, with the layers that share it."""
    groups: dict[str, list[int]] = {}
    for plan in plans:
        groups.setdefault(plan.why, []).append(plan.index)
    return tuple(f"layers {ranges(layers)}: {why}" for why, layers in groups.items())


def reports() -> bool:
    """Whether this rank logs what its whole TP group knows: rank 0 of each pipeline stage."""
    from vllm.distributed import get_tensor_model_parallel_rank, model_parallel_is_initialized

    return not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0


def counts_for_all() -> bool:
    """Whether this rank hands on counts: rank 0 of the last pipeline stage, where the draft is too. Every
    stage counts the same steps."""
    from vllm.distributed import get_pp_group, model_parallel_is_initialized

    return not model_parallel_is_initialized() or (reports() and get_pp_group().is_last_rank)


def ranges(numbers: Iterable[int]) -> str:
    """Layer numbers in few characters: 0-3,7."""
    ordered = sorted(set(numbers))
    starts = [ordered[0]] + [after for before, after in pairwise(ordered) if after != before + 1]
    ends = [before for before, after in pairwise(ordered) if after != before + 1] + [ordered[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
