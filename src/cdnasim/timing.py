# SPDX-License-Identifier: Apache-2.0
"""Modelled launch times from counts: ``model(counts(report, arch))``, and the table of the base's kernels.

    python -m cdnasim.timing        the fit, its residuals, held-out points, counts beside published times

Every time that this module gives is modelled. A launch's time is a sum of parts, each a count over a peak
that AMD publishes, times one fitted constant: the chain of hand-offs (a launch's start and end with it);
distinct bytes over HBM's bandwidth; device-scope traffic, which passes the caches of an XCD; what the
busiest compute unit issues; LDS; what the longest wave issues. A sum and no maximum: the kernels
alternate between these phases, with hand-offs between.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .counts import Counts, counts
from .device import LaunchReport

PARTS = ("handoffs", "hbm", "device scope", "issue", "lds", "longest wave")

# Nothing beats a published peak: these factors are 1 at least. As few other constants as help.
LOWEST = {"hbm": 1.0, "issue": 1.0, "lds": 1.0}
MOST_CONSTANTS = 3


@dataclass(frozen=True)
class Machine:
    """Published peaks: HBM bytes a second, clock in Hz, dense matrix operations a cycle and SIMD by type."""

    name: str
    hbm: float
    clock: float
    matrix: dict[str, int]


# AMD's data sheets: MI355X 8 TB/s, 2.4 GHz, 256 units, 5.0 / 2.5 PFLOPS dense 8-bit / 16-bit, 157 TFLOPS f32;
# MI300X 5.3 TB/s, 2.1 GHz, 304 units, 2.6 / 1.3 PFLOPS dense 8-bit / 16-bit, 163 TFLOPS f32.
MACHINES = {
    "gfx950": Machine("MI355X", 8.0e12, 2.4e9, {"8": 2048, "16": 1024, "32": 64}),
    "gfx942": Machine("MI300X", 5.3e12, 2.1e9, {"8": 1024, "16": 512, "32": 64}),
}
SIMDS, LANES_A_CYCLE, LDS_BYTES_A_CYCLE = 4, 16, 128


@dataclass(frozen=True)
class Constants:
    """One factor a part: microseconds a hand-off, and dimensionless factors of the other parts' ideal
    times."""

    handoffs: float
    hbm: float
    device_scope: float
    issue: float
    lds: float
    longest_wave: float

    def values(self) -> tuple[float, ...]:
        """In the order of ``PARTS``."""
        return self.handoffs, self.hbm, self.device_scope, self.issue, self.lds, self.longest_wave


@dataclass(frozen=True)
class Modelled:
    """A modelled time, never a measured one. us: microseconds; parts: the same by ``PARTS``."""

    us: float
    parts: dict[str, float] = field(default_factory=dict)
    label: str = "modelled"
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.us:.1f} us ({self.label}, {self.machine})"


def mfma_cycles(opcode: str, machine: Machine) -> float:
    """Cycles of a SIMD's matrix unit for one instruction of this shape and type, at the published rate."""
    match = re.search(r"_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w*)$", opcode)
    if not match:
        raise ValueError(f"{opcode} is not a matrix opcode with a shape such as 16x16x32")
    tail = match[5]
    bits = "32" if tail.startswith("f32") else "16" if "f16" in tail else "8"
    size = int(match[1]) * int(match[2]) * int(match[3])
    if match[4]:
        # Several products of 4 x 4: half the rate on CDNA3, two passes of four cycles (LLVM, SISchedule.td).
        size *= 2 * int(match[4])
    return 2 * size / machine.matrix[bits]


def features(c: Counts) -> dict[str, float]:
    """The ideal time of each part in microseconds (hand-offs: how many)."""
    m = MACHINES[c.arch]
    share = c.busiest["mfma"] / max(1.0, c.instructions["mfma"])
    matrix = share * sum(n * mfma_cycles(name, m) for name, n in c.mfma.items())
    # A vector instruction of 64 lanes holds its SIMD for four cycles; anything else takes an issue slot.
    vector = 64 / LANES_A_CYCLE * c.busiest["valu"]
    other = sum(
        n for name, n in c.busiest.items() if name not in ("valu", "mfma", "wait", "sleep", "barrier")
    )
    longest = sum(n for name, n in c.longest.items() if name not in ("sleep",))
    scoped = sum(n for name, n in (*c.load_bytes.items(), *c.store_bytes.items()) if "sc1" in name)
    return {
        "handoffs": c.handoff_depth,
        "hbm": c.rank_bytes / m.hbm * 1e6,
        "device scope": scoped / m.hbm * 1e6,
        "issue": (matrix + vector + other) / SIMDS / m.clock * 1e6,
        "lds": (c.lds_bytes / LDS_BYTES_A_CYCLE + c.lds_cycles) / c.units / m.clock * 1e6,
        "longest wave": 64 / LANES_A_CYCLE * longest / m.clock * 1e6,
    }


def model(
    what: Counts | LaunchReport | Sequence[LaunchReport],
    arch: str = "gfx950",
    constants: Constants | None = None,
) -> Modelled:
    """The modelled time of one launch from its counts, or from the reports of its ranks.

    Reports need ``Device.count_handoffs()`` on while they ran: without it the chain of hand-offs is
    missing, and a launch that hands anything over (scope sc1) is refused with a ValueError. The constants
    were fitted on gfx950; for gfx942 they are applied to its peaks, which nothing here has checked."""
    if isinstance(what, Counts):
        c = what
    else:
        c = counts(what if isinstance(what, LaunchReport) else list(what), arch)
    parts = features(c)
    if not c.handoff_depth and parts["device scope"]:
        raise ValueError(
            f"{c.kernel}: device-scope traffic but no hand-off was counted; "
            "call Device.count_handoffs() before the launch"
        )
    factors = dict(zip(PARTS, (constants or FITTED).values(), strict=True))
    out = {name: factors[name] * parts[name] for name in PARTS}
    return Modelled(sum(out.values()), out, machine=MACHINES[c.arch].name)


# ---- the fit on the base's kernels
# Published by the authors of the base's mono decode, measured on MI355X at 6 rows a request, microseconds:
# (what, TP, rows) -> time. "layer" is K1 and K2 of a standard layer.
REQUESTS = (6, 12, 24, 48)
PUBLISHED = {
    (what, tp, rows): us
    for what, tp, times in (
        ("ffn", 4, (57, 85, 140, 209)),
        ("ffn", 2, (81, 128, 215, 342)),
        ("layer ratio1", 4, (94, 123, 192, 282)),
        ("layer ratio1", 2, (122, 179, 280, 427)),
        ("layer ratio2", 4, (95, 121, 185, 270)),
        ("layer ratio2", 2, (123, 172, 269, 406)),
    )
    for rows, us in zip(REQUESTS, times, strict=True)
}
# Fitted on; every other published point is held out.
FIT_ON = tuple((what, tp, rows) for what in ("ffn", "layer ratio1") for tp in (2, 4) for rows in (6, 48))


def launches(cases: dict[str, Any], key: tuple[str, int, int]) -> list[Counts] | None:
    """The launches behind a published point, from a file of counts; None when it does not hold them."""
    what, tp, rows = key
    kind, _, ratio = what.partition(" ")
    case = cases.get(f"{kind} tp{tp} {rows}" + (f" {ratio}" if ratio else ""))
    return None if case is None else [Counts.from_json(x) for x in case.values()]


def point_features(parts: list[Counts]) -> list[float]:
    """The features of a point, its launches added up, in the order of ``PARTS``."""
    rows = [features(c) for c in parts]
    return [sum(r[name] for r in rows) for name in PARTS]


def fit(points: list[tuple[list[float], float]]) -> Constants:
    """Factors with the least sum of squared relative errors: none below its ``LOWEST`` (0 for the
    others), at most
    ``MOST_CONSTANTS`` above it. Every such set is tried."""
    lowest = [LOWEST.get(name, 0.0) for name in PARTS]
    rows = [[x / us for x in row] for row, us in points]
    rest = [1 - sum(low * x for low, x in zip(lowest, row, strict=True)) for row in rows]
    best = (sum(t * t for t in rest), lowest)
    for size in range(1, min(MOST_CONSTANTS, len(points)) + 1):
        for on in itertools.combinations(range(len(PARTS)), size):
            a = [[row[i] for i in on] for row in rows]
            extra = _least_squares(a, rest)
            if extra is None or min(extra) < 0:
                continue
            error = sum(
                (sum(x * y for x, y in zip(r, extra, strict=True)) - t) ** 2
                for r, t in zip(a, rest, strict=True)
            )
            if error < best[0] - 1e-9:
                full = list(lowest)
                for i, x in zip(on, extra, strict=True):
                    full[i] += x
                best = (error, full)
    if not points:
        raise ValueError("no point to fit on")
    return Constants(*best[1])


def _least_squares(a: list[list[float]], y: list[float]) -> list[float] | None:
    """x with a x = y in the least-squares sense, by the normal equations; None when they are singular."""
    n = len(a[0])
    m = [
        [sum(r[i] * r[j] for r in a) for j in range(n)] + [sum(r[i] * t for r, t in zip(a, y, strict=True))]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(m[k][i]))
        if abs(m[pivot][i]) < 1e-12:
            return None
        m[i], m[pivot] = m[pivot], m[i]
        for k in range(n):
            if k != i:
                factor = m[k][i] / m[i][i]
                m[k] = [x - factor * y for x, y in zip(m[k], m[i], strict=True)]
    return [m[i][n] / m[i][i] for i in range(n)]


# What ``fit`` gives on FIT_ON with docs/tuning/base_mono_counts.json (a test fits again).
FITTED = Constants(2.455, 1.0, 0.0, 1.0, 1.0, 0.0)


def find_counts() -> Path:
    """docs/tuning/base_mono_counts.json of this repository."""
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (path := root / "docs/tuning/base_mono_counts.json").exists():
            return path
    raise SystemExit("docs/tuning/base_mono_counts.json not found: run from the repository, or name the file")


def table(data: dict[str, Any], constants: Constants) -> list[str]:
    """Markdown: published and modelled times of every point whose counts ``data`` holds."""
    lines = [
        "| point | TP | rows | published us | modelled us | error | used for |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, us in PUBLISHED.items():
        parts = launches(data["cases"], key)
        if parts is None:
            continue
        modelled = sum(model(c, constants=constants).us for c in parts)
        use = "fit" if key in FIT_ON else "held out"
        what, tp, rows = key
        lines.append(f"| {what} | {tp} | {rows} | {us} | {modelled:.0f} | {modelled / us - 1:+.0%} | {use} |")
    return lines


def kernel_table(data: dict[str, Any], constants: Constants) -> list[str]:
    """Markdown: counts (a rank) and modelled time of every kernel, by part."""
    lines = [
        "| kernel | wave-instr. M | longest wave | MFMA k | HBM MB | sc1 MB | LDS MB | hand-offs "
        "| modelled us | " + " | ".join(PARTS) + " |",
        "|---" * (9 + len(PARTS)) + "|",
    ]
    for name, case in data["cases"].items():
        for kernel, raw in case.items():
            c = Counts.from_json(raw)
            m = model(c, constants=constants)
            scoped = sum(n for p, n in (*c.load_bytes.items(), *c.store_bytes.items()) if "sc1" in p)
            label = name if kernel == "ffn" else name.replace("layer", kernel)
            lines.append(
                f"| {label} | {c.total / 1e6:.1f} | {sum(c.longest.values()):.0f} "
                f"| {c.instructions['mfma'] / 1e3:.0f} | {c.rank_bytes / 1e6:.0f} | {scoped / 1e6:.0f} "
                f"| {c.lds_bytes / 1e6:.0f} | {c.handoff_depth:.0f} | {m.us:.0f} | "
                + " | ".join(f"{m.parts[p]:.1f}" for p in PARTS)
                + " |"
            )
    return lines


def fit_on(data: dict[str, Any]) -> Constants:
    """The constants from the points of ``FIT_ON`` that ``data`` holds."""
    found = [(launches(data["cases"], key), PUBLISHED[key]) for key in FIT_ON]
    return fit([(point_features(parts), float(us)) for parts, us in found if parts])


HEADING = """# The base's mono kernels: counts, published and modelled times

Written by `python -m cdnasim.timing`; a test holds it to the counts. **Modelled us are modelled, by `cdnasim.timing`;
published us were measured by the authors of the base's mono decode on MI355X (their pull request's text), 6 rows a
request at 1, 2, 4 and 8 requests. Nothing here was measured by us.**

Counts: `tests/sim/base/counting.py` on the simulator, {arch}, kernel sources {source}; the mean of the ranks. Routing
is that of random weights, every row its own token; the experts' memory is zero, which no count depends on.

## Constants
"""  # noqa: E501


def document(data: dict[str, Any]) -> str:
    """docs/tuning/base_mono_timing.md: constants, published beside modelled times, counts of every kernel."""
    constants = fit_on(data)
    lines = [HEADING.format(**data), "| part | fitted factor | of |", "|---|---|---|"]
    for name, value in zip(PARTS, constants.values(), strict=True):
        of = "us a hand-off (start and end of a launch with it)" if name == "handoffs" else "the ideal time"
        lines.append(f"| {name} | {value:.3f} | {of} |")
    lines += ["", "## Published and modelled", "", *table(data, constants)]
    lines += ["", "## Counts and modelled parts of each launch", "", *kernel_table(data, constants)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="modelled times of the base's mono kernels, from counts")
    parser.add_argument("--counts", type=Path, help="a file that tests/sim/base/counting.py wrote")
    print(document(json.loads((parser.parse_args().counts or find_counts()).read_text())), end="")


if __name__ == "__main__":
    main()
