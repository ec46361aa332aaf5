# SPDX-License-Identifier: Apache-2.0
"""The timing model: its ideal parts against hand-made counts, the fit against planted constants, and the kept
counts of the base's kernels against the published times."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
import torch
from base import kernels
from planted import GOOD, HEAD, PRODUCE, TAIL

from cdnasim import Device, load, timing
from cdnasim.counts import Counts, counts
from cdnasim.native import CLASSES

ZERO = dict.fromkeys(CLASSES, 0.0)
BARE = Counts("k", "gfx950", ZERO, ZERO, ZERO, {}, {}, {}, 0.0, 0.0, 0.0, 0.0, 8.0, 1.0)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return json.loads(timing.find_counts().read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change, part, us",
    [
        ({"handoff_depth": 5.0}, "handoffs", 5),
        ({"rank_bytes": 8e6}, "hbm", 1),
        ({"load_bytes": {"plain": 8e6, "sc1": 4e6, "sc0 sc1 nt": 4e6}}, "device scope", 1),
        ({"busiest": ZERO | {"valu": 2400.0}}, "issue", 2400 * 4 / 4 / 2400),
        ({"busiest": ZERO | {"salu": 2400.0, "wait": 9e9}}, "issue", 2400 / 4 / 2400),
        ({"lds_bytes": 128 * 2400.0}, "lds", 1),
        ({"lds_cycles": 2400.0, "units": 2.0}, "lds", 0.5),
        ({"longest": ZERO | {"valu": 600.0, "sleep": 1e9}}, "longest wave", 1),
    ],
)
def test_the_ideal_time_of_a_part(change: dict[str, Any], part: str, us: float) -> None:
    found = timing.features(dataclasses.replace(BARE, **change))
    assert found[part] == pytest.approx(us)
    assert all(value == 0 for name, value in found.items() if name != part)


@pytest.mark.parametrize(
    "opcode, cycles",
    [
        ("v_mfma_f32_16x16x32_bf16", 16),
        ("v_mfma_f32_32x32x16_bf16", 32),
        ("v_mfma_f32_32x32x8bf16_1k", 16),
        ("v_mfma_f32_16x16x4_f32", 32),
        ("v_mfma_f32_4x4x4_16b_bf16", 4),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", 32),
        ("v_mfma_i32_16x16x64_i8", 16),
    ],
)
def test_matrix_cycles_follow_from_shape_and_published_rate(opcode: str, cycles: float) -> None:
    assert timing.mfma_cycles(opcode, timing.MACHINES["gfx950"]) == cycles


def test_a_matrix_opcode_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="v_mfma_wobble"):
        timing.mfma_cycles("v_mfma_wobble", timing.MACHINES["gfx950"])


def test_the_fit_finds_planted_constants_and_never_beats_the_peak() -> None:
    rng = random.Random(1)
    rows = [[rng.uniform(1, 20) for _ in timing.PARTS] for _ in range(12)]
    want = timing.Constants(3.0, 1.2, 0.0, 1.5, 1.0, 0.0)
    points = [(r, sum(a * b for a, b in zip(r, want.values(), strict=True))) for r in rows]
    found = timing.fit(points)
    assert found.values() == pytest.approx(want.values(), abs=1e-6)
    # Times shorter than the peaks allow do not pull a factor under its bound.
    short = timing.fit([(r, 0.1 * r[1]) for r in rows])
    assert (short.hbm, short.issue, short.lds) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no point"):
        timing.fit([])


def test_a_report_is_modelled_and_says_so() -> None:
    text = HEAD.format(arch="gfx950") + PRODUCE.format(**GOOD) + TAIL.format(lds=0)
    kernel = load(text, "gfx950", "planted.s").kernel()
    dev = Device("gfx950")
    buffer = dev.zeros(1024, dtype=torch.int32)
    blind = dev.launch(kernel, 2, 128, [buffer.zero_()], persistent=True)
    with pytest.raises(ValueError, match="count_handoffs"):
        timing.model(blind, "gfx950")
    dev.count_handoffs()
    report = dev.launch(kernel, 2, 128, [buffer.zero_()], persistent=True)
    result = timing.model(report, "gfx950")
    assert result.label == "modelled" and "modelled" in str(result) and result.machine == "MI355X"
    assert result.us == pytest.approx(sum(result.parts.values()))
    assert result.parts["handoffs"] == timing.FITTED.handoffs  # one hand-off
    assert timing.model([report, report], "gfx950").us == pytest.approx(result.us)


def test_counts_survive_a_file_and_a_wrong_version_is_named() -> None:
    assert Counts.from_json(json.loads(json.dumps(BARE.as_json()))) == BARE
    with pytest.raises(TypeError, match="wobble"):
        Counts.from_json(BARE.as_json() | {"wobble": 1})
    with pytest.raises(ValueError, match="no report"):
        counts([], "gfx950")


def test_the_kept_counts_belong_to_the_pinned_kernels(data: dict[str, Any]) -> None:
    assert data["source"] == kernels.source_hash(), "the base's kernels changed: count them again"


def test_every_published_point_of_the_fit_and_the_hold_out_is_counted(data: dict[str, Any]) -> None:
    for what in ("ffn", "layer ratio1"):
        for tp in (2, 4):
            for rows in timing.REQUESTS:
                assert timing.launches(data["cases"], (what, tp, rows)), (what, tp, rows)


def test_the_constants_are_the_fit_of_the_kept_counts(data: dict[str, Any]) -> None:
    assert timing.FITTED.values() == pytest.approx(timing.fit_on(data).values(), abs=2e-3)


def test_residuals_and_held_out_points(data: dict[str, Any]) -> None:
    """What docs/simulator.md says of the model's errors: a change of the model that makes it worse fails."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for key, us in timing.PUBLISHED.items():
        if parts := timing.launches(data["cases"], key):
            modelled = sum(timing.model(c).us for c in parts)
            errors[key in timing.FIT_ON].append(abs(modelled / us - 1))
    assert max(errors[True]) < FIT_BOUND and max(errors[False]) < HELD_OUT_BOUND


def test_the_document_is_the_tables(data: dict[str, Any]) -> None:
    document = timing.document(data)
    path = timing.find_counts().with_name("base_mono_timing.md")
    assert path.read_text() == document, f"python -m cdnasim.timing > {path.name}"
    assert document.count("| held out |") >= 8 and document.count("| fit |") >= 8
    for name in ("ffn tp4 6", "k1 tp4 6 ratio1", "k2 tp2 48 ratio1"):
        assert f"| {name} |" in document


FIT_BOUND, HELD_OUT_BOUND = 0.105, 0.105
