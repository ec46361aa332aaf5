# SPDX-License-Identifier: Apache-2.0
"""Every region that a whole layer's two launches write, against the float64 stage on that stage's own input.

As ``compare``, whose bounds and FFN stages these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import compare
from .compare import EXACT, Bound, Error, Stages, ref, tagged
from .layer_case import HEAD_DIM, g
from .layer_run import BackRun, FrontRun, LayerRun
from .sources import modules

att, formats = modules().attention, modules().formats

# The heads' MXFP8 outputs may be this much further from float64 than MXFP8 of the float64 outputs is: the
# weights of the sum are rounded to bf16.
ATTENDED_FACTOR = 1.02
# A norm's value beside a tie may be rounded to bf16 either way, and to e4m3 then: a sixteenth of one input,
# which moves every output a little. A row seldom has one; a norm left unrounded or a code off moves far more.
QUANTISED = Bound(cosine=0.99999, relative=2e-3)
BOUNDS = compare.BOUNDS | {
    "normed_out": compare.ROUNDED,
    "qkv": QUANTISED,
    "query_rank_out": compare.ROUNDED,
    "query": QUANTISED,
    "record": QUANTISED,
    "codes": EXACT,
    "cache": EXACT,
    "attended": Bound(cosine=0.999, relative=0.04),
    "attended excess": Bound(largest=ATTENDED_FACTOR),
    "ranks": compare.ROUNDED,
    "wo_b": compare.ROUNDED,
}


def _bound(name: str) -> Bound:
    """Of a stage; a number behind it is the rank, other words name a part of it."""
    stage = name.rstrip("0123456789 ")
    return BOUNDS.get(stage) or BOUNDS[stage.split()[0]]


def failing(errors: dict[str, Error]) -> set[str]:
    """The stages that are out of their bounds."""
    return {name for name, error in errors.items() if not _bound(name).holds(error)}


def check(errors: dict[str, Error]) -> None:
    """Raises ``AssertionError`` with every stage that is out of its bound."""
    out = failing(errors)
    if out:
        raise AssertionError("; ".join(f"{name}: {e}" for name, e in errors.items() if name in out))


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def failing_pairs(pairs: Pairs) -> set[str]:
    """``failing`` of the launch's and the reference's outputs."""
    return failing({name: Error.of(*pair) for name, pair in pairs.items()})


def front_pairs(run: FrontRun, rank: int) -> Pairs:
    """(launch's, reference's) of each stage of one rank's front, of the rows that count."""
    case, args, live = run.layer, run.ranks[rank], run.layer.shape.live
    a = case.ffn.activations
    residual = args["residual_out"].double()
    wanted = a["residual_in"].double()
    if case.shape.fold:
        wanted = ref.fold(a["residual_in"], case.step["x"], a["post_in"], a["comb_in"])
    sums = tagged(run, "seam_sums", rank).view(torch.float32).double()
    mixes = ref.mixes(sums.sum(-1), args["mix_scale"], args["mix_base"])
    collapsed, qkv = run.collapsed(rank), run.qkv(rank)
    normed = ref.normalise(collapsed, args["norm_weight"])
    query_rank = att.query_rank(qkv, args["query_norm"])
    out = {
        "residual": (residual, wanted),
        "collapsed": (collapsed, ref.collapse(residual, a["pre_in"])),
        "seam_sums": (sums, ref.seam_sums(residual, args["mix_projection"])),
        **{f"mixes {n}": (args[f"{n}_out"].double(), want) for n, want in mixes.items()},
        "qkv": (qkv, att.qkv(normed, args["wqkv"], args["wqkv_scale"])),
    }
    if case.shape.hands_out:
        out["normed_out"] = (args["normed_out"].double(), normed)
        out["query_rank_out"] = (args["query_rank_out"].double(), query_rank)
    out |= {
        "query": (
            args["query"].double(),
            att.query(query_rank, args["wq_b"], args["wq_b_scale"], case.angles()),
        )
    }
    return {name: (got[live], want[live]) for name, (got, want) in out.items()} | _records(run, rank, qkv)


def _records(run: FrontRun, rank: int, qkv: torch.Tensor) -> Pairs:
    """The new keys' records; and the rest of the cache, which must be as it was."""
    case, args = run.layer, run.ranks[rank]
    live = case.shape.live
    slots, raw = case.step["slots"][live], args["window_cache"]
    got = case.window.read(slots, raw)
    want = att.Records.of(att.key(qkv, args["key_norm"], case.angles())[live], case.window.fp8)
    before = case.window.without(slots, case.window.raw)
    return {
        "record": (got.values, want.values),
        "codes": (got.codes.double(), want.codes.double()),
        "cache": (case.window.without(slots, raw)[None].float(), before[None].float()),
    }


def heads(run: BackRun, rank: int) -> torch.Tensor:
    """float64 attention of the rank's heads, [rows, heads, 512], on its own queries and caches."""
    case, args = run.layer, run.ranks[rank]
    out = torch.zeros(case.shape.rows, args["query"].shape[1], HEAD_DIM, dtype=torch.float64)
    for row in case.shape.live:
        window, compressed = case.slots(row)
        keys = torch.cat(
            [case.compressed.read(compressed).values, case.window.read(window, args["window_cache"]).values]
        )
        out[row] = att.attend(args["query"][row].double(), keys, args["sink"])
    return out


def back_pairs(run: BackRun, rank: int) -> Pairs:
    """(launch's, reference's) of the attention's stages of one rank's back."""
    args, live = run.ranks[rank], run.layer.shape.live
    got, ranks = run.attended(rank), run.group_ranks(rank)
    want = att.attended(heads(run, rank), run.layer.angles())
    partial = run.partials("attention", rank)[rank]
    pairs = {
        "attended": (got.values, want),
        "ranks": (ranks, settled(ranks, att.group_ranks, got, args["wo_a"], args["wo_a_scale"])),
        "wo_b": (
            partial,
            settled(partial, att.linear, formats.quantise(ranks), args["wo_b"], args["wo_b_scale"]),
        ),
    }
    return {name: (x[live], y[live]) for name, (x, y) in pairs.items()} | {
        "attended excess": _excess(got.values[live], want[live])
    }


# Of the sum of a product's magnitudes: what fp32 sums of it, in any order, are off by.
SUMS = 2.0**-27


def settled(
    got: torch.Tensor, operation: Callable[..., torch.Tensor], rows: Any, *weights: torch.Tensor
) -> torch.Tensor:
    """The bf16 outputs of a linear. Where fp32 sums may fall on either side of a tie, ``got``'s: among the
    few outputs of a token, three that do are more than the share that may move."""
    values, codes = weights
    exact = operation(rows, values, codes, rounded=False)
    positive = formats.MxRows(rows.raw & 0x7F, rows.codes)
    slack = operation(positive, values & 0x7F, codes, rounded=False) * SUMS
    low, want, high = (formats.round_bf16(exact + sign * slack) for sign in (-1, 0, 1))
    return torch.where((got == low) | (got == high), got, want)


def _excess(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(A token's error over MXFP8's own, 0)."""
    own = (formats.quantise(want).values - want).norm(dim=1)
    ratio = (got - want).norm(dim=1) / own
    # Its L2 error is that of the sums as a whole; a token without keys has none.
    ratio = torch.where(own == 0, (got - want).norm(dim=1), ratio)
    return ratio[:, None], torch.zeros_like(ratio)[:, None]


def check_front(run: FrontRun, ranks: list[int] | None = None) -> dict[str, Error]:
    """Every stage of the front on some ranks (the first and the last)."""
    run.outputs()
    errors: dict[str, Error] = {}
    for rank in _some(run.case.tp) if ranks is None else ranks:
        errors |= {f"{name} {rank}": Error.of(*pair) for name, pair in front_pairs(run, rank).items()}
    check(errors)
    return errors


def check_back(run: BackRun, ranks: list[int] | None = None, whole: bool = True) -> dict[str, Error]:
    """The attention's stages on some ranks (the first and the last), then the FFN half's."""
    errors: dict[str, Error] = {}
    for rank in _some(run.case.tp) if ranks is None else ranks:
        errors |= {f"{name} {rank}": Error.of(*pair) for name, pair in back_pairs(run, rank).items()}
    # What is wrong with the FFN half's input says nothing of the FFN half.
    check(errors)
    run.case = run.ffn_case()
    live = run.layer.shape.live
    ffn = Stages(run, 0, live).errors()
    if whole:
        want = compare.whole_launch(run, ref.VLLM, live)
        ffn["launch"] = Error.of(run.ranks[0]["out"].double()[live], want)
    run.outputs()
    check(ffn)
    return errors | ffn


def check_layer(run: LayerRun, **settings: Any) -> dict[str, Error]:
    """Both launches."""
    errors = {f"front {name}": e for name, e in check_front(run.front).items()}
    return errors | {f"back {name}": e for name, e in check_back(run.back, **settings).items()}


def _some(tp: int) -> list[int]:
    return [0, tp - 1]


assert g.HEAD_DIM == HEAD_DIM
