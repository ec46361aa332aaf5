# SPDX-License-Identifier: Apache-2.0
"""Opcodes against the manual's pseudocode (``conformance``), and against own statements where there is
none."""

from __future__ import annotations

import itertools
import math

import conformance
import conformance_lists
import numpy as np
import pytest
import torch
from pcode_values import Unsupported

from cdnasim.lab import AGPR0, Bench

ARCH_FP8 = {
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
}
FLOATS = np.array([0.0, -0.0, 1.0, -1.5, 3.14159, 447.9, 448.0, 460.0, 500.0, 1e-3, 2.0**-9, 2.0**-10, -(2.0**-7), 240.0, 250.0, 0.017, 57344.0, 60000.0, math.inf, -math.inf, math.nan])  # fmt: skip  # noqa: E501
# Lists are short: an opcode without an independent check is one more thing to believe.
MOST_UNCHECKED = 40


LISTED = {*conformance_lists.UNCHECKED, *conformance_lists.NOT_EVALUATED}
COMPARED = sorted(set(conformance.alu_opcodes()) - LISTED)


@pytest.mark.parametrize("name", COMPARED)
def test_opcode(name: str) -> None:
    assert conformance.check(name, rounds=1) > 0


@pytest.mark.parametrize("name", sorted(conformance_lists.NOT_EVALUATED))
def test_opcode_without_usable_pseudocode_is_still_without(name: str) -> None:
    """Each exception expires: one that the interpreter comes to evaluate must be compared."""
    with pytest.raises(Unsupported, match=conformance_lists.NOT_EVALUATED[name]):
        conformance.check(name, rounds=1)


def test_list_of_unchecked_is_short() -> None:
    assert len(LISTED) <= MOST_UNCHECKED


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("v_add_u32", "+", "-"),
        ("v_cmp_lt_f32", "<", ">"),
        ("s_bfe_u32", "22 : 16", "21 : 16"),
        ("v_subb_co_u32", ">", "<"),
        ("v_fma_f32", "S2.f32", "S0.f32"),
    ],
)
def test_a_wrong_statement_is_noticed(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict(conformance.pseudocode())
    texts[name] = texts[name].replace(old, new)
    monkeypatch.setattr(conformance, "pseudocode", lambda: texts)
    with pytest.raises(conformance.Mismatch):
        conformance.check(name, rounds=4)


def lanes(values: np.ndarray) -> np.ndarray:
    return np.resize(values.astype(np.float32), 64).view(np.uint32)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("which, opcode", [(0, "fp8"), (1, "bf8")])
def test_fp8_round_trip(arch: str, which: int, opcode: str) -> None:
    dtype = ARCH_FP8[arch][which]
    b = Bench(
        arch,
        [
            f"v_cvt_pk_{opcode}_f32 v2, v0, v1",
            f"v_cvt_pk_f32_{opcode}_e32 v[4:5], v3",
            f"v_cvt_f32_{opcode}_sdwa v6, v3 src0_sel:BYTE_2",
        ],
    )
    limit = torch.finfo(dtype).max
    values = FLOATS[np.isfinite(FLOATS) & (np.abs(FLOATS) <= limit)]
    b.vgprs[0], b.vgprs[1] = lanes(values), lanes(values[::-1])
    b.vgprs[2] = 0xABCD0000
    b.step(0)
    for half, source in ((0, values), (8, values[::-1])):
        want = torch.from_numpy(np.resize(source.astype(np.float32), 64)).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal(b.vgprs[2] >> half & 0xFF, want)
    assert (b.vgprs[2] >> 16 == 0xABCD).all()
    codes = np.arange(256, dtype=np.uint32)
    for base in range(0, 256, 64):
        b.vgprs[3] = (
            codes[base : base + 64] | (255 - codes[base : base + 64]) << 8 | codes[base : base + 64] << 16
        )
        b.step(1)
        b.step(2)
        want = torch.from_numpy(codes.astype(np.uint8)).view(dtype).float().numpy()
        assert np.array_equal(b.vgprs[4].view(np.float32), want[base : base + 64], equal_nan=True)
        assert np.array_equal(b.vgprs[5].view(np.float32), want[::-1][base : base + 64], equal_nan=True)
        assert np.array_equal(b.vgprs[6].view(np.float32), want[base : base + 64], equal_nan=True)


@pytest.mark.parametrize("fmt, dtype", [("fp8", torch.float8_e4m3fn), ("bf8", torch.float8_e5m2)])
def test_scaled_down_conversion(fmt: str, dtype: torch.dtype) -> None:
    b = Bench(
        "gfx950",
        [
            f"v_cvt_scalef32_pk_{fmt}_f32 v3, v0, v1, v2",
            f"v_cvt_scalef32_pk_{fmt}_f32 v3, v0, v1, v2 op_sel:[0,0,0,1]",
        ],
    )
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    y = x[::-1].copy()
    b.vgprs[0], b.vgprs[1], b.vgprs[2], b.vgprs[3] = (
        x.view(np.uint32),
        y.view(np.uint32),
        np.float32(0.25).view(np.uint32),
        0,
    )
    b.step(0)
    b.step(1)
    want = [
        torch.from_numpy(v / np.float32(0.25)).to(dtype).view(torch.uint8).numpy().astype(np.uint32)
        for v in (x, y)
    ]
    assert np.array_equal(b.vgprs[3], (want[0] | want[1] << 8) * 0x10001)


def nearest_code(values: list[float], x: float) -> int:
    """The code of the value next to ``x``; between two, the even code; past the largest, the largest."""
    distance = [abs(abs(x) - v) for v in values]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    return min(best, key=lambda i: (i % 2, i))


def magnitudes(fmt: str) -> list[float]:
    """A format's finite values without sign, by code."""
    if fmt == "fp4":
        return [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    dtype, count = (torch.float8_e4m3fn, 127) if fmt == "fp8" else (torch.float8_e5m2, 124)
    return torch.arange(count, dtype=torch.uint8).view(dtype).double().tolist()


@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize("fmt", ["fp8", "bf8", "fp4"])
def test_scaled_down_conversions(fmt: str, source: str) -> None:
    """Divided by the scale's power of two, the nearest value of the format, ties to the even code, saturated;
    only the chosen byte (fp4) or word of the destination changes."""
    places = 4 if fmt == "fp4" else 2
    selects = [f"0,0,{w & 1},{w >> 1}" if fmt == "fp4" else f"0,0,0,{w}" for w in range(places)]
    if fmt != "fp4" and source == "bf16":
        selects = ["0,0,0", "0,0,1"]
    sources = "v0, v1, v2" if source == "f32" else "v0, v2"
    text = [f"v_cvt_scalef32_pk_{fmt}_{source} v3, {sources} op_sel:[{sel}]" for sel in selects]
    b = Bench("gfx950", text)
    rng = np.random.default_rng(5)
    values, full = magnitudes(fmt), 8 if fmt == "fp4" else 128
    between = [(lo + hi) / 2 for lo, hi in itertools.pairwise(values)]
    pool = np.array([*values, *between, values[-1] * 1.5], dtype=np.float32)
    pair = rng.choice(np.concatenate([pool, -pool]), (2, 64)).astype(np.float32)
    pair[:, 48:] = rng.standard_normal((2, 16)) * 3
    pair = torch.from_numpy(pair).bfloat16().float().numpy()
    scale = np.float32(2.0) ** rng.integers(-4, 5, 64).astype(np.float32)
    x = (pair * scale).astype(np.float32)
    bits = x.view(np.uint32)
    b.vgprs[0], b.vgprs[1] = (bits[0], bits[1]) if source == "f32" else (bits[0] >> 16 | bits[1], 0)
    b.vgprs[2] = (scale * np.float32(1.25)).view(np.uint32)  # its mantissa does not count
    for place in range(places):
        b.vgprs[3] = 0x5A5A5A5A
        b.step(place)
        width = 32 // places
        got = b.vgprs[3] >> (place * width) & ((1 << width) - 1)
        for lane in range(64):
            low, high = (
                nearest_code(values, float(v)) | (full if np.signbit(v) else 0) for v in pair[:, lane]
            )
            assert got[lane] == low | high << (width // 2), (lane, pair[:, lane], hex(got[lane]))
        rest = np.uint32(~(((1 << width) - 1) << (place * width)) & 0xFFFFFFFF)
        assert np.array_equal(b.vgprs[3] & rest, np.full(64, 0x5A5A5A5A & rest, dtype=np.uint32))


def test_divisions_over_the_exponent_range() -> None:
    """LLVM's f32 division sequence, whole: correctly rounded also where scaling is needed."""
    text = [
        "v_div_scale_f32 v2, s[0:1], v1, v1, v0",
        "v_rcp_f32_e32 v3, v2",
        "v_fma_f32 v4, -v2, v3, 1.0",
        "v_fmac_f32_e32 v3, v4, v3",
        "v_div_scale_f32 v4, vcc, v0, v1, v0",
        "v_mul_f32_e32 v5, v4, v3",
        "v_fma_f32 v6, -v2, v5, v4",
        "v_fmac_f32_e32 v5, v6, v3",
        "v_fma_f32 v2, -v2, v5, v4",
        "v_div_fmas_f32 v2, v2, v3, v5",
        "v_div_fixup_f32 v2, v2, v1, v0",
    ]
    b = Bench("gfx950", text)
    rng = np.random.default_rng(3)
    for _ in range(60):
        n, d = (
            np.ldexp(rng.uniform(1, 2, 64), rng.integers(-126, 128, 64)).astype(np.float32) for _ in range(2)
        )
        b.vgprs[0], b.vgprs[1] = n.view(np.uint32), d.view(np.uint32)
        for i in range(len(text)):
            b.step(i)
        with np.errstate(all="ignore"):
            want = (n.astype(np.float64) / d).astype(np.float32)
        got = b.vgprs[2].view(np.float32)
        # Past the largest float the sequence itself overflows on the way: not settled by the manual, not
        # checked.
        normal = (np.abs(want) >= 2.0**-126) & np.isfinite(want)
        assert np.array_equal(got[normal], want[normal])
        tiny = np.abs(want) < 2.0**-126
        assert np.abs(got[tiny].view(np.int32) - want[tiny].view(np.int32)).max(initial=0) <= 1


def test_lane_access() -> None:
    b = Bench("gfx950", ["v_readlane_b32 s4, v0, 17", "v_readfirstlane_b32 s5, v0", "v_writelane_b32 v1, 77, 63", "v_permlane16_swap_b32_e32 v2, v3", "v_permlane32_swap_b32_e32 v4, v5"])  # fmt: skip  # noqa: E501
    ids = np.arange(64, dtype=np.uint32)
    for i in range(6):
        b.vgprs[i] = ids + 100 * i
    b.exec = 0xFFFFFFFFFFFFFF00
    b.step(0)
    b.step(1)
    b.step(2)
    assert b.sgprs[4] == 17 and b.sgprs[5] == 8 and b.vgprs[1][63] == 77 and b.vgprs[1][62] == 162
    b.exec = (1 << 64) - 1
    b.step(3)
    b.step(4)
    odd = ids & 16 != 0
    assert np.array_equal(b.vgprs[2], np.where(odd, 300 + ids - 16, 200 + ids))
    assert np.array_equal(b.vgprs[3], np.where(odd, 300 + ids, 200 + ids + 16))
    high = ids & 32 != 0
    assert np.array_equal(b.vgprs[4], np.where(high, 500 + ids - 32, 400 + ids))
    assert np.array_equal(b.vgprs[5], np.where(high, 500 + ids, 400 + ids + 32))


@pytest.mark.parametrize(
    "control, source",
    [("quad_perm:[1,0,3,2]", lambda i: i ^ 1), ("row_shl:8", lambda i: i + 8 if i % 16 < 8 else None), ("row_shr:4", lambda i: i - 4 if i % 16 >= 4 else None),  # noqa: E501
     ("row_ror:3", lambda i: i & ~15 | (i - 3) & 15), ("row_mirror", lambda i: i & ~15 | 15 - (i & 15)), ("row_half_mirror", lambda i: i & ~7 | 7 - (i & 7)),  # noqa: E501
     ("row_bcast:15", lambda i: (i & ~15) - 1 if i >= 16 else None), ("row_newbcast:5", lambda i: i & ~15 | 5), ("wave_shr:1", lambda i: i - 1 if i else None)],  # noqa: E501
)  # fmt: skip
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp(control: str, source: object, bound: str) -> None:
    b = Bench("gfx942", [f"v_mov_b32_dpp v1, v0 {control} row_mask:0xe bank_mask:0x7{bound}"])
    b.vgprs[0], b.vgprs[1] = np.arange(64) + 1000, 7
    b.exec = ((1 << 64) - 1) & ~(1 << 21)
    b.step()
    for i in range(64):
        from_ = source(i)  # type: ignore[operator]
        live = from_ is not None and from_ != 21
        writes = i >= 16 and i % 16 < 12 and i != 21 and (live or bool(bound))
        assert b.vgprs[1][i] == ((1000 + from_ if live else 0) if writes else 7), i


@pytest.mark.parametrize(
    "m, k, name, words",
    [
        (16, 16, "16x16x16_bf16", 2),
        (32, 8, "32x32x8_bf16", 2),
        (16, 32, "16x16x32_bf16", 4),
        (32, 16, "32x32x16_bf16", 4),
    ],
)
def test_mfma_bf16(m: int, k: int, name: str, words: int) -> None:
    """Lane layouts restated in torch: lane l holds row l % m, K elements (l // m) * k / groups onwards."""
    regs = m * m // 64
    c0, d0 = 16, AGPR0 + 8
    b = Bench(
        "gfx950",
        [
            f"v_mfma_f32_{name} a[8:{8 + regs - 1}], v[0:{words - 1}], v[8:{8 + words - 1}], v[{c0}:{c0 + regs - 1}]"  # noqa: E501
        ],
    )
    g = torch.Generator().manual_seed(0)
    a, bt, c = (torch.randn(*s, generator=g).bfloat16() for s in ((m, k), (m, k), (m, m)))
    per = k * m // 64
    for lane in range(64):
        row, k0 = lane % m, lane // m * per
        for base, x in ((0, a), (8, bt)):
            raw = x[row, k0 : k0 + per].contiguous().view(torch.uint16).numpy().astype(np.uint32)
            for i in range(words):
                b.vgprs[base + i][lane] = raw[2 * i] | raw[2 * i + 1] << 16
        for r in range(regs):
            b.vgprs[c0 + r][lane] = (
                c[out_row(m, lane, r), lane % m].float().view(torch.int32).item() & 0xFFFFFFFF
            )
    b.exec = 1
    b.step()
    want = a.double() @ bt.double().T + c.double()
    for lane in range(64):
        for r in range(regs):
            assert b.vgprs[d0 + r][lane : lane + 1].view(np.float32)[0] == pytest.approx(
                want[out_row(m, lane, r), lane % m].item(), rel=1e-5, abs=1e-5
            )


def out_row(m: int, lane: int, r: int) -> int:
    return 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4


@pytest.mark.parametrize("bits", [16, 8])
def test_transposed_lds_read(bits: int) -> None:
    e = 64 // bits
    b = Bench("gfx950", [f"ds_read_b64_tr_b{bits} v[2:3], v0"])
    data = np.random.default_rng(1).integers(0, 1 << bits, (64, e))
    b.lds[:512] = data.astype({16: np.uint16, 8: np.uint8}[bits]).view(np.uint8).flatten()
    b.vgprs[0] = np.arange(64) * 8
    b.step()
    for lane in range(64):
        raw = int(b.vgprs[2][lane]) | int(b.vgprs[3][lane]) << 32
        base, r = lane & ~15, lane & 15
        for k in range(e):
            assert raw >> (bits * k) & ((1 << bits) - 1) == data[base + (16 // e) * k + r // e][r % e]


def test_own_statements() -> None:
    """Opcodes whose pseudocode is missing or not settled, stated here in numpy."""
    text = [
        "v_cvt_pkrtz_f16_f32 v2, v0, v1",
        "v_frexp_exp_i32_f32_e32 v3, v0",
        "v_sin_f32_e32 v4, v0",
        "v_cos_f32_e32 v5, v0",
        "v_fract_f32_e32 v6, v0",
        "v_fmaak_f32 v7, v0, v1, 0x40490fdb",
        "v_fmamk_f32 v8, v0, 0x40490fdb, v1",
        "v_fma_mix_f32 v9, v0, v1, v10 op_sel:[0,0,1] op_sel_hi:[0,0,1]",
        "v_fma_mixlo_f16 v11, v0, v1, v0",
        "v_fma_mixhi_f16 v11, v0, v1, v1",
        "v_accvgpr_write_b32 a3, v0",
        "v_accvgpr_read_b32 v12, a3",
        "v_rcp_f16_e32 v13, v10",
    ]
    b = Bench("gfx942", text)
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    halves = rng.standard_normal(128).astype(np.float16)
    x[:4] = [1e-40, -1e-30, 65519.0, -1e9]
    b.vgprs[0], b.vgprs[1] = x.view(np.uint32), y.view(np.uint32)
    b.vgprs[10] = (
        halves[:64].view(np.uint16).astype(np.uint32) | halves[64:].view(np.uint16).astype(np.uint32) << 16
    )
    for i in range(len(text)):
        b.step(i)
    got = b.vgprs[2] & 0xFFFF
    back = got.astype(np.uint16).view(np.float16).astype(np.float64)
    assert (np.abs(back) <= np.abs(x)).all() and (np.isfinite(back)).all()
    step = np.spacing(np.abs(back).astype(np.float16)).astype(np.float64)
    inside = np.abs(x) < 65504
    assert (np.abs(x) - np.abs(back) < step)[inside].all()
    assert np.array_equal(b.vgprs[3].view(np.int32), np.frexp(x.astype(np.float64))[1])
    near = np.abs(x) < 256
    turn = x.astype(np.float64) * 2 * np.pi
    assert np.abs(b.vgprs[4].view(np.float32) - np.sin(turn))[near].max() < 1e-6
    assert np.abs(b.vgprs[5].view(np.float32) - np.cos(turn))[near].max() < 1e-6
    fract = b.vgprs[6].view(np.float32)
    assert (fract < 1).all() and np.abs(fract - (x.astype(np.float64) - np.floor(x)))[near].max() < 1e-7
    k = np.float32(np.pi)
    wide = x.astype(np.longdouble)
    assert np.array_equal(b.vgprs[7].view(np.float32), (wide * y + k).astype(np.float32))
    assert np.array_equal(b.vgprs[8].view(np.float32), (wide * k + y).astype(np.float32))
    assert np.array_equal(b.vgprs[9].view(np.float32), (wide * y + halves[64:]).astype(np.float32))
    for shift, third in ((0, x), (16, y)):
        want = (wide * y + third).astype(np.float32).astype(np.float16)
        assert np.array_equal((b.vgprs[11] >> shift).astype(np.uint16), want.view(np.uint16))
    assert np.array_equal(b.vgprs[12], x.view(np.uint32))
    rcp = (b.vgprs[13] & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    assert np.abs(rcp * halves[:64].astype(np.float64) - 1).max() < 1e-3


def test_lds_atomics_and_exchange() -> None:
    text = [
        "ds_add_u32 v0, v1",
        "ds_add_rtn_u32 v2, v0, v1",
        "ds_cmpst_rtn_b32 v3, v0, v4, v5",
        "ds_bpermute_b32 v6, v7, v1",
        "ds_permute_b32 v8, v7, v1",
        "ds_swizzle_b32 v9, v1 offset:swizzle(SWAP,16)",
        "ds_swizzle_b32 v10, v1 offset:swizzle(QUAD_PERM,1,0,3,2)",
    ]
    b = Bench("gfx950", text)
    lane = np.arange(64, dtype=np.uint32)
    b.vgprs[0], b.vgprs[1] = (lane & 3) * 4, lane + 1
    b.vgprs[4], b.vgprs[5] = 0xFFFFFFFF, 9
    b.vgprs[7] = ((lane * 5 + 3) % 64) * 4
    for i in range(len(text)):
        b.step(i)
    total = [(lane[lane & 3 == q] + 1).sum() for q in range(4)]
    words = b.lds[:16].view(np.uint32)
    assert list(words) == [2 * t for t in total]
    running = list(total)
    for i in range(64):
        assert b.vgprs[2][i] == running[i & 3]
        running[i & 3] += i + 1
    assert np.array_equal(
        b.vgprs[3], np.array(words)[lane & 3]
    )  # no match: memory unchanged, old value returned
    source = (lane * 5 + 3) % 64
    assert np.array_equal(b.vgprs[6], source + 1)
    assert np.array_equal(b.vgprs[8][source], lane + 1)
    assert np.array_equal(b.vgprs[9], (lane ^ 16) + 1)
    assert np.array_equal(b.vgprs[10], (lane ^ 1) + 1)
