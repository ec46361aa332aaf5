# SPDX-License-Identifier: Apache-2.0
"""The base's whole-layer launches K1 and K2 on the simulator, and the same layer in float64.

K1 is compared on its inputs; the attention of K2 on K1's own queries and cache, its FFN half on K1's own
residual and mixes (``ffn``), so a failure names the stage. Facts: the layer's page and the base's numerics
test.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from cdnasim import Device, LaunchReport

from . import formats as f
from .ffn import EPS, FfnCase, FfnRun, base_module, errors, ffn_seam
from .kernels import compiled

HIDDEN, HC, Q_RANK, HEAD_DIM, NOPE, ROPE = 5120, 4, 1280, 512, 448, 64
HEADS, GROUPS, O_RANK, WINDOW, TOPK = 64, 8, 1024, 128, 512
RECORD, DATA, BLOCK, COMP_BLOCK = 584, 576, 32, 128
KEYS = TOPK + WINDOW


def rope(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Pairs (2 i, 2 i + 1) of the last 64 values turned; ``cos_sin`` [rows, 64] is broadcast over the middle."""  # noqa: E501
    cos, sin = cos_sin[..., :32].double(), cos_sin[..., 32:].double()
    if inverse:
        sin = -sin
    out = x.clone()
    even, odd = x[..., NOPE::2], x[..., NOPE + 1 :: 2]
    out[..., NOPE::2] = even * cos - odd * sin
    out[..., NOPE + 1 :: 2] = even * sin + odd * cos
    return out


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm, rounded to bf16."""
    return f.bf16(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double())


def cache_format(arch: str, window: bool) -> tuple[torch.dtype, float]:
    """The e4m3 of a cache's records: FNUZ for the window on gfx942, OCP otherwise."""
    return (torch.float8_e4m3fnuz, 224.0) if arch == "gfx942" and window else (torch.float8_e4m3fn, 448.0)


# What f32's norm and rotation may be off in a value of a KV record, relative: 16 units of its last place.
KV_ERROR = 2.0**-20


def same_elements(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where the data bytes [n, 576] of records hold the same: 448 e4m3 elements, then 64 of bf16."""
    wide = [x[:, NOPE:].contiguous().view(torch.int16) for x in (got, want)]
    return torch.cat([got[:, :NOPE] == want[:, :NOPE], wide[0] == wide[1]], 1)


def record_bytes(kv: torch.Tensor, arch: str, window: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 rows [n, 512] (rotary done) -> (data bytes [n, 576], scale bytes [n, 8])."""
    dtype, top = cache_format(arch, window)
    nope = kv[:, :NOPE].double().view(-1, 7, 64)
    exp = torch.ceil(torch.log2(nope.abs().amax(-1).clamp_min(1e-4) / top))
    q = (nope * torch.exp2(-exp)[..., None]).clamp(-top, top).reshape(-1, NOPE)
    data = torch.cat(
        [q.float().to(dtype).view(torch.uint8), kv[:, NOPE:].bfloat16().contiguous().view(torch.uint8)], 1
    )
    scales = torch.zeros(kv.shape[0], 8, dtype=torch.uint8)
    scales[:, :7] = (exp + 127).clamp(0, 255).to(torch.uint8)
    return data, scales


def split_attention(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor, chunk: int) -> torch.Tensor:
    """[heads, dim] of queries [heads, dim] on keys [n, dim] (values, too), in chunks as a flash-decoding
    kernel
    takes them: a chunk's weights are rounded to bf16 under the chunk's own maximum, and so is its partial
    result; the sums of weights are not rounded. ``sink`` [heads] joins at the end."""
    score = q @ keys.T * HEAD_DIM**-0.5
    parts, tops, sums = [], [], []
    for first in range(0, keys.shape[0], chunk):
        one = score[:, first : first + chunk]
        top = one.amax(1)
        weight = torch.exp(one - top[:, None])
        parts.append(f.bf16(f.bf16(weight) @ keys[first : first + chunk]))
        tops.append(top)
        sums.append(weight.sum(1))
    top = torch.maximum(torch.stack(tops).amax(0), sink)
    share = [torch.exp(x - top) for x in tops]
    total = torch.exp(sink - top) + sum(x * y for x, y in zip(sums, share, strict=True))
    return sum(p * x[:, None] for p, x in zip(parts, share, strict=True)) / total[:, None]


class Cache:
    """A paged cache: blocks of data rows, then scale rows, a page a multiple of 576 bytes."""

    def __init__(self, blocks: int, block: int, arch: str, window: bool) -> None:
        self.block, self.arch, self.window = block, arch, window
        self.stride = -(-block * RECORD // DATA) * DATA
        self.raw = torch.zeros(blocks * self.stride, dtype=torch.uint8)

    def places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base, row = slots // self.block * self.stride, slots % self.block
        return base + row * DATA, base + self.block * DATA + row * 8

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        data, scales = record_bytes(kv, self.arch, self.window)
        d, s = self.places(slots)
        self.raw[d[:, None] + torch.arange(DATA)] = data
        self.raw[s[:, None] + torch.arange(8)] = scales

    def read(self, slots: torch.Tensor, raw: torch.Tensor | None = None) -> torch.Tensor:
        """float64 rows of the records at ``slots``."""
        raw = self.raw if raw is None else raw
        d, s = self.places(slots)
        data, scales = raw[d[:, None] + torch.arange(DATA)], raw[s[:, None] + torch.arange(8)]
        dtype, _ = cache_format(self.arch, self.window)
        nope = data[:, :NOPE].contiguous().view(dtype).double().view(-1, 7, 64)
        nope = nope * f.e8m0(scales[:, :7])[..., None]
        tail = data[:, NOPE:].contiguous().view(torch.bfloat16).double()
        return torch.cat([nope.reshape(-1, NOPE), tail], 1)


class LayerRun:
    """One decode step of one request with ``rows`` tokens through K1 and K2 of every rank."""

    def __init__(self, rows: int, tp: int, arch: str, ratio: int = 1, seed: int = 0, **device: Any) -> None:
        self.rows, self.tp, self.arch, self.ratio = rows, tp, arch, ratio
        self.device = Device(arch, ranks=tp, **device)
        self.g = torch.Generator().manual_seed(77 + seed)
        self.ffn = FfnCase(rows, tp, arch, seed, defer=True)
        self.heads, self.groups = HEADS // tp, GROUPS // tp
        self.inputs()
        self.memory()

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.g) * scale

    def mxfp8(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(118, 123, (n // 32, k // 32), generator=self.g, dtype=torch.uint8)
        return self.randn(n, k).clamp(-6, 6).to(torch.float8_e4m3fn), codes

    def inputs(self) -> None:
        m = self.rows
        self.x = (self.randn(m, HIDDEN) * 0.5).bfloat16()
        self.w = {
            "wqkv": self.mxfp8(Q_RANK + HEAD_DIM, HIDDEN),
            "wq_b": self.mxfp8(HEADS * HEAD_DIM, Q_RANK),
            "wo_a": self.mxfp8(GROUPS * O_RANK, HEADS // GROUPS * HEAD_DIM),
            "wo_b": self.mxfp8(HIDDEN, GROUPS * O_RANK),
        }
        self.q_norm = (1 + self.randn(Q_RANK, scale=0.1)).bfloat16()
        self.kv_norm = (1 + self.randn(HEAD_DIM, scale=0.1)).bfloat16()
        self.attn = {
            "fn": self.randn(24, HC * HIDDEN, scale=0.01),
            "hc_scale": self.randn(3, scale=0.5).abs() + 0.5,
            "hc_base": self.randn(24, scale=0.1),
            "norm": (1 + self.randn(HIDDEN, scale=0.1)).bfloat16(),
        }
        self.sink = self.randn(HEADS)
        context = 700
        angles = torch.arange(context + m)[:, None] / 10000 ** (torch.arange(32)[None] / 32)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
        self.pos = torch.arange(context, context + m)
        blocks = (context + m) // BLOCK + 2
        table = torch.randperm(blocks, generator=self.g)
        slot = lambda p: table[p // BLOCK] * BLOCK + p % BLOCK  # noqa: E731
        self.window = Cache(blocks, BLOCK, self.arch, True)
        history = torch.arange(context)
        self.window.write(slot(history), self.history(history))
        self.slot = slot(self.pos)
        self.swa_idx = torch.full((m, WINDOW), -1, dtype=torch.int32)
        for i, p in enumerate(self.pos.tolist()):
            self.swa_idx[i] = slot(torch.arange(p - WINDOW + 1, p + 1)).int()
        self.swa_lens = torch.full((m,), WINDOW, dtype=torch.int32)
        entries = COMP_BLOCK // self.ratio
        count = (context + m) // self.ratio
        comp_blocks = -(-count // entries)
        self.comp = Cache(comp_blocks + 1, entries, self.arch, False)
        self.comp_table = (torch.randperm(comp_blocks, generator=self.g) + 1).int()
        index = torch.arange(count)
        self.comp.write(self.comp_slot(index), self.history(index * self.ratio))
        self.topk = torch.full((m, TOPK), -1, dtype=torch.int32)
        for i, p in enumerate(self.pos.tolist()):
            candidates = (p + 1) // self.ratio
            n = min(candidates, TOPK)
            self.topk[i, :n] = torch.randperm(candidates, generator=self.g)[:n].int()

    def comp_slot(self, index: torch.Tensor) -> torch.Tensor:
        entries = COMP_BLOCK // self.ratio
        return self.comp_table[index // entries].long() * entries + index % entries

    def history(self, positions: torch.Tensor) -> torch.Tensor:
        kv = rms(self.randn(len(positions), HEAD_DIM).double(), self.kv_norm)
        return f.bf16(rope(kv, self.cos_sin[positions]))

    # ---- memory of every rank
    def linear(self, w: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's linear in the architecture's layout."""
        raw = w.contiguous().view(torch.uint8)
        if self.arch == "gfx942":
            return base_module(self.arch, "weights942").dense_copy(raw, codes.contiguous())
        return raw, codes

    def memory(self) -> None:
        m, dev = self.rows, self.device
        self.k1 = compiled("k1", m, self.tp, self.arch, self.ratio)
        self.ranks: list[dict[str, Any]] = []
        for r in range(self.tp):
            t = lambda x, name, r=r: dev.tensor(x, name, r)  # noqa: E731
            h = slice(r * self.heads * HEAD_DIM, (r + 1) * self.heads * HEAD_DIM)
            hs = slice(r * self.heads * 16, (r + 1) * self.heads * 16)
            o = slice(r * self.groups * O_RANK, (r + 1) * self.groups * O_RANK)
            os_ = slice(r * self.groups * 32, (r + 1) * self.groups * 32)
            parts = {
                "wqkv": self.linear(*self.w["wqkv"]),
                "wqb": self.linear(self.w["wq_b"][0][h], self.w["wq_b"][1][hs]),
                "woa": self.linear(self.w["wo_a"][0][o], self.w["wo_a"][1][os_]),
                "wob": self.linear(self.w["wo_b"][0][:, o], self.w["wo_b"][1][:, os_]),
            }
            d = self.ffn.data
            args: dict[str, Any] = {
                "res_in": t(d["residual"], "res_in"),
                "pend": t(self.x, "pend"),
                "post_in": t(d["post"], "post_in"),
                "comb_in": t(d["comb"], "comb_in"),
                "pre_in": t(d["pre"], "pre_in"),
                "hc_fn": t(self.attn["fn"], "hc_fn"),
                "hc_scale": t(self.attn["hc_scale"], "hc_scale"),
                "hc_base": t(self.attn["hc_base"], "hc_base"),
                "attn_w": t(self.attn["norm"], "attn_w"),
                "res_out": dev.empty(m, HC, HIDDEN, dtype=torch.bfloat16, name="res_mid", rank=r),
                "post_out": dev.empty(m, HC, name="post_a", rank=r),
                "comb_out": dev.empty(m, HC, HC, name="comb_a", rank=r),
                "pre_out": dev.empty(m, HC, name="pre_a", rank=r),
                "qn_w": t(self.q_norm, "qn_w"),
                "kvn_w": t(self.kv_norm, "kvn_w"),
                "cos_sin": t(self.cos_sin, "cos_sin"),
                "pos": t(self.pos, "pos"),
                "slot": t(self.slot, "slot"),
                "swa": t(self.window.raw, "swa"),
                "swa_stride": self.window.stride,
                "swa_block": BLOCK,
                "q": dev.empty(m, self.heads, HEAD_DIM, dtype=torch.bfloat16, name="q", rank=r),
                "swa_idx": t(self.swa_idx, "swa_idx"),
                "swa_lens": t(self.swa_lens, "swa_lens"),
                "comp": t(self.comp.raw, "comp"),
                "comp_stride": self.comp.stride,
                "comp_block": self.comp.block,
                "comp_bt": t(self.comp_table, "comp_bt"),
                "bt_stride": self.comp_table.numel(),
                "topk": t(self.topk, "topk"),
                "t2r": dev.zeros(m, dtype=torch.int32, name="t2r", rank=r),
                "kt": dev.zeros(m * KEYS, dtype=torch.int32, name="kt", rank=r),
                "klen": dev.zeros(2 * m, dtype=torch.int32, name="klen", rank=r),
                "normed_out": 0,
                "qr_out": 0,
                "scratch": dev.zeros(self.k1.scratch_bytes, dtype=torch.uint8, name="scratch", rank=r),
                "epoch": dev.zeros(self.k1.epoch_words, dtype=torch.int32, name="epoch", rank=r),
                "tl": 0,
                "sink": t(self.sink[r * self.heads : (r + 1) * self.heads].contiguous(), "sink"),
                "qk_scale": struct.unpack("<i", struct.pack("<f", HEAD_DIM**-0.5 * 1.4426950408889634))[0],
                "zrec": dev.zeros(1024, dtype=torch.uint8, name="zrec", rank=r),
            }
            for name, (w, codes) in parts.items():
                args[name], args[name + "_s"] = t(w, name), t(codes, name + "_s")
            self.ranks.append(args)

    # ---- K1
    def run_k1(self) -> list[LaunchReport]:
        return self.device.run(
            [
                self.device.prepare(
                    self.k1.kernel, 256, 512, [a[n] for n in self.k1.arguments], rank=r, persistent=True
                )
                for r, a in enumerate(self.ranks)
            ]
        )

    def compare_k1(self) -> dict[str, tuple[float, float]]:
        """(cosine, relative error) of K1's outputs; "record" counts right elements of the new KV records."""
        seam = ffn_seam(self.ffn.data | self.attn, self.x.double())
        normed = seam["normed"]
        qkv = f.bf16(f.mxfp8_rows(normed, 2.0**-127) @ f.mxfp8_matrix(*self.w["wqkv"]).T)
        qr, kv = rms(qkv[:, :Q_RANK], self.q_norm), rms(qkv[:, Q_RANK:], self.kv_norm)
        q = f.bf16(f.mxfp8_rows(qr, 2.0**-127) @ f.mxfp8_matrix(*self.w["wq_b"]).T)
        q = f.bf16(rope(q.view(self.rows, HEADS, HEAD_DIM), self.cos_sin[self.pos][:, None]))
        kv = rope(kv, self.cos_sin[self.pos])
        # The norm and the rotation are in f32: near a tie either bf16 neighbour is right.
        data = [record_bytes(f.bf16(kv * (1 + way)), self.arch)[0] for way in (-KV_ERROR, KV_ERROR)]
        scales = record_bytes(f.bf16(kv), self.arch)[1]
        a = self.ranks[0]
        at, at_s = self.window.places(self.slot)
        got = a["swa"][at[:, None] + torch.arange(DATA)]
        got_s = a["swa"][at_s[:, None] + torch.arange(8)]
        right = same_elements(got, data[0]) | same_elements(got, data[1])
        same = right.double().mean().item(), float(not torch.equal(got_s[:, :7], scales[:, :7]))
        queries = torch.cat([r["q"].double() for r in self.ranks], 1)
        return {
            "residual": errors(a["res_out"], seam["residual"]),
            "post": errors(a["post_out"], seam["post"]),
            "comb": errors(a["comb_out"], seam["comb"]),
            "pre": errors(a["pre_out"], seam["pre"]),
            "q": errors(queries, q),
            "record": same,
        }

    # ---- K2
    def chunk_keys(self) -> int:
        """Keys of one unit of the split attention, from the size of its partial results."""
        k2 = compiled("k2", self.rows, self.tp, self.arch, self.ratio)
        chunks = k2.regions["part"][1] // (self.rows * self.heads * HEAD_DIM * 2)
        return KEYS // chunks

    def attention(self, rank: int) -> torch.Tensor:
        """A rank's unreduced wo_b output, bf16 [rows, hidden], from K1's own queries and cache."""
        a = self.ranks[rank]
        q, out = a["q"].double(), torch.zeros(self.rows, self.heads, HEAD_DIM, dtype=torch.float64)
        sink = a["sink"].double()
        for t in range(self.rows):
            chosen = self.topk[t][self.topk[t] >= 0].long()
            keys = torch.cat(
                [
                    self.comp.read(self.comp_slot(chosen)),
                    self.window.read(self.swa_idx[t].long(), a["swa"]),
                ]
            )
            out[t] = split_attention(q[t], keys, sink, self.chunk_keys())
        out = rope(f.bf16(out), self.cos_sin[self.pos][:, None], inverse=True)
        x = f.mxfp8_rows(out.reshape(self.rows, -1), 2.0**-127)
        o = slice(rank * self.groups * O_RANK, (rank + 1) * self.groups * O_RANK)
        os_ = slice(rank * self.groups * 32, (rank + 1) * self.groups * 32)
        wo_a = f.mxfp8_matrix(self.w["wo_a"][0][o], self.w["wo_a"][1][os_])
        width = HEADS // GROUPS * HEAD_DIM
        z = [
            x[:, g * width : (g + 1) * width] @ wo_a[g * O_RANK : (g + 1) * O_RANK].T
            for g in range(self.groups)
        ]
        z8 = f.mxfp8_rows(f.bf16(torch.cat(z, 1)), 2.0**-127)
        wo_b = f.mxfp8_matrix(self.w["wo_b"][0][:, o], self.w["wo_b"][1][:, os_])
        return (z8 @ wo_b.T).float().bfloat16()

    def prepare_k2(self) -> FfnRun:
        """The FFN half's case on K1's own outputs, and K2's memory."""
        a = self.ranks[0]
        self.ffn.data |= {
            "part": torch.stack([self.attention(r) for r in range(self.tp)]),
            "residual": a["res_out"].clone(),
            "post": a["post_out"].clone(),
            "comb": a["comb_out"].clone(),
            "pre": a["pre_out"].clone(),
        }
        self.ffn.finish()
        return self.k2_run()

    def k2_run(self) -> FfnRun:
        """K2's memory, on the FFN half's case as it is."""
        extra = []
        for args in self.ranks:
            keep = "q swa swa_stride swa_block comp comp_stride comp_block kt klen slot swa_idx swa_lens t2r topk "  # noqa: E501
            keep += "comp_bt bt_stride pos sink qk_scale cos_sin woa woa_s wob wob_s zrec scratch epoch"
            extra.append({name: args[name] for name in keep.split()})
        k2 = compiled("k2", self.rows, self.tp, self.arch, self.ratio)
        return FfnRun(self.ffn, self.device, k2, extra)
