# SPDX-License-Identifier: Apache-2.0
"""A server's ``/metrics`` page: counters as sums over their series, and their growth between two pages.

Engines and API servers each have series of their own, so that a counter is the sum of its series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rocm_overlay.errors import OverlayError

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
TAKEN_STEPS = "vllm:specialized_decode_taken_steps_total"
DECLINED_STEPS = "vllm:specialized_decode_declined_steps_total"
GENERATED = "vllm:generation_tokens_total"
# The metric names of a server that is no vLLM, or of a page that is none, have no such beginning.
PREFIX = "vllm:"
# The counters of the target model, not of its draft.
TARGET_ROLE = "target"

Series = tuple[str, tuple[tuple[str, str], ...]]


def _wrong_counter(samples: Mapping[Series, float]) -> str:
    """The first of vLLM's counters that nothing can be computed of; empty where there is none."""
    for (name, pairs), value in samples.items():
        if not name.startswith(PREFIX) or not name.endswith("_total"):
            continue
        position = dict(pairs).get("position", "0")
        if not 0 <= value < math.inf or not (position.isascii() and position.isdecimal()):
            return f"{name}{dict(pairs)} {value}"
    return ""


@dataclass(frozen=True)
class Page:
    """Every sample of a page, by name and labels."""

    samples: Mapping[Series, float]

    @classmethod
    def parse(cls, text: str, url: str) -> Page:
        """A page from its text; ``url`` names it in errors.

        Raises:
            OverlayError: text that is no Prometheus page, one without any of vLLM's metrics, or one with a
                counter that is no number from zero.
        """
        from prometheus_client.parser import text_string_to_metric_families

        try:
            samples = {
                (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        except (ValueError, KeyError, IndexError) as error:
            raise OverlayError(
                f"{url} is no Prometheus page",
                seen=str(error) or type(error).__name__,
                wanted="the text format of vLLM's /metrics",
                fix="check what answers at this address",
            ) from None
        if wrong := _wrong_counter(samples):
            raise OverlayError(
                f"{url} holds a counter that is none",
                seen=wrong,
                wanted="numbers from zero, and positions that are whole numbers",
                fix="check what answers at this address",
            )
        if not any(name.startswith(PREFIX) for name, _ in samples):
            raise OverlayError(
                f"{url} holds none of vLLM's metrics",
                seen=f"{len(samples)} samples",
                wanted=f"names that begin with {PREFIX}",
                fix="serve without --disable-log-stats, and scrape the server itself",
            )
        return cls(samples)

    def by_label(self, name: str, label: str, **wanted: str) -> dict[str, float]:
        """A counter's sums by one of its labels, over the series with the ``wanted`` labels."""
        found: dict[str, float] = {}
        for (own, pairs), value in self.samples.items():
            labels = dict(pairs)
            if own == name and label in labels and wanted.items() <= labels.items():
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found

    def total(self, name: str, **wanted: str) -> float | None:
        """A counter's sum over the series with the ``wanted`` labels, None where the page has none."""
        values = [
            value
            for (own, pairs), value in self.samples.items()
            if own == name and wanted.items() <= dict(pairs).items()
        ]
        return sum(values) if values else None


@dataclass(frozen=True)
class Window:
    """Two pages of one server, and the growth of its counters from one to the other."""

    before: Page
    after: Page

    def __post_init__(self) -> None:
        for name in (DRAFTS, PREFIX_QUERIES, GENERATED, TAKEN_STEPS):
            if (self.after.total(name) or 0.0) < (self.before.total(name) or 0.0):
                raise OverlayError(
                    f"{name} fell between two scrapes",
                    seen=f"{self.before.total(name)} then {self.after.total(name)}",
                    wanted="a counter that only grows",
                    fix="the server was started again during the run; run it anew",
                )

    def growth(self, name: str, **wanted: str) -> float | None:
        """A counter's growth; a series that only the later page has counts from zero."""
        after = self.after.total(name, **wanted)
        return None if after is None else after - (self.before.total(name, **wanted) or 0.0)

    def growth_by(self, name: str, label: str, **wanted: str) -> dict[str, float]:
        """A counter's growth by one of its labels."""
        before = self.before.by_label(name, label, **wanted)
        after = self.after.by_label(name, label, **wanted)
        return {key: value - before.get(key, 0.0) for key, value in after.items()}

    def acceptance_length(self) -> float | None:
        """1 + accepted drafts a verification, None without speculative decoding."""
        drafts, accepted = self.growth(DRAFTS), self.growth(ACCEPTED)
        return 1 + accepted / drafts if drafts and accepted is not None else None

    def acceptance_by_position(self) -> list[float]:
        """The share of verifications that accepted the draft at each position, from the first."""
        drafts = self.growth(DRAFTS)
        if not drafts:
            return []
        accepted = self.growth_by(ACCEPTED_BY_POSITION, "position")
        return [accepted[key] / drafts for key in sorted(accepted, key=int)]

    def prefix_hit_rate(self) -> float | None:
        """The share of prompt tokens that were in the prefix cache, None where none was looked up."""
        queries, hits = self.growth(PREFIX_QUERIES), self.growth(PREFIX_HITS)
        return hits / queries if queries and hits is not None else None

    def kernel_steps(self) -> tuple[float, dict[str, float]] | None:
        """The target's steps on our kernels, and its declined ones by reason; None where not served."""
        taken = self.growth(TAKEN_STEPS, role=TARGET_ROLE)
        declined = self.growth_by(DECLINED_STEPS, "reason", role=TARGET_ROLE)
        return None if taken is None and not declined else (taken or 0.0, declined)
