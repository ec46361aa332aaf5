# SPDX-License-Identifier: Apache-2.0
"""Which kernels a recipe can reach: step widths from its graph sizes, TP size, target and draft routing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocm_overlay.errors import OverlayError
from rocm_overlay.kernel_arches import BACK, FFN, FRONT, KINDS, most_rows, reachable_widths, tp_sizes
from rocm_overlay.recipe import Recipe
from rocm_overlay.render import build_command
from rocm_overlay.settings import read_settings
from rocm_overlay.values import as_count, as_map

TARGET, DRAFT = (384, 6), (128, 3)
NO_ROUTING = (0, 0)
# --kv-cache-dtype with which the layers have the packed records that whole layers read
# (vllm/models/deepseek_v41/attention.py, _resolve_dsv4_kv_cache_dtype).
PACKED_CACHES = ("auto", "fp8", "fp8_ds_mla")


@dataclass(frozen=True, order=True)
class Wanted:
    """One kernel to compile. ``experts`` and ``picks`` are 0 where the routing is no part of it."""

    arch: str
    kernel: str
    tp: int
    experts: int
    picks: int
    rows: int

    def __str__(self) -> str:
        routing = f" {self.experts}/{self.picks}" if self.experts else ""
        return f"{self.kernel} {self.arch} TP{self.tp}{routing} {self.rows} rows"


def of_recipe(recipe: Recipe, environ: dict[str, str] | None = None) -> set[Wanted]:
    """The kernels that a recipe's server can reach; empty where it decodes without them."""
    settings = read_settings(recipe, build_command(recipe), environ or {})
    shape = settings.shape
    arch = shape.architecture
    if not shape.monokernel or shape.tensor_parallel not in tp_sizes(arch):
        return set()
    values = settings.command.values
    compilation = as_map(values, "compilation-config")
    largest = as_count(values, "max-cudagraph-capture-size", default=512)
    given = compilation.get("cudagraph_capture_sizes")
    rows = most_rows(arch, shape.tensor_parallel)
    widths = reachable_widths(rows, shape.drafts, largest, given)
    if settings.graph_mode == "NONE":
        # Without graphs nothing is padded, and any number of rows is a step.
        widths = set(range(1, rows + 1))
    routings = (TARGET, DRAFT) if shape.drafts else (TARGET,)
    # Layers whose cache is of another format keep vLLM's attention and take the FFN launch.
    whole = str(values.get("kv-cache-dtype", "auto")) in PACKED_CACHES
    kinds = (FRONT, BACK) if whole else (FFN,)
    return _of(arch, kinds, shape.tensor_parallel, routings, widths)


def _of(
    arch: str,
    kinds: Iterable[str],
    tensor_parallel: int,
    routings: Sequence[tuple[int, int]],
    widths: Iterable[int],
) -> set[Wanted]:
    """The kernels of every combination."""
    return {
        Wanted(arch, kind, tensor_parallel, *routing, rows)
        for kind, rows in itertools.product(kinds, widths)
        for routing in (routings if KINDS[kind] else (NO_ROUTING,))
    }


def of_recipes(recipes: Iterable[Recipe], arch: str) -> list[Wanted]:
    """The kernels of all recipes for ``arch``, in order."""
    return sorted(one for one in set().union(*map(of_recipe, recipes)) if one.arch == arch)


def every(arch: str) -> list[Wanted]:
    """Every kernel that there is for ``arch``."""
    found: set[Wanted] = set()
    for tp in tp_sizes(arch):
        found |= _of(arch, KINDS, tp, (TARGET, DRAFT), range(1, most_rows(arch, tp) + 1))
    return sorted(found)


FORM = "KERNEL:TP:EXPERTS:PICKS:ROWS"


def parse(text: str, arch: str) -> Wanted:
    """One kernel as a user names it: ``KERNEL:TP:EXPERTS:PICKS:ROWS``, or ``KERNEL:TP:ROWS`` where the
    routing is no part of it.

    Raises:
        OverlayError: it is not of that form.
    """
    kind, *rest = text.split(":")
    numbers = [int(part) for part in rest if part.isdecimal()]
    if kind not in KINDS or len(numbers) != len(rest) or len(rest) != (4 if KINDS[kind] else 2):
        raise OverlayError(
            f"--only takes kernels as {FORM}",
            seen=text,
            wanted=f"for example {FFN}:4:384:6:48, {BACK}:4:384:6:48 or {FRONT}:4:48",
            fix="correct --only, or leave it out",
        )
    tp, *routing, rows = numbers
    experts, picks = routing or NO_ROUTING
    return Wanted(arch, kind, tp, experts, picks, rows)
