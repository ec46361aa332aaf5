# SPDX-License-Identifier: Apache-2.0
"""The FFN launch, shown: compiled for gfx950, run on the simulator of every rank, judged beside the base's.

python tests/sim/mono/demo.py [--rows 6] [--tp 4]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cdnasim import Device, timing
from cdnasim.counts import Counts, counts
from mono import compare
from mono.beside_base import ROUNDINGS, base_errors, base_run, our_errors
from mono.case import make
from mono.compare import Error
from mono.run import Run
from mono.sources import compiled

ARCH = "gfx950"
# Ours rounds the sum over experts once, the base's after every expert, as vLLM's operations do.
OUTPUTS = {
    "output, the sum rounded once": ROUNDINGS["out"],
    "output, rounded as vLLM rounds": ROUNDINGS["out as vLLM"],
}


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says what is done, and how long it took."""
    print(f"{text} ..", end=" ", flush=True)
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def device(tp: int) -> Device:
    out = Device(ARCH, ranks=tp, seed=1)
    out.count_handoffs()
    return out


def errors_table(ours: dict[str, Error], base: dict[str, Error]) -> list[str]:
    """A line a stage: the worst token's relative error against float64."""
    lines = [f"{'error against float64':<34}{'ours':>12}{'base':>12}"]
    return lines + [f"  {name:<32}{ours[name].relative:>12.1e}{base[name].relative:>12.1e}" for name in ours]


def counts_table(ours: Counts, base: Counts) -> list[str]:
    """Hand-offs, instructions and modelled time of a launch."""
    rows = (
        ("hand-offs on the longest chain", "{:.0f}", lambda c: c.handoff_depth),
        (
            "instructions of the longest wave",
            "{:.0f}",
            lambda c: sum(n for kind, n in c.longest.items() if kind != "sleep"),
        ),
        ("wave instructions, millions", "{:.1f}", lambda c: c.total / 1e6),
        ("modelled us a launch (not measured)", "{:.1f}", lambda c: timing.model(c).us),
    )
    return [f"{name:<36}{form.format(of(ours)):>10}{form.format(of(base)):>12}" for name, form, of in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    given = parser.parse_args()
    rows, tp = given.rows, given.tp
    print(
        f"FFN launch, {rows} rows, TP{tp}, 384 experts with top-6: {tp} simulated {ARCH} GPUs, random weights"
    )
    with step("compiling for gfx950 (kept between runs)"):
        kernel = compiled(rows, tp)
    case = make(rows, tp)
    ours = Run(case, device(tp), kernel)
    with step(f"our launch on {tp} ranks"):
        reports = ours.launch()
    with step("every stage of rank 0 against float64, within the proof's bounds"):
        compare.check_run(ours, whole=False)
    theirs = base_run(case, device(tp))
    with step("the base's launch on the same inputs"):
        base_reports = theirs.launch()
    with step("both against float64"):
        mine, other = our_errors(ours, OUTPUTS), base_errors(case, theirs, OUTPUTS)
    print()
    print("\n".join(errors_table(mine, other)))
    print()
    print("\n".join(counts_table(counts(reports, ARCH), counts(base_reports, ARCH))))
    print("\nNothing here ran on a GPU: errors are of simulated runs, times are modelled by cdnasim.timing.")


if __name__ == "__main__":
    main()
