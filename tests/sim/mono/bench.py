# SPDX-License-Identifier: Apache-2.0
"""Our mono kernels beside the base's: same inputs, same simulator, one run.

    python tests/sim/mono/bench.py [--rows 6 12 24 48] [--tp 4 2] [--write]

Prints counts and modelled times, ours and the base's, and with ``--write`` keeps them in docs/tuning. Every
time is modelled (cdnasim.timing).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cdnasim import Device, timing
from cdnasim.counts import Counts, counts
from cdnasim.native import CHECKS
from mono.beside_base import base_run
from mono.case import make
from mono.run import Run
from mono.sources import OVERLAY, source_hash
from rocm_overlay.project import Project

ARCH = "gfx950"
HBM_BYTES_A_US = timing.MACHINES[ARCH].hbm / 1e6


def device(tp: int) -> Device:
    """A device that counts and checks nothing."""
    out = Device(ARCH, ranks=tp, checks=dict.fromkeys(CHECKS, "off"), seed=1)
    out.count_handoffs()
    return out


def both(rows: int, tp: int) -> dict[str, Counts]:
    """The counts of one FFN launch on the same inputs, the mean of its ranks, of the base's and of ours."""
    case, found = make(rows, tp), {}
    for who, run in (
        ("base", lambda: base_run(case, device(tp))),
        ("ours", lambda: Run(case, device(tp))),
    ):
        found[who] = counts(run().launch(), ARCH)
        gc.collect()
    return found


def scoped(c: Counts) -> float:
    """MB loaded past the L2."""
    return sum(n for name, n in c.load_bytes.items() if "sc1" in name) / 1e6


def row(point: str, who: str, c: Counts, other: Counts | None) -> list[str]:
    """One line of the table; ``other`` is the base for ours."""
    modelled = timing.model(c)
    limit = c.rank_bytes / HBM_BYTES_A_US
    ratio = "" if other is None else f"{modelled.us / timing.model(other).us:.2f}"
    longest = sum(n for name, n in c.longest.items() if name != "sleep")
    parts = modelled.parts
    return [
        point,
        who,
        f"{c.total / 1e6:.1f}",
        f"{longest:.0f}",
        f"{c.rank_bytes / 1e6:.0f}",
        f"{scoped(c):.0f}",
        f"{c.handoff_depth:.0f}",
        f"{parts['handoffs']:.1f} + {parts['hbm']:.1f} + {parts['issue']:.1f} + {parts['lds']:.1f}",
        f"{modelled.us:.1f}",
        f"{modelled.us / limit:.2f}",
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


def table(cases: dict[str, dict[str, Counts]]) -> str:
    """The Markdown table of the cases that were counted."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for point, pair in cases.items():
        lines.append("| " + " | ".join(row(point, "base", pair["base"], None)) + " |")
        lines.append("| " + " | ".join(row(point, "ours", pair["ours"], pair["base"])) + " |")
    return "\n".join(lines)


PAGE = """# The FFN launch beside the base's

Written by `make bench-mono KERNEL=ffn WRITE=1`; a test holds it to the counts beside it. **Every time here is
modelled by `cdnasim.timing`; nothing was measured.** gfx950, same inputs, same simulator, one run; routing
is that of random weights. The byte limit is the distinct bytes of a rank at 8 TB/s.

{table}
"""


def files() -> tuple[Path, Path]:
    """The kept counts, and the page."""
    folder = Project.find().root / "docs" / "tuning"
    return folder / "ffn_mono_counts.json", folder / "ffn_mono.md"


def kept() -> dict[str, dict[str, Counts]]:
    """The counts of docs/tuning."""
    data = json.loads(files()[0].read_text())
    return {p: {who: Counts.from_json(c) for who, c in pair.items()} for p, pair in data["cases"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[6])
    parser.add_argument("--tp", type=int, nargs="+", default=[4])
    parser.add_argument("--write", action="store_true", help="keep the counts and the table in docs/tuning")
    options = parser.parse_args()
    cases: dict[str, dict[str, Counts]] = {}
    for rows in options.rows:
        for tp in options.tp:
            name = f"ffn TP{tp} {rows} rows"
            started = time.monotonic()
            cases[name] = both(rows, tp)
            print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(cases))
    print("\nmodelled, not measured")
    if options.write:
        where, page = files()
        raw = {p: {who: c.as_json() for who, c in pair.items()} for p, pair in cases.items()}
        where.write_text(
            json.dumps({"arch": ARCH, "source": source_hash(OVERLAY), "cases": raw}, indent=1) + "\n"
        )
        page.write_text(PAGE.format(table=table(cases)))


if __name__ == "__main__":
    main()
