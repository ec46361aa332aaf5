# SPDX-License-Identifier: Apache-2.0
"""A picture of a launch: workgroups by rows, time from left to right, coloured by stage, waits shown.

    dev.record_timeline()
    report = dev.launch(kernel, ...)
    write_svg(timeline(dev, kernel, stages=[(0, "load"), (120, "compute"), (300, "store")]), path)

Time is the rank's clock of executed wave-instructions: it shows what came before what and who waited, and
says nothing about microseconds."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .device import Device
from .program import Kernel

WAITS = {1: "barrier", 2: "sleep", 4: "peers"}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#225555", "#663333")
WAIT_COLOURS = {"barrier": "#777777", "sleep": "#bbbbbb", "peers": "#333333"}
Stages = Sequence[tuple[int, str]] | Callable[[int, str], str]


@dataclass(frozen=True)
class Bar:
    """A stretch of one workgroup's row. ``wait`` is "" while the wave ran or could have run."""

    workgroup: int
    begin: int
    end: int
    stage: str
    wait: str = ""


def stage_names(kernel: Kernel, stages: Stages | None) -> dict[int, str]:
    """The stage of each source line of the assembly. ``stages``: (first line, name) in order, or a
    function of
    (assembly line, source location). By default the file that an instruction came from, where the compiler
    said so."""
    if stages is None:
        stages = lambda _line, source: Path(source.split(":")[0]).name if source else kernel.name  # noqa: E731
    if callable(stages):
        return {i.line: stages(i.line, s) for i, s in zip(kernel.insts, kernel.sources, strict=True)}
    starts = [line for line, _ in stages]
    if starts != sorted(starts) or not starts:
        raise ValueError(f"stages are (first line, name) with growing lines, not {list(stages)}")
    names = [name for _, name in stages]
    return {i.line: names[max(0, bisect.bisect_right(starts, i.line) - 1)] for i in kernel.insts}


def timeline(
    device: Device, kernel: Kernel, *, rank: int = 0, wave: int = 0, stages: Stages | None = None
) -> list[Bar]:
    """The bars of one wave of each workgroup of the last run of ``rank``, in order of time a workgroup."""
    spans = device.spans(rank)
    if not len(spans["begin"]):
        raise ValueError("nothing was recorded: call Device.record_timeline() before the launch")
    stage = stage_names(kernel, stages)
    rows: dict[int, list[Bar]] = {}
    waiting: dict[int, str] = {}
    keep = spans["wave"] == wave
    columns = [spans[name][keep].tolist() for name in ("workgroup", "begin", "end", "line", "kind")]
    for group, begin, end, line, kind in zip(*columns, strict=True):
        row = rows.setdefault(group, [])
        name = stage.get(line, kernel.name)
        if row and row[-1].end < begin:
            wait = waiting.get(group, "")
            row.append(Bar(group, row[-1].end, begin, row[-1].stage if not wait else name, wait))
        row.append(Bar(group, begin, end, name))
        waiting[group] = WAITS.get(kind, "")
    return [bar for group in sorted(rows) for bar in _merged(rows[group])]


def _merged(row: list[Bar]) -> list[Bar]:
    out: list[Bar] = []
    for bar in row:
        if out and (out[-1].stage, out[-1].wait) == (bar.stage, bar.wait) and out[-1].end == bar.begin:
            out[-1] = Bar(bar.workgroup, out[-1].begin, bar.end, bar.stage, bar.wait)
        else:
            out.append(bar)
    return out


def write_svg(bars: Sequence[Bar], path: Path | str, *, width: int = 1200, title: str = "") -> None:
    """Write the picture. Raises ValueError without a bar."""
    if not bars:
        raise ValueError("a timeline without a bar")
    groups = sorted({b.workgroup for b in bars})
    first, last = min(b.begin for b in bars), max(b.end for b in bars)
    height = max(2, min(16, 1024 // len(groups)))
    left, top = 60, 46
    scale = (width - left - 10) / max(1, last - first)
    stages = list(dict.fromkeys(b.stage for b in bars))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(stages)}
    total = top + height * len(groups) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" '
        'font-size="11">',
        f'<text x="{left}" y="14">{escape(title or "workgroups over executed wave-instructions")}</text>',
    ]
    x = left
    for name, fill in [*colour.items(), *((f"waits: {k}", v) for k, v in WAIT_COLOURS.items())]:
        out.append(f'<rect x="{x}" y="22" width="10" height="10" fill="{fill}"/>')
        out.append(f'<text x="{x + 14}" y="31">{escape(name)}</text>')
        x += 26 + 7 * len(name)
    row = {group: top + i * height for i, group in enumerate(groups)}
    for bar in bars:
        fill = WAIT_COLOURS[bar.wait] if bar.wait else colour[bar.stage]
        what = f"workgroup {bar.workgroup}: {bar.stage}" + (f", waits ({bar.wait})" if bar.wait else "")
        out.append(
            f'<rect x="{left + (bar.begin - first) * scale:.1f}" y="{row[bar.workgroup]}" '
            f'width="{max(0.3, (bar.end - bar.begin) * scale):.1f}" height="{height - (height > 3)}" '
            f'fill="{fill}"><title>{escape(what)}, {bar.begin} to {bar.end}</title></rect>'
        )
    for group in groups[:: max(1, len(groups) // 16)]:
        out.append(f'<text x="4" y="{row[group] + height}">wg {group}</text>')
    out.append(f'<text x="{left}" y="{total - 8}">{first}</text>')
    out.append(f'<text x="{width - 90}" y="{total - 8}">{last} instr.</text>')
    Path(path).write_text("\n".join([*out, "</svg>"]) + "\n")
