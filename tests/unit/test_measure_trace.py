# SPDX-License-Identifier: Apache-2.0
"""Launches a decode step from a profiler trace: by launch, not by when the GPU ran it; decode steps alone."""

import gzip
import json

import pytest

from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import records, trace
from tests.published_figures import SWA_LAUNCH_TOTALS, SWA_LAUNCHES, swa_records


class Trace:
    """Builds a trace: each step's GPU work is launched in it and runs ``late_us`` after."""

    def __init__(self, late_us=0.0):
        self.events, self.time, self.late_us, self.correlation = [], 0.0, late_us, 0

    def step(self, launches, context=0, generation=1):
        name = f"execute_context_{context}({8 * context})_generation_{generation}({6 * generation})"
        self.events.append({"cat": "user_annotation", "name": name, "ts": self.time, "dur": 10.0})
        for kernel, number in launches.items():
            for _ in range(number):
                self.work(kernel)
        self.time += 100.0
        return self

    def work(self, kernel):
        self.correlation += 1
        self.time += 1.0
        link = {"correlation": self.correlation}
        kind = "gpu_memcpy" if "copy" in kernel else "kernel"
        launch = {"cat": "cuda_runtime", "name": "hipLaunchKernel", "ts": self.time, "dur": 1.0, "args": link}
        run = {"cat": kind, "name": kernel, "ts": self.time + self.late_us, "dur": 2.0, "args": link}
        # The file is in no order of time.
        self.events[:0] = [run, launch]

    def end(self):
        return self.step({}, context=1).events


def published(arm, steps=133, odd=18):
    built = Trace(late_us=150.0)
    for index in range(steps):
        extra = {"FillFunctor<int>": SWA_LAUNCHES[arm]["FillFunctor<int>"] + 3} if index < odd else {}
        built.step(SWA_LAUNCHES[arm] | extra)
    return built.end()


@pytest.mark.parametrize("arm", SWA_LAUNCHES)
def test_the_published_counts_come_out_of_a_trace_of_133_steps(arm):
    found = trace.count(published(arm), "trace")
    assert found.by_kernel == SWA_LAUNCHES[arm]
    total = SWA_LAUNCH_TOTALS[arm]
    assert (found.steps, found.usual, found.totals) == (133, 115, {total: 115, total + 3: 18})


def test_work_that_runs_in_the_next_step_belongs_to_the_step_that_launched_it():
    events = Trace(late_us=1000.0).step({"a": 3}).step({"b": 1}).step({"a": 3}).step({"a": 3}).end()
    found = trace.count(events, "trace")
    assert found.totals == {1: 1, 3: 3}
    assert found.gpu_us["a"] == 6.0


def test_steps_with_a_prefill_and_the_last_step_are_left_out():
    events = Trace().step({"p": 9}, context=1).step({"d": 2}).step({"d": 2}).step({"d": 1}).events
    found = trace.count(events, "trace")
    assert (found.steps, found.by_kernel) == (2, {"d": 2})


def test_the_detailed_annotation_is_read_too():
    events = Trace().step({"d": 2}).end()
    for event in events:
        event["name"] = event["name"].replace(
            "execute_context_0(0)_generation_1(6)",
            "execute_6_context_0(sq0sk0sqsq0sqsk0)_generation_1(sq6sk70sqsq36sqsk420)",
        )
    assert trace.count(events, "trace").by_kernel == {"d": 2}


def test_a_trace_without_a_decode_step_or_a_launch_is_refused():
    with pytest.raises(OverlayError, match="no whole decode step"):
        trace.count(Trace().step({"p": 1}, context=1).step({"d": 1}).events, "trace")
    events = [event for event in Trace().step({"d": 1}).end() if event["cat"] != "cuda_runtime"]
    with pytest.raises(OverlayError, match="without its launch"):
        trace.count(events, "trace")


def test_the_verb_reads_a_compressed_trace_and_compare_shows_its_launches(tmp_path, capsys):
    sets = {}
    for arm, found in zip(("base", "PR"), swa_records(), strict=True):
        sets[arm] = tmp_path / arm
        kept = records.ResultSet(sets[arm])
        for record in found:
            kept.append(records.from_json(json.loads(record.line()) | {"launches": {}}, "line"))
        file = tmp_path / f"{arm}.json.gz"
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": published(arm)}).encode()))
        before = (sets[arm] / "runs.jsonl").read_bytes()
        words = ["bench-trace", str(file), "--out", str(sets[arm]), "--arm", arm, "--point", "32k/1k c1"]
        assert main(words) == 0
        assert (sets[arm] / "runs.jsonl").read_bytes() == before
    assert "133 decode steps; launches: 65 in 115" in capsys.readouterr().out
    words = ["--quantity", "itl_p50_ms", "--out", str(tmp_path / "out")]
    assert main(["compare", *map(str, sets.values()), *words]) == 0
    assert "| all launches | 114 | 65 |" in capsys.readouterr().out


def test_what_is_no_trace_or_no_run_is_named(tmp_path, capsys):
    file = tmp_path / "trace.json"
    file.write_text("{}")
    assert main(["bench-trace", str(file)]) == 2
    file.write_text(json.dumps({"traceEvents": published("PR")}))
    records.ResultSet(tmp_path / "set").append(swa_records()[0][0])
    assert main(["bench-trace", str(file), "--out", str(tmp_path / "set"), "--arm", "other"]) == 2
    error = capsys.readouterr().err
    assert "is no torch-profiler trace" in error and "has no run of other" in error
