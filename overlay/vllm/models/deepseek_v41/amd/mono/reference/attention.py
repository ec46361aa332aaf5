# SPDX-License-Identifier: Apache-2.0
"""The attention half layer in float64, a function a stage; the seam before it is ``ffn``'s.

Rounding points are those of the operation (docs of each function); everything between is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..geometry import (
    GROUP_K,
    HEAD_DIM,
    OUTPUT_RANK,
    POSITION_FREE,
    QUERY_RANK,
    RECORD_BLOCK,
    RECORD_CODES,
    ROTARY,
)
from .ffn import normalise
from .formats import E4M3_MAX, MxRows, e8m0, mxfp8, quantise, round_bf16

RECORD_FLOOR = 1e-4
BLOCKS = POSITION_FREE // RECORD_BLOCK


def linear(rows: MxRows, weights: torch.Tensor, codes: torch.Tensor, rounded: bool = True) -> torch.Tensor:
    """[rows, outputs] of an MXFP8 linear, ``rounded`` to bf16; ``weights`` e4m3 bytes [outputs, k], ``codes``
    [outputs / 32, k / 32]."""
    out = rows.values @ mxfp8(weights, codes).T
    return round_bf16(out) if rounded else out


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """The last 64 of ``x``'s values turned, as pairs of neighbours, by the row's angles (or back by them);
    rounded to bf16. ``x`` bf16 [rows, .., 512], ``cos_sin`` f32 [rows, 64]: 32 cosines, then 32 sines."""
    angles = cos_sin.double().view(cos_sin.shape[0], *[1] * (x.dim() - 2), ROTARY)
    cos, sin = angles[..., : ROTARY // 2], angles[..., ROTARY // 2 :]
    if inverse:
        sin = -sin
    even, odd = x[..., POSITION_FREE::2], x[..., POSITION_FREE + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :POSITION_FREE], round_bf16(turned)], -1)


# ---- the front
def qkv(normed: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[rows, 1280 + 512]: the query's rank and the key, of the normed bf16 rows."""
    return linear(quantise(normed), weights, codes)


def query_rank(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of the query part of ``qkv``, rounded to bf16: [rows, 1280]."""
    return normalise(rows[:, :QUERY_RANK], weight)


def query(
    rank: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """[rows, heads, 512] of the normed query rank; rounded to bf16 before the rotary and after it."""
    return rotate(linear(quantise(rank), weights, codes).unflatten(1, (-1, HEAD_DIM)), cos_sin)


def key(rows: torch.Tensor, weight: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm of the key part of ``qkv``, rounded to bf16, turned: [rows, 512]."""
    return rotate(normalise(rows[:, QUERY_RANK:], weight), cos_sin)


# ---- records of a key cache
@dataclass(frozen=True)
class RecordFormat:
    """The FP8 of a cache's records, and what its writer scales a block's largest magnitude to at most."""

    dtype: torch.dtype
    largest: float


OCP = RecordFormat(torch.float8_e4m3fn, E4M3_MAX)
# Of the sliding window on CDNA3: csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu.
FNUZ = RecordFormat(torch.float8_e4m3fnuz, E4M3_MAX / 2)


@dataclass(frozen=True)
class Records:
    """fp8_ds_mla records: ``data`` uint8 [n, 576], 448 e4m3 and 64 bf16; ``codes`` uint8 [n, 8], seven E8M0
    of 64 values each and a zero."""

    data: torch.Tensor
    codes: torch.Tensor
    fp8: RecordFormat = OCP

    @classmethod
    def of(cls, keys: torch.Tensor, fp8: RecordFormat = OCP) -> Records:
        """bf16 keys [n, 512]: a code is ceil(log2(max(amax, 1e-4) / largest)) + 127."""
        blocks = keys[:, :POSITION_FREE].reshape(-1, BLOCKS, RECORD_BLOCK)
        amax = blocks.abs().amax(-1).clamp_min(RECORD_FLOOR)
        # amax = m 2^e with m in [0.5, 1), and 448 = 0.875 x 2^9: no logarithm that could round.
        (mantissa, exponent), (most, power) = torch.frexp(amax), math.frexp(fp8.largest)
        codes = (exponent - power + (mantissa > most) + 127).clamp(0, 254).to(torch.uint8)
        scaled = (blocks / e8m0(codes)[..., None]).clamp(-fp8.largest, fp8.largest).flatten(1)
        values = scaled.float().to(fp8.dtype).view(torch.uint8)
        rotary = keys[:, POSITION_FREE:].bfloat16().contiguous().view(torch.uint8)
        pad = RECORD_CODES - codes.shape[1]
        return cls(torch.cat([values, rotary], 1), torch.nn.functional.pad(codes, (0, pad)), fp8)

    @property
    def values(self) -> torch.Tensor:
        """What the records stand for, [n, 512]."""
        raw = self.data[:, :POSITION_FREE].contiguous().view(self.fp8.dtype).double()
        blocks = raw.view(-1, BLOCKS, RECORD_BLOCK) * e8m0(self.codes[:, :-1])[..., None]
        rotary = self.data[:, POSITION_FREE:].contiguous().view(torch.bfloat16).double()
        return torch.cat([blocks.flatten(1), rotary], 1)


# ---- the back
def attend(queries: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """[heads, 512] of one row, not rounded: ``queries`` [heads, 512] on ``keys`` [n, 512], which are the
    values too; softmax of the scores x 512^-0.5 with the heads' ``sink`` logits in the denominator."""
    logits = torch.cat([queries @ keys.T * HEAD_DIM**-0.5, sink.double()[:, None]], 1)
    return torch.softmax(logits, 1)[:, :-1] @ keys


def attended(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The heads' outputs [rows, heads, 512] rounded to bf16 and turned back: bf16 [rows, heads x 512]."""
    return rotate(round_bf16(heads), cos_sin, inverse=True).flatten(1)


def group_ranks(
    rows: MxRows, weights: torch.Tensor, codes: torch.Tensor, rounded: bool = True
) -> torch.Tensor:
    """wo_a: each group of heads [rows, 4096] to its rank of 1024; [rows, groups x 1024], ``rounded`` to
    bf16."""
    groups = weights.shape[0] // OUTPUT_RANK
    x, w = rows.values.unflatten(1, (groups, GROUP_K)), mxfp8(weights, codes).unflatten(0, (groups, -1))
    out = torch.einsum("rgk,gok->rgo", x, w).flatten(1)
    return round_bf16(out) if rounded else out


def output(ranks: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """wo_b: this rank's partial [rows, 5120] of its groups' bf16 ranks, rounded to bf16."""
    return linear(quantise(ranks), weights, codes)
