# SPDX-License-Identifier: Apache-2.0
"""The counts of a launch that a timing model needs, as plain data that can be kept in a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .device import LaunchReport
from .native import CLASSES


@dataclass(frozen=True)
class Counts:
    """One launch of one rank (the mean over ranks when made from several reports).

    instructions: wave-instructions by class. busiest: the same of the compute unit that issued most, and
    ``longest`` of the wave that issued most. mfma: by opcode. load_bytes, store_bytes: by scope and nt, every
    lane counted. rank_bytes: distinct 64-byte lines of the rank's memory. lds_cycles: bank conflicts.
    handoff_depth: the longest chain of hand-offs between workgroups. waves, units: waves, and compute units
    that had one.
    """

    kernel: str
    arch: str
    instructions: dict[str, float]
    busiest: dict[str, float]
    longest: dict[str, float]
    mfma: dict[str, float]
    load_bytes: dict[str, float]
    store_bytes: dict[str, float]
    rank_bytes: float
    lds_bytes: float
    lds_cycles: float
    handoff_depth: float
    waves: float
    units: float

    @property
    def total(self) -> float:
        """Wave-instructions."""
        return sum(self.instructions.values())

    def as_json(self) -> dict[str, Any]:
        """For a file; ``from_json`` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Counts:
        """Raises TypeError, naming the field, when the data are of another version."""
        return Counts(**data)


def _one(report: LaunchReport, arch: str) -> Counts:
    table = report.per_wave
    unit = table["compute_unit"]
    sums = {name: unit.new_zeros(int(unit.max()) + 1).index_add(0, unit, table[name]) for name in CLASSES}
    # Instructions of waiting say little about how busy a unit is.
    work = sum(
        (sums[name] for name in CLASSES if name not in ("wait", "sleep", "barrier")), unit.new_zeros(1)
    )
    busiest, longest = int(work.argmax()), int(table["issued"].argmax())
    return Counts(
        kernel=report.kernel,
        arch=arch,
        instructions={k: float(v) for k, v in report.instructions.items()},
        busiest={name: float(sums[name][busiest]) for name in CLASSES},
        longest={name: float(table[name][longest]) for name in CLASSES},
        mfma={k: float(v) for k, v in report.mfma.items()},
        load_bytes={k: float(v) for k, v in report.load_policy.items()},
        store_bytes={k: float(v) for k, v in report.store_policy.items()},
        rank_bytes=float(report.rank_bytes),
        lds_bytes=float(report.lds_read_bytes + report.lds_write_bytes),
        lds_cycles=float(report.lds_conflict_cycles),
        handoff_depth=float(report.handoff_depth),
        waves=float(report.waves),
        units=float(unit.unique().numel()),
    )


def counts(reports: LaunchReport | list[LaunchReport], arch: str) -> Counts:
    """The counts of one launch, or the mean over the ranks of one run (their kernels are the same)."""
    if isinstance(reports, LaunchReport):
        return _one(reports, arch)
    if not reports:
        raise ValueError("no report: at least one launch is needed")
    return mean([_one(r, arch) for r in reports])


def mean(parts: list[Counts]) -> Counts:
    """Field by field; the hand-off depth is the longest."""
    out: dict[str, Any] = {"kernel": parts[0].kernel, "arch": parts[0].arch}
    for field in dataclasses.fields(Counts):
        values = [getattr(p, field.name) for p in parts]
        if field.name == "handoff_depth":
            out[field.name] = max(values)
        elif isinstance(values[0], dict):
            names = sorted(
                set().union(*values), key=lambda n: list(values[0]).index(n) if n in values[0] else 99
            )
            out[field.name] = {n: sum(v.get(n, 0.0) for v in values) / len(values) for n in names}
        elif field.name not in out:
            out[field.name] = sum(values) / len(values)
    return Counts(**out)
