# SPDX-License-Identifier: Apache-2.0
"""Our whole-layer launches and the base's on the same inputs: each stage's error against float64.

    python -m mono.layer_beside_base --rows 6 --tp 4     (in tests/sim)

The front is judged from its own residual on, as the base publishes nothing in between; the attention by the
residual that the back folds its output into, from the launch's own queries and cache; then the FFN half as
``beside_base`` does it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from base import ffn as base_ffn
from base import layer as base_layer
from base.kernels import compiled as base_compiled

from cdnasim import Device

from .beside_base import EXPERTS, NAMES, ROUNDINGS, stage_errors
from .case import Case
from .compare import Error, ref
from .layer_case import HEADS, NOT_READ, LayerCase, Shape, make_layer
from .layer_run import LayerRun
from .sources import modules

att, formats = modules().attention, modules().formats
CARRIED = ("residual", "post", "comb", "pre")


class BaseLayer(base_layer.LayerRun):
    """The base's two launches on our case: one request, as its harness has it."""

    def __init__(self, case: LayerCase, device: Device | None = None) -> None:
        s = case.shape
        self.case = case
        self.rows, self.tp, self.arch, self.ratio = s.rows, s.tp, "gfx950", s.ratio
        self.device = device or Device(self.arch, ranks=s.tp)
        self.heads, self.groups = HEADS // s.tp, base_layer.GROUPS // s.tp
        self.ffn = base_ffn.FfnCase(s.rows, s.tp, self.arch, defer=True)
        given = case.ffn.unsharded()
        self.ffn.data = {name: given[ours] for name, ours in NAMES.items()}
        for name in ("sgu", "sw2"):
            self.ffn.data[name] = self.ffn.data[name].view(torch.float8_e4m3fn)
        self._take(case)
        self.memory()
        for args in self.ranks:
            args["swa_block"], args["bt_stride"] = case.window.block, self.comp_table.shape[-1]

    def _take(self, case: LayerCase) -> None:
        w, step = case.dense, case.step
        self.x, self.pos, self.slot = step["x"], step["positions"], step["slots"]
        self.w = {
            name: (w[name].view(torch.float8_e4m3fn), w[f"{name}_scale"])
            for name in ("wqkv", "wq_b", "wo_a", "wo_b")
        }
        self.q_norm, self.kv_norm = w["query_norm"], w["key_norm"]
        self.attn = {
            "fn": w["mix_projection"],
            "hc_scale": w["mix_scale"],
            "hc_base": w["mix_base"],
            "norm": w["norm_weight"],
        }
        self.sink, self.cos_sin = w["sink"], w["cos_sin"]
        self.window, self.comp = case.window, case.compressed
        self.swa_idx, self.swa_lens = step["window_indices"], step["window_lens"]
        self.comp_table = step["block_table"]
        # It looks up entries that it then leaves out.
        selected = step["selected"]
        self.topk = torch.where(selected == NOT_READ, -1, selected)

    def back(self) -> base_ffn.FfnRun:
        """The second launch's memory, on the first one's outputs."""
        first = self.ranks[0]
        self.ffn.data |= {name: first[f"{short}_out"].clone() for name, short in
                          zip(CARRIED, ("res", "post", "comb", "pre"), strict=True)}  # fmt: skip
        extra = []
        keep = (
            "q swa swa_stride swa_block comp comp_stride comp_block kt klen slot swa_idx swa_lens t2r topk "
        )
        keep += "comp_bt bt_stride pos sink qk_scale cos_sin woa woa_s wob wob_s zrec scratch epoch"
        for rank, args in enumerate(self.ranks):
            given = self.case.ffn.arguments(rank)
            experts = {
                name: self.device.register(given[ours], name, rank, read_only=True)
                for name, ours in EXPERTS.items()
            }
            extra.append({name: args[name] for name in keep.split()} | experts)
        kernel = base_compiled("k2", self.rows, self.tp, self.arch, self.ratio)
        return base_ffn.FfnRun(self.ffn, self.device, kernel, extra)


@dataclass
class Front:
    """What a front gave, by our names: rank 0's, but ``query`` [rank]."""

    outputs: dict[str, torch.Tensor]
    query: list[torch.Tensor]
    cache: torch.Tensor


def front_errors(case: LayerCase, front: Front) -> dict[str, Error]:
    """Of each of the front's outputs, from its own residual on."""
    a, w, out = case.ffn.activations, case.dense, front.outputs
    residual = out["residual_out"].double()
    want = ref.fold(a["residual_in"], case.step["x"], a["post_in"], a["comb_in"])
    errors = {"seam residual": Error.of(residual, want)}
    sums = ref.seam_sums(residual, w["mix_projection"]).sum(-1)
    for name, value in ref.mixes(sums, w["mix_scale"], w["mix_base"]).items():
        errors[f"seam {name}"] = Error.of(out[f"{name}_out"], value)
    normed = ref.normalise(ref.collapse(residual, a["pre_in"]), w["norm_weight"])
    qkv = att.qkv(normed, w["wqkv"], w["wqkv_scale"])
    query = att.query(att.query_rank(qkv, w["query_norm"]), w["wq_b"], w["wq_b_scale"], case.angles())
    errors["query"] = Error.of(torch.cat([q.double() for q in front.query], 1), query)
    key = att.Records.of(att.key(qkv, w["key_norm"], case.angles()))
    errors["key record"] = Error.of(case.window.read(case.step["slots"], front.cache).values, key.values)
    return errors


def partials(case: LayerCase, front: Front) -> torch.Tensor:
    """float64 partials of every rank from a front's own queries and cache, bf16 [TP, rows, 5120]."""
    out = []
    for rank, queries in enumerate(front.query):
        args = case.back_arguments(rank)
        heads = torch.empty(queries.shape, dtype=torch.float64)
        for row in range(case.shape.rows):
            window, compressed = case.slots(row)
            keys = [case.compressed.read(compressed).values, case.window.read(window, front.cache).values]
            heads[row] = att.attend(queries[row].double(), torch.cat(keys), args["sink"])
        rows = formats.quantise(att.attended(heads, case.angles()))
        ranks = att.group_ranks(rows, args["wo_a"].contiguous(), args["wo_a_scale"])
        out.append(att.output(ranks, args["wo_b"].contiguous(), args["wo_b_scale"].contiguous()))
    return torch.stack(out).bfloat16()


def back_case(case: LayerCase, front: Front) -> Case:
    """The FFN half's case on a front's outputs, and on float64 attention of its queries."""
    given = {f"{name}_in": front.outputs[f"{name}_out"] for name in CARRIED}
    return replace(case.ffn, activations=given | {"partial": partials(case, front)})


def our_errors(run: LayerRun) -> dict[str, Error]:
    """Of our launches, which have run."""
    case = run.case
    outputs, cache = run.front.outputs(), run.front.ranks[0]["window_cache"]
    front = Front(outputs, [args["query"] for args in run.front.ranks], cache)
    normed = ref.normalise(run.back.collapsed(0), case.ffn.unsharded()["norm_weight"])
    logits = run.back.box("logits", 0)[0].view(torch.float32).double()
    ffn = stage_errors(back_case(case, front), run.back.outputs(), normed, logits, ROUNDINGS)
    return front_errors(case, front) | named(ffn)


def base_errors(run: BaseLayer, back: base_ffn.FfnRun) -> dict[str, Error]:
    """Of the base's launches, which have run; ``back`` is the second."""
    case, first = run.case, run.ranks[0]

    def outputs(memory: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"residual_out": memory["res_out"]} | {f"{n}_out": memory[f"{n}_out"] for n in CARRIED[1:]}

    front = Front(outputs(first), [args["q"] for args in run.ranks], first["swa"])
    errors = front_errors(case, front)
    memory = back.ranks[0]
    ffn = stage_errors(
        back_case(case, front), outputs(memory) | {"out": memory["out"]}, back.normed(0), None, ROUNDINGS
    )
    return errors | named(ffn)


def named(ffn: dict[str, Error]) -> dict[str, Error]:
    """The FFN half's errors by the names of a whole layer's."""
    return {"attention, folded" if name == "residual" else name: error for name, error in ffn.items()}


def both(shape: Shape) -> dict[str, tuple[Error, Error]]:
    """Stage -> (our error, the base's)."""
    case = make_layer(shape)
    ours = LayerRun(case)
    ours.launch()
    theirs = BaseLayer(case)
    theirs.run_k1()
    back = theirs.back()
    back.launch()
    mine, other = our_errors(ours), base_errors(theirs, back)
    return {name: (mine[name], other[name]) for name in mine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--ratio", type=int, default=1)
    parser.add_argument("--kind", default="random")
    given = parser.parse_args()
    shape = Shape(given.rows, given.tp, given.ratio, kind=given.kind)
    print(f"{given.rows} rows TP{given.tp} ratio {given.ratio}: worst token's relative error, worst cosine")
    print("| stage | ours | the base's |\n|---|---|---|")
    for name, pair in both(shape).items():
        print(f"| {name} | " + " | ".join(f"{e.relative:.1e}, 1 - {1 - e.cosine:.0e}" for e in pair) + " |")


if __name__ == "__main__":
    sys.exit(main())
