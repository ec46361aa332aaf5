# SPDX-License-Identifier: Apache-2.0
"""Counters: what they hand to Prometheus, when, and what they log."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_specialized_decode_tree import TREE

import vllm.distributed as distributed  # isort: skip
from vllm.models.common.specialized_decode import metrics, report  # isort: skip

SERVED = """
from vllm.models.common.specialized_decode.metrics import StepCounters
counters = StepCounters("kernels", "target")
for rows in (6, 12):
    counters.taken(rows)
counters.recorded(18, True, [])
counters.replayed(18, 17)
counters.declined("not decode only")
counters.export()
counters.declined("not decode only")
"""
SCRAPED = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""


@pytest.fixture(autouse=True)
def own_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose thread never starts: whether an earlier test of this process began one must not matter."""
    hand_over = metrics.HandOver()
    hand_over._started = True
    monkeypatch.setattr(metrics, "_hand_over", hand_over)


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
    """As with several API servers: the worker counts in one process, vLLM's registry answers in another. What
    the worker counts last it hands on as it ends."""
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
    counters.taken(6)
    counters.export()


def test_other_ranks_neither_export_nor_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "set")
    monkeypatch.setattr(metrics, "counts_for_all", lambda: False)
    monkeypatch.setattr(metrics, "_counter", lambda metric: pytest.fail(f"{metric} was exported"))
    monkeypatch.setattr(metrics.logger, "info", lambda *_: pytest.fail("logged"))
    monkeypatch.setattr(metrics._hand_over, "watch", lambda *_: pytest.fail("watched"))
    counters = metrics.StepCounters("kernels", "target")
    counters.taken(6)
    counters.export()
    counters.log()


# (TP rank, whether its stage is the last) and who logs a stage's table, who hands on what all of them count.
RANKS = {
    (0, True): (True, True),
    (0, False): (True, False),
    (1, True): (False, False),
    (3, False): (False, False),
}


@pytest.mark.parametrize("rank", RANKS)
def test_one_rank_speaks_for_those_that_count_alike(
    monkeypatch: pytest.MonkeyPatch, rank: tuple[int, bool]
) -> None:
    tp_rank, last = rank
    monkeypatch.setattr(distributed, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_rank", lambda: tp_rank)
    monkeypatch.setattr(distributed, "get_pp_group", lambda: SimpleNamespace(is_last_rank=last))
    assert (report.reports(), report.counts_for_all()) == RANKS[rank]


def test_a_process_without_vllm_s_groups_speaks_for_itself() -> None:
    assert not distributed.model_parallel_is_initialized()
    assert report.reports() and report.counts_for_all()


def test_counts_are_handed_on_without_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause of the thread hands on; every sixth one logs."""
    pauses: list[float] = []

    class Pause:
        def wait(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) > 7:
                raise SystemExit

    handed: list[str] = []
    # Of this module alone: other threads of the test process make events, too.
    monkeypatch.setattr(metrics, "threading", SimpleNamespace(Event=Pause, Lock=threading.Lock))
    monkeypatch.setattr(metrics.StepCounters, "export", lambda self: handed.append("export"))
    monkeypatch.setattr(metrics.StepCounters, "log", lambda self: handed.append("log"))
    hand_over = metrics.HandOver()
    hand_over._counters.add(counters := metrics.StepCounters("kernels", "target"))
    with pytest.raises(SystemExit):
        hand_over._run()
    assert counters.taken_steps == 0 and set(pauses) == {metrics.EXPORT_SECONDS}
    assert handed == ["export"] * 6 + ["log", "export"]


def test_a_failed_hand_over_stops_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> None:
        raise OSError("no space left")

    failures: list[str] = []
    monkeypatch.setattr(metrics.StepCounters, "export", full)
    monkeypatch.setattr(metrics.logger, "exception", lambda text, *values: failures.append(text % values))
    hand_over = metrics.HandOver()
    kept = [metrics.StepCounters("kernels", role) for role in ("target", "draft")]
    hand_over._counters.update(kept)
    for _ in range(2):
        hand_over.hand_on(log=True)
    expected = [f"kernels ({role}): the counts were not handed on" for role in ("draft", "target")] * 2
    assert sorted(failures) == sorted(expected)


def test_the_first_counts_start_one_thread_and_the_last_hand_over_exports_and_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed: list[str] = []
    started: list[Any] = []
    at_exit: list[Any] = []
    monkeypatch.setattr(metrics, "_hand_over", metrics.HandOver())
    thread = lambda **given: started.append(given) or SimpleNamespace(start=lambda: None)  # noqa: E731
    monkeypatch.setattr(metrics, "threading", SimpleNamespace(Thread=thread))
    register = lambda call, **given: at_exit.append((call, given))  # noqa: E731
    monkeypatch.setattr(metrics.atexit, "register", register)
    monkeypatch.setattr(metrics.StepCounters, "export", lambda self: handed.append(f"export {self.role}"))
    monkeypatch.setattr(metrics.StepCounters, "log", lambda self: handed.append(f"log {self.role}"))
    kept = [metrics.StepCounters("kernels", role) for role in ("target", "draft")]
    assert len(kept) == 2 and len(started) == 1 and started[0]["daemon"]
    ((call, given),) = at_exit
    call(**given)
    assert sorted(handed) == ["export draft", "export target", "log draft", "log target"]


def test_counters_that_a_model_leaves_behind_are_freed() -> None:
    counters = metrics.StepCounters("kernels", "target")
    dead = weakref.ref(counters)
    del counters
    gc.collect()
    assert dead() is None


def test_the_log_line_says_what_was_taken_and_why_the_rest_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda message, *values: logged.append(message % values))
    counters = metrics.StepCounters("kernels", "draft")
    counters.taken(6)
    counters.log()
    counters.log()
    for reason in ("rows", "graph mode", "rows"):
        counters.declined(reason)
    counters.log()
    assert logged == [
        "kernels (draft): 1 steps of 6 rows taken; declined: none",
        "kernels (draft): 1 steps of 6 rows taken; declined: rows 2, graph mode 1",
    ]
