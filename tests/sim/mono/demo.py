# SPDX-License-Identifier: Apache-2.0
"""Our launches, shown: compiled for gfx950, run on the simulator of every rank, judged beside the base's.

python tests/sim/mono/demo.py [--kernel ffn | layer] [--rows 6] [--tp 4]
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
from mono import compare, layer_beside_base
from mono.beside_base import ROUNDINGS, base_errors, base_run, our_errors
from mono.case import make
from mono.compare import Error
from mono.layer_beside_base import BaseLayer
from mono.layer_case import Shape, make_layer
from mono.layer_run import LayerRun, back_kernel, front_kernel
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


def counts_table(ours: list[Counts], base: list[Counts]) -> list[str]:
    """Hand-offs, instructions and modelled time, the sum of launches that follow one another."""
    rows = (
        ("hand-offs on the longest chain", "{:.0f}", lambda c: c.handoff_depth),
        (
            "instructions of the longest wave",
            "{:.0f}",
            lambda c: sum(n for kind, n in c.longest.items() if kind != "sleep"),
        ),
        ("wave instructions, millions", "{:.1f}", lambda c: c.total / 1e6),
        ("modelled us (not measured)", "{:.1f}", lambda c: timing.model(c).us),
    )
    return [
        f"{name:<36}{form.format(sum(map(of, ours))):>10}{form.format(sum(map(of, base))):>12}"
        for name, form, of in rows
    ]


def show_ffn(rows: int, tp: int) -> tuple[list[Counts], list[Counts]]:
    """The FFN launch; prints errors, gives the counts of ours and of the base's."""
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
    return [counts(reports, ARCH)], [counts(base_reports, ARCH)]


def show_layer(rows: int, tp: int) -> tuple[list[Counts], list[Counts]]:
    """Both launches of a standard layer; prints errors, gives the counts of ours and of the base's."""
    shape = Shape(rows, tp)
    with step("compiling for gfx950 (kept between runs)"):
        front_kernel(shape), back_kernel(shape)
    case = make_layer(shape)
    ours = LayerRun(case, device(tp))
    with step(f"our front and back on {tp} ranks"):
        mine = [counts(half.launch(), ARCH) for half in (ours.front, ours.back)]
    theirs = BaseLayer(case, device(tp))
    with step("the base's two launches on the same inputs"):
        front = theirs.run_k1()
        back = theirs.back()
        other = [counts(front, ARCH), counts(back.launch(), ARCH)]
    with step("both against float64"):
        errors = layer_beside_base.our_errors(ours), layer_beside_base.base_errors(theirs, back)
    print()
    print("\n".join(errors_table(*errors)))
    return mine, other


SHOWN = {
    "ffn": ("FFN launch", show_ffn),
    "layer": ("a standard layer's two launches, 700 tokens of context", show_layer),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=list(SHOWN), default="ffn")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    given = parser.parse_args()
    rows, tp = given.rows, given.tp
    title, show = SHOWN[given.kernel]
    print(f"{title}, {rows} rows, TP{tp}, 384 experts with top-6: {tp} simulated {ARCH} GPUs, random weights")
    ours, base = show(rows, tp)
    print()
    print("\n".join(counts_table(ours, base)))
    print("\nNothing here ran on a GPU: errors are of simulated runs, times are modelled by cdnasim.timing.")


if __name__ == "__main__":
    main()
