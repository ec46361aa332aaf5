# SPDX-License-Identifier: Apache-2.0
"""Our FFN launch and the base's on the same inputs: each stage's error against float64, in one table.

    python -m mono.beside_base --rows 6 --tp 4     (in tests/sim)

A stage is judged on the launch's own input to it. The output has two references: the sum over experts rounded
once ("out"), and rounded where vLLM rounds ("out as vLLM").
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from base import ffn as base

from cdnasim import Device

from .case import Case, make
from .compare import Error, ref
from .run import Run
from .sources import modules

NAMES = {
    "part": "partial",
    "residual": "residual_in",
    "post": "post_in",
    "comb": "comb_in",
    "pre": "pre_in",
    "fn": "mix_projection",
    "hc_scale": "mix_scale",
    "hc_base": "mix_base",
    "norm": "norm_weight",
    "gate": "gate_weight",
    "bias": "gate_bias",
    "sgu": "shared_w13",
    "sgu_s": "shared_w13_scale",
    "sw2": "shared_w2",
    "sw2_s": "shared_w2_scale",
}
EXPERTS = {"w13": "w13", "w13_s": "w13_scale", "w2": "w2", "w2_s": "w2_scale"}


def base_run(case: Case, device: Device | None = None) -> base.FfnRun:
    """The base's launch on our case's memory; ``device``: another than a plain one. On gfx942, where it reads
    copies of the routed experts, those are zeros: for counts alone."""
    given = case.unsharded()
    theirs = base.FfnCase(case.rows, case.tp, case.arch, defer=True)
    theirs.data = {name: given[ours] for name, ours in NAMES.items()}
    for name in ("sgu", "sw2"):
        theirs.data[name] = theirs.data[name].view(torch.float8_e4m3fn)
    device = device or Device(case.arch, ranks=case.tp)
    if case.arch == "gfx942":
        return base.FfnRun(theirs, device)
    extra = []
    for rank in range(case.tp):
        args = case.arguments(rank)
        extra.append(
            {name: device.register(args[ours], name, rank, read_only=True) for name, ours in EXPERTS.items()}
        )
    return base.FfnRun(theirs, device, extra=extra)


def weights(case: Case, rank: int) -> Any:
    args = case.arguments(rank)
    return ref.RankWeights(
        case.geometry.share,
        lambda e: {name: args[name][e] for name in EXPERTS.values()},
        *(args[n] for n in ("shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale")),
    )


ROUNDINGS = {"out": ref.KERNEL, "out as vLLM": ref.VLLM}


def stage_errors(
    case: Case,
    outputs: dict[str, torch.Tensor],
    normed: torch.Tensor,
    logits: torch.Tensor | None,
    roundings: dict[str, Any],
) -> dict[str, Error]:
    """Errors of ``outputs`` (by our names), whose MoE input was ``normed``; ``logits``: the launch's own."""
    a = case.unsharded()
    residual = outputs["residual_out"].double()
    sums = ref.seam_sums(residual, a["mix_projection"]).sum(-1)
    errors = {
        "residual": Error.of(
            residual,
            ref.fold(a["residual_in"], ref.all_reduce(a["partial"]), a["post_in"], a["comb_in"]),
        )
    }
    for name, want in ref.mixes(sums, a["mix_scale"], a["mix_base"]).items():
        errors[name] = Error.of(outputs[f"{name}_out"], want)
    errors["normed"] = Error.of(normed, ref.normalise(ref.collapse(residual, a["pre_in"]), a["norm_weight"]))
    if logits is None:
        logits = ref.router_logits(normed, a["gate_weight"])
    picks = ref.choose(logits, a["gate_bias"], case.picks)
    for name, rounding in roundings.items():
        parts = []
        for rank in range(case.tp):
            middle = ref.gate_up(normed, picks, weights(case, rank), rounding)
            parts.append(ref.down(middle, picks, weights(case, rank), rounding))
        errors[name] = Error.of(outputs["out"], ref.all_reduce(parts))
    return errors


def our_errors(run: Run, roundings: dict[str, Any] = ROUNDINGS) -> dict[str, Error]:
    """Of our launch that has run."""
    normed = ref.normalise(run.collapsed(0), run.case.unsharded()["norm_weight"])
    logits = run.box("logits", 0)[0].view(torch.float32).double()
    return stage_errors(run.case, run.outputs(), normed, logits, roundings)


def base_errors(case: Case, run: base.FfnRun, roundings: dict[str, Any] = ROUNDINGS) -> dict[str, Error]:
    """Of the base's launch on ``case`` that has run."""
    first = run.ranks[0]
    outputs = {"residual_out": first["res_out"], "out": first["out"]} | {
        f"{n}_out": first[f"{n}_out"] for n in ("post", "comb", "pre")
    }
    return stage_errors(case, outputs, run.normed(0), None, roundings)


def both(rows: int, tp: int, kind: str) -> dict[str, tuple[Error, Error]]:
    """Stage -> (our error, the base's)."""
    case = make(rows, tp, kind)
    ours, theirs = Run(case, Device("gfx950", ranks=tp)), base_run(case)
    ours.launch()
    theirs.launch()
    mine, other = our_errors(ours), base_errors(case, theirs)
    return {name: (mine[name], other[name]) for name in mine}


def table(errors: dict[str, tuple[Error, Error]]) -> str:
    """Worst token's relative error and cosine, Markdown."""
    lines = ["| stage | ours | the base's |", "|---|---|---|"]
    for name, pair in errors.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{e.relative:.1e}, 1 - {1 - e.cosine:.0e}" for e in pair) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--kind", default="random")
    given = parser.parse_args()
    print(f"{given.rows} rows TP{given.tp} {given.kind}: worst token's relative error, worst cosine")
    print(table(both(given.rows, given.tp, given.kind)))


assert modules().geometry.HIDDEN == base.HIDDEN

if __name__ == "__main__":
    sys.exit(main())
