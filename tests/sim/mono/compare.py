# SPDX-License-Identifier: Apache-2.0
"""Every region that the FFN launch writes, against the float64 stage on that stage's own input.

A stage's input is what the launch itself handed over, so a failure names the stage. Bounds are the
proof's: seams' cosine above 0.99999 and mixes within 1e-4, every token's output at least 0.9993 and within
1 %. Where a stage rounds once, few values may lie on the other side of a tie, each by one step of bf16; where
its input was rounded on the way, the ties that may have fallen either way are settled first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .run import Run
from .sources import modules

ref, formats = modules().reference, modules().formats


@dataclass(frozen=True)
class Error:
    """``cosine``: the worst token's. ``relative``: L2 of the difference over L2 of the reference, the worst
    token's. ``largest``: largest absolute difference. A token whose reference is zero has cosine 1 and the
    difference itself as relative error. ``moved``: share of values that are not the reference's, the worst
    token's. ``steps``: largest difference in bf16 steps at the reference's value, where a step is at least
    what fp32 sums lose, 2^-19 of the token's largest value."""

    cosine: float
    relative: float
    largest: float
    moved: float
    steps: float

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> Error:
        a, b = got.double().flatten(1), want.double().flatten(1)
        difference = (a - b).norm(dim=1)
        zero = b.norm(dim=1) == 0
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=1)
        cosine = torch.where(zero, torch.ones_like(cosine), cosine)
        relative = torch.where(zero, difference, difference / b.norm(dim=1))
        step = torch.ldexp((b != 0).double(), torch.frexp(b)[1] - 8)
        step = torch.maximum(step, b.abs().amax(1, keepdim=True) * 2.0**-19)
        steps = torch.where(a == b, torch.zeros_like(a), (a - b).abs() / step)
        return cls(
            cosine.min().item(),
            relative.max().item(),
            (a - b).abs().max().item(),
            (a != b).double().mean(1).max().item(),
            steps.max().item(),
        )


@dataclass(frozen=True)
class Bound:
    """A stage's errors must lie within."""

    cosine: float = -1.0
    relative: float = float("inf")
    largest: float = float("inf")
    moved: float = 1.0
    steps: float = float("inf")

    def holds(self, error: Error) -> bool:
        # Written so that a NaN fails.
        return (
            error.cosine >= self.cosine
            and error.relative <= self.relative
            and error.largest <= self.largest
            and error.moved <= self.moved
            and error.steps <= self.steps
        )


EXACT = Bound(relative=0.0, largest=0.0)
# A value rounded to bf16 from fp32 sums may fall on the other side of a tie, by one step. One in a thousand
# does at most; a rounding left out moves a quarter of them.
ROUNDED = Bound(cosine=0.99999, moved=1e-3, steps=1.0)
BOUNDS = {
    "attention": EXACT,
    "residual": ROUNDED,
    "collapsed": ROUNDED,
    "seam_sums": Bound(cosine=0.99999, relative=1e-5),
    "mixes": Bound(largest=1e-4),
    "logits": Bound(cosine=0.99999, relative=1e-6),
    "intermediate": Bound(cosine=0.99999, relative=2e-3),
    "partial": ROUNDED,
    "out": EXACT,
    "launch": Bound(cosine=0.9993, relative=1e-2),
}


def tagged(run: Run, name: str, rank: int) -> torch.Tensor:
    """A mailbox's payloads; raises ``AssertionError`` if a word is not of the last launch."""
    payload, tag = run.box(name, rank)
    last = run.tag(rank) - 1 or modules().epoch.LAST_TAG
    if not torch.equal(tag >> 8 & 0xFFFFFF, torch.full_like(tag, last)):
        raise AssertionError(f"{name} of rank {rank} has words that the last launch did not write")
    return payload


class Stages:
    """One rank's hand-offs of the launch, and the reference's stages on them; ``rows`` are what counts."""

    def __init__(self, run: Run, rank: int, rows: list[int] | None = None) -> None:
        self.run, self.rank, self.case = run, rank, run.case
        self.args = run.ranks[rank]
        self.rows = list(range(run.case.rows)) if rows is None else rows
        self.weights = ref.RankWeights(
            run.geometry.share,
            lambda e: {name: self.args[name][e] for name in ("w13", "w13_scale", "w2", "w2_scale")},
            *(self.args[n] for n in ("shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale")),
            layout=run.case.layout,
        )

    def sums(self) -> torch.Tensor:
        """[rows, 25, 256]."""
        return tagged(self.run, "seam_sums", self.rank).view(torch.float32).double()

    def logits(self) -> torch.Tensor:
        """[rows, experts]."""
        return tagged(self.run, "logits", self.rank).view(torch.float32).double()

    def picks(self, scaling: float = modules().geometry.ROUTED_SCALING) -> Any:
        """The choice that the launch's own logits lead to."""
        return ref.choose(self.logits(), self.args["gate_bias"], self.case.picks, scaling)

    def normed(self) -> torch.Tensor:
        """The norm of the launch's own collapsed rows."""
        return ref.normalise(self.run.collapsed(self.rank), self.args["norm_weight"])

    def _ties(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns where the norm's value lies within 2^-20 of a tie, and what its other rounding adds: fp32
        may round those either way, the router's workgroups one and the experts' another."""
        exact = self._exact[row]
        low, high = (formats.round_bf16(exact * (1 + sign * 2.0**-20)) for sign in (-1, 1))
        columns = (low != high).nonzero()[:, 0]
        return columns, (low + high - 2 * formats.round_bf16(exact))[columns]

    @cached_property
    def _exact(self) -> torch.Tensor:
        return ref.normalise(self.run.collapsed(self.rank), self.args["norm_weight"], rounded=False)

    def router_input(self) -> torch.Tensor:
        """The norm, its ties rounded as the launch's logits say: one moves a row's by more than sums do."""
        normed, got, gate = self.normed(), self.logits(), self.args["gate_weight"].double()
        for row in self.rows:
            columns, others = self._ties(row)
            # The choice of each is 0 or 1: what fits best, rounded.
            moves = gate[:, columns] * others
            choice = torch.linalg.lstsq(moves, (got[row] - gate @ normed[row])[:, None]).solution[:, 0]
            normed[row, columns] += choice.round().clamp(0, 1) * others
        return normed

    @cached_property
    def expert_input(self) -> torch.Tensor:
        """The norm, its ties rounded as the launch's shared expert says: one at a block's largest value moves
        the whole block's codes."""
        normed, got = self.normed(), self.intermediate()[-1].values
        quantised = lambda x: formats.quantise(x, ref.KERNEL.shared_floor)  # noqa: E731
        for row in self.rows:
            choices, plain = normed[row][None], quantised(normed[row][None])
            for column, other in zip(*self._ties(row), strict=True):
                moved = choices.clone()
                moved[:, column] += other
                now = quantised(moved[:1])
                if not (torch.equal(now.raw, plain.raw) and torch.equal(now.codes, plain.codes)):
                    choices = torch.cat([choices, moved])
            if len(choices) > 1:
                rows = ref.shared_gate_up(quantised(choices), *self.weights.shared_gate_up())
                normed[row] = choices[(rows.values - got[row]).norm(dim=1).argmin()]
        return normed

    def intermediate(self) -> list[Any]:
        """The intermediate rows by slot as they were handed over."""
        run, g = self.run, self.run.geometry
        # The word of block 4 step + group is at [group, step].
        words = run.box("blocks_ready", self.rank)[1].transpose(2, 3).flatten(2)[..., : g.blocks]
        last = run.tag(self.rank) - 1 or modules().epoch.LAST_TAG
        if not torch.equal(words >> 8 & 0xFFFFFF, torch.full_like(words, last)):
            raise AssertionError(f"rank {self.rank} has blocks that the last launch did not announce")
        codes = (words & 0xFF).to(torch.uint8)
        region = run.workspace.intermediate
        raw = run.ranks[self.rank]["workspace"][region.offset : region.offset + region.size]
        raw = raw.view(g.rows, g.slots, g.share)
        return [formats.MxRows(raw[:, s].contiguous(), codes[:, s].contiguous()) for s in range(g.slots)]

    # ---- (launch's, reference's) of each stage; the first axis is the rows
    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        case, args, rank = self.case, self.args, self.rank
        a = case.activations
        attention = ref.all_reduce(a["partial"])
        residual = args["residual_out"].double()
        picks, middle = self.picks(), self.intermediate()
        wanted = ref.gate_up(self.expert_input, picks, self.weights)
        moe = self.run.partials("moe", rank)
        mixes = ref.mixes(self.sums().sum(-1), args["mix_scale"], args["mix_base"])
        values = lambda xs: torch.stack([x.values for x in xs], 1)  # noqa: E731
        out = {
            "attention": (
                self.run.partials("attention", rank).transpose(0, 1),
                a["partial"].double().transpose(0, 1),
            ),
            "residual": (residual, ref.fold(a["residual_in"], attention, a["post_in"], a["comb_in"])),
            "collapsed": (self.run.collapsed(rank), ref.collapse(residual, a["pre_in"])),
            "seam_sums": (self.sums(), ref.seam_sums(residual, args["mix_projection"])),
            **{f"mixes {n}": (args[f"{n}_out"].double(), want) for n, want in mixes.items()},
            "logits": (self.logits(), ref.router_logits(self.router_input(), args["gate_weight"])),
            "intermediate": (values(middle), values(wanted)),
            "partial": (moe[rank], ref.down(middle, picks, self.weights)),
            "out": (args["out"].double(), ref.all_reduce(list(moe.bfloat16()))),
        }
        return {name: (got[self.rows], want[self.rows]) for name, (got, want) in out.items()}

    def errors(self) -> dict[str, Error]:
        return {name: Error.of(*pair) for name, pair in self.pairs().items()}


def whole_launch(
    run: Run, rounding: Any, rows: list[int] | None = None, scaling: float | None = None
) -> torch.Tensor:
    """The MoE's output [rows, 5120] of the reference, from the launch's own MoE input (near-tied experts make
    any other input another question)."""
    keep = list(range(run.case.rows)) if rows is None else rows
    parts = []
    for rank in range(run.case.tp):
        stages = Stages(run, rank, keep)
        picks = stages.picks() if scaling is None else stages.picks(scaling)
        normed = stages.expert_input[keep]
        picks = ref.Picks(picks.experts[keep], picks.weights[keep])
        middle = ref.gate_up(normed, picks, stages.weights, rounding)
        parts.append(ref.down(middle, picks, stages.weights, rounding).bfloat16())
    return ref.all_reduce(parts)


def check(errors: dict[str, Error]) -> None:
    """Raises ``AssertionError`` with every stage that is out of its bound."""
    faults = [f"{name}: {e}" for name, e in errors.items() if not BOUNDS[name.split()[0]].holds(e)]
    if faults:
        raise AssertionError("; ".join(faults))


def check_run(run: Run, rows: list[int] | None = None, whole: bool = True) -> dict[str, Error]:
    """Every stage of rank 0, and with ``whole`` the output against the reference with vLLM's rounding."""
    run.outputs()
    stages = Stages(run, 0, rows)
    errors = stages.errors()
    if whole:
        want = whole_launch(run, ref.VLLM, rows)
        errors["launch"] = Error.of(run.ranks[0]["out"].double()[stages.rows], want)
    check(errors)
    return errors
