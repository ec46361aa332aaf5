# SPDX-License-Identifier: Apache-2.0
"""Our mono kernels beside the base's: same inputs, same simulator, one run.

    python tests/sim/mono/bench.py [--arch gfx950] [--kernel ffn | layer] [--rows 6 12 24 48] [--tp 4 2]
        [--write]

``ffn`` is the FFN launch, ``layer`` the two launches of a standard layer with compress ratio 1. Prints counts
and modelled times, ours and the base's, and with ``--write`` keeps them in docs/tuning. Every time is
modelled (cdnasim.timing). On gfx942 the base's kernels read their own copies of the weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cdnasim import Device, timing
from cdnasim.counts import Counts, counts
from cdnasim.native import CHECKS
from cdnasim.program import Kernel as Build
from mono.beside_base import base_run
from mono.case import make
from mono.layer_beside_base import BaseLayer
from mono.layer_case import Shape, make_layer
from mono.layer_run import LayerRun, back_kernel, front_kernel
from mono.run import Run
from mono.sources import code_hash, compiled
from rocm_overlay.project import Project


def device(tp: int, arch: str) -> Device:
    """A device that counts and checks nothing."""
    out = Device(arch, ranks=tp, checks=dict.fromkeys(CHECKS, "off"), seed=1)
    out.count_handoffs()
    return out


# The launches of a point, each the mean of its ranks, by whose they are.
Point = dict[str, list[Counts]]


def ffn(rows: int, tp: int, arch: str) -> Point:
    """The FFN launch of both on the same inputs."""
    case, found = make(rows, tp, arch=arch), {}
    for who, run in (
        ("base", lambda: base_run(case, device(tp, arch))),
        ("ours", lambda: Run(case, device(tp, arch))),
    ):
        found[who] = [counts(run().launch(), arch)]
        gc.collect()
    return found


def layer(rows: int, tp: int, arch: str) -> Point:
    """Both launches of a standard layer of both on the same inputs."""
    case = make_layer(Shape(rows, tp, arch=arch))
    base = BaseLayer(case, device(tp, arch))
    found = {"base": [counts(base.run_k1(), arch), counts(base.back().launch(), arch)]}
    del base
    gc.collect()
    ours = LayerRun(case, device(tp, arch))
    found["ours"] = [counts(half.launch(), arch) for half in (ours.front, ours.back)]
    return found


def builds(kernel: str, arch: str, rows: int, tp: int) -> list[Build]:
    """Our kernels of a point, in the order of its launches."""
    if kernel == "ffn":
        return [compiled(rows, tp, arch)]
    shape = Shape(rows, tp, arch=arch)
    return [front_kernel(shape), back_kernel(shape)]


def scoped(c: Counts) -> float:
    """MB loaded past the L2."""
    return sum(n for name, n in c.load_bytes.items() if "sc1" in name) / 1e6


def modelled_us(launches: list[Counts]) -> float:
    """Of launches that follow one another, without what starting one costs."""
    return sum(timing.model(c).us for c in launches)


def row(point: str, who: str, launches: list[Counts], other: list[Counts] | None) -> list[str]:
    """One line of the table; ``other`` is the base for ours."""
    us = modelled_us(launches)
    read = sum(c.rank_bytes for c in launches)
    ratio = "" if other is None else f"{us / modelled_us(other):.2f}"
    parts = [timing.model(c).parts for c in launches]
    named = (sum(part[name] for part in parts) for name in ("handoffs", "hbm", "issue", "lds"))
    return [
        point,
        who,
        f"{sum(c.total for c in launches) / 1e6:.1f}",
        f"{sum(n for c in launches for name, n in c.longest.items() if name != 'sleep'):.0f}",
        f"{read / 1e6:.0f}",
        f"{sum(scoped(c) for c in launches):.0f}",
        f"{sum(c.handoff_depth for c in launches):.0f}",
        " + ".join(f"{part:.1f}" for part in named),
        f"{us:.1f}",
        f"{us / (read / timing.MACHINES[launches[0].arch].hbm * 1e6):.2f}",
        ratio,
    ]


HEAD = [
    "point",
    "kernels",
    "wave-instr. M",
    "longest wave",
    "distinct MB",
    "past L2 MB",
    "hand-offs",
    "hand-offs + HBM + issue + LDS, us",
    "modelled us",
    "x byte limit",
    "ours / base",
]


def table(cases: dict[str, Point]) -> str:
    """The Markdown table of the cases that were counted."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for point, pair in cases.items():
        lines.append("| " + " | ".join(row(point, "base", pair["base"], None)) + " |")
        lines.append("| " + " | ".join(row(point, "ours", pair["ours"], pair["base"])) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Kernel:
    """What is put beside the base's: how a point is counted, and the page's title."""

    point: Callable[[int, int, str], Point]
    title: str


KERNELS = {
    "ffn": Kernel(ffn, "The FFN launch beside the base's"),
    "layer": Kernel(layer, "A standard layer beside the base's"),
}
# What docs/tuning keeps, as (kernel, architecture).
KEPT = (("ffn", "gfx950"), ("layer", "gfx950"), ("ffn", "gfx942"))
PAGE = """# {title}{on}

Written by `make bench-mono {verb} WRITE=1`; a test holds it to the counts beside it. **Every time
here is modelled by `cdnasim.timing`; nothing was measured.** {arch}, same inputs, same simulator, one run;
routing is that of random weights. The byte limit is the distinct bytes of a rank at {hbm}. Of a layer's two
launches everything is the sum, the longest waves' included; what starting a launch costs is not in it.
{note}
{table}
"""
NOTE_942 = """
The model's constants were fitted on gfx950 and are applied to MI300X's published peaks, which nothing has
checked; both launches run on 256 of its 304 compute units. The base's kernels read their own copies of the
weights, ours what vLLM's prefill reads.
"""


def page(kernel: str, arch: str, cases: dict[str, Point]) -> str:
    """The text of a kernel's page."""
    default = arch == "gfx950"
    return PAGE.format(
        title=KERNELS[kernel].title,
        on="" if default else f" on {arch}",
        verb=f"KERNEL={kernel}" if default else f"ARCH={arch} KERNEL={kernel}",
        arch=arch,
        hbm=f"{timing.MACHINES[arch].hbm / 1e12:g} TB/s",
        note="" if default else NOTE_942,
        table=table(cases),
    )


def files(kernel: str, arch: str) -> tuple[Path, Path]:
    """The kept counts, and the page."""
    folder = Project.find().root / "docs" / "tuning"
    name = f"{kernel}_mono" + ("" if arch == "gfx950" else f"_{arch}")
    return folder / f"{name}_counts.json", folder / f"{name}.md"


def kept_code(kernel: str, arch: str) -> dict[str, str]:
    """``code_hash`` of our kernels by the kept points."""
    code: dict[str, str] = json.loads(files(kernel, arch)[0].read_text())["code"]
    return code


def kept(kernel: str, arch: str) -> dict[str, Point]:
    """The counts of docs/tuning."""
    data = json.loads(files(kernel, arch)[0].read_text())
    return {
        point: {who: [Counts.from_json(c) for c in launches] for who, launches in pair.items()}
        for point, pair in data["cases"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=list(timing.MACHINES), default="gfx950")
    parser.add_argument("--kernel", choices=list(KERNELS), default="ffn")
    parser.add_argument("--rows", type=int, nargs="+", default=[6])
    parser.add_argument("--tp", type=int, nargs="+", default=[4])
    parser.add_argument("--write", action="store_true", help="keep the counts and the table in docs/tuning")
    options = parser.parse_args()
    if (options.kernel, options.arch) not in KEPT:
        parser.error(f"no {options.kernel} of ours for {options.arch}: --kernel ffn, or --arch gfx950")
    cases: dict[str, Point] = {}
    code: dict[str, str] = {}
    for rows in options.rows:
        for tp in options.tp:
            name = f"{options.kernel} TP{tp} {rows} rows"
            started = time.monotonic()
            cases[name] = KERNELS[options.kernel].point(rows, tp, options.arch)
            code[name] = code_hash(builds(options.kernel, options.arch, rows, tp))
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(cases))
    print("\nmodelled, not measured")
    if options.write:
        write(options.kernel, options.arch, cases, code)


def write(kernel: str, arch: str, cases: dict[str, Point], code: dict[str, str]) -> None:
    """Keep the counts, the hashes of the code that they are of, and the page in docs/tuning."""
    where, text = files(kernel, arch)
    raw = {p: {who: [c.as_json() for c in each] for who, each in pair.items()} for p, pair in cases.items()}
    found = {"arch": arch, "code": code, "cases": raw}
    where.write_text(json.dumps(found, indent=1) + "\n")
    text.write_text(page(kernel, arch, cases))


if __name__ == "__main__":
    main()
