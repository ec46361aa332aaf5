# SPDX-License-Identifier: Apache-2.0
"""Our whole-layer launches on the simulator: every rank's memory for one decode step of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from base.layer import BLOCK, GROUPS, HEAD_DIM, HIDDEN, O_RANK, Q_RANK, LayerRun

from cdnasim import LaunchReport

from .case import STREAMS, make
from .run import THREADS, WAIT_LIMIT, WORKGROUPS, Run
from .sources import compiled_kind, modules

CONTROL = 16


class Layer(LayerRun):
    """One step of one request with ``rows`` tokens through the attention front and the attention back."""

    def __init__(
        self,
        rows: int,
        tp: int,
        ratio: int = 1,
        seed: int = 0,
        *,
        kind: str = "random",
        fold: bool = True,
        hands_out: bool = False,
        **device: Any,
    ) -> None:
        self.fold, self.hands_out = fold, hands_out
        self.case = make(rows, tp, kind, seed=seed)
        super().__init__(rows, tp, "gfx950", ratio, seed, **device)

    # ---- the front
    def memory(self) -> None:
        m, dev, tp = self.rows, self.device, self.tp
        fields = {"rows": m, "tp": tp}
        self.geometry = modules().geometry.FrontGeometry(**fields)
        self.front = compiled_kind("front", **fields)
        workspace = modules().regions.front_workspace(self.geometry)
        self.controls = [
            dev.zeros(CONTROL, dtype=torch.uint8, name=f"front control {r}", rank=r, peer=True)
            for r in range(tp)
        ]
        self.addresses = [torch.tensor([c.data_ptr() for c in self.controls]) for _ in range(tp)]
        self.ranks: list[dict[str, Any]] = []
        d = self.ffn.data
        for r in range(tp):
            t = lambda x, name, r=r: dev.tensor(x, name, r)  # noqa: E731
            out = lambda *s, name, dtype=torch.bfloat16, r=r: dev.empty(*s, dtype=dtype, name=name, rank=r)  # noqa: E731
            h = slice(r * self.heads * HEAD_DIM, (r + 1) * self.heads * HEAD_DIM)
            hs = slice(r * self.heads * 16, (r + 1) * self.heads * 16)
            args = {
                "x": t(self.x, "x"),
                "residual_in": t(d["residual"], "residual_in"),
                "post_in": t(d["post"], "post_in"),
                "comb_in": t(d["comb"], "comb_in"),
                "pre_in": t(d["pre"], "pre_in"),
                "positions": t(self.pos, "positions"),
                "slots": t(self.slot, "slots"),
                "mix_projection": t(self.attn["fn"], "mix_projection"),
                "mix_scale": t(self.attn["hc_scale"], "mix_scale"),
                "mix_base": t(self.attn["hc_base"], "mix_base"),
                "norm_weight": t(self.attn["norm"], "norm_weight"),
                "wqkv": t(self.w["wqkv"][0].view(torch.uint8), "wqkv"),
                "wqkv_scale": t(self.w["wqkv"][1], "wqkv_scale"),
                "wq_b": t(self.w["wq_b"][0].view(torch.uint8)[h], "wq_b"),
                "wq_b_scale": t(self.w["wq_b"][1][hs], "wq_b_scale"),
                "query_norm": t(self.q_norm, "query_norm"),
                "key_norm": t(self.kv_norm, "key_norm"),
                "cos_sin": t(self.cos_sin, "cos_sin"),
                "window_cache": t(self.window.raw, "window_cache"),
                "window_stride": self.window.stride,
                "residual_out": out(m, STREAMS, HIDDEN, name="residual_mid"),
                "post_out": out(m, STREAMS, name="post_mid", dtype=torch.float32),
                "comb_out": out(m, STREAMS, STREAMS, name="comb_mid", dtype=torch.float32),
                "pre_out": out(m, STREAMS, name="pre_mid", dtype=torch.float32),
                "query": out(m, self.heads, HEAD_DIM, name="query"),
                "normed_out": out(m, HIDDEN, name="normed") if self.hands_out else 0,
                "query_rank_out": out(m, Q_RANK, name="query rank") if self.hands_out else 0,
                "workspace": dev.zeros(workspace.size, dtype=torch.uint8, name="front workspace", rank=r),
                "peers": dev.register(self.addresses[r], "front peers", r, read_only=True),
                "window_block": BLOCK,
                "fold": int(self.fold),
                "rank": r,
            }
            assert list(args) == list(modules().front.FrontArguments.__annotations__)
            # Names under which the float64 layer reads them.
            self.ranks.append(
                args
                | {
                    "res_out": args["residual_out"],
                    "q": args["query"],
                    "swa": args["window_cache"],
                    "sink": t(self.sink[r * self.heads : (r + 1) * self.heads].contiguous(), "sink"),
                }
            )
        for control in self.controls:
            control.view(torch.int32)[:] = torch.tensor([1, WAIT_LIMIT, 0, 0], dtype=torch.int32)

    def launch_front(self) -> list[LaunchReport]:
        """Every rank's front, side by side."""
        names = list(modules().front.FrontArguments.__annotations__)
        return self.device.run(
            [
                self.device.prepare(
                    self.front, WORKGROUPS, THREADS, [a[n] for n in names], rank=r, persistent=True
                )
                for r, a in enumerate(self.ranks)
            ]
        )

    # ---- the back
    def prepare_back(self) -> Run:
        """The back's memory, on the front's outputs."""
        self.case = replace(self.case, activations=self._activations())
        self.back = BackRun(self)
        return self.back

    def _activations(self) -> dict[str, torch.Tensor]:
        first = self.ranks[0]
        names = {f"{n}_in": first[f"{n}_out"].clone() for n in ("residual", "post", "comb", "pre")}
        return self.case.activations | names


class BackRun(Run):
    """The attention back on a layer's memory, after its front."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        fields = {"rows": layer.rows, "tp": layer.tp}
        self.shape = modules().geometry.BackGeometry(**fields)
        super().__init__(layer.case, layer.device, compiled_kind("back", **fields))

    def argument_names(self) -> list[str]:
        return list(modules().back.BackArguments.__annotations__)

    def layouts(self) -> tuple[Any, Any]:
        layouts = modules().regions
        return layouts.back_workspace(self.shape), layouts.back_symmetric(self.shape)

    def _arguments(self, rank: int, share: Run | None) -> dict[str, Any]:
        layer, a = self.layer, self.layer.ranks[rank]
        t = lambda x, name: layer.device.tensor(x, name, rank)  # noqa: E731
        o = slice(rank * layer.groups * O_RANK, (rank + 1) * layer.groups * O_RANK)
        os_ = slice(rank * layer.groups * 32, (rank + 1) * layer.groups * 32)
        args = super()._arguments(rank, share) | {
            "query": a["query"],
            "positions": a["positions"],
            "slots": a["slots"],
            "window_indices": t(layer.swa_idx, "window_indices"),
            "window_lens": t(layer.swa_lens, "window_lens"),
            "selected": t(layer.topk, "selected"),
            "requests": t(torch.zeros(layer.rows, dtype=torch.int32), "requests"),
            "block_table": t(layer.comp_table, "block_table"),
            "window_cache": a["window_cache"],
            "window_stride": layer.window.stride,
            "compressed_cache": t(layer.comp.raw, "compressed_cache"),
            "compressed_stride": layer.comp.stride,
            "sink": a["sink"],
            "cos_sin": a["cos_sin"],
            "wo_a": t(layer.w["wo_a"][0].view(torch.uint8)[o], "wo_a"),
            "wo_a_scale": t(layer.w["wo_a"][1][os_], "wo_a_scale"),
            "wo_b": t(layer.w["wo_b"][0].view(torch.uint8)[:, o].contiguous(), "wo_b"),
            "wo_b_scale": t(layer.w["wo_b"][1][:, os_].contiguous(), "wo_b_scale"),
            "table_stride": layer.comp_table.numel(),
            "window_block": BLOCK,
            "compressed_block": layer.comp.block,
            "ratio": max(layer.ratio, 1),
            "window": 128,
            "selected_keys": 512 if layer.ratio else 0,
        }
        return args


assert GROUPS == modules().geometry.OUTPUT_GROUPS
