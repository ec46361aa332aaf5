# SPDX-License-Identifier: Apache-2.0
"""Matrix layouts and memory opcodes against statements of their own, one by one.

Layouts, from AMD's matrix instruction calculator: with G = 64 / M groups of lanes and P = K / G elements a
lane, lane l holds row (of A) or column (of B) l mod M and the k from P (l / M) on; result register r of
lane l is row 4 (l / 16) + r of a 16-wide tile, 8 (r / 4) + 4 (l / 32) + r mod 4 of a 32-wide one, column
l mod M. A 4-wide tile is one of 16 in an instruction, of four lanes each, with every k in a lane and row r in
result register r. Integers small enough that every sum is exact make the comparison one of bits.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from planted import run

from cdnasim.lab import AGPR0, Bench
from cdnasim.opcodes import table

FLOAT8 = {
    ("gfx950", "fp8"): torch.float8_e4m3fn,
    ("gfx950", "bf8"): torch.float8_e5m2,
    ("gfx942", "fp8"): torch.float8_e4m3fnuz,
    ("gfx942", "bf8"): torch.float8_e5m2fnuz,
}
MATRIX = [name for name in table() if name.startswith("v_mfma") and "f8f6f4" not in name]
BLOCKS = sorted(name for name in MATRIX if "_4x4x" in name)
PLAIN = sorted({*MATRIX} - {*BLOCKS})


def kinds(name: str) -> tuple[str, str]:
    """The element types of A and B."""
    tail = re.sub(r"^v_mfma_\w32_\d+x\d+x\d+_?", "", name).removesuffix("_1k")
    parts = tail.split("_")
    return (parts[0], parts[-1])


def encode(values: torch.Tensor, kind: str, arch: str) -> np.ndarray:
    """[..., n] small integers as bytes of the element type."""
    if kind == "i8":
        return values.to(torch.int8).numpy().view(np.uint8)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}.get(kind) or FLOAT8[
        arch, kind
    ]
    return values.float().to(dtype).contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", PLAIN)
def test_matrix_layout(name: str, arch: str) -> None:
    m, _, k = map(int, re.search(r"_(\d+)x(\d+)x(\d+)", name).groups())  # type: ignore[union-attr]
    per, regs = k * m // 64, m * m // 64
    kind_a, kind_b = kinds(name)
    g = torch.Generator().manual_seed(5)
    a, b, c = (torch.randint(-6, 7, s, generator=g) for s in ((m, k), (m, k), (m, m)))
    words = per * encode(a[:1, :1], kind_a, arch).shape[-1] // 4
    last = words - 1
    sources = ("v0", "v8") if words == 1 else (f"v[0:{last}]", f"v[8:{8 + last}]")
    bench = Bench(arch, [f"{name} a[8:{7 + regs}], {sources[0]}, {sources[1]}, v[16:{15 + regs}]"])
    rows = np.arange(64) % m
    for base, x, kind in ((0, a, kind_a), (8, b, kind_b)):
        for lane in range(64):
            mine = x[rows[lane], lane // m * per : lane // m * per + per]
            bench.vgprs[base : base + words, lane] = encode(mine, kind, arch).view(np.uint32)
    integer = name.startswith("v_mfma_i32")
    for lane in range(64):
        for r in range(regs):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            value = c[row, lane % m]
            bits = value.int() if integer else value.float().view(torch.int32)
            bench.vgprs[16 + r, lane] = int(bits) & 0xFFFFFFFF
    bench.step()
    want = a @ b.T + c
    for lane in range(64):
        for r in range(regs):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            raw = bench.vgprs[AGPR0 + 8 + r, lane : lane + 1]
            got = raw.view(np.int32)[0] if integer else raw.view(np.float32)[0]
            assert got == want[row, lane % m].item(), (lane, r)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", BLOCKS)
def test_matrix_layout_of_blocks(name: str, arch: str) -> None:
    k, blocks, kind = re.search(r"_4x4x(\d+)_(\d+)b_(\w+)$", name).groups()  # type: ignore[union-attr]
    k, blocks = int(k), int(blocks)
    g = torch.Generator().manual_seed(6)
    a, b = (torch.randint(-6, 7, (blocks, 4, k), generator=g) for _ in range(2))
    c = torch.randint(-6, 7, (blocks, 4, 4), generator=g)
    bench = Bench(arch, [f"{name} a[8:11], v[0:1], v[8:9], v[16:19]"])
    for lane in range(64):
        block, place = lane // 4, lane % 4
        for base, x in ((0, a), (8, b)):
            bench.vgprs[base : base + 2, lane] = encode(x[block, place], kind, arch).view(np.uint32)
        bench.vgprs[16:20, lane] = c[block, :, place].float().numpy().view(np.uint32)
    bench.step()
    want = a @ b.transpose(1, 2) + c
    for lane in range(64):
        got = np.ascontiguousarray(bench.vgprs[AGPR0 + 8 : AGPR0 + 12, lane]).view(np.float32)
        assert got.tolist() == want[lane // 4, :, lane % 4].tolist(), lane


MEMORY = np.arange(1, 257, dtype=np.uint32) * np.uint32(0x9E3779B9)  # what the buffer holds, 256 dwords
NARROW = {
    "ubyte": lambda b: int(b[0]),
    "sbyte": lambda b: int(b[:1].view(np.int8)[0]) & 0xFFFFFFFF,
    "ushort": lambda b: int(b[:2].view(np.uint16)[0]),
    "sshort": lambda b: int(b[:2].view(np.int16)[0]) & 0xFFFFFFFF,
    "dword": lambda b: int(b[:4].view(np.uint32)[0]),
}
D16 = {
    "short_d16": lambda old, b: (old & 0xFFFF0000) | int(b[:2].view(np.uint16)[0]),
    "short_d16_hi": lambda old, b: (old & 0xFFFF) | int(b[:2].view(np.uint16)[0]) << 16,
    "ubyte_d16": lambda old, b: (old & 0xFFFF0000) | int(b[0]),
    "ubyte_d16_hi": lambda old, b: (old & 0xFFFF) | int(b[0]) << 16,
    "sbyte_d16": lambda old, b: (old & 0xFFFF0000) | (int(b[:1].view(np.int8)[0]) & 0xFFFF),
    "sbyte_d16_hi": lambda old, b: (old & 0xFFFF) | (int(b[:1].view(np.int8)[0]) & 0xFFFF) << 16,
}
OLD = 0x12345678


def body(load: str, size: int) -> str:
    """Fill the buffer's first 1024 bytes, load with ``load`` at byte size x lane + 8, store at 1024 on."""
    return (
        "v_add_u32_e32 v2, 1, v0\n v_mul_lo_u32 v2, v2, 0x9e3779b9\n global_store_dword v1, v2, s[4:5]\n"
        " s_waitcnt vmcnt(0)\n s_barrier\n s_mov_b32 s6, -1\n s_mov_b32 s7, 0x27000\n"
        f" v_mul_u32_u24_e32 v3, {size}, v0\n v_mov_b32_e32 v4, 0x12345678\n"
        f" v_mov_b32_e32 v5, 0\n v_mov_b32_e32 v6, 0\n v_mov_b32_e32 v7, 0\n {load}\n s_waitcnt vmcnt(0)\n"
        " v_lshlrev_b32_e32 v8, 4, v0\n global_store_dwordx4 v8, v[4:7], s[4:5] offset:1024"
    )


FORMS = {
    "global": "global_load_{} {}, v3, s[4:5] offset:8",
    "buffer": "buffer_load_{} {}, v3, s[4:7], 0 offen offset:8",
    "flat": "v_mov_b32_e32 v10, s4\n v_mov_b32_e32 v11, s5\n v_add_co_u32_e32 v10, vcc, v10, v3\n"
    " v_addc_co_u32_e32 v11, vcc, 0, v11, vcc\n flat_load_{} {}, v[10:11] offset:8",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*NARROW, *D16, "dwordx2", "dwordx3", "dwordx4"])
def test_load(name: str, form: str) -> None:
    """Every width of every form, bytes little-endian; a d16 load keeps the register's other half."""
    words = int(name[-1]) if name.startswith("dwordx") else 1
    size = 1 if "byte" in name else 2 if "short" in name else 4
    register = f"v[4:{3 + words}]" if words > 1 else "v4"
    out = run(body(FORMS[form].format(name, register), size), block=256, bytes_=1024 + 4096)
    raw = MEMORY.view(np.uint8)
    got = out[256 : 256 + 4 * 200].numpy().view(np.uint32).reshape(200, 4)
    for lane in range(200):
        at = size * lane + 8
        piece = raw[at : at + 16]
        if words > 1:
            assert got[lane, :words].tolist() == piece[: 4 * words].view(np.uint32).tolist()
        else:
            want = NARROW[name](piece) if name in NARROW else D16[name](OLD, piece)
            assert got[lane, 0] == want, (lane, hex(int(got[lane, 0])), hex(want))
        assert got[lane, words:].tolist() == [0] * (4 - words)


@pytest.mark.parametrize("memory", ["exact", "hostile"])
@pytest.mark.parametrize("name", D16)
def test_a_d16_load_outside_its_buffer_keeps_the_other_half(name: str, memory: str) -> None:
    """What is loaded there is zero."""
    size = 1 if "byte" in name else 2
    text = body(f"s_mov_b32 s6, {8 + 50 * size}\n buffer_load_{name} v4, v3, s[4:7], 0 offen offset:8", size)
    out = run(text, block=256, bytes_=1024 + 4096, memory=memory)
    got = out[256 : 256 + 4 * 200].numpy().view(np.uint32).reshape(200, 4)[:, 0]
    raw, zeros = MEMORY.view(np.uint8), np.zeros(16, dtype=np.uint8)
    for lane in range(200):
        at = size * lane + 8
        assert got[lane] == D16[name](OLD, raw[at : at + 16] if lane < 50 else zeros), lane


@pytest.mark.parametrize("form", ["global", "buffer"])
@pytest.mark.parametrize(
    "name, size", [("byte", 1), ("short", 2), ("dword", 4), ("dwordx2", 8), ("dwordx4", 16)]
)
def test_store(name: str, size: int, form: str) -> None:
    """Lane l writes the low bytes of its registers at l x size; nothing else changes."""
    data = "v4" if size <= 4 else f"v[4:{3 + size // 4}]"
    store = {
        "global": f"global_store_{name} v3, {data}, s[4:5]",
        "buffer": "s_mov_b32 s6, -1\n s_mov_b32 s7, 0x27000\n"
        f" buffer_store_{name} {data}, v3, s[4:7], 0 offen",
    }[form]
    fill = "".join(f"v_add_u32_e32 v{4 + i}, {0x01020304 * (i + 1):#x}, v0\n " for i in range(4))
    out = run(f"v_mul_u32_u24_e32 v3, {size}, v0\n {fill}{store}", block=64, bytes_=2048)
    want = np.zeros(2048, np.uint8)
    for lane in range(64):
        registers = np.array([(0x01020304 * (i + 1) + lane) & 0xFFFFFFFF for i in range(4)], np.uint32)
        want[lane * size : (lane + 1) * size] = registers.view(np.uint8)[:size]
    assert out.numpy().view(np.uint8).tolist() == want.tolist()


LDS_READS = {
    "ds_read_u8": ("v4", lambda b: [int(b[0])]),
    "ds_read_i8": ("v4", lambda b: [int(b[:1].view(np.int8)[0]) & 0xFFFFFFFF]),
    "ds_read_u16": ("v4", lambda b: [int(b[:2].view(np.uint16)[0])]),
    "ds_read_i16": ("v4", lambda b: [int(b[:2].view(np.int16)[0]) & 0xFFFFFFFF]),
    "ds_read_b32": ("v4", lambda b: b[:4].view(np.uint32).tolist()),
    "ds_read_b64": ("v[4:5]", lambda b: b[:8].view(np.uint32).tolist()),
    "ds_read_b96": ("v[4:6]", lambda b: b[:12].view(np.uint32).tolist()),
    "ds_read_b128": ("v[4:7]", lambda b: b[:16].view(np.uint32).tolist()),
}


@pytest.mark.parametrize("name", LDS_READS)
def test_lds_read(name: str) -> None:
    """Bytes of LDS at address + offset, for addresses in any order and with lanes off."""
    register, want = LDS_READS[name]
    bench = Bench("gfx950", [f"{name} {register}, v0 offset:16"])
    rng = np.random.default_rng(3)
    bench.lds[:] = rng.integers(0, 256, 4096)
    bench.vgprs[4:8] = OLD
    bench.vgprs[0] = rng.permutation(200)[:64].astype(np.uint32) * 16
    bench.exec = 0xF0F0_FFFF_0000_3333
    bench.step()
    for lane in range(64):
        at = int(bench.vgprs[0, lane]) + 16
        expected = want(bench.lds[at : at + 16]) if bench.exec >> lane & 1 else []
        expected += [OLD] * (4 - len(expected))
        assert bench.vgprs[4:8, lane].tolist() == expected


@pytest.mark.parametrize(
    "name, bytes_", [("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16)]
)
def test_lds_write(name: str, bytes_: int) -> None:
    """The low bytes of the data registers, for lanes that are on; the rest of LDS stays."""
    register = "v4" if bytes_ <= 4 else f"v[4:{3 + bytes_ // 4}]"
    bench = Bench("gfx950", [f"ds_write_{name} v0, {register} offset:16"])
    rng = np.random.default_rng(4)
    bench.lds[:] = rng.integers(0, 256, 4096)
    bench.vgprs[4:8] = rng.integers(0, 1 << 32, (4, 64), dtype=np.uint32)
    bench.vgprs[0] = rng.permutation(200)[:64].astype(np.uint32) * 16
    bench.exec = 0x0FF0_1234_FFFF_0001
    want = bench.lds.copy()
    for lane in range(64):
        if bench.exec >> lane & 1:
            at = int(bench.vgprs[0, lane]) + 16
            want[at : at + bytes_] = np.ascontiguousarray(bench.vgprs[4:8, lane]).view(np.uint8)[:bytes_]
    bench.step()
    assert np.array_equal(bench.lds, want)


@pytest.mark.parametrize(
    "name, stride, words", [("b32", 4, 1), ("st64_b32", 256, 1), ("b64", 8, 2), ("st64_b64", 512, 2)]
)
def test_lds_two_places(name: str, stride: int, words: int) -> None:
    """read2 and write2: two places of one access, offsets in units of the element (or of 64 of them)."""
    registers = f"v[4:{3 + 2 * words}]"
    data = [
        f"v{8 + i * words}" if words == 1 else f"v[{8 + i * words}:{7 + (i + 1) * words}]" for i in (0, 1)
    ]
    kind = "" if name[0] == "b" else "st64"
    width = name.removeprefix("st64_")
    bench = Bench(
        "gfx950",
        [
            f"ds_write2{kind}_{width} v0, {data[0]}, {data[1]} offset0:1 offset1:3",
            f"ds_read2{kind}_{width} {registers}, v0 offset0:1 offset1:3",
        ],
    )
    rng = np.random.default_rng(6)
    bench.vgprs[8:12] = rng.integers(0, 1 << 32, (4, 64), dtype=np.uint32)
    bench.vgprs[0] = np.arange(64, dtype=np.uint32) * 4 * words
    written = bench.vgprs[8 : 8 + 2 * words].copy()
    bench.step(0)
    first, second = (int(bench.vgprs[0, 5]) + n * stride for n in (1, 3))
    piece = bench.lds[second : second + 4 * words].view(np.uint32).tolist()
    assert piece == written[words:, 5].tolist() and first < second
    bench.step(1)
    if kind:  # no lane's first place is another's second
        assert np.array_equal(bench.vgprs[4 : 4 + 2 * words], written)
    else:
        flat = bench.lds.view(np.uint32)
        for lane in range(64):
            for half, n in ((0, 1), (1, 3)):
                at = (int(bench.vgprs[0, lane]) + n * stride) // 4
                got = bench.vgprs[4 + half * words : 4 + (half + 1) * words, lane].tolist()
                assert got == flat[at : at + words].tolist()
