# SPDX-License-Identifier: Apache-2.0
"""The base's own FFN launch, compiled as it is, against the float64 half layer (bounds of the base's numerics
test), and under the hostile memory model bit for bit what exact memory gives."""

from __future__ import annotations

import pytest
import torch
from base import ffn
from base import layer as whole

from cdnasim import Device

full = pytest.mark.full
long = pytest.mark.timeout(6 * 3600)  # on a machine that does other work, too
# rows, TP, architecture. gfx942's kernels are for TP4 and at most 42 rows.
CASES = [
    pytest.param(1, 2, "gfx950"),
    pytest.param(6, 4, "gfx950", marks=full),
    pytest.param(8, 2, "gfx950", marks=full),
    pytest.param(48, 4, "gfx950", marks=full),
    pytest.param(1, 4, "gfx942", marks=full),
    pytest.param(6, 4, "gfx942", marks=full),
    pytest.param(42, 4, "gfx942", marks=full),
]


# At TP4 the base's MoE stages load LDS of steps past a rank's share, which an earlier stage may have left
# unwritten, and give what they multiply it into a scale of 0. Values are compared all the same.
STALE = {"lds-never-written": "warn"}


def stale_checks(tp: int) -> dict[str, str]:
    return STALE if tp == 4 else {}


def only_stale(device: Device) -> None:
    """No warning but of that, and of what is one by default: an offset that passes 2^32."""
    known = ("lds-never-written", "offset-wrap")
    assert [text for text in device.warnings if not text.startswith(known)] == []


def check(result: dict[str, tuple[float, float]]) -> None:
    for name in ("residual", "post", "comb", "pre", "normed"):
        cosine, relative = result[name]
        assert cosine > 0.9999 and relative < 0.01, (name, cosine, relative)
    cosine, relative = result["out"]
    assert cosine > 0.9998 and relative < 0.02, ("out", cosine, relative)


@long
@pytest.mark.parametrize("rows, tp, arch", CASES)
def test_ffn_launch(rows: int, tp: int, arch: str) -> None:
    case = ffn.FfnCase(rows, tp, arch)
    run = ffn.FfnRun(case, Device(arch, ranks=tp, checks=stale_checks(tp)))
    run.launch()
    only_stale(run.device)
    check(ffn.compare(run))
    # A second launch on the same memory takes the next epoch and gives the same bits.
    first = [rank["out"].clone() for rank in run.ranks]
    run.launch()
    for rank, out in zip(run.ranks, first, strict=True):
        assert torch.equal(rank["out"], out)


@long
@pytest.mark.parametrize(
    "rows, tp, arch", [pytest.param(1, 2, "gfx950"), pytest.param(6, 4, "gfx942", marks=full)]
)
def test_ffn_launch_on_hostile_memory(rows: int, tp: int, arch: str) -> None:
    case = ffn.FfnCase(rows, tp, arch)
    outs = []
    for settings in (
        {},
        {"memory": "hostile", "seed": 3},
        {"memory": "hostile", "seed": 4, "schedule": "rank-stalled"},
    ):
        run = ffn.FfnRun(case, Device(arch, ranks=tp, checks=stale_checks(tp), **settings))
        run.launch()
        only_stale(run.device)
        outs.append([run.ranks[0][name].clone() for name in ("out", "res_out", "pre_out")])
        for rank in run.ranks[1:]:
            assert torch.equal(rank["out"], run.ranks[0]["out"])
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


def test_a_wrong_weight_is_noticed() -> None:
    """The comparison fails when one expert's scales are off by a step for a sixteenth of its rows."""
    case = ffn.FfnCase(1, 2, "gfx950")
    run = ffn.FfnRun(case, Device("gfx950", ranks=2))
    _, picks = ffn.moe(case, case.seam["normed"])
    run.ranks[0]["w13_s"][picks[0, 0]] += 1
    run.launch()
    with pytest.raises(AssertionError):
        check(ffn.compare(run))


def check_k1(result: dict[str, tuple[float, float]]) -> None:
    for name in ("residual", "post", "comb", "pre", "q"):
        cosine, relative = result[name]
        assert cosine > 0.9999 and relative < 0.01, (name, cosine, relative)
    assert result["record"] == (1.0, 0.0)  # every element of the new KV records, and every scale


def test_k1() -> None:
    """K1 of a standard layer on every rank: seam, queries, KV records."""
    run = whole.LayerRun(6, 4, "gfx950")
    run.run_k1()
    check_k1(run.compare_k1())


def test_one_element_of_a_record_is_noticed() -> None:
    run = whole.LayerRun(1, 2, "gfx950")
    run.run_k1()
    a = run.ranks[0]
    at, _ = run.window.places(run.slot)
    for byte in (0, whole.DATA - 2):  # e4m3 and bf16
        a["swa"][at[0] + byte] ^= 1
        with pytest.raises(AssertionError, match=r"0\.99"):
            check_k1(run.compare_k1())
        a["swa"][at[0] + byte] ^= 1
    check_k1(run.compare_k1())


@full
def test_k1_takes_an_old_line_that_nobody_asked_for() -> None:
    """The base's K1 loads rows of other XCDs by plain loads without an acquire, which is right only while no
    cache holds their lines: LLVM's memory model does not promise that, and unasked fetches break it."""
    errors = []
    for seed in range(8):
        run = whole.LayerRun(1, 4, "gfx950", memory="hostile", checks=STALE)
        run.device.reseed(seed)
        run.run_k1()
        errors.append(run.compare_k1()["q"][1])
    assert max(errors) > 0.01, errors


@long
@pytest.mark.parametrize(
    "rows, tp, arch, ratio, memory",
    [
        pytest.param(1, 2, "gfx950", 1, "exact"),
        pytest.param(6, 4, "gfx950", 1, "exact", marks=full),
        pytest.param(6, 4, "gfx950", 1, "hostile", marks=full),
        pytest.param(8, 2, "gfx950", 2, "exact", marks=full),
        pytest.param(48, 4, "gfx950", 1, "exact", marks=full),
        pytest.param(6, 4, "gfx942", 1, "exact", marks=full),
        pytest.param(6, 4, "gfx942", 1, "hostile", marks=full),
        pytest.param(42, 4, "gfx942", 1, "exact", marks=full),
    ],
)
def test_whole_layer(rows: int, tp: int, arch: str, ratio: int, memory: str) -> None:
    """K1, then K2 on K1's outputs: attention, wo_a, wo_b, both TP sums, seam, MoE. The reference rounds
    where the split attention does, so that K2's residual is closer than the general bound asks. No line is
    fetched unasked: K1 needs that (``test_k1_takes_an_old_line_that_nobody_asked_for``)."""
    run = whole.LayerRun(rows, tp, arch, ratio, memory=memory, checks=stale_checks(tp), unasked=False)
    run.run_k1()
    assert run.device.warnings == []
    check_k1(run.compare_k1())
    second = run.prepare_k2()
    second.launch()
    only_stale(second.device)
    result = ffn.compare(second)
    check(result)
    assert result["residual"][1] < 1e-3, result["residual"]
