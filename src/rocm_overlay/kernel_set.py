# SPDX-License-Identifier: Apache-2.0
"""Which kernels a recipe can reach: step widths from its graph sizes, TP size, target and draft routing."""

from __future__ import annotations

import itertools
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
# Launches by name, as builds.py has them, and whether the routing is part of their kernel.
FRONT, BACK, FFN = "attention_front", "attention_back_ffn", "ffn"
KINDS = {FRONT: False, BACK: True, FFN: True}
NO_ROUTING = (0, 0)
# --kv-cache-dtype with which the layers have the packed records that whole layers read
# (vllm/models/deepseek_v41/attention.py, _resolve_dsv4_kv_cache_dtype).
PACKED_CACHES = ("auto", "fp8", "fp8_ds_mla")
# The base's graph sizes up to its largest decode width: vllm/config/vllm.py, _set_cudagraph_sizes.
SMALL_SIZES, SIZE_STEP = (1, 2, 4), 8


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
    # Layers whose cache is of another format keep vLLM's attention and take the FFN launch.
    whole = str(values.get("kv-cache-dtype", "auto")) in PACKED_CACHES
    kinds = (FRONT, BACK) if whole else (FFN,)
    return _of(shape.architecture, kinds, (shape.tensor_parallel,), routings, widths)


def _of(
    arch: str,
    kinds: Iterable[str],
    tp_sizes: Iterable[int],
    routings: Sequence[tuple[int, int]],
    widths: Iterable[int],
) -> set[Wanted]:
    """The kernels of every combination."""
    return {
        Wanted(arch, kind, tp, *routing, rows)
        for kind, tp, rows in itertools.product(kinds, tp_sizes, widths)
        for routing in (routings if KINDS[kind] else (NO_ROUTING,))
    }


def of_recipes(recipes: Iterable[Recipe], arch: str) -> list[Wanted]:
    """The kernels of all recipes for ``arch``, in order."""
    return sorted(one for one in set().union(*map(of_recipe, recipes)) if one.arch == arch)


def every(arch: str) -> list[Wanted]:
    """Every kernel that there is for ``arch``."""
    if arch not in KERNEL_ARCHES:
        return []
    return sorted(_of(arch, KINDS, TP_SIZES, (TARGET, DRAFT), range(1, MAX_ROWS + 1)))


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
