# SPDX-License-Identifier: Apache-2.0
"""Inputs, key caches and weights of one whole layer.

Weights and the caches' history do not depend on the case: slices of pooled bytes, any of which are valid.
Activations and the step's key lists are made for a case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .case import LOADED, MIXES, STREAMS, Case, make
from .sources import modules

g = modules().geometry
att = modules().attention
HIDDEN, HEADS, HEAD_DIM = g.HIDDEN, g.HEADS, g.HEAD_DIM
DATA, CODES = g.RECORD_DATA, g.RECORD_CODES
MOST_POSITIONS = 2048
# What lies in places that nobody may read.
NOT_READ = 0x7FFFFFF0


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=2)
def _weights(arch: str) -> dict[str, torch.Tensor]:
    """Of the attention, unsharded, as an architecture's memory has them; e4m3 values include denormals and
    -0."""
    r = _generator(12)
    period = 1048573  # prime: rows of a matrix begin at different places
    values = torch.randn(period, generator=r).clamp(-6, 6)
    values[::97] *= 2.0**-9
    values[50::911] = -0.0
    raw = LOADED[arch].dense(values.to(torch.float8_e4m3fn).view(torch.uint8))

    def linear(name: str, outputs: int, k: int) -> dict[str, torch.Tensor]:
        codes = torch.randint(118, 123, (outputs // 32, k // 32), generator=r, dtype=torch.uint8)
        matrix = raw.repeat(-(-outputs * k // period))[: outputs * k].view(outputs, k)
        return {name: matrix, f"{name}_scale": codes}

    angles = torch.arange(MOST_POSITIONS)[:, None] / 10000 ** (torch.arange(32)[None] / 32)
    return {
        "mix_projection": torch.randn(MIXES, STREAMS * HIDDEN, generator=r) * 0.01,
        "mix_scale": torch.rand(3, generator=r) + 0.5,
        "mix_base": torch.randn(MIXES, generator=r) * 0.1,
        "norm_weight": (1 + torch.randn(HIDDEN, generator=r) * 0.1).bfloat16(),
        **linear("wqkv", g.QKV, HIDDEN),
        **linear("wq_b", HEADS * HEAD_DIM, g.QUERY_RANK),
        **linear("wo_a", g.OUTPUT_GROUPS * g.OUTPUT_RANK, g.GROUP_K),
        **linear("wo_b", HIDDEN, g.OUTPUT_GROUPS * g.OUTPUT_RANK),
        "query_norm": (1 + torch.randn(g.QUERY_RANK, generator=r) * 0.1).bfloat16(),
        "key_norm": (1 + torch.randn(HEAD_DIM, generator=r) * 0.1).bfloat16(),
        "sink": torch.randn(HEADS, generator=r),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1).float(),
    }


FRONT = ("mix_projection", "mix_scale", "mix_base", "norm_weight", "wqkv", "wqkv_scale", "wq_b", "wq_b_scale")
FRONT_STEP = ("x", "residual_in", "post_in", "comb_in", "pre_in", "positions", "slots")
BACK_STEP = ("positions", "slots", "window_indices", "window_lens", "selected", "requests", "block_table")


@dataclass(frozen=True)
class Cache:
    """A paged key cache as one tensor of bytes: blocks of data rows, then of code rows, ``stride`` bytes
    apart."""

    block: int
    stride: int
    raw: torch.Tensor
    fp8: Any

    @classmethod
    def filled(cls, blocks: int, block: int, slack: int, seed: int, fp8: Any) -> Cache:
        """Every record holds some key; ``slack`` bytes that nobody may read lie between blocks."""
        r = _generator(seed)
        kinds = 509  # prime
        keys = torch.randn(kinds, HEAD_DIM, generator=r).bfloat16().double()
        records = att.Records.of(keys, fp8)
        which = torch.arange(blocks * block) % kinds
        raw = torch.full((blocks, block * (DATA + CODES) + slack), 0xFF, dtype=torch.uint8)
        raw[:, : block * DATA] = records.data[which].view(blocks, -1)
        raw[:, block * DATA : block * (DATA + CODES)] = records.codes[which].view(blocks, -1)
        return cls(block, raw.shape[1], raw.flatten(), fp8)

    def varied(self, negative_zeros: bool) -> Cache:
        """The same records with codes raised and lowered by one, and with -0 among their e4m3."""
        raw = self.raw.view(-1, self.stride).clone()
        data = raw[:, : self.block * DATA].view(-1, self.block, DATA)
        codes = raw[:, self.block * DATA : self.block * (DATA + CODES)].view(-1, self.block, CODES)
        if negative_zeros:
            data[..., torch.arange(5, g.POSITION_FREE, 37)] = 0x80
        record = torch.arange(raw.shape[0] * self.block).view(-1, self.block, 1)
        codes[..., : att.BLOCKS] += ((record + torch.arange(att.BLOCKS)) % 3 - 1).to(torch.uint8)
        return replace(self, raw=raw.flatten())

    def read(self, slots: torch.Tensor, raw: torch.Tensor | None = None) -> Any:
        """The records at ``slots``, of this cache or of another's bytes ``raw``."""
        raw = self.raw if raw is None else raw
        block, inside = slots // self.block * self.stride, slots % self.block
        data = raw[(block + inside * DATA)[:, None] + torch.arange(DATA)]
        codes = block + self.block * DATA + inside * CODES
        return att.Records(data, raw[codes[:, None] + torch.arange(CODES)], self.fp8)

    def without(self, slots: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """``raw`` with the records at ``slots`` zeroed: what no store to them may have changed."""
        out = raw.clone()
        block, inside = slots // self.block * self.stride, slots % self.block
        out[(block + inside * DATA)[:, None] + torch.arange(DATA)] = 0
        codes = block + self.block * DATA + inside * CODES
        out[codes[:, None] + torch.arange(CODES)] = 0
        return out


@dataclass(frozen=True)
class Shape:
    """What a layer's builds and memory depend on.

    ``ratio`` 0 is a layer without compressed keys. ``window`` is the width of the window's index rows;
    ``slack`` bytes lie between cache blocks; ``contexts``: tokens a request has in its caches before this
    step; ``padded`` rows have slot -1 and garbage."""

    rows: int
    tp: int
    ratio: int = 1
    fold: bool = True
    hands_out: bool = False
    experts: int = 384
    picks: int = 6
    window: int = 128
    window_block: int = 64
    compressed_block: int = 64
    slack: int = 0
    contexts: tuple[int, ...] = (700,)
    padded: tuple[int, ...] = ()
    kind: str = "random"
    arch: str = "gfx950"

    @property
    def front(self) -> dict[str, int]:
        """The front's geometry: the routing has no part in it."""
        return {"rows": self.rows, "tp": self.tp}

    @property
    def back(self) -> dict[str, int]:
        """The back's."""
        return self.front | {"experts": self.experts, "picks": self.picks}

    @property
    def live(self) -> list[int]:
        return [row for row in range(self.rows) if row not in self.padded]

    def request_of(self, row: int) -> tuple[int, int]:
        """(request, its token) of a row: requests have the same number of tokens each."""
        each = -(-self.rows // len(self.contexts))
        return row // each, row % each

    @property
    def causal(self) -> bool:
        """A draft's window is wider than the tokens it holds, and every token sees the whole of it."""
        return self.window == g.WINDOW


def draft(rows: int, tp: int, **more: Any) -> Shape:
    """A layer of the draft: no compressed keys, a window of 128 tokens and the step's own."""
    return Shape(rows, tp, ratio=0, experts=128, picks=3, window=192, **more)


@dataclass(frozen=True)
class LayerCase:
    """``step``: the attention's inputs that change from step to step, by argument name. ``ffn``: the
    rest of the activations, the router, and the FFN half's weights."""

    shape: Shape
    ffn: Case
    step: dict[str, torch.Tensor]
    window: Cache
    compressed: Cache
    dense: dict[str, torch.Tensor]

    def front_arguments(self, rank: int) -> dict[str, torch.Tensor]:
        """Every input tensor of a rank's front but the cache."""
        per = HEADS // self.shape.tp
        w = self.dense
        heads, codes = (slice(rank * per * n, (rank + 1) * per * n) for n in (HEAD_DIM, HEAD_DIM // 32))
        return (
            {n: self.ffn.activations[n] for n in ("residual_in", "post_in", "comb_in", "pre_in")}
            | {n: self.step[n] for n in ("x", "positions", "slots")}
            | {n: w[n] for n in (*FRONT, "query_norm", "key_norm", "cos_sin")}
            | {"wq_b": w["wq_b"][heads], "wq_b_scale": w["wq_b_scale"][codes]}
        )

    def back_arguments(self, rank: int) -> dict[str, torch.Tensor]:
        """Every input tensor of the attention of a rank's back but caches and the query."""
        w, tp = self.dense, self.shape.tp
        ranks = g.OUTPUT_GROUPS * g.OUTPUT_RANK // tp
        mine, codes = (slice(rank * n, (rank + 1) * n) for n in (ranks, ranks // 32))
        return {n: self.step[n] for n in BACK_STEP} | {
            "sink": w["sink"][rank * HEADS // tp : (rank + 1) * HEADS // tp],
            "cos_sin": w["cos_sin"],
            "wo_a": w["wo_a"][mine],
            "wo_a_scale": w["wo_a_scale"][codes],
            "wo_b": w["wo_b"][:, mine],
            "wo_b_scale": w["wo_b_scale"][:, codes],
        }

    def varied(self) -> LayerCase:
        """The same case with codes that differ between a record's blocks and between records, and -0 among
        the e4m3 of every compressed record."""
        window, compressed = (
            cache.varied(cache is self.compressed) for cache in (self.window, self.compressed)
        )
        return replace(self, window=window, compressed=compressed)

    def angles(self) -> torch.Tensor:
        """cos_sin of every row's position."""
        return self.dense["cos_sin"][self.step["positions"]]

    def slots(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots of the window's keys, of the compressed ones) that a row attends to."""
        s, step = self.shape, self.step
        window = step["window_indices"][row, : int(step["window_lens"][row])].long()
        if not s.ratio:
            return window[window >= 0], window[:0]
        count = min((int(step["positions"][row]) + 1) // s.ratio, g.SELECTED)
        entries = step["selected"][row, :count].long()
        entries = entries[entries >= 0]
        table = step["block_table"][int(step["requests"][row])].long()
        block = self.compressed.block
        return window[window >= 0], table[entries // block] * block + entries % block


# ---- a step's key lists
def _window(s: Shape, r: torch.Generator, positions: list[int]) -> tuple[dict[str, torch.Tensor], int]:
    """Slots, indices and lens of every row, and the blocks of the cache: a request's tokens lie in blocks of
    its own in any order."""
    blocks = -(-(g.WINDOW + s.rows) // s.window_block) + 1
    tables = [torch.randperm(blocks, generator=r) + i * blocks for i in range(len(s.contexts))]

    def slot(request: int, position: torch.Tensor) -> torch.Tensor:
        at = position % (blocks * s.window_block)
        return tables[request][at // s.window_block] * s.window_block + at % s.window_block

    slots = torch.empty(s.rows, dtype=torch.int64)
    indices = torch.full((s.rows, s.window), NOT_READ, dtype=torch.int32)
    lens = torch.empty(s.rows, dtype=torch.int32)
    for row, position in enumerate(positions):
        request, token = s.request_of(row)
        # A draft's token sees its request's later ones too.
        each = -(-s.rows // len(s.contexts))
        last = position if s.causal else min(position - token + each, positions[-1] + 1) - 1
        width = g.WINDOW if s.causal else g.WINDOW + min(each, 5)
        seen = torch.arange(max(0, last - width + 1), last + 1)
        slots[row] = slot(request, torch.tensor(position))
        indices[row, : len(seen)] = slot(request, seen).int()
        lens[row] = len(seen)
    return {"slots": slots, "window_indices": indices, "window_lens": lens}, blocks * len(s.contexts)


def _compressed(s: Shape, r: torch.Generator, positions: list[int]) -> tuple[dict[str, torch.Tensor], int]:
    """Entries of every row's compressed keys, the block table, and the blocks of the cache."""
    longest = max(s.contexts) + s.rows
    per = -(-longest // max(s.ratio, 1) // s.compressed_block) + 1
    blocks = per * len(s.contexts)
    # One word more a request than it has blocks.
    table = torch.full((len(s.contexts), per + 1), NOT_READ, dtype=torch.int32)
    table[:, :per] = torch.randperm(blocks, generator=r).view(-1, per).int()
    selected = torch.full((s.rows, g.SELECTED), NOT_READ, dtype=torch.int32)
    for row, position in enumerate(positions):
        there = (position + 1) // s.ratio if s.ratio else 0
        count = min(there, g.SELECTED)
        entries = torch.randperm(there, generator=r)[:count].int()
        entries[torch.rand(count, generator=r) < 0.1] = -1
        selected[row, :count] = entries
    return {"selected": selected, "block_table": table}, blocks


GARBAGE = (float("nan"), float("inf"), -float("inf"))
# Of the whole numbers of a padded row; positions stay within the table of angles, as vLLM's do.
WORDS = {"window_indices": -7, "window_lens": 0x7FFFFFFF, "selected": 0x12345678, "requests": 0x13579BDF}


def _pad(case: LayerCase, r: torch.Generator) -> LayerCase:
    step = {name: x.clone() for name, x in case.step.items()}
    ffn = case.ffn
    for turn, row in enumerate(case.shape.padded):
        value = GARBAGE[turn % len(GARBAGE)]
        step["x"][row] = value
        step["slots"][row] = -1
        step["positions"][row] = torch.randint(MOST_POSITIONS, (), generator=r)
        for name, word in WORDS.items():
            step[name][row] = word
        ffn = ffn.with_rows([row], residual_in=value, post_in=value, comb_in=value, pre_in=value)
    return replace(case, step=step, ffn=ffn)


def make_layer(shape: Shape, seed: int = 0) -> LayerCase:
    """A case of a shape; another ``seed`` is another step of it on the same weights and caches."""
    s, r = shape, _generator(5000 + seed)
    positions = [s.contexts[request] + token for request, token in map(s.request_of, range(s.rows))]
    window, window_blocks = _window(s, r, positions)
    compressed, compressed_blocks = _compressed(s, r, positions)
    step = {
        # Of no effect on a residual that owes nothing.
        "x": (torch.randn(s.rows, HIDDEN, generator=r) * (0.5 if s.fold else float("nan"))).bfloat16(),
        "positions": torch.tensor(positions),
        "requests": torch.tensor([s.request_of(row)[0] for row in range(s.rows)], dtype=torch.int32),
        **window,
        **compressed,
    }
    ffn = make(s.rows, s.tp, s.kind, seed=seed, experts=s.experts, picks=s.picks, arch=s.arch)
    caches = (
        _cache(window_blocks, s.window_block, s.slack, 21, LOADED[s.arch].window),
        # Its writer knows OCP values alone, on every architecture.
        _cache(compressed_blocks, s.compressed_block, s.slack, 22, att.OCP),
    )
    return _pad(LayerCase(s, ffn, step, *caches, dict(_weights(s.arch))), r)


_cache = lru_cache(maxsize=4)(Cache.filled)
