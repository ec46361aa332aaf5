# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself: that its requests ended, its text is some, and its steps ran as promised.

A proof is true, false, or None where nothing could be read; a run with a false one is kept and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocm_overlay.measure.client import Outcome
from rocm_overlay.measure.metrics_page import DRAFTS, Window
from rocm_overlay.measure.workload import Pass, Profile, Promise

# Reasons for which vLLM's path runs a step that is no fallback of a decode step: the step holds a prefill,
# which shows in its rows or its graph mode first, or is a warm-up without metadata. A decode step that hides
# among them is missed by the count of verifications below.
NO_FALLBACK = frozenset({"not decode only", "rows", "graph mode", "no attention metadata"})
LEAST_KERNEL_SHARE = 0.99
# A decode step verifies one request's drafts at least and all requests' at most.
LEAST_STEPS_A_VERIFICATION = 0.9
NEEDED_EVIDENCE = ("image_digest", "sku", "recipe_hash")


@dataclass(frozen=True)
class Proof:
    """One line: whether it holds, and what was seen against what was wanted."""

    ok: bool | None
    says: str


def prove(
    own: Pass,
    profile: Profile,
    promised: Promise,
    outcome: Outcome,
    window: Window | None,
    evidence: Mapping[str, Any],
) -> dict[str, Proof]:
    """Every proof of a run; ``window`` is None where the metrics could not be read."""
    proofs = {
        "requests": _requests(own, outcome),
        "text": _text(outcome),
        "tokens": _tokens(own, outcome),
        "evidence": _evidence(evidence),
    }
    if window is None:
        unread = Proof(None, "the metrics could not be read")
        return proofs | dict.fromkeys(("acceptance", "prefix", "kernels", "fallback"), unread)
    return proofs | {
        "acceptance": _acceptance(promised, window),
        "prefix": _prefix(profile, own, window),
        "kernels": _kernels(own, promised, window),
        "fallback": _fallback(promised, window),
    }


def _requests(own: Pass, outcome: Outcome) -> Proof:
    failed = outcome.failed
    says = f"{len(failed)} of {own.point.prompts} requests failed"
    lines = failed[0].strip().splitlines() if failed else []
    return Proof(not failed, f"{says}; the first: {lines[-1]}" if lines else says)


def _text(outcome: Outcome) -> Proof:
    pairs = zip(outcome.texts, outcome.requests, strict=True)
    empty = sum(1 for text, request in pairs if not text.strip() and not request.error)
    return Proof(not empty, f"{empty} of {len(outcome.texts)} answers are empty")


def _tokens(own: Pass, outcome: Outcome) -> Proof:
    wanted = own.point.output_tokens
    short = [one.output_tokens for one in outcome.requests if not one.error and one.output_tokens != wanted]
    says = f"{len(short)} answers have another length than {wanted} tokens"
    return Proof(not short, f"{says}: {short[:5]}" if short else says)


def _evidence(evidence: Mapping[str, Any]) -> Proof:
    missing = [name for name in NEEDED_EVIDENCE if not evidence.get(name)]
    return Proof(None if missing else True, f"not recorded: {', '.join(missing)}" if missing else "recorded")


def _acceptance(promised: Promise, window: Window) -> Proof:
    length = window.acceptance_length()
    if promised.acceptance is None:
        return Proof(
            length is None, "no drafts" if length is None else f"{length:.3f} without drafts in the recipe"
        )
    low, high = promised.acceptance
    if length is None:
        return Proof(False, f"no drafts were verified, wanted a length of {low:.2f} to {high:.2f}")
    return Proof(low <= length <= high, f"{length:.3f}, wanted {low:.2f} to {high:.2f}")


def _prefix(profile: Profile, own: Pass, window: Window) -> Proof:
    rate = window.prefix_hit_rate()
    low, high = profile.prefix_hit_rate
    if rate is None:
        return Proof(low == 0, "no prefix was looked up")
    if not own.first:
        return Proof(None, f"{rate:.2%} on a repeated pass")
    return Proof(low <= rate <= high, f"{rate:.2%}, wanted {low:.2%} to {high:.2%}")


NOT_SERVED = "the counters are not served; set PROMETHEUS_MULTIPROC_DIR for the server"


def _kernels(own: Pass, promised: Promise, window: Window) -> Proof:
    steps = window.kernel_steps()
    if steps is None:
        return Proof(None if promised.kernels is not False else True, NOT_SERVED)
    taken, declined = steps
    decode = taken + sum(count for reason, count in declined.items() if reason not in NO_FALLBACK)
    if not decode:
        return Proof(promised.kernels is not True, "no decode step was counted")
    says = f"{taken:.0f} of {decode:.0f} decode steps ({taken / decode:.2%})"
    if promised.kernels is None:
        return Proof(True, f"{says}; nothing is promised of so many rows")
    if promised.kernels:
        verified = (window.growth(DRAFTS) or 0.0) / own.point.concurrency
        if taken < LEAST_STEPS_A_VERIFICATION * verified:
            return Proof(False, f"{taken:.0f} steps for at least {verified:.0f} that verified drafts")
        return Proof(taken / decode >= LEAST_KERNEL_SHARE, f"{says}, wanted {LEAST_KERNEL_SHARE:.0%}")
    return Proof(taken == 0, f"{says}, wanted none")


def _fallback(promised: Promise, window: Window) -> Proof:
    steps = window.kernel_steps()
    if steps is None or promised.kernels is not True:
        return Proof(None if promised.kernels else True, NOT_SERVED if promised.kernels else "not promised")
    found = {reason: count for reason, count in steps[1].items() if reason not in NO_FALLBACK and count}
    says = ", ".join(f"{reason} {count:.0f}" for reason, count in sorted(found.items()))
    return Proof(not found, says or "none")
