# SPDX-License-Identifier: Apache-2.0
"""What two arms' runs say: differences by round, the noise beside them, and a verdict with its rule.

A round's value is the median of its runs on one server. The difference of a point is that of the two
arms' means over the rounds, as a share of the first arm's mean. Two noises stand beside it: the *same-arm
spread*, (max - min) / mean of the runs on one server, and *half to half*, the same of one arm's round
values, which were taken on the node's two halves. Of each, the largest over servers and arms counts.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.quantities import Quantity
from rocm_overlay.measure.records import Record

RULE = (
    "An arm is called faster or slower when every round's difference has the same sign and the mean "
    "difference is larger than the noise: the larger of same-arm spread (max-min of the runs on one server, "
    "over their mean) and half to half (the same, of one arm's rounds). Anything else is within noise. A "
    "point without a noise figure, or whose arms did not serve on the same halves, is not judged."
)


class Verdict(StrEnum):
    """What may be said of a point."""

    FASTER = "faster"
    SLOWER = "slower"
    HIGHER = "higher"
    LOWER = "lower"
    WITHIN_NOISE = "within noise"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Round:
    """A round's values: ``first`` and ``second`` are the two arms', in the quantity's unit."""

    number: int
    halves: tuple[str, str]
    first: float
    second: float

    @property
    def change(self) -> float:
        """(second - first) / first."""
        return self.second / self.first - 1


@dataclass(frozen=True)
class Noise:
    """Shares of the mean; None where there are too few runs to tell."""

    same_arm: float | None
    half_to_half: float | None
    stated: float | None = None

    @property
    def limit(self) -> float | None:
        """The largest that is known."""
        known = [one for one in (self.same_arm, self.half_to_half, self.stated) if one is not None]
        return max(known, default=None)


@dataclass(frozen=True)
class Comparison:
    """One quantity at one point."""

    point: str
    quantity: Quantity
    rounds: tuple[Round, ...]
    noise: Noise
    verdict: Verdict
    because: str

    @property
    def first(self) -> float:
        """The first arm's mean over the rounds."""
        return statistics.fmean(one.first for one in self.rounds)

    @property
    def second(self) -> float:
        """The second arm's mean over the rounds."""
        return statistics.fmean(one.second for one in self.rounds)

    @property
    def difference(self) -> float:
        """second - first, in the quantity's unit."""
        return self.second - self.first

    @property
    def change(self) -> float:
        """The difference as a share of the first arm's mean."""
        return self.difference / self.first

    @property
    def gain(self) -> float:
        """How many times better the second arm is; second over first where no direction is better."""
        return self.first / self.second if self.quantity.lower_is_better else self.second / self.first


def spread(values: Sequence[float]) -> float | None:
    """(max - min) / mean, None of fewer than two values."""
    if len(values) < 2:
        return None
    return (max(values) - min(values)) / statistics.fmean(values)


def compare_point(
    first: Sequence[Record], second: Sequence[Record], quantity: Quantity, stated_noise: float | None = None
) -> Comparison:
    """Two arms' runs of one point.

    Args:
        first: the records of one arm, all of one point; those without the quantity are left out.
        second: the same of the other arm.
        stated_noise: a noise known from elsewhere, as a share; it joins the measured ones.

    Raises:
        OverlayError: no round that both arms ran, or a value that is not above zero.
    """
    arms = [_by_round(first, quantity), _by_round(second, quantity)]
    numbers = sorted(arms[0].keys() & arms[1].keys())
    if not numbers:
        raise OverlayError(
            f"{first[0].point}: the arms have no round in common with {quantity.title}",
            seen=f"rounds {sorted(arms[0])} and {sorted(arms[1])}",
            wanted="the same rounds in both arms",
            fix="resume the session that stopped early",
        )
    rounds = tuple(
        Round(
            number, (arms[0][number].half, arms[1][number].half), arms[0][number].value, arms[1][number].value
        )
        for number in numbers
    )
    noise = Noise(
        same_arm=_largest([spread(arm[number].runs) for arm in arms for number in numbers]),
        half_to_half=_largest([spread([arm[number].value for number in numbers]) for arm in arms]),
        stated=stated_noise,
    )
    return Comparison(first[0].point, quantity, rounds, noise, *judge(rounds, noise, quantity))


@dataclass(frozen=True)
class _Server:
    half: str
    runs: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.runs)


def _by_round(records: Sequence[Record], quantity: Quantity) -> dict[int, _Server]:
    runs: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if quantity.key in record.figures:
            runs[record.round].append(record)
    found = {}
    for number, own in runs.items():
        halves = {record.half for record in own}
        values = tuple(record.figures[quantity.key] for record in own)
        if len(halves) > 1 or min(values) <= 0:
            raise OverlayError(
                f"{own[0].arm}, {own[0].point}, round {number}: {quantity.title} cannot be compared",
                seen=f"halves {', '.join(sorted(halves))}; values {', '.join(map(str, values))}",
                wanted="one half a round, and values above zero",
                fix="leave the faulty runs out",
            )
        found[number] = _Server(own[0].half, values)
    return found


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def judge(rounds: Sequence[Round], noise: Noise, quantity: Quantity) -> tuple[Verdict, str]:
    """The verdict by ``RULE`` and the reason for it, in a few words."""
    if not swapped(rounds):
        return Verdict.NOT_JUDGED, "the arms did not serve on the same halves"
    limit = noise.limit
    if limit is None:
        return Verdict.NOT_JUDGED, "one run an arm says nothing of noise"
    first = statistics.fmean(one.first for one in rounds)
    change = statistics.fmean(one.second for one in rounds) / first - 1
    signs = {one.change > 0 for one in rounds if one.change != 0}
    if len(signs) != 1 or any(one.change == 0 for one in rounds):
        return Verdict.WITHIN_NOISE, "the rounds differ in sign"
    if abs(change) <= limit:
        return Verdict.WITHIN_NOISE, f"{abs(change):.2%} is not above {limit:.2%}"
    if quantity.lower_is_better is None:
        verdict = Verdict.HIGHER if change > 0 else Verdict.LOWER
    else:
        verdict = Verdict.FASTER if (change < 0) == quantity.lower_is_better else Verdict.SLOWER
    return verdict, f"{abs(change):.2%} is above {limit:.2%}, every round agrees"


def swapped(rounds: Sequence[Round]) -> bool:
    """Whether both arms served on the same halves; so too where the halves have no names."""
    first, second = ({one.halves[arm] for one in rounds} for arm in (0, 1))
    return first == second


@dataclass(frozen=True)
class PairedRatio:
    """Second arm's over first arm's inter-token latency, request by request; ``median`` of ``requests``."""

    median: float
    low: float
    high: float
    requests: int


def paired_ratio(first: Sequence[Record], second: Sequence[Record]) -> PairedRatio | None:
    """The ratio over the requests that both arms answered, None where their sequences differ.

    Sequences match where the runs of the same round and number sent as many requests, each with the same
    number of input tokens. Requests that failed, or made one token, in either arm are left out.
    """
    other = {(record.round, record.run): record for record in second}
    ratios: list[float] = []
    for record in first:
        twin = other.get((record.round, record.run))
        if twin is None:
            continue
        lengths = [[request.input_tokens for request in one.requests] for one in (record, twin)]
        if not record.requests or lengths[0] != lengths[1] or record.seed != twin.seed:
            return None
        pairs = zip(record.requests, twin.requests, strict=True)
        ratios += [b.itl_ms / a.itl_ms for a, b in pairs if a.itl_ms and b.itl_ms]
    if not ratios:
        return None
    tenths = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 9
    return PairedRatio(statistics.median(ratios), tenths[0], tenths[-1], len(ratios))
