# SPDX-License-Identifier: Apache-2.0
"""The picture of a launch: who ran which stage when, who waited."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from planted import GOOD, HEAD, PRODUCE, TAIL

from cdnasim import Device, load
from cdnasim.timeline import timeline, write_svg


def handoff(tmp_path: Path | None = None) -> tuple[Device, object, list[tuple[int, str]]]:
    slow = ".Lslow:\n s_sub_u32 s10, s10, 1\n s_cmp_lg_u32 s10, 0\n s_cbranch_scc1 .Lslow\n"
    body = PRODUCE.format(**GOOD).replace(
        "v_add_u32_e32 v3", "s_movk_i32 s10, 0x400\n" + slow + "v_add_u32_e32 v3", 1
    )
    text = HEAD.format(arch="gfx950") + body + TAIL.format(lds=0)
    kernel = load(text, "gfx950", "planted.s").kernel()
    lines = {t: i.line for i, t in zip(kernel.insts, kernel.texts, strict=True)}
    consume = next(n for t, n in lines.items() if "s_sleep" in t) - 3
    dev = Device("gfx950", quantum=(20, 40))
    dev.record_timeline()
    dev.launch(kernel, 2, 128, [dev.zeros(1024, dtype=torch.int32)], persistent=True)
    return dev, kernel, [(0, "produce"), (consume, "consume")]


def test_a_consumer_waits_until_its_producer_stored(tmp_path: Path) -> None:
    dev, kernel, stages = handoff()
    bars = timeline(dev, kernel, stages=stages)  # type: ignore[arg-type]
    first, second = ([b for b in bars if b.workgroup == g] for g in (0, 1))
    for row in (first, second):
        assert all(a.end == b.begin for a, b in itertools.pairwise(row))  # no gap: running or waiting
    waits = [b for b in second if b.wait == "sleep"]
    assert waits and waits[-1].end >= max(b.end for b in first if b.stage == "produce" and not b.wait) - 40
    assert sum(b.end - b.begin for b in waits) > 1000
    assert {b.stage for b in second if not b.wait} >= {"consume"}
    path = tmp_path / "launch.svg"
    write_svg(bars, path, title="hand-off")
    root = ET.parse(path).getroot()
    rectangles = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(rectangles) == len(bars) + 2 + 3  # and the legend: two stages, three kinds of wait
    assert "waits (sleep)" in path.read_text() and "hand-off" in path.read_text()


def test_bad_requests_say_what_is_wrong(tmp_path: Path) -> None:
    dev, kernel, _ = handoff()
    with pytest.raises(ValueError, match="growing lines"):
        timeline(dev, kernel, stages=[(9, "b"), (3, "a")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="record_timeline"):
        timeline(Device("gfx950"), kernel)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a bar"):
        write_svg([], tmp_path / "none.svg")
