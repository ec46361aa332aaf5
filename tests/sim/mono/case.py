# SPDX-License-Identifier: Apache-2.0
"""Inputs and weights of one FFN launch, made in seconds.

Weights do not depend on the case: they are slices of pooled random bytes, the routed experts' already in the
device layout (any bytes are a valid expert). Only activations, the gate and its bias are made for a case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .pool import PAGE, Pool
from .sources import modules

# Tests run one process a core.
torch.set_num_threads(1)

g = modules().geometry
HIDDEN, STREAMS, MIXES, INTER = g.HIDDEN, g.STREAMS, g.MIXES, g.INTERMEDIATE
# Prime numbers of pages (pool.py); e2m1 takes every byte, codes are those of weights of ordinary size.
BYTE_PAGES, CODE_PAGES = 4099, 1009


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=1)
def _pools() -> tuple[Pool, Pool]:
    r = _generator(1)
    raw = torch.randint(0, 256, (BYTE_PAGES * PAGE,), generator=r, dtype=torch.uint8)
    codes = torch.randint(118, 122, (CODE_PAGES * PAGE,), generator=r, dtype=torch.uint8)
    return Pool(raw), Pool(codes)


@dataclass(frozen=True)
class Loaded:
    """What the serving engine leaves in memory on an architecture: the routed experts' layout, whether e4m3
    weights were rid of -0, which FNUZ reads as a NaN, and the FP8 of the sliding window's records."""

    layout: str
    no_negative_zero: bool
    window: Any

    def dense(self, weights: torch.Tensor) -> torch.Tensor:
        """e4m3 bytes as they are in memory."""
        return torch.where(weights == 0x80, 0, weights) if self.no_negative_zero else weights


LOADED = {
    "gfx950": Loaded("aiter_shuffle", False, modules().attention.OCP),
    "gfx942": Loaded("row_major", True, modules().attention.FNUZ),
}


@lru_cache(maxsize=8)
def _routed(tp: int, rank: int, experts: int, layout: str) -> dict[str, torch.Tensor]:
    """One rank's memory of every routed expert. The loader's padding holds anything but zeros."""
    inter = g.padded_share(INTER // tp, layout)
    columns = -(-(inter // 32) // 8) * 8
    raw, codes = _pools()
    scales = {
        "aiter_shuffle": ((2 * inter, HIDDEN // 32), (HIDDEN, columns)),
        "row_major": ((HIDDEN // 32, 2 * inter), (inter // 32, HIDDEN)),
    }[layout]
    shapes = {
        "w13": (raw, (experts, 2 * inter, HIDDEN // 2)),
        "w13_scale": (codes, (experts, *scales[0])),
        "w2": (raw, (experts, HIDDEN, inter // 2)),
        "w2_scale": (codes, (experts, *scales[1])),
    }
    out = {}
    for turn, (name, (pool, shape)) in enumerate(shapes.items()):
        size = shape[0] * shape[1] * shape[2]
        out[name] = pool.repeat(size, 131 * rank + 17 * turn).view(shape)
    return out


@lru_cache(maxsize=1)
def _dense() -> dict[str, torch.Tensor]:
    """The seam's and the shared expert's weights, unsharded; e4m3 values include denormals and -0."""
    r = _generator(2)
    period = 1048573  # prime: rows of a matrix begin at different places
    values = torch.randn(period, generator=r).clamp(-6, 6)
    values[::97] *= 2.0**-9
    values[50::911] = -0.0
    raw = values.to(torch.float8_e4m3fn).view(torch.uint8)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return raw.repeat(-(-rows * columns // period))[: rows * columns].view(rows, columns)

    def codes(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(118, 123, (rows, columns), generator=r, dtype=torch.uint8)

    return {
        "mix_projection": torch.randn(MIXES, STREAMS * HIDDEN, generator=r) * 0.01,
        "mix_scale": torch.rand(3, generator=r) + 0.5,
        "mix_base": torch.randn(MIXES, generator=r) * 0.1,
        "norm_weight": (1 + torch.randn(HIDDEN, generator=r) * 0.1).bfloat16(),
        "shared_w13": matrix(2 * INTER, HIDDEN),
        "shared_w13_scale": codes(2 * INTER // 32, HIDDEN // 32),
        "shared_w2": matrix(HIDDEN, INTER),
        "shared_w2_scale": codes(HIDDEN // 32, INTER // 32),
    }


@lru_cache(maxsize=2)
def _gate(experts: int) -> dict[str, torch.Tensor]:
    r = _generator(3)
    return {
        "gate_weight": (torch.randn(experts, HIDDEN, generator=r) * 0.02).bfloat16(),
        "gate_bias": torch.randn(experts, generator=r) * 0.02,
    }


@dataclass(frozen=True)
class Case:
    """``activations`` and ``router``: tensors by argument name; ``partial`` is [TP, rows, 5120]."""

    rows: int
    tp: int
    experts: int
    picks: int
    activations: dict[str, torch.Tensor]
    router: dict[str, torch.Tensor]
    arch: str = "gfx950"

    @property
    def layout(self) -> str:
        """Of the routed experts."""
        return LOADED[self.arch].layout

    @property
    def geometry(self) -> Any:
        return g.FfnGeometry(self.rows, self.tp, self.experts, self.picks)

    def unsharded(self) -> dict[str, torch.Tensor]:
        """Every input but the routed experts, as the model has it; ``partial`` of all ranks."""
        return self.activations | self.router | _dense()

    def arguments(self, rank: int) -> dict[str, torch.Tensor]:
        """Every input tensor of a rank."""
        dense = _dense()
        share = INTER // self.tp
        cut, blocks = (slice(rank * n, (rank + 1) * n) for n in (share, share // 32))
        first, scale = dense["shared_w13"], dense["shared_w13_scale"]
        values = {
            "shared_w13": torch.cat([first[:INTER][cut], first[INTER:][cut]]),
            "shared_w2": dense["shared_w2"][:, cut].contiguous(),
        }
        values = {name: LOADED[self.arch].dense(x) for name, x in values.items()}
        return (
            self.activations
            | self.router
            | dense
            | _routed(self.tp, rank, self.experts, self.layout)
            | values
            | {
                "partial": self.activations["partial"][rank],
                "shared_w13_scale": torch.cat([scale[: INTER // 32][blocks], scale[INTER // 32 :][blocks]]),
                "shared_w2_scale": dense["shared_w2_scale"][:, blocks].contiguous(),
            }
        )

    def with_rows(self, rows: list[int], **values: float) -> Case:
        """The same case with the named activations of some rows set to a value."""
        changed = {name: x.clone() for name, x in self.activations.items()}
        for name, value in values.items():
            where = changed[name][:, rows] if name == "partial" else changed[name][rows]
            filled = torch.full_like(where, value)
            if name == "partial":
                changed[name][:, rows] = filled
            else:
                changed[name][rows] = filled
        return replace(self, activations=changed)

    def normed(self) -> torch.Tensor:
        """The MoE's input by the reference, float64 [rows, 5120]."""
        ref, a = modules().reference, self.activations
        residual = ref.fold(a["residual_in"], ref.all_reduce(a["partial"]), a["post_in"], a["comb_in"])
        return ref.normalise(ref.collapse(residual, a["pre_in"]), _dense()["norm_weight"])


def make(
    rows: int,
    tp: int,
    kind: str = "random",
    *,
    seed: int = 0,
    experts: int = 384,
    picks: int = 6,
    arch: str = "gfx950",
) -> Case:
    """A case whose routing or values are of one of ``KINDS``, as an architecture's memory has it."""
    r = _generator(1000 + seed)
    residual = torch.randn(rows, STREAMS, HIDDEN, generator=r)
    residual *= torch.rsqrt(residual.pow(2).mean(-1, keepdim=True))
    comb = torch.rand(rows, STREAMS, STREAMS, generator=r) + 0.1
    for _ in range(20):
        comb = comb / comb.sum(-1, keepdim=True)
        comb = comb / comb.sum(-2, keepdim=True)
    activations = {
        "partial": (torch.randn(tp, rows, HIDDEN, generator=r) * 0.5 / tp**0.5).bfloat16(),
        "residual_in": residual.bfloat16(),
        "post_in": torch.sigmoid(torch.randn(rows, STREAMS, generator=r)) * 2,
        "comb_in": comb,
        "pre_in": torch.sigmoid(torch.randn(rows, STREAMS, generator=r)) + g.MIX_EPSILON,
    }
    case = Case(rows, tp, experts, picks, activations, dict(_gate(experts)), arch)
    return KINDS[kind](case)


# ---- kinds of routing and of values
def _same(case: Case) -> Case:
    """Every row picks the same experts, which lie apart."""
    bias = case.router["gate_bias"].clone()
    bias[torch.arange(case.picks) * (case.experts // case.picks) + 5] += 10
    return replace(case, router=case.router | {"gate_bias": bias})


def _few(case: Case) -> Case:
    """Rows pick among 24 experts: many rows without many experts."""
    bias = case.router["gate_bias"].clone()
    bias[torch.arange(24) * (case.experts // 24) + 3] += 2
    return replace(case, router=case.router | {"gate_bias": bias})


def _tied(case: Case) -> Case:
    """All experts score the same: the lowest ids are picked."""
    return replace(case, router={k: torch.zeros_like(v) for k, v in case.router.items()})


def _tied_groups(case: Case) -> Case:
    """Runs of five experts score the same, and so does every eighth run: the last pick of six is one of those
    that a lane, which has six experts side by side, has equal."""
    group = torch.arange(case.experts) // 5 % 8
    gate = case.router["gate_weight"][group]
    return replace(case, router={"gate_weight": gate, "gate_bias": case.router["gate_bias"][group]})


def _near_tie(case: Case) -> Case:
    """Scores of all experts lie within a thousandth: the sixth and the seventh differ in the last digits."""
    gate = (case.router["gate_weight"].float() * 1e-3).bfloat16()
    return replace(case, router={"gate_weight": gate, "gate_bias": case.router["gate_bias"] * 1e-2})


def _distinct(case: Case) -> Case:
    """No two rows share an expert: row r's experts follow its own direction."""
    gate = case.router["gate_weight"].float()
    normed = case.normed().float()
    for row in range(case.rows):
        ids = (torch.arange(case.picks) * case.rows + row) * (case.experts // (case.rows * case.picks))
        gate[ids] += normed[row] * (8.0 / HIDDEN)
    return replace(case, router=case.router | {"gate_weight": gate.bfloat16()})


def _tiny_blocks(case: Case) -> Case:
    """Columns of every fifth MX block are denormal in bf16 or -0 in all streams and partials; every seventh
    block is -0."""
    a = {name: x.clone() for name, x in case.activations.items()}
    block = torch.arange(HIDDEN) // 32
    for name in ("partial", "residual_in"):
        small = (a[name].float() * 2.0**-127).bfloat16()
        a[name] = torch.where(block % 5 == 0, small, a[name])
        a[name] = torch.where(block % 7 == 0, torch.tensor(-0.0).bfloat16(), a[name])
    return replace(case, activations=a)


def _zero_rows(case: Case) -> Case:
    """Even rows are zero."""
    rows = list(range(0, case.rows, 2))
    return case.with_rows(rows, partial=0.0, residual_in=0.0)


def _cancelling(case: Case) -> Case:
    """The first and the last rank's partials are large and opposite, so that the sum depends on its order."""
    partial = case.activations["partial"].clone()
    partial[0] *= 2.0**17
    partial[-1] = -partial[0]
    return replace(case, activations=case.activations | {"partial": partial})


KINDS = {
    "random": lambda case: case,
    "few": _few,
    "same": _same,
    "tied": _tied,
    "tied-groups": _tied_groups,
    "near-tie": _near_tie,
    "distinct": _distinct,
    "tiny-blocks": _tiny_blocks,
    "zero-rows": _zero_rows,
    "cancelling": _cancelling,
}
