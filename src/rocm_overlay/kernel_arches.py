# SPDX-License-Identifier: Apache-2.0
"""What there is of the mono kernels on each architecture, and which step widths a server reaches.

The kernels' own packages say the same (``builds.ARCHITECTURES`` and ``geometry``); here it can be read
without them. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

# Launches by name, and whether the routing is part of their kernel.
FRONT, BACK, FFN = "attention_front", "attention_back_ffn", "ffn"
KINDS = MappingProxyType({FRONT: False, BACK: True, FFN: True})
# Rows of the largest decode step, by the tensor parallel sizes that a server may have.
MOST_ROWS: Mapping[str, Mapping[int, int]] = MappingProxyType(
    {"gfx950": MappingProxyType({2: 48, 4: 48}), "gfx942": MappingProxyType({2: 32, 4: 42})}
)
# The base's graph sizes up to its largest decode width: vllm/config/vllm.py, _set_cudagraph_sizes.
SMALL_SIZES, SIZE_STEP = (1, 2, 4), 8


def tp_sizes(arch: str) -> tuple[int, ...]:
    """Tensor parallel sizes of the kernels of ``arch``; none where there are no kernels."""
    return tuple(sorted(MOST_ROWS.get(arch, ())))


def most_rows(arch: str, tensor_parallel: int) -> int:
    """Rows of the largest decode step that the kernels take; 0 where there are no kernels."""
    return MOST_ROWS.get(arch, {}).get(tensor_parallel, 0)


def graph_widths(sizes: Iterable[int], query: int) -> set[int]:
    """Rows of the steps that captured ``sizes`` make: each as it is, for the eager step that warms it up, and
    rounded up to whole requests of ``query`` rows, which is what a FULL decode graph holds."""
    return {width for size in sizes for width in (size, -(-size // query) * query)}


def reachable_widths(rows: int, drafts: int, most: int, given: Sequence[int] | None = None) -> set[int]:
    """Rows of every decode step that the kernels take of a server.

    Args:
        rows: those of their largest step, ``most_rows``.
        drafts: draft tokens a request, 0 without a draft model.
        most: the largest captured size.
        given: the captured sizes where the server names them.
    """
    sizes = list(given) if given else [*SMALL_SIZES, *range(SIZE_STEP, rows + 1, SIZE_STEP)]
    sizes = [size for size in sizes if size <= most]
    widths: set[int] = set()
    # The target verifies drafts and one more a request; the draft model's step has a row less, or as many.
    for query in {drafts + 1, max(drafts, 1)}:
        widths |= graph_widths(sizes, query) | set(range(query, rows + 1, query))
    return {width for width in widths if 1 <= width <= rows}
