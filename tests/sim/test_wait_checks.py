# SPDX-License-Identifier: Apache-2.0
"""Checks that look at whole instructions: a register used before the wait of its load, an LDS store that
a barrier
does not wait for, an infinity or a NaN born of finite numbers."""

from __future__ import annotations

import pytest
from planted import run

from cdnasim import SimulationError

EARLY = {
    "global load": (
        "global_load_dword v2, v1, s[4:5]\n {wait}\n v_add_u32_e32 v3, v2, v0",
        "s_waitcnt vmcnt(0)",
        "vector register 2",
    ),
    "second of two loads": (
        "global_load_dword v2, v1, s[4:5]\n global_load_dword v3, v1, s[4:5] offset:4\n {wait}\n"
        " v_add_u32_e32 v3, v2, v3",
        "s_waitcnt vmcnt(0)",
        "vector register 3",
    ),
    "LDS read": (
        "ds_write_b32 v1, v0\n ds_read_b32 v2, v1\n {wait}\n v_add_u32_e32 v3, v2, v0",
        "s_waitcnt lgkmcnt(0)",
        "vector register 2",
    ),
    "scalar load": (
        "s_load_dwordx2 s[8:9], s[4:5], 0x0\n {wait}\n s_add_u32 s10, s9, 1",
        "s_waitcnt lgkmcnt(0)",
        "scalar register 9",
    ),
    "overwritten before it arrives": (
        "global_load_dword v2, v1, s[4:5]\n {wait}\n v_mov_b32_e32 v2, 0",
        "s_waitcnt vmcnt(0)",
        "vector register 2",
    ),
    "atomic's old value": (
        "global_atomic_add v2, v1, v0, s[4:5] sc0\n {wait}\n v_add_u32_e32 v3, v2, v0",
        "s_waitcnt vmcnt(0)",
        "vector register 2",
    ),
    "LDS store at a barrier": (
        "ds_write_b32 v1, v0\n {wait}\n s_barrier",
        "s_waitcnt lgkmcnt(0)",
        "LDS store",
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_missing_wait_is_named(name: str) -> None:
    body, wait, what = EARLY[name]
    run(body.format(wait=wait), memory="hostile")
    with pytest.raises(SimulationError, match=f"register-before-wait: .*{what}") as caught:
        run(body.format(wait=""), memory="hostile")
    assert (caught.value.line and "load of line" in str(caught.value)) or "store of line" in str(caught.value)
    run(body.format(wait=""))  # exact memory does not look, unless it is asked to
    with pytest.raises(SimulationError, match="register-before-wait"):
        run(body.format(wait=""), checks={"register-before-wait": "error"})


def test_a_counted_wait_covers_the_older_operations() -> None:
    """vmcnt(1) waits for all but the newest; loads into one register stay in order; scalar loads answer
    in any
    order, so that only lgkmcnt(0) covers one."""
    two = "global_load_dword v2, v1, s[4:5]\n global_load_dword v3, v1, s[4:5]\n s_waitcnt vmcnt(1)\n"
    run(two + "v_add_u32_e32 v4, v2, v0\n s_waitcnt vmcnt(0)", memory="hostile")
    with pytest.raises(SimulationError, match="vector register 3"):
        run(two + "v_add_u32_e32 v4, v3, v0", memory="hostile")
    run("global_load_dword v2, v1, s[4:5]\n global_load_dword v2, v1, s[4:5]", memory="hostile")
    reads = (
        "ds_write_b32 v1, v0\n ds_read_b32 v2, v1\n {more} s_waitcnt lgkmcnt(1)\n v_add_u32_e32 v4, v2, v0"
    )
    run(reads.format(more="ds_read_b32 v3, v1\n"), memory="hostile")
    with pytest.raises(SimulationError, match="vector register 2"):
        run(reads.format(more="s_load_dword s8, s[4:5], 0x0\n"), memory="hostile")


BORN = {
    "reciprocal of zero": ("v_mov_b32_e32 v2, 0\n v_rcp_f32_e32 v3, v2", "v_rcp_f32"),
    "overflow": ("v_mov_b32_e32 v2, 0x7f000000\n v_mul_f32_e32 v3, v2, v2", "v_mul_f32"),
    "root of a negative": ("v_mov_b32_e32 v2, -1.0\n v_sqrt_f32_e32 v3, v2", "v_sqrt_f32"),
    "half overflow": ("v_mov_b32_e32 v2, 0x7bff\n v_add_f16_e32 v3, v2, v2", "v_add_f16"),
    "double overflow": (
        "v_mov_b32_e32 v2, 0\n v_mov_b32_e32 v3, 0x7fe00000\n v_add_f64 v[4:5], v[2:3], v[2:3]",
        "v_add_f64",
    ),
    "matrix overflow": (
        "v_mov_b32_e32 v2, 0x7f007f00\n v_mov_b32_e32 v3, v2\n"
        " v_mfma_f32_16x16x16_bf16 v[4:7], v[2:3], v[2:3], 0",
        "v_mfma",
    ),
}


@pytest.mark.parametrize("name", BORN)
def test_an_infinity_or_a_nan_is_caught_where_it_is_born(name: str) -> None:
    body, text = BORN[name]
    run(body)
    with pytest.raises(SimulationError, match="not-finite") as caught:
        run(body, checks={"not-finite": "error"})
    assert text in caught.value.text


@pytest.mark.parametrize(
    "body",
    [
        "v_mov_b32_e32 v2, 0x7f800000\n v_add_f32_e32 v3, v2, v2",  # it was there before
        "v_mov_b32_e32 v2, 2.0\n v_rcp_f32_e32 v3, v2",
        "v_mov_b32_e32 v2, 0x7f800000\n v_add_u32_e32 v3, v2, v2",  # not a floating-point operation
        "v_mov_b32_e32 v2, 0\n s_mov_b64 s[8:9], exec\n s_mov_b64 exec, 0\n v_rcp_f32_e32 v3, v2\n"
        " s_mov_b64 exec, s[8:9]",  # no lane is on
    ],
)
def test_what_was_not_born_here_is_left_alone(body: str) -> None:
    run(body, checks={"not-finite": "error"})
