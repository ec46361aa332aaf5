# SPDX-License-Identifier: Apache-2.0
"""What is known to fail after the weights are read, refused before.

Each refusal names the flag or variable, what it holds, and the smallest change that works. All
that apply are reported at once. A change is advised only after it was tried: applied to what the
user asked for, it removes its refusal and brings no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rocm_overlay.errors import CheckFailed
from rocm_overlay.machine import Gpu
from rocm_overlay.recipe import Recipe
from rocm_overlay.rules import Fault, faults
from rocm_overlay.settings import Change, Settings, changed


@dataclass(frozen=True)
class Refusal:
    """One reason not to start: the flag or variable, why, what it holds, and what to do.

    Attributes:
        rule: the rule that refuses.
        changes: the changes that were tried and work, best first; empty where only ``change``, in
            words, can be said.
    """

    rule: str
    flag: str
    why: str
    seen: str
    change: str
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        return f"{self.flag} {self.seen}: {self.why}. Smallest change: {self.change}"


def check(
    settings: Settings, present: Sequence[Gpu] | None = None, recipes: Sequence[Recipe] = ()
) -> list[Refusal]:
    """Every reason why a server with these settings cannot start or run, each with what to do.

    Args:
        present: the machine's GPUs, visible to the server or not; None: whatever the machine.
        recipes: those that may be advised.
    """
    found = faults(settings, present, recipes)
    trial = _Trial(settings, present, recipes, frozenset(fault.rule for fault in found))
    refusals: list[Refusal] = []
    for fault in found:
        works = trial.changes(fault)
        advice = ", or ".join(map(str, works)) or fault.otherwise
        refusals.append(Refusal(fault.rule, fault.flag, fault.why, fault.seen, advice, works))
    return refusals


@dataclass(frozen=True)
class _Trial:
    """Tries changes on the settings as they are."""

    settings: Settings
    present: Sequence[Gpu] | None
    recipes: Sequence[Recipe]
    known: frozenset[str]

    def changes(self, fault: Fault) -> tuple[Change, ...]:
        """The changes to name for ``fault``: those after which the fewest refusals are left."""
        works = self._that_work(fault, iter(fault.changes)) or self._that_work(fault, self._pairs(fault))
        fewest = min((left for left, _ in works), default=0)
        return tuple(change for left, change in works if left == fewest)[: fault.alternatives]

    def _that_work(self, fault: Fault, changes: Iterator[Change]) -> list[tuple[int, Change]]:
        works: list[tuple[int, Change]] = []
        for change in changes:
            left = self._after(change)
            if left is None or not {one.rule for one in left} <= self.known - {fault.rule}:
                continue
            works.append((len(left), change))
            if sum(not left for left, _ in works) == fault.alternatives:
                break
        return works

    def _after(self, change: Change) -> list[Fault] | None:
        after = changed(self.settings, change, self.recipes)
        return None if after is None else faults(after, self.present, self.recipes)

    def _pairs(self, fault: Fault) -> Iterator[Change]:
        """Each change with one of those for the single refusal that it leaves or brings."""
        for first in (*fault.partial, *fault.changes):
            after = self._after(first)
            if after is None:
                continue
            bad = [one for one in after if one.rule == fault.rule or one.rule not in self.known]
            if not bad:
                yield first
            if len(bad) == 1:
                yield from (first.then(second) for second in bad[0].changes)


def refuse(recipe: str, refusals: Sequence[Refusal]) -> None:
    """Raise all of ``refusals`` as one error; nothing where there are none.

    Raises:
        CheckFailed: with a line for each refusal.
    """
    if not refusals:
        return
    count = f"{len(refusals)} reasons" if len(refusals) > 1 else "one reason"
    lines = "\n          ".join(f"{refusal.flag} {refusal.seen}: {refusal.why}" for refusal in refusals)
    fixes = "\n          ".join(refusal.change for refusal in refusals)
    raise CheckFailed(f"preflight refuses {recipe} for {count}", seen=lines, fix=fixes)
