# SPDX-License-Identifier: Apache-2.0
"""64-bit and floating-point atomics of vector memory, each stated again over lanes in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from planted import HEAD, TAIL

from cdnasim import Device, load

U64 = (1 << 64) - 1


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


WHOLE: dict[str, Callable[[int, int], int]] = {
    "add_x2": lambda old, x: old + x,
    "sub_x2": lambda old, x: old - x,
    "swap_x2": lambda old, x: x,
    "umin_x2": min,
    "umax_x2": max,
    "smin_x2": lambda old, x: min(old, x, key=signed),
    "smax_x2": lambda old, x: max(old, x, key=signed),
    "and_x2": lambda old, x: old & x,
    "or_x2": lambda old, x: old | x,
    "xor_x2": lambda old, x: old ^ x,
}


def pairs(dtype: torch.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Two halves of a word, each added in its own type."""

    def add(old: np.ndarray, x: np.ndarray) -> np.ndarray:
        a, b = (torch.from_numpy(np.atleast_1d(v).view(np.int16).copy()).view(dtype) for v in (old, x))
        return (a + b).view(torch.int16).numpy().view(np.uint32)

    return add


def by_type(
    kind: type, f: Callable[[np.ndarray, np.ndarray], np.ndarray], raw: type
) -> Callable[..., np.ndarray]:
    return lambda old, x: f(np.atleast_1d(old).view(kind), np.atleast_1d(x).view(kind)).view(raw)


FLOAT = {
    "add_f32": by_type(np.float32, np.add, np.uint32),
    "add_f64": by_type(np.float64, np.add, np.uint64),
    "min_f64": by_type(np.float64, np.minimum, np.uint64),
    "max_f64": by_type(np.float64, np.maximum, np.uint64),
    "pk_add_bf16": pairs(torch.bfloat16),
    "pk_add_f16": pairs(torch.float16),
}


def instruction(name: str, form: str, words: int, data: int) -> str:
    """Old values to v[8:..], data in v[4:..], the byte offset in v2; a buffer's data takes the old."""
    span = lambda first, n: f"v{first}" if n == 1 else f"v[{first}:{first + n - 1}]"  # noqa: E731
    if form == "global":
        return f"global_atomic_{name} {span(8, words)}, v2, {span(4, data)}, s[4:5] sc0"
    moves = "".join(f"v_mov_b32_e32 v{8 + i}, v{4 + i}\n\t" for i in range(data))
    return f"{moves}buffer_atomic_{name} {span(8, data)}, v2, s[4:7], 0 offen sc0"


def atomics(
    name: str, form: str, start: np.ndarray, data: np.ndarray, arch: str
) -> tuple[np.ndarray, np.ndarray]:
    """(memory, old values a lane): lane l on element l % 4 with ``data[l]``, an element or two."""
    size = start.itemsize
    words, total = size // 4, data.shape[1] * size // 4
    shift = size.bit_length() - 1
    body = f"""
	s_mov_b32 s6, -1
	s_mov_b32 s7, 0x27000
	v_and_b32_e32 v2, 3, v0
	v_lshlrev_b32_e32 v2, {shift}, v2
	v_mul_u32_u24_e32 v3, {4 * total}, v0
	global_load_dword{f"x{total}" if total > 1 else ""} v[4:{3 + total}], v3, s[4:5] offset:1024
	s_waitcnt vmcnt(0)
	{instruction(name, form, words, total)}
	v_lshlrev_b32_e32 v3, {shift}, v0
	s_waitcnt vmcnt(0)
	global_store_dword{f"x{words}" if words > 1 else ""} v3, v[8:{7 + words}], s[4:5] offset:2048
"""
    body = body.replace("v[4:4]", "v4").replace("v[8:8]", "v8")
    kernel = load(HEAD.format(arch=arch) + body + TAIL.format(lds=0), arch, "planted.s").kernel()
    image = np.zeros(4096, dtype=np.uint8)
    image[: 4 * size] = start.view(np.uint8)
    image[1024 : 1024 + data.nbytes] = data.reshape(-1).view(np.uint8)
    dev = Device(arch)
    buffer = dev.tensor(torch.from_numpy(image))
    dev.launch(kernel, 1, 64, [buffer])
    out = buffer.numpy()
    return out[: 4 * size].view(start.dtype), out[2048 : 2048 + 64 * size].view(start.dtype)


def check(
    name: str, form: str, start: np.ndarray, data: np.ndarray, f: Callable[..., int], arch: str
) -> None:
    memory, old = atomics(name, form, start, data, arch)
    want = [int(x) for x in start]
    for lane in range(64):
        assert int(old[lane]) == want[lane % 4], (lane, hex(int(old[lane])), hex(want[lane % 4]))
        want[lane % 4] = f(want[lane % 4], *(int(x) for x in data[lane]))
    assert [int(x) for x in memory] == want


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("form", ["global", "buffer"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_of_64_bits(name: str, form: str, arch: str) -> None:
    rng = np.random.default_rng(1)
    start, data = rng.integers(0, U64, 4, np.uint64), rng.integers(0, U64, (64, 1), np.uint64)
    check(name, form, start, data, lambda old, x: WHOLE[name](old, x) & U64, arch)


@pytest.mark.parametrize("form", ["global", "buffer"])
@pytest.mark.parametrize("name, dtype", [("cmpswap", np.uint32), ("cmpswap_x2", np.uint64)])
def test_compare_and_swap(name: str, form: str, dtype: type) -> None:
    """The new value, then the one that memory must hold: half of the lanes guess right."""
    rng = np.random.default_rng(2)
    start = rng.integers(0, np.iinfo(dtype).max, 4, dtype)
    data, now = np.zeros((64, 2), dtype=dtype), start.copy()
    for lane in range(64):
        new = rng.integers(0, np.iinfo(dtype).max, dtype=dtype)
        right = bool(rng.integers(2))
        data[lane] = new, now[lane % 4] if right else now[lane % 4] + dtype(1)
        if right:
            now[lane % 4] = new
    check(name, form, start, data, lambda old, new, wanted: new if old == wanted else old, "gfx950")


@pytest.mark.parametrize("form", ["global", "buffer"])
@pytest.mark.parametrize("name", FLOAT)
def test_floating_point(name: str, form: str) -> None:
    rng = np.random.default_rng(3)
    raw = np.uint64 if name.endswith("f64") else np.uint32
    kind = np.float64 if raw is np.uint64 else np.float32
    values = rng.standard_normal(68).astype(kind)
    if name.startswith("pk"):
        dtype = torch.bfloat16 if name == "pk_add_bf16" else torch.float16
        halves = torch.from_numpy(rng.standard_normal(136).astype(np.float32)).to(dtype)
        values = halves.view(torch.int16).numpy().view(np.uint32)
    bits = values.view(raw)

    def step(old: int, x: int) -> int:
        return int(FLOAT[name](np.array([old], dtype=raw), np.array([x], dtype=raw))[0])

    check(name, form, bits[:4].copy(), bits[4:, None].copy(), step, "gfx950")
