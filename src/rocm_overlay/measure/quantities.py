# SPDX-License-Identifier: Apache-2.0
"""The quantities that a run is judged by: unit, direction and how a figure is written."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_overlay.errors import OverlayError

# Of a millisecond quantity, differences are written in microseconds.
MICROSECONDS = 1e3


@dataclass(frozen=True)
class Quantity:
    """One figure of a run.

    Attributes:
        key: its name in a record.
        title: its name in a table.
        unit: ``ms``, ``tok/s``, ``tok/s/user``, ``us``, ``s`` or empty.
        lower_is_better: the direction of an improvement; None where there is none, as for the
            acceptance length, which a kernel must leave alone.
        digits: decimals of a figure.
    """

    key: str
    title: str
    unit: str
    lower_is_better: bool | None
    digits: int

    def show(self, value: float) -> str:
        """The figure, with thousands separated where it has no decimals."""
        return f"{value:,.{self.digits}f}"

    def show_difference(self, difference: float) -> str:
        """A difference with its sign; of milliseconds, in microseconds."""
        if self.unit == "ms":
            return f"{difference * MICROSECONDS:+.0f} us"
        return f"{difference:+,.{self.digits}f}{' ' + self.unit if self.unit else ''}"

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def _latencies() -> list[Quantity]:
    names = {"itl": "ITL", "tpot": "TPOT", "ttft": "TTFT", "e2el": "E2E latency"}
    return [
        Quantity(f"{name}_{statistic}_ms", f"{title} {statistic}", "ms", True, 3)
        for name, title in names.items()
        for statistic in ("p50", "p90", "p99", "mean")
    ]


QUANTITIES = {
    one.key: one
    for one in (
        *_latencies(),
        Quantity("output_tok_s", "output throughput", "tok/s", False, 2),
        Quantity("total_tok_s", "total throughput", "tok/s", False, 0),
        Quantity("interactivity_p90", "p90 interactivity", "tok/s/user", False, 1),
        Quantity("layer_us", "time a layer", "us", True, 0),
        Quantity("ttft_p90_s", "TTFT p90", "s", True, 2),
        Quantity("acceptance_length", "acceptance length", "", None, 2),
        Quantity("launches", "launches a step", "", True, 0),
    )
}


def quantity(key: str) -> Quantity:
    """The quantity of that key.

    Raises:
        OverlayError: there is none.
    """
    if key not in QUANTITIES:
        raise OverlayError(
            f"no quantity named {key}",
            seen=key,
            wanted=f"one of {', '.join(sorted(QUANTITIES))}",
            fix="correct --quantity, or the record that holds it",
        )
    return QUANTITIES[key]
