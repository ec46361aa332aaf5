# SPDX-License-Identifier: Apache-2.0
"""The FFN half layer in float64, a function a stage.

Rounding points are those of the operation (docs of each function); everything between is float64. Where
the kernels and vLLM round differently, ``Rounding`` says which. Routed experts come one at a time, so
that a step needs the memory of one expert's matrices and not of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..geometry import (
    HIDDEN,
    MIX_EPSILON,
    MIXES,
    NORM_EPSILON,
    ROUTED_SCALING,
    SINKHORN_ROUNDS,
    STREAMS,
    SWIGLU_LIMIT,
    WORKGROUPS,
)
from .formats import EXPERT_FORMATS, MX_BLOCK, MxRows, mxfp4, mxfp8, quantise, round_bf16


@dataclass(frozen=True)
class Rounding:
    """Where the sum over experts is rounded, and the least magnitude of a block that is quantised.

    ``each_expert``: every pick's weighted product, the running sum and the shared expert's product are
    rounded to bf16. Otherwise the rank's sum is rounded once."""

    each_expert: bool
    routed_floor: float
    shared_floor: float


KERNEL = Rounding(each_expert=False, routed_floor=0.0, shared_floor=0.0)
VLLM = Rounding(each_expert=True, routed_floor=1e-10, shared_floor=1e-4)


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """bf16 partials of every rank, summed in fp32 in rank order, rounded to bf16."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return round_bf16(total.double())


# ---- the seam
def fold(
    residual: torch.Tensor, attention: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The new streams: post[j] x attention + sum over i of comb[i, j] x stream i; rounded to bf16."""
    mixed = torch.einsum("rij,rih->rjh", comb.double(), residual.double())
    return round_bf16(mixed + post.double()[..., None] * attention.double()[:, None])


def collapse(residual: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum over streams of pre x stream; rounded to bf16."""
    return round_bf16((pre.double()[..., None] * residual.double()).sum(1))


def seam_sums(residual: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """[rows, 25, 256]: each slice's part of the 24 mixes' dot products, and of the sum of squares."""
    rows, width = residual.shape[0], HIDDEN // WORKGROUPS
    x = residual.double().view(rows, STREAMS, WORKGROUPS, width)
    w = projection.double().view(MIXES, STREAMS, WORKGROUPS, width)
    dots = torch.einsum("rjsc,mjsc->rms", x, w)
    return torch.cat([dots, x.pow(2).sum((1, 3))[:, None]], 1)


def mixes(sums: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
    """post [rows, 4], comb [rows, 4, 4], pre [rows, 4] of the 25 sums of a row: [rows, 25]."""
    sums, scale, base = sums.double(), scale.double(), base.double()
    x = sums[:, :MIXES] * torch.rsqrt(sums[:, MIXES:] / (STREAMS * HIDDEN) + NORM_EPSILON)
    pre = torch.sigmoid(x[:, :STREAMS] * scale[0] + base[:STREAMS]) + MIX_EPSILON
    post = 2 * torch.sigmoid(x[:, STREAMS : 2 * STREAMS] * scale[1] + base[STREAMS : 2 * STREAMS])
    comb = (x[:, 2 * STREAMS :] * scale[2] + base[2 * STREAMS :]).view(-1, STREAMS, STREAMS)
    comb = torch.softmax(comb, -1) + MIX_EPSILON
    for turn in range(SINKHORN_ROUNDS):
        if turn:
            comb = comb / (comb.sum(-1, keepdim=True) + MIX_EPSILON)
        comb = comb / (comb.sum(-2, keepdim=True) + MIX_EPSILON)
    return {"post": post, "comb": comb, "pre": pre}


def normalise(collapsed: torch.Tensor, weight: torch.Tensor, rounded: bool = True) -> torch.Tensor:
    """RMSNorm of the bf16 row, ``rounded`` to bf16."""
    x = collapsed.double()
    normed = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + NORM_EPSILON) * weight.double()
    return round_bf16(normed) if rounded else normed


# ---- the router
def router_logits(normed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """[rows, experts], not rounded."""
    return normed @ gate.double().T


@dataclass(frozen=True)
class Picks:
    """``experts`` int64 and ``weights`` [rows, picks], best first."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose(logits: torch.Tensor, bias: torch.Tensor, picks: int, scaling: float = ROUTED_SCALING) -> Picks:
    """The best by score + bias in float32, ties to the lowest expert; score = sqrt(softplus(logit)). Weights
    are the chosen scores' shares x ``scaling``. A NaN ranks below every number."""
    score = torch.nn.functional.softplus(logits.double()).sqrt()
    ranked = torch.nan_to_num((score + bias.double()).float(), nan=-torch.inf)
    experts = torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :picks]
    chosen = score.gather(1, experts)
    return Picks(experts, chosen / chosen.sum(1, keepdim=True) * scaling)


# ---- the experts
def _clamped(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)


def routed_gate_up(x: MxRows, gate: torch.Tensor, up: torch.Tensor, floor: float = 0.0) -> MxRows:
    """One expert's intermediate rows: silu(gate) x up of the clamped products, rounded to bf16, MXFP8."""
    g, u = _clamped(x.values @ gate.T, x.values @ up.T)
    return quantise(round_bf16(g * torch.sigmoid(g) * u), floor)


def shared_gate_up(x: MxRows, gate: torch.Tensor, up: torch.Tensor, floor: float = 0.0) -> MxRows:
    """The shared expert's: gate and up rounded to bf16, silu(gate) too, and their product; MXFP8."""
    g, u = _clamped(round_bf16(x.values @ gate.T), round_bf16(x.values @ up.T))
    return quantise(round_bf16(round_bf16(g * torch.sigmoid(g)) * u), floor)


@dataclass(frozen=True)
class RankWeights:
    """One rank's weights as the launch reads them; ``share`` is its intermediate columns of each expert.

    ``routed(expert)`` gives the bytes of w13, w13_scale, w2, w2_scale of one routed expert, which ``layout``
    names the layout of."""

    share: int
    routed: Callable[[int], dict[str, torch.Tensor]]
    shared_w13: torch.Tensor
    shared_w13_scale: torch.Tensor
    shared_w2: torch.Tensor
    shared_w2_scale: torch.Tensor
    layout: str = "aiter_shuffle"

    def routed_gate_up(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate, up [share, 5120] of a routed expert."""
        w, form = self.routed(expert), EXPERT_FORMATS[self.layout]
        raw = form.split(form.unpack_bytes(w["w13"]))
        codes = form.split(form.unpack_codes(w["w13_scale"]))
        gate, up = (mxfp4(r[: self.share], c[: self.share]) for r, c in zip(raw, codes, strict=True))
        return gate, up

    def routed_down(self, expert: int) -> torch.Tensor:
        """down [5120, share] of a routed expert."""
        w, form = self.routed(expert), EXPERT_FORMATS[self.layout]
        raw = form.unpack_bytes(w["w2"])[:, : self.share // 2]
        return mxfp4(raw, form.unpack_codes(w["w2_scale"])[:, : self.share // MX_BLOCK])

    def shared_gate_up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate, up [share, 5120] of the shared expert."""
        w = mxfp8(self.shared_w13, self.shared_w13_scale)
        return w[: self.share], w[self.share :]

    def shared_down(self) -> torch.Tensor:
        """down [5120, share] of the shared expert."""
        return mxfp8(self.shared_w2, self.shared_w2_scale)


def gate_up(
    normed: torch.Tensor, picks: Picks, weights: RankWeights, rounding: Rounding = KERNEL
) -> list[MxRows]:
    """The intermediate rows by slot: the picks in order, then the shared expert; each of [rows, share]."""
    rows, num_picks = picks.experts.shape
    raw = torch.zeros(num_picks, rows, weights.share, dtype=torch.uint8)
    codes = torch.zeros(num_picks, rows, weights.share // MX_BLOCK, dtype=torch.uint8)
    x = quantise(normed, rounding.routed_floor)
    for expert in picks.experts.unique().tolist():
        row, slot = (picks.experts == expert).nonzero(as_tuple=True)
        out = routed_gate_up(
            MxRows(x.raw[row], x.codes[row]), *weights.routed_gate_up(expert), rounding.routed_floor
        )
        raw[slot, row], codes[slot, row] = out.raw, out.codes
    shared = shared_gate_up(
        quantise(normed, rounding.shared_floor), *weights.shared_gate_up(), rounding.shared_floor
    )
    return [*(MxRows(r, c) for r, c in zip(raw, codes, strict=True)), shared]


def down(
    intermediate: Sequence[MxRows], picks: Picks, weights: RankWeights, rounding: Rounding = KERNEL
) -> torch.Tensor:
    """The rank's bf16 partial [rows, 5120] of its intermediate rows by slot."""
    rows, num_picks = picks.experts.shape
    products = torch.zeros(num_picks, rows, HIDDEN, dtype=torch.float64)
    values = torch.stack([x.values for x in intermediate])
    for expert in picks.experts.unique().tolist():
        row, slot = (picks.experts == expert).nonzero(as_tuple=True)
        products[slot, row] = values[slot, row] @ weights.routed_down(expert).T
    products = products * picks.weights.double().T[..., None]
    shared = values[num_picks] @ weights.shared_down().T
    if not rounding.each_expert:
        return round_bf16(products.sum(0) + shared)
    total = torch.zeros_like(shared)
    for product in products:
        total = round_bf16(total + round_bf16(product))
    return round_bf16(total + round_bf16(shared))
