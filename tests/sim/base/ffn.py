# SPDX-License-Identifier: Apache-2.0
"""The base's FFN launch on the simulator, and the same half layer in float64.

``FfnCase`` makes inputs and weights (only the experts that a token picks or nearly picks have weights: the
rest
of the expert memory is never touched), ``reference`` computes what the launch must give, ``run`` launches it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cdnasim import Device, LaunchReport

from . import formats as f
from .kernels import BaseKernel, compiled

HIDDEN, HC, MIX, EXPERTS, PICKS, INTER = 5120, 4, 24, 384, 6, 2304
EPS, HC_EPS, SINKHORN = 1e-20, 1e-6, 20


@dataclass
class FfnCase:
    """Inputs of one FFN launch. Tensors are unsharded; ``part`` is one bf16 [rows, hidden] a rank."""

    rows: int
    tp: int
    arch: str
    seed: int = 0
    data: dict[str, torch.Tensor] = field(default_factory=dict)
    experts: list[int] = field(default_factory=list)  # those that have weights (``expert``)
    defer: bool = False  # ``finish`` is called later, on other seam inputs

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(1000 + self.seed)
        m = self.rows

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=g) * scale

        residual = randn(m, HC, HIDDEN)
        residual = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True))
        comb = torch.rand(m, HC, HC, generator=g) + 0.1
        for _ in range(20):
            comb = comb / comb.sum(-1, keepdim=True)
            comb = comb / comb.sum(-2, keepdim=True)
        self.data = {
            "part": (randn(self.tp, m, HIDDEN) * 0.5 / self.tp**0.5).bfloat16(),
            "residual": residual.bfloat16(),
            "post": torch.sigmoid(randn(m, HC)) * 2,
            "comb": comb,
            "pre": torch.sigmoid(randn(m, HC)) + HC_EPS,
            "fn": randn(MIX, HC * HIDDEN, scale=0.01),
            "hc_scale": randn(3, scale=0.5).abs() + 0.5,
            "hc_base": randn(MIX, scale=0.1),
            "norm": (1 + randn(HIDDEN, scale=0.1)).bfloat16(),
            "gate": randn(EXPERTS, HIDDEN, scale=0.02).bfloat16(),
            "bias": randn(EXPERTS, scale=0.02),
            "sgu": randn(2 * INTER, HIDDEN).clamp(-6, 6).to(torch.float8_e4m3fn),
            "sgu_s": torch.randint(118, 123, (2 * INTER // 32, HIDDEN // 32), generator=g, dtype=torch.uint8),
            "sw2": randn(HIDDEN, INTER).clamp(-6, 6).to(torch.float8_e4m3fn),
            "sw2_s": torch.randint(118, 123, (HIDDEN // 32, INTER // 32), generator=g, dtype=torch.uint8),
        }
        if not self.defer:
            self.finish()

    def finish(self) -> None:
        """The seam and the experts' weights, from ``data`` as it is now."""
        self.seam = ffn_seam(self.data, attention_sum(self.data["part"]))
        self.experts = self.near_picks()

    def near_picks(self) -> list[int]:
        """Experts that some token has among its best eight: a kernel's rounding may change places 6 and 7."""
        score = self.seam["score"]
        return sorted(set(score.topk(8, 1).indices.flatten().tolist()))

    def expert(self, expert: int) -> dict[str, torch.Tensor]:
        """An expert's weights, unsharded, made again each time: 48 rows pick more than fits twice."""
        g = np.random.default_rng([50_000 + 1000 * self.seed, expert])

        def nibbles(*shape: int) -> torch.Tensor:
            raw = torch.frombuffer(bytearray(g.bytes(shape[0] * shape[1])), dtype=torch.uint8).view(shape)
            if self.arch == "gfx942":  # its kernels take no -0
                raw = torch.where(raw & 0xF == 8, raw & 0xF0, raw)
                raw = torch.where(raw & 0xF0 == 0x80, raw & 0xF, raw)
            return raw

        def codes(*shape: int) -> torch.Tensor:
            return torch.from_numpy(g.integers(118, 122, shape, dtype=np.uint8))

        return {
            "gate": nibbles(INTER, HIDDEN // 2),
            "gate_s": codes(INTER, HIDDEN // 32),
            "up": nibbles(INTER, HIDDEN // 2),
            "up_s": codes(INTER, HIDDEN // 32),
            "down": nibbles(HIDDEN, INTER // 2),
            "down_s": codes(HIDDEN, INTER // 32),
        }


def attention_sum(part: torch.Tensor) -> torch.Tensor:
    """The ranks' bf16 partials summed in float32 in rank order, rounded to bf16."""
    x = torch.zeros(part.shape[1:])
    for one in part:
        x = x + one.float()
    return f.bf16(x.double())


def ffn_seam(d: dict[str, torch.Tensor], attn: torch.Tensor) -> dict[str, torch.Tensor]:
    """A seam: ``attn`` folded into the residual, this seam's mixes, the normed input; router scores."""
    res, comb, post, pre = (d[k].double() for k in ("residual", "comb", "post", "pre"))
    mixed = torch.einsum("tij,tih->tjh", comb, res) + post[..., None] * attn[:, None]
    residual = f.bf16(mixed)
    flat = residual.flatten(1)
    mixes = (flat @ d["fn"].double().T) * torch.rsqrt(flat.pow(2).mean(1, keepdim=True) + EPS)
    s, b = d["hc_scale"].double(), d["hc_base"].double()
    out_pre = torch.sigmoid(mixes[:, :HC] * s[0] + b[:HC]) + HC_EPS
    out_post = torch.sigmoid(mixes[:, HC : 2 * HC] * s[1] + b[HC : 2 * HC]) * 2
    c = (mixes[:, 2 * HC :] * s[2] + b[2 * HC :]).view(-1, HC, HC)
    c = torch.softmax(c, -1) + HC_EPS
    c = c / (c.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(SINKHORN - 1):
        c = c / (c.sum(-1, keepdim=True) + HC_EPS)
        c = c / (c.sum(-2, keepdim=True) + HC_EPS)
    collapsed = f.bf16((pre[..., None] * residual).sum(1))
    normed = f.bf16(
        collapsed * torch.rsqrt(collapsed.pow(2).mean(1, keepdim=True) + EPS) * d["norm"].double()
    )
    logits = normed @ d["gate"].double().T
    weight = torch.nn.functional.softplus(logits).sqrt()
    return {
        "residual": residual,
        "pre": out_pre,
        "post": out_post,
        "comb": c,
        "normed": normed,
        "weight": weight,
        "score": weight + d["bias"].double(),
    }


def silu_mul_rounded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The shared expert's form: the activation is rounded to bf16 before the product."""
    gate, up = gate.clamp(max=10), up.clamp(-10, 10)
    return f.bf16(gate * torch.sigmoid(gate)) * up


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The clamped product: gate at most 10, up within [-10, 10]."""
    gate, up = gate.clamp(max=10), up.clamp(-10, 10)
    return gate * torch.sigmoid(gate) * up


def moe(case: FfnCase, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [rows, hidden], picks [rows, 6]) of the MoE on the given normed rows."""
    d = case.data
    logits = normed @ d["gate"].double().T
    weight = torch.nn.functional.softplus(logits).sqrt()
    score = weight + d["bias"].double()
    order = torch.sort(score, dim=1, descending=True, stable=True).indices[:, :PICKS]
    w = weight.gather(1, order)
    w = w / w.sum(1, keepdim=True) * 1.5
    x_routed, x_shared = f.mxfp8_rows(normed, 1e-10), f.mxfp8_rows(normed, 1e-4)
    share = INTER // case.tp
    cuts = [slice(rank * share, (rank + 1) * share) for rank in range(case.tp)]
    gate_up = f.bf16(x_shared @ f.mxfp8_matrix(d["sgu"], d["sgu_s"]).T)
    shared_mid = f.mxfp8_rows(f.bf16(silu_mul_rounded(gate_up[:, :INTER], gate_up[:, INTER:])), 1e-4)
    shared_w2 = f.mxfp8_matrix(d["sw2"], d["sw2_s"])
    # What each pick adds on each rank, expert by expert so that one expert's matrices exist at a time.
    terms = torch.zeros(case.tp, case.rows, PICKS, HIDDEN, dtype=torch.float64)
    for e in sorted(set(order.flatten().tolist())):
        weights = case.expert(e)
        gate, up, down = (f.mxfp4_matrix(weights[k], weights[k + "_s"]) for k in ("gate", "up", "down"))
        tokens, places = (order == e).nonzero(as_tuple=True)
        x = x_routed[tokens]
        mid = f.bf16(silu_mul(x @ gate.T, x @ up.T))
        for rank, cut in enumerate(cuts):
            part = f.mxfp8_rows(mid[:, cut].contiguous(), 1e-10) @ down[:, cut].T
            terms[rank, tokens, places] = f.bf16(w[tokens, places][:, None] * part)
    total = torch.zeros(case.rows, HIDDEN)
    for rank, cut in enumerate(cuts):
        acc = torch.zeros(case.rows, HIDDEN, dtype=torch.float64)
        for k in range(PICKS):
            acc = f.bf16(acc + terms[rank, :, k])
        part = f.bf16(acc + f.bf16(shared_mid[:, cut] @ shared_w2[:, cut].T))
        total = total + part.float()
    return f.bf16(total.double()), order


def expert_memory(case: FfnCase, device: Device) -> list[dict[str, torch.Tensor]]:
    """Each rank's expert tensors in the architecture's layout, filled for the experts that have weights."""
    share = INTER // case.tp
    inter = share if case.arch == "gfx942" else -(-share // 128) * 128
    columns = inter // 32 if case.arch == "gfx942" else -(-(inter // 32) // 8) * 8
    shapes = {
        "w13": (EXPERTS, 2 * inter, HIDDEN // 2),
        "w13_s": (EXPERTS, 2 * inter, HIDDEN // 32),
        "w2": (EXPERTS, HIDDEN, inter // 2),
        "w2_s": (EXPERTS, HIDDEN, columns),
    }
    # numpy's zeros are pages that exist once touched; torch's are written at once.
    ranks = [
        {k: torch.from_numpy(np.zeros(s, dtype=np.uint8)) for k, s in shapes.items()} for _ in range(case.tp)
    ]
    for e in case.experts:
        weights = case.expert(e)
        for rank, out in enumerate(ranks):
            for name, value in expert_layout(case, weights, rank, inter).items():
                out[name][e] = value
    for rank, out in enumerate(ranks):
        for name, tensor in out.items():
            device.register(tensor, name, rank)
    return ranks


def expert_layout(
    case: FfnCase, x: dict[str, torch.Tensor], rank: int, inter: int
) -> dict[str, torch.Tensor]:
    """One expert's share of a rank, ``inter`` rows wide, as the kernels read it."""
    share = INTER // case.tp
    cut = slice(rank * share, (rank + 1) * share)
    gate, up, gs, us = x["gate"][cut], x["up"][cut], x["gate_s"][cut], x["up_s"][cut]
    down = x["down"][:, rank * share // 2 : (rank + 1) * share // 2]
    ds = x["down_s"][:, rank * share // 32 : (rank + 1) * share // 32]
    if case.arch == "gfx942":
        w = base_module(case.arch, "weights942")
        return {
            "w13": w.fp4_tile_major(f.interleave_rows(gate, up)),
            "w13_s": w.codes_tile_rounds(f.interleave_rows(gs, us)),
            "w2": w.fp4_tile_major(down),
            "w2_s": ds,
        }

    def pad(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        if x.shape == (rows, cols):
            return x
        return torch.nn.functional.pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))

    tiles = f.interleave_tiles(pad(gate, inter, HIDDEN // 2), pad(up, inter, HIDDEN // 2))
    codes = f.interleave_tiles(pad(gs, inter, HIDDEN // 32), pad(us, inter, HIDDEN // 32))
    return {
        "w13": f.shuffle_fp4(tiles),
        "w13_s": f.shuffle_codes(codes),
        "w2": f.shuffle_fp4(pad(down, HIDDEN, inter // 2)),
        "w2_s": f.shuffle_codes(pad(ds, HIDDEN, inter // 32)),
    }


def base_module(arch: str, name: str) -> Any:
    """The base's own host-side weight preparation (pure torch), run as it is."""
    import importlib.util

    from .kernels import BASE

    key = f"_base_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, BASE / f"models/deepseek_v41/amd/mono/{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]


class FfnRun:
    """Device memory of every rank for one case; ``launch`` runs the launch once more on it."""

    def __init__(
        self,
        case: FfnCase,
        device: Device,
        kernel: BaseKernel | None = None,
        extra: list[dict[str, Any]] | None = None,
    ) -> None:
        self.case, self.device = case, device
        self.built = kernel or compiled("ffn", case.rows, case.tp, case.arch)
        m, d = case.rows, case.data
        self.peers = [
            device.zeros(
                2 * self.built.peer_half_bytes, dtype=torch.uint8, name=f"peer {r}", rank=r, peer=True
            )
            for r in range(case.tp)
        ]
        experts = expert_memory(case, device)
        self.ranks: list[dict[str, Any]] = []
        for rank in range(case.tp):
            t = lambda x, name, rank=rank: device.tensor(x, name, rank)  # noqa: E731
            share = INTER // case.tp
            cut = slice(rank * share, (rank + 1) * share)
            blocks = slice(rank * share // 32, (rank + 1) * share // 32)
            sgu = torch.cat(
                [d["sgu"].view(torch.uint8)[:INTER][cut], d["sgu"].view(torch.uint8)[INTER:][cut]]
            )
            sgu_s = torch.cat([d["sgu_s"][: INTER // 32][blocks], d["sgu_s"][INTER // 32 :][blocks]])
            sw2 = d["sw2"].view(torch.uint8)[:, cut].contiguous()
            sw2_s = d["sw2_s"][:, blocks].contiguous()
            if case.arch == "gfx942":
                w = base_module(case.arch, "weights942")
                sgu, sgu_s = w.dense_copy(sgu, sgu_s)
                sw2, sw2_s = w.dense_copy(sw2, sw2_s)
            addresses = torch.tensor([p.data_ptr() for p in self.peers], dtype=torch.int64)
            self.ranks.append(
                {
                    "part": t(d["part"][rank], "part"),
                    "res_in": t(d["residual"], "res_in"),
                    "post_in": t(d["post"], "post_in"),
                    "comb_in": t(d["comb"], "comb_in"),
                    "pre_in": t(d["pre"], "pre_in"),
                    "hc_fn": t(d["fn"], "hc_fn"),
                    "hc_scale": t(d["hc_scale"], "hc_scale"),
                    "hc_base": t(d["hc_base"], "hc_base"),
                    "ffn_w": t(d["norm"], "ffn_w"),
                    "res_out": device.empty(m, HC, HIDDEN, dtype=torch.bfloat16, name="res_out", rank=rank),
                    "post_out": device.empty(m, HC, name="post_out", rank=rank),
                    "comb_out": device.empty(m, HC, HC, name="comb_out", rank=rank),
                    "pre_out": device.empty(m, HC, name="pre_out", rank=rank),
                    "gate_w": t(d["gate"], "gate_w"),
                    "bias": t(d["bias"], "bias"),
                    **experts[rank],
                    "sgu": t(sgu, "sgu"),
                    "sgu_s": t(sgu_s, "sgu_s"),
                    "sw2": t(sw2, "sw2"),
                    "sw2_s": t(sw2_s, "sw2_s"),
                    "out": device.empty(m, HIDDEN, dtype=torch.bfloat16, name="out", rank=rank),
                    "scratch": device.zeros(
                        self.built.scratch_bytes, dtype=torch.uint8, name="scratch", rank=rank
                    ),
                    "sym": self.peers[rank],
                    "peers": t(addresses, "peers"),
                    "rank": rank,
                    "epoch": device.zeros(self.built.epoch_words, dtype=torch.int32, name="epoch", rank=rank),
                    "tl": 0,
                }
                | (extra[rank] if extra else {})
            )

    def launch(self) -> list[LaunchReport]:
        """Every rank's launch, side by side."""
        return self.device.run(
            [
                self.device.prepare(
                    self.built.kernel,
                    256,
                    512,
                    [args[name] for name in self.built.arguments],
                    rank=rank,
                    persistent=True,
                )
                for rank, args in enumerate(self.ranks)
            ]
        )

    def normed(self, rank: int) -> torch.Tensor:
        """The launch's own MoE input, float64 [rows, hidden]."""
        first, size = self.built.regions["normed"]
        raw = self.ranks[rank]["scratch"][first : first + size]
        return raw.view(torch.bfloat16).view(self.case.rows, HIDDEN).double()


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(cosine, relative L2 error)."""
    a, b = got.double().flatten(), want.double().flatten()
    return (
        torch.nn.functional.cosine_similarity(a, b, dim=0).item(),
        ((a - b).norm() / b.norm()).item(),
    )


def compare(run: FfnRun) -> dict[str, tuple[float, float]]:
    """(cosine, relative error) of each output of rank 0; raises when the ranks differ in a bit."""
    first = run.ranks[0]
    for rank in run.ranks[1:]:
        for name in ("out", "res_out", "post_out", "comb_out", "pre_out"):
            if not torch.equal(rank[name].view(torch.uint8), first[name].view(torch.uint8)):
                raise AssertionError(f"{name} differs between ranks")
    seam = run.case.seam
    normed = run.normed(0)
    want, _ = moe(run.case, normed)
    return {
        "residual": errors(first["res_out"], seam["residual"]),
        "post": errors(first["post_out"], seam["post"]),
        "comb": errors(first["comb_out"], seam["comb"]),
        "pre": errors(first["pre_out"], seam["pre"]),
        "normed": errors(normed, seam["normed"]),
        "out": errors(first["out"], want),
    }
