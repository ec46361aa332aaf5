# SPDX-License-Identifier: Apache-2.0
"""Counters: what they hand to Prometheus, when, and what they log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_specialized_decode_tree import TREE

from vllm.models.common.specialized_decode import metrics  # isort: skip

SERVED = """
from vllm.models.common.specialized_decode.metrics import StepCounters
counters = StepCounters("kernels", "target")
for rows in (6, 12):
    counters.taken(rows, captured=False)
counters.taken(18, captured=True)
counters.replayed(18, 17)
counters.declined("not decode only")
counters.export()
counters.declined("not decode only")
counters.export()
"""
SCRAPED = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


def in_process(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(TREE), "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_worker_s_counts_are_in_vllm_s_metrics(tmp_path: Path) -> None:
    """As with several API servers: the worker counts in one process, vLLM's registry answers in another."""
    in_process(SERVED, tmp_path)
    shown = in_process(SCRAPED, tmp_path)
    labels = 'kernels="kernels",reason="{}",role="target"'
    for metric, reason, value in (
        ("taken_steps", "", 3.0),
        ("taken_rows", "", 35.0),
        ("declined_steps", "not decode only", 2.0),
    ):
        assert f"vllm:specialized_decode_{metric}_total{{{labels.format(reason)}}} {value}" in shown


def test_without_a_served_registry_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "_counter", lambda metric: pytest.fail(f"{metric} was exported"))
    counters = metrics.StepCounters("kernels", "target")
    counters.taken(6, captured=False)
    counters.export()


def test_other_ranks_neither_export_nor_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "set")
    monkeypatch.setattr(metrics, "_is_first_rank", lambda: False)
    monkeypatch.setattr(metrics, "_counter", lambda metric: pytest.fail(f"{metric} was exported"))
    monkeypatch.setattr(metrics.logger, "info", lambda *_: pytest.fail("logged"))
    counters = metrics.StepCounters("kernels", "target")
    counters.taken(6, captured=False)
    counters.export()
    counters.log()


def test_counts_are_handed_on_when_their_time_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    handed: list[str] = []
    monkeypatch.setattr(metrics.StepCounters, "export", lambda self: handed.append("export"))
    monkeypatch.setattr(metrics.StepCounters, "log", lambda self: handed.append("log"))
    counters = metrics.StepCounters("kernels", "target")
    counters.taken(6, captured=False)
    assert handed == []
    clock[0] += metrics.EXPORT_SECONDS
    counters.declined("rows")
    counters.replayed(6, 6)
    assert handed == ["export"]
    clock[0] += metrics.LOG_SECONDS
    counters.taken(6, captured=False)
    assert handed == ["export", "export", "log"]


def test_the_log_line_says_what_was_taken_and_why_the_rest_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda message, *values: logged.append(message % values))
    counters = metrics.StepCounters("kernels", "draft")
    counters.taken(6, captured=False)
    counters.log()
    counters.log()
    for reason in ("rows", "graph mode", "rows"):
        counters.declined(reason)
    counters.log()
    assert logged == [
        "kernels (draft): 1 steps of 6 rows taken; declined: none",
        "kernels (draft): 1 steps of 6 rows taken; declined: rows 2, graph mode 1",
    ]
