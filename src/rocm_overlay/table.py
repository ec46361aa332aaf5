# SPDX-License-Identifier: Apache-2.0
"""Plain-text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def render(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A left-aligned table with a rule under the header, columns two spaces apart.

    Args:
        headers: one name a column.
        rows: the cells; every row has one cell a column, turned to text with ``str``.

    Raises:
        ValueError: a row has another number of cells than there are headers.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"table row has {len(row)} cells, wanted {len(headers)}: {row}")
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]

    def line(parts: Sequence[str]) -> str:
        return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])
