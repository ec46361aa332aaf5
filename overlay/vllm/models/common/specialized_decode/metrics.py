# SPDX-License-Identifier: Apache-2.0
"""Counters of taken and declined steps, for the log and for Prometheus.

The counters are plain integers, so that a step pays for an addition. A thread hands them on, with or without
a next step, and once more when the process ends.

vLLM serves the metrics of all its processes where ``PROMETHEUS_MULTIPROC_DIR`` is set: by several API
servers, or by the user. A worker's registry is not served otherwise, and the log line is then all there is.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.models.common.specialized_decode.report import counts_for_all

logger = init_logger(__name__)

EXPORT_SECONDS = 10.0
EXPORTS_A_LOG_LINE = 6
NO_KERNELS_IN_GRAPH = "captured on vLLM's path"


@dataclass(frozen=True)
class Graph:
    """What a FULL graph recorded: whether the kernels run in it, and why some launch does not."""

    taken: bool
    declines: tuple[str, ...]


class StepCounters:
    """Steps of one model.

    Args:
        name: the kernels.
        role: which of the deployment's models.
    """

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.taken_steps = 0
        self.taken_rows = 0
        self.graphs: dict[int, Graph] = {}
        self.declines: Counter[str] = Counter()
        self._exported: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], int] = {}
        # Read while vLLM's groups are there: when the process ends they are gone.
        self._speaks = counts_for_all()
        if self._speaks:
            _hand_over.watch(self)

    def taken(self, rows: int) -> None:
        """Count a step that the kernels run."""
        self.taken_steps += 1
        self.taken_rows += rows

    def declined(self, reason: str) -> None:
        """Count a step of which vLLM's path runs all layers, or some."""
        self.declines[reason] += 1

    def recorded(self, width: int, taken: bool, declines: Sequence[str]) -> None:
        """Note what a FULL graph records for its replays; that is no step."""
        self.graphs[width] = Graph(taken, tuple(declines))

    def declined_in_graph(self, width: int, reason: str) -> None:
        """Note that vLLM's path runs some layers of a graph that the kernels are in."""
        graph = self.graphs[width]
        if reason not in graph.declines:
            self.graphs[width] = Graph(graph.taken, (*graph.declines, reason))

    def replayed(self, width: int, rows: int) -> bool:
        """Count a replay of the FULL graph of ``width`` rows.

        Args:
            width: rows of the graph.
            rows: rows of the step in it.

        Returns:
            Whether the kernels run in it.
        """
        graph = self.graphs.get(width)
        if graph is None or not graph.taken:
            self.declined(NO_KERNELS_IN_GRAPH)
            return False
        self.taken(rows)
        for reason in graph.declines:
            self.declined(reason)
        return True

    def values(self) -> dict[tuple[str, str], int]:
        """Every count, by metric and reason; the reason is empty but for declined steps."""
        taken = {("taken_steps", ""): self.taken_steps, ("taken_rows", ""): self.taken_rows}
        # Copied, since a step may add a reason while the thread reads.
        return taken | {("declined_steps", reason): count for reason, count in self.declines.copy().items()}

    def export(self) -> None:
        """Bring the Prometheus counters up to date, where vLLM serves those of its workers."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ or not self._speaks:
            return
        for key, value in self.values().items():
            metric, reason = key
            if added := value - self._exported[key]:
                _counter(metric).labels(self.name, self.role, reason).inc(added)
                self._exported[key] = value

    def log(self) -> None:
        """Log the counts when they changed."""
        values = self.values()
        if values == self._logged or not self._speaks:
            return
        self._logged = values
        declines = sorted(self.declines.copy().items(), key=lambda one: -one[1])
        logger.info(
            "%s (%s): %d steps of %d rows taken; declined: %s",
            self.name,
            self.role,
            self.taken_steps,
            self.taken_rows,
            ", ".join(f"{reason} {count}" for reason, count in declines) or "none",
        )


class HandOver:
    """Hands the counts of a process on: every ``EXPORT_SECONDS``, and when the process ends."""

    def __init__(self) -> None:
        self._counters: weakref.WeakSet[StepCounters] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._started = False

    def watch(self, counters: StepCounters) -> None:
        """Hand these counts on too. The first ones start the thread."""
        with self._lock:
            self._counters.add(counters)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="specialized-decode-metrics", daemon=True).start()
                atexit.register(self.hand_on, log=True)

    def _run(self) -> None:
        pause = threading.Event()
        for beat in itertools.count(1):
            pause.wait(EXPORT_SECONDS)
            self.hand_on(log=beat % EXPORTS_A_LOG_LINE == 0)

    def hand_on(self, log: bool) -> None:
        """Export every count, and log those that changed. A failure stops no later hand-over."""
        with self._lock:
            for counters in tuple(self._counters):
                try:
                    counters.export()
                    if log:
                        counters.log()
                except Exception:
                    logger.exception("%s (%s): the counts were not handed on", counters.name, counters.role)


_hand_over = HandOver()
_counters: dict[str, Any] = {}


def _counter(metric: str) -> Any:
    from prometheus_client import Counter as PrometheusCounter

    if metric not in _counters:
        _counters[metric] = PrometheusCounter(
            f"vllm:specialized_decode_{metric}",
            f"Specialised decode: {metric.replace('_', ' ')}.",
            labelnames=("kernels", "role", "reason"),
        )
    return _counters[metric]
