# SPDX-License-Identifier: Apache-2.0
"""Counters of taken and declined steps, for the log and for Prometheus.

The counters are plain integers. A worker hands them on at most every ``EXPORT_SECONDS``, so that a step pays
for an addition and a look at the clock.

vLLM serves the metrics of all its processes where ``PROMETHEUS_MULTIPROC_DIR`` is set: by several API
servers, or by the user. A worker's registry is not served otherwise, and the log line is then all there is.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

EXPORT_SECONDS = 10.0
LOG_SECONDS = 60.0


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
        self.captured_widths: set[int] = set()
        self.declines: Counter[str] = Counter()
        self._exported: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], int] = {}
        self._export_at = time.monotonic() + EXPORT_SECONDS
        self._log_at = time.monotonic() + LOG_SECONDS

    def taken(self, rows: int, captured: bool) -> None:
        """Count a step that the kernels run, or note the width of one that a graph records."""
        if captured:
            self.captured_widths.add(rows)
            return
        self.taken_steps += 1
        self.taken_rows += rows
        self._hand_on()

    def replayed(self, width: int, rows: int) -> None:
        """Count a replay of the FULL graph of ``width`` rows, which runs none of the model's Python.

        Args:
            width: rows of the graph.
            rows: rows of the step in it.
        """
        if width in self.captured_widths:
            self.taken_steps += 1
            self.taken_rows += rows
        else:
            self.declines["captured on vLLM's path"] += 1
        self._hand_on()

    def declined(self, reason: str) -> None:
        """Count a step, or one layer of a taken step, that vLLM's path runs."""
        self.declines[reason] += 1
        self._hand_on()

    def values(self) -> dict[tuple[str, str], int]:
        """Every count, by metric and reason; the reason is empty but for declined steps."""
        taken = {("taken_steps", ""): self.taken_steps, ("taken_rows", ""): self.taken_rows}
        return taken | {("declined_steps", reason): count for reason, count in self.declines.items()}

    def _hand_on(self) -> None:
        now = time.monotonic()
        if now >= self._export_at:
            self._export_at = now + EXPORT_SECONDS
            self.export()
        if now >= self._log_at:
            self._log_at = now + LOG_SECONDS
            self.log()

    def export(self) -> None:
        """Bring the Prometheus counters up to date, where vLLM serves those of its workers."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ or not _is_first_rank():
            return
        for key, value in self.values().items():
            metric, reason = key
            if added := value - self._exported[key]:
                _counter(metric).labels(self.name, self.role, reason).inc(added)
                self._exported[key] = value

    def log(self) -> None:
        """Log the counts when they changed."""
        values = self.values()
        if values == self._logged or not _is_first_rank():
            return
        self._logged = values
        declined = ", ".join(f"{reason} {count}" for reason, count in self.declines.most_common())
        logger.info(
            "%s (%s): %d steps of %d rows taken; declined: %s",
            self.name,
            self.role,
            self.taken_steps,
            self.taken_rows,
            declined or "none",
        )


def _is_first_rank() -> bool:
    # All TP ranks count alike: one of them speaks.
    from vllm.distributed import get_tensor_model_parallel_rank, model_parallel_is_initialized

    return not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0


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
