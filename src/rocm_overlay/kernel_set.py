# SPDX-License-Identifier: Apache-2.0
"""Which kernels a recipe can reach: step widths from its graph sizes, TP size, target and draft routing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe
from rocm_overlay.render import build_command
from rocm_overlay.settings import read_settings
from rocm_overlay.values import as_count, as_map

# Architectures that the mono kernels are written for; geometry.py and builds.py of the kernels have the same.
KERNEL_ARCHES = ("gfx950",)
MAX_ROWS = 48
TP_SIZES = (2, 4)
TARGET, DRAFT = (384, 6), (128, 3)
# The base's graph sizes up to its largest decode width: vllm/config/vllm.py, _set_cudagraph_sizes.
SMALL_SIZES, SIZE_STEP = (1, 2, 4), 8


@dataclass(frozen=True, order=True)
class Wanted:
    """One kernel to compile."""

    arch: str
    tp: int
    experts: int
    picks: int
    rows: int

    def __str__(self) -> str:
        return f"ffn {self.arch} TP{self.tp} {self.experts}/{self.picks} {self.rows} rows"


def graph_widths(sizes: Iterable[int], query: int) -> set[int]:
    """Rows of the steps that captured ``sizes`` make: each as it is, for the eager step that warms it up, and
    rounded up to whole requests of ``query`` rows, which is what a FULL decode graph holds."""
    return {width for size in sizes for width in (size, -(-size // query) * query)}


def reachable_widths(drafts: int, most: int, given: Sequence[int] | None = None) -> set[int]:
    """Rows of every decode step that the kernels take of a server.

    Args:
        drafts: draft tokens a request, 0 without a draft model.
        most: the largest captured size.
        given: the captured sizes where the server names them.
    """
    sizes = list(given) if given else [*SMALL_SIZES, *range(SIZE_STEP, MAX_ROWS + 1, SIZE_STEP)]
    sizes = [size for size in sizes if size <= most]
    widths: set[int] = set()
    # The target verifies drafts and one more a request; the draft model's step has a row less, or as many.
    for query in {drafts + 1, max(drafts, 1)}:
        widths |= graph_widths(sizes, query) | set(range(query, MAX_ROWS + 1, query))
    return {width for width in widths if 1 <= width <= MAX_ROWS}


def of_recipe(recipe: Recipe, environ: dict[str, str] | None = None) -> set[Wanted]:
    """The kernels that a recipe's server can reach; empty where it decodes without them or there are none."""
    settings = read_settings(recipe, build_command(recipe), environ or {})
    shape = settings.shape
    if (
        not shape.monokernel
        or shape.architecture not in KERNEL_ARCHES
        or shape.tensor_parallel not in TP_SIZES
    ):
        return set()
    values = settings.command.values
    compilation = as_map(values, "compilation-config")
    largest = as_count(values, "max-cudagraph-capture-size", default=512)
    given = compilation.get("cudagraph_capture_sizes")
    widths = reachable_widths(shape.drafts, largest, given)
    if settings.graph_mode == "NONE":
        # Without graphs nothing is padded, and any number of rows is a step.
        widths = set(range(1, MAX_ROWS + 1))
    routings = (TARGET, DRAFT) if shape.drafts else (TARGET,)
    return {
        Wanted(shape.architecture, shape.tensor_parallel, experts, picks, rows)
        for experts, picks in routings
        for rows in widths
    }


def of_recipes(recipes: Iterable[Recipe], arch: str) -> list[Wanted]:
    """The kernels of all recipes for ``arch``, in order."""
    return sorted(one for one in set().union(*map(of_recipe, recipes)) if one.arch == arch)


def every(arch: str) -> list[Wanted]:
    """Every kernel that there is for ``arch``."""
    if arch not in KERNEL_ARCHES:
        return []
    return sorted(
        Wanted(arch, tp, *routing, rows)
        for tp in TP_SIZES
        for routing in (TARGET, DRAFT)
        for rows in range(1, MAX_ROWS + 1)
    )


def parse(text: str, arch: str) -> Wanted:
    """One kernel as a user names it: ``TP:EXPERTS:PICKS:ROWS``.

    Raises:
        OverlayError: it is not of that form.
    """
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise OverlayError(
            "--only takes kernels as TP:EXPERTS:PICKS:ROWS",
            seen=text,
            wanted="for example 4:384:6:48",
            fix="correct --only, or leave it out",
        )
    tp, experts, picks, rows = map(int, parts)
    return Wanted(arch, tp, experts, picks, rows)
