# SPDX-License-Identifier: Apache-2.0
"""``compare``: two arms of a result set, or two sets, as Markdown for a pull request and as a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import options
from rocm_overlay.measure import records as store
from rocm_overlay.measure.quantities import QUANTITIES, Quantity, quantity
from rocm_overlay.measure.records import Record
from rocm_overlay.measure.statistics import (
    RULE,
    Comparison,
    PairedRatio,
    Verdict,
    compare_point,
    paired_ratio,
)
from rocm_overlay.textio import write_text_atomically

DEFAULT_QUANTITIES = ("itl_p50_ms", "ttft_p50_ms", "output_tok_s", "acceptance_length")
# What must be the same in two arms for their difference to be the build's.
SAME_EVIDENCE = ("sku", "model", "repeats")
SHOWN_EVIDENCE = (
    "image",
    "image_digest",
    "sku",
    "recipe",
    "recipe_hash",
    "overlay_hash",
    "client",
    "command",
    "env",
)
REPORT_NAME = "compare"
# Beside the verdict of a point some of whose runs have a false proof.
UNPROVED = ", not all runs proved"


@dataclass(frozen=True)
class Report:
    """Two arms compared, by quantity in the order of the records.

    Attributes:
        unproved: the points that have a false proof.
        left_out: a line for each run that has no counterpart in the other arm.
    """

    arms: tuple[str, str]
    comparisons: Mapping[str, Sequence[Comparison]]
    paired: Mapping[str, PairedRatio | None]
    launches: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]
    evidence: Mapping[str, tuple[str, str]]
    failed: Sequence[str]
    unproved: Collection[str] = ()
    left_out: Sequence[str] = ()


def make_report(
    first: Sequence[Record],
    second: Sequence[Record],
    quantities: Sequence[Quantity],
    stated_noise: float | None = None,
) -> Report:
    """Compare two arms at every point that both ran.

    Raises:
        OverlayError: an arm that is several, no point in common, other hardware or another model in
            one of the arms, or none of the quantities in both.
    """
    arms = tuple(_one_arm(side) for side in (first, second))
    sides = [_by_point(side) for side in (first, second)]
    points = [point for point in sides[0] if point in sides[1]]
    if not points:
        raise OverlayError(
            "the two arms have no point in common",
            seen=f"{', '.join(sides[0])} and {', '.join(sides[1])}",
            wanted="the same workload and concurrency in both",
            fix="run bench with one profile for both arms",
        )
    evidence = _evidence(first, second)
    pairs = {point: (sides[0][point], sides[1][point]) for point in points}
    comparisons = {
        one.key: [
            compare_point(*pair, one, stated_noise)
            for pair in pairs.values()
            if all(any(one.key in record.figures for record in side) for side in pair)
        ]
        for one in quantities
    }
    kept = {key: found for key, found in comparisons.items() if found}
    if not kept:
        raise OverlayError(
            "no chosen quantity is in both arms",
            seen=", ".join(sorted({key for record in (*first, *second) for key in record.figures})),
            wanted=", ".join(one.key for one in quantities),
            fix="name the ones that are there with --quantity",
        )
    return Report(
        arms=(arms[0], arms[1]),
        comparisons=kept,
        paired={point: paired_ratio(*pair) for point, pair in pairs.items()},
        launches={point: found for point, pair in pairs.items() if (found := _launches(*pair))},
        evidence=evidence,
        failed=_failed_proofs((*first, *second)),
        left_out=_left_out(arms, sides),
        unproved={record.point for record in (*first, *second) if _failed_proofs([record])},
    )


def _one_arm(side: Sequence[Record]) -> str:
    names = store.arms_of(side)
    if len(names) != 1:
        raise OverlayError(
            "a side of the comparison is more than one arm",
            seen=", ".join(names),
            wanted="one arm a side",
            fix="write SET:ARM for each side",
        )
    return names[0]


def _by_point(side: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in side:
        found.setdefault(record.point, []).append(record)
    return found


def _left_out(arms: Sequence[str], sides: Sequence[Mapping[str, Sequence[Record]]]) -> list[str]:
    found = []
    for arm, (own, other) in zip(arms, (sides, sides[::-1]), strict=True):
        for point, kept in own.items():
            if point not in other:
                found.append(f"{point}: only {arm} ran it")
                continue
            theirs = {(record.round, record.run) for record in other[point]}
            alone = sorted({(record.round, record.run) for record in kept} - theirs)
            found += [f"{point}: round {number}, run {run}: only {arm} has it" for number, run in alone]
    return found


def _evidence(first: Sequence[Record], second: Sequence[Record]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name in SHOWN_EVIDENCE + SAME_EVIDENCE:
        values = [
            sorted({str(one.evidence[name]) for one in side if one.evidence.get(name)})
            for side in (first, second)
        ]
        if name in SAME_EVIDENCE and len(set(values[0]) | set(values[1])) > 1:
            raise OverlayError(
                f"the arms ran with another {name}",
                seen=" and ".join(", ".join(value) or "not recorded" for value in values),
                wanted=f"one {name}",
                fix="compare runs of the same hardware and model",
            )
        if any(values):
            found[name] = (", ".join(values[0]) or "not recorded", ", ".join(values[1]) or "not recorded")
    return found


def _launches(
    first: Sequence[Record], second: Sequence[Record]
) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
    found = [next((record.launches for record in side if record.launches), None) for side in (first, second)]
    return (found[0], found[1]) if found[0] and found[1] else None


def _failed_proofs(found: Sequence[Record]) -> list[str]:
    return [
        f"{record.arm}, {record.point}, round {record.round}, run {record.run}: {name}: "
        + " ".join(proof["says"].split())
        for record in found
        for name, proof in record.proofs.items()
        if proof["ok"] is False
    ]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a pipe in a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def difference_table(
    found: Sequence[Comparison], arms: tuple[str, str], unproved: Collection[str] = ()
) -> str:
    """One quantity by round, with means, difference and verdict, a line a point."""
    one = found[0].quantity
    numbers = sorted({round_.number for comparison in found for round_ in comparison.rounds})
    halves = {
        number: next((r.halves[0] for c in found for r in c.rounds if r.number == number), "")
        for number in numbers
    }
    headers = [
        f"{one.heading}, each cell {arms[0]} / {arms[1]}",
        *(f"Round {n}" + (f" ({arms[0]} on {halves[n]})" if halves[n] else "") for n in numbers),
        *(f"Mean {arm}" for arm in arms),
        "Delta",
        "Verdict",
    ]
    rows = []
    for comparison in found:
        by_number = {round_.number: round_ for round_ in comparison.rounds}
        cells = [
            f"{one.show(by_number[n].first)} / {one.show(by_number[n].second)} ({by_number[n].change:+.2%})"
            if n in by_number
            else ""
            for n in numbers
        ]
        delta = f"{one.show_difference(comparison.difference)} ({comparison.change:+.2%})"
        means = [one.show(comparison.first), one.show(comparison.second)]
        verdict = f"{comparison.verdict}{UNPROVED if comparison.point in unproved else ''}"
        rows.append([comparison.point, *cells, *means, delta, verdict])
    return markdown_table(headers, rows)


def gain_cell(comparison: Comparison) -> str:
    """``first → second (gain×)``."""
    one = comparison.quantity
    return f"{one.show(comparison.first)} → {one.show(comparison.second)} ({comparison.gain:.2f}×)"


def gain_table(report: Report) -> str:
    """Every quantity side by side as gains, with the ratio of the same requests' inter-token latency."""
    points = list(dict.fromkeys(c.point for found in report.comparisons.values() for c in found))
    paired = any(report.paired.values())
    headers = ["point", *(QUANTITIES[key].heading for key in report.comparisons)]
    rows = []
    for point in points:
        cells = [point]
        for found in report.comparisons.values():
            cells.append(next((gain_cell(c) for c in found if c.point == point), ""))
        if paired:
            ratio = report.paired.get(point)
            cells.append(f"{ratio.median:.3f}" if ratio else "sequences differ")
        rows.append(cells)
    return markdown_table([*headers, *(["decode, same requests"] if paired else [])], rows)


def noise_lines(found: Sequence[Comparison]) -> list[str]:
    """The noise of each point and why its verdict is what it is."""

    def share(value: float | None) -> str:
        return "not known" if value is None else f"{value:.2%}"

    lines = []
    for comparison in found:
        noise = comparison.noise
        stated = f", stated {share(noise.stated)}" if noise.stated is not None else ""
        lines.append(
            f"- {comparison.point}: same-arm spread {share(noise.same_arm)}, half to half "
            f"{share(noise.half_to_half)}{stated}; {comparison.verdict}: {comparison.because}."
        )
    return lines


def launch_table(first: Mapping[str, float], second: Mapping[str, float], arms: tuple[str, str]) -> str:
    """Launches a decode step by kernel name, all of them first, then those that differ, then the rest."""
    names = sorted(first.keys() | second.keys())
    rows = [["all launches", *(f"{sum(side.values()):g}" for side in (first, second))]]
    names.sort(key=lambda name: (first.get(name, 0) == second.get(name, 0), name))
    rows += [[f"`{name}`", f"{first.get(name, 0):g}", f"{second.get(name, 0):g}"] for name in names]
    return markdown_table(["Per decode step", *arms], rows)


def markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [f"## {report.arms[0]} against {report.arms[1]}"]
    for found in report.comparisons.values():
        parts.append(difference_table(found, report.arms, report.unproved))
        parts.append("\n".join(["Noise:", *noise_lines(found)]))
    parts += ["### Gains", gain_table(report)]
    ratios = {point: ratio for point, ratio in report.paired.items() if ratio}
    if ratios:
        lines = [
            f"- {point}: median {ratio.median:.3f} of {ratio.requests} requests, a tenth of them below "
            f"{ratio.low:.3f} and a tenth above {ratio.high:.3f}."
            for point, ratio in ratios.items()
        ]
        title = f"Inter-token latency of the same requests, {report.arms[1]} / {report.arms[0]}:"
        parts.append("\n".join([title, *lines]))
    for point, pair in report.launches.items():
        parts += [f"### Launches, {point}", launch_table(*pair, report.arms)]
    parts += [f"Verdicts: {RULE}"]
    if report.failed:
        parts.append(
            "\n".join(["**Runs that did not prove themselves:**", *(f"- {f}" for f in report.failed)])
        )
    if report.left_out:
        parts.append("\n".join(["**Not in both arms:**", *(f"- {line}" for line in report.left_out)]))
    if report.evidence:
        rows = [[name, *values] for name, values in report.evidence.items()]
        parts += ["### Evidence", markdown_table(["", *report.arms], rows)]
    return "\n\n".join(parts) + "\n"


def plot(report: Report, folder: Path, name: str = REPORT_NAME) -> list[Path]:
    """Draw every point's change with its rounds and its noise, a panel a quantity, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    # The same report gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    from matplotlib import pyplot

    panels = list(report.comparisons.values())
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False)
    for axis, found in zip(axes[0], panels, strict=True):
        positions = range(len(found))
        for position, comparison in zip(positions, found, strict=True):
            limit = comparison.noise.limit or 0.0
            axis.bar(position, 200 * limit, 0.8, -100 * limit, color="lightgrey")
            axis.bar(position, 100 * comparison.change, 0.4, color=COLOURS[comparison.verdict])
            rounds = [100 * one.change for one in comparison.rounds]
            axis.plot([position] * len(rounds), rounds, "k_", markersize=12)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(list(positions), [comparison.point for comparison in found], rotation=30, ha="right")
        axis.set_title(found[0].quantity.title)
    axes[0][0].set_ylabel(f"{report.arms[1]} against {report.arms[0]}, %")
    figure.suptitle("bar: mean; dashes: rounds; grey: noise")
    figure.tight_layout()
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


COLOURS = {
    Verdict.FASTER: "tab:green",
    Verdict.SLOWER: "tab:red",
    Verdict.HIGHER: "tab:blue",
    Verdict.LOWER: "tab:orange",
    Verdict.WITHIN_NOISE: "tab:grey",
    Verdict.NOT_JUDGED: "white",
}


def read_side(word: str) -> list[Record]:
    """The records that ``SET`` or ``SET:ARM`` names.

    Raises:
        OverlayError: no such set, or no such arm in it.
    """
    place, _, arm = word.rpartition(":")
    if not place or Path(word).exists():
        place, arm = word, ""
    found = store.read(Path(place))
    if not arm:
        return found
    chosen = [record for record in found if record.arm == arm]
    if not chosen:
        raise OverlayError(
            f"{place} has no arm {arm}",
            seen=arm,
            wanted=f"one of {', '.join(store.arms_of(found))}",
            fix="correct the arm's name",
        )
    return chosen


def run(arguments: argparse.Namespace) -> int:
    """Print the Markdown, write it and the plot into the output folder."""
    first, second = read_side(arguments.first), read_side(arguments.second)
    quantities = [quantity(key) for key in arguments.quantity or DEFAULT_QUANTITIES]
    noise = None if arguments.noise is None else arguments.noise / 100
    report = make_report(first, second, quantities, noise)
    text = markdown(report)
    print(text, end="")
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / f"{REPORT_NAME}.md", text)
    try:
        paths = plot(report, folder)
    except ModuleNotFoundError as missing:
        print(f"no plot: {missing}; install matplotlib where the result sets are compared", file=sys.stderr)
    else:
        print("plot: " + ", ".join(map(str, paths)), file=sys.stderr)
    slower = [c.point for found in report.comparisons.values() for c in found if c.verdict is Verdict.SLOWER]
    if arguments.fail_slower and slower:
        print(f"slower beyond noise: {', '.join(dict.fromkeys(slower))}", file=sys.stderr)
        return EXIT_FAILED_CHECK
    return EXIT_OK


def register(subparsers: Any) -> None:
    """Add the ``compare`` verb."""
    parser = subparsers.add_parser(
        "compare", help="two result sets of bench: deltas, noise, verdicts, a plot"
    )
    form = "SET or SET:ARM, where SET is a folder or a runs.jsonl"
    parser.add_argument("first", help=f"what is compared with: {form}")
    parser.add_argument("second", help=f"what is compared: {form}")
    parser.add_argument(
        "--quantity", action="append", help=f"default {', '.join(DEFAULT_QUANTITIES)}; repeatable"
    )
    parser.add_argument("--noise", type=options.percentage, help="a noise known from elsewhere, in percent")
    parser.add_argument(
        "--fail-slower", action="store_true", help="status 1 where a point is slower beyond noise"
    )
    parser.add_argument("--out", type=Path, default=Path("build/compare"), help="folder of report and plot")
    parser.set_defaults(run=run)
