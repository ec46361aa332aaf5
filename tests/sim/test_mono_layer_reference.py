# SPDX-License-Identifier: Apache-2.0
"""The float64 reference of the attention half gives what vLLM's own torch code gives, function by function.

vLLM's functions run as they are in the pinned base, each cut out of its file: the files import the engine.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mono.compare import Bound, Error
from mono.layer_compare import settled
from mono.sources import modules

from rocm_overlay.project import Project

BASE = Project.find().base / "vllm/model_executor"
MHC = "kernels/mhc/torch.py"
MX = "layers/quantization/utils/mxfp8_utils.py"
ROTARY = "layers/rotary_embedding/common.py"
NORM = "layers/layernorm.py"
g, ref, att, formats = (getattr(modules(), n) for n in ("geometry", "reference", "attention", "formats"))
# vLLM's sums are fp32, so a value may be rounded to bf16 the other way.
CLOSE = Bound(cosine=0.99999, moved=1e-3, steps=1.0)


def vllms(file: str, name: str, **known: Any) -> Callable[..., Any]:
    """The function ``name`` (of a class: ``Class.name``) of one of vLLM's files."""
    body: list[Any] = ast.parse((BASE / file).read_text()).body
    for part in name.split("."):
        (found,) = (one for one in body if getattr(one, "name", None) == part)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = []
    names: dict[str, Any] = {"torch": torch, **known}
    exec(compile(ast.Module([found], []), file, "exec"), names)
    return names[found.name]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def residual() -> torch.Tensor:
    return random(5, g.STREAMS, g.HIDDEN).bfloat16()


def test_fold(residual: torch.Tensor) -> None:
    x, post = random(5, g.HIDDEN, seed=1).bfloat16(), random(5, g.STREAMS, seed=2).sigmoid() * 2
    comb = random(5, g.STREAMS, g.STREAMS, seed=3).softmax(-1)
    want = vllms(MHC, "mhc_post_torch")(x, residual, post[..., None], comb)
    assert CLOSE.holds(Error.of(ref.fold(residual, x, post, comb), want))


def test_collapse_and_mixes(residual: torch.Tensor) -> None:
    projection, scale = (
        random(g.MIXES, g.STREAMS * g.HIDDEN, seed=1, scale=0.01),
        torch.tensor([0.7, 1.0, 1.3]),
    )
    base, carried = random(g.MIXES, seed=2, scale=0.1), random(5, g.STREAMS, seed=3).sigmoid()
    epsilons = (g.NORM_EPSILON, g.MIX_EPSILON, g.MIX_EPSILON)
    post, comb, collapsed, pre = vllms(MHC, "mhc_pre_delayed_torch")(
        residual, projection, scale, base, *epsilons, 2.0, g.SINKHORN_ROUNDS, carried
    )
    got = ref.mixes(ref.seam_sums(residual, projection).sum(-1), scale, base)
    for name, want in (("post", post[..., 0]), ("comb", comb), ("pre", pre)):
        torch.testing.assert_close(got[name].float(), want, rtol=0, atol=2e-6)
    assert CLOSE.holds(Error.of(ref.collapse(residual, carried), collapsed))


def test_norm() -> None:
    x, weight = random(5, g.QUERY_RANK).bfloat16(), (1 + random(g.QUERY_RANK, seed=1, scale=0.1)).bfloat16()
    want = vllms(NORM, "RMSNormGated.forward_static", F=torch.nn.functional)(
        x, None, weight, g.NORM_EPSILON, torch.bfloat16
    )
    assert CLOSE.holds(Error.of(ref.normalise(x, weight), want))


def test_rotary() -> None:
    x, angles = random(5, 3, g.HEAD_DIM).bfloat16(), random(5, g.ROTARY // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    turn = vllms(ROTARY, "ApplyRotaryEmb.forward_static")
    want = turn(x[..., g.POSITION_FREE :], cos, sin, is_neox_style=False, enable_fp32_compute=True)
    got = att.rotate(x.double(), torch.cat([cos, sin], 1))
    assert torch.equal(got[..., : g.POSITION_FREE], x[..., : g.POSITION_FREE].double())
    assert CLOSE.holds(Error.of(got[..., g.POSITION_FREE :], want))
    back = att.rotate(got, torch.cat([cos, sin], 1), inverse=True)
    assert Error.of(back, x).relative < 4e-3  # rounded twice


def test_mx_rows() -> None:
    x = random(5, g.HIDDEN).bfloat16()
    x[0, :32], x[1, :32], x[2, :32] = 0, x[1, :32] * 2.0**-120, 448.0
    constants = {"MXFP8_BLOCK_SIZE": 32, "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn}
    values, codes = vllms(MX, "_mxfp8_e4m3_quantize_torch", **constants)(x)
    got = formats.quantise(x.double())
    assert torch.equal(got.raw, values.view(torch.uint8)) and torch.equal(got.codes, codes)
    want = vllms(MX, "dequant_mxfp8_to_bf16", **constants)(values, codes)
    assert torch.equal(got.values, want.double())


# log2(1e-4 / 448) is -22.09.
@pytest.mark.parametrize("fp8, floor", [(att.OCP, -22), (att.FNUZ, -21)], ids=["OCP", "FNUZ"])
def test_records_survive_their_reading(fp8: Any, floor: int) -> None:
    keys = random(7, g.HEAD_DIM).bfloat16().double()
    keys[0, : g.POSITION_FREE] = 0
    records = att.Records.of(keys, fp8)
    assert records.data.shape == (7, g.RECORD_DATA) and records.codes.shape == (7, g.RECORD_CODES)
    assert not records.codes[:, -1].any()
    assert records.codes[0, :-1].tolist() == [127 + floor] * (g.RECORD_CODES - 1)
    assert torch.equal(records.values[:, g.POSITION_FREE :], keys[:, g.POSITION_FREE :])
    assert Error.of(records.values, keys).relative < 2.0**-4
    # What a record holds is a record of itself.
    assert torch.equal(att.Records.of(records.values, fp8).values, records.values)


def test_fnuz_records_have_the_bytes_of_ocp_ones() -> None:
    """But for -0, which FNUZ has not, and with codes one higher: the same values."""
    keys = random(7, g.HEAD_DIM).bfloat16().double()
    keys[:, ::5] *= 2.0**-10
    keys[1, 0] = -0.0
    ocp, fnuz = (att.Records.of(keys, fp8) for fp8 in (att.OCP, att.FNUZ))
    data = ocp.data.clone()
    data[:, : g.POSITION_FREE][data[:, : g.POSITION_FREE] == 0x80] = 0
    assert torch.equal(fnuz.data, data) and not torch.equal(ocp.data, data)
    assert torch.equal(fnuz.codes[:, :-1], ocp.codes[:, :-1] + 1) and not fnuz.codes[:, -1].any()
    assert torch.equal(fnuz.values, ocp.values)


def test_attention_is_softmax_with_one_more_key_of_value_zero() -> None:
    queries, keys, sink = (random(*s, seed=i).double() for i, s in enumerate([(4, 512), (9, 512), (4,)]))
    scores = torch.einsum("hd,kd->hk", queries, keys) / 512**0.5
    weights = scores.exp() / (scores.exp().sum(1, keepdim=True) + sink.exp()[:, None])
    torch.testing.assert_close(att.attend(queries, keys, sink), weights @ keys)
    assert not att.attend(queries, keys[:0], sink).any()


def test_only_ties_are_settled_as_a_launch_has_them() -> None:
    """Of a linear whose two outputs are a tie, 1 + 2^-8, and not one, 1: a launch that has the tie's other
    side is right, one that has a neighbour of any other value is not."""
    one = int(torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8))
    small = int(torch.tensor(2.0**-8).to(torch.float8_e4m3fn).view(torch.uint8))
    rows = torch.zeros(1, 32, dtype=torch.uint8)
    rows[0, :2] = one
    weights = torch.zeros(32, 32, dtype=torch.uint8)
    weights[:, 0], weights[0, 1] = one, small
    codes = torch.full((1, 1), 127, dtype=torch.uint8)
    for up in (0.0, 2.0**-7):
        got = torch.full((1, 32), 1.0 + up, dtype=torch.float64)
        want = settled(got, att.linear, formats.MxRows(rows, codes), weights, codes)
        assert want[0, 0] == 1.0 + up and (want[0, 1:] == 1.0).all()
    far = torch.full((1, 32), 1.0 + 2.0**-6, dtype=torch.float64)
    assert (settled(far, att.linear, formats.MxRows(rows, codes), weights, codes) == 1.0).all()
