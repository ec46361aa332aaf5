# SPDX-License-Identifier: Apache-2.0
"""``bench-host``: its figures, its verdict, and the count of lines in upstream's model files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from rocm_overlay import bench_host
from rocm_overlay.errors import OverlayError
from rocm_overlay.project import Project

PROJECT = Project.find()
HARNESS = Path(__file__).parents[1] / "harness"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_host.register(parser.add_subparsers())
    return parser.parse_args(["bench-host", *words])


def test_ours_does_at_most_half_of_the_work_of_vllm_s() -> None:
    """Bytecodes and calls of a step, the same in every run: the goal for every commit."""
    trees = {bench_host.VLLM: PROJECT.base, bench_host.OURS: PROJECT.tree}
    works = bench_host.count(trees, HARNESS)
    assert [one.case for one in works] == list(bench_host.CASES)
    assert {one.case: one for one in works if one.ratio > bench_host.GOAL} == {}


def test_work_is_counted_in_bytecodes_and_calls_of_the_second_step() -> None:
    seen: list[int] = []

    def step() -> None:
        seen.append(len(seen))
        if len(seen) % 2 == 0:
            for _ in range(10):
                len(seen)

    bytecodes, calls = bench_host._work(step)
    assert len(seen) == 4, "one to settle and one to count, for each of the two counts"
    assert calls == 1 + 3 + 10 + 1, "step; append, len twice; len ten times; the watch's end"
    assert bench_host._work(step) == (bytecodes, calls) and bytecodes > 10 * 4


@pytest.mark.parametrize(
    ("ours", "ratio"), [((50, 5), 0.5), ((51, 5), 0.51), ((10, 6), 0.6)], ids=["half", "bytecodes", "calls"]
)
def test_the_worse_of_bytecodes_and_calls_counts(ours: tuple[int, int], ratio: float) -> None:
    assert bench_host.Work("a case", vllm=(100, 10), ours=ours).ratio == ratio


# Times on a machine that others use decide nothing about a commit: make bench-host measures, make test-full
# holds it to the goal.
@pytest.mark.full
def test_ours_takes_at_most_half_of_the_host_time_of_vllm_s() -> None:
    trees = {bench_host.VLLM: PROJECT.base, bench_host.OURS: PROJECT.tree}
    figures = bench_host.measure(trees, HARNESS, steps=300, turns=3)
    assert [one.case for one in figures] == list(bench_host.CASES)
    assert {one.case: one.ratio for one in figures if one.ratio > bench_host.GOAL} == {}


def turns(ours_us: float, ours_calls: int) -> Any:
    """Sides of which vLLM's takes 100 us, 1000 bytecodes and 100 calls, and ours 10 bytecodes."""

    def turn(side: str, tree: Path, harness: Path, steps: int) -> dict[str, Any]:
        vllm = side == bench_host.VLLM
        time_us, work = (100.0, [1000, 100]) if vllm else (ours_us, [10, ours_calls])
        return dict.fromkeys(bench_host.CASES, time_us if steps else work)

    return turn


@pytest.mark.parametrize(
    ("ours", "status", "said"),
    [
        ((50.0, 50), 0, "largest ratio 0.50, goal 0.5: reached"),
        ((51.0, 50), 1, "largest ratio 0.51, goal 0.5: not reached"),
        ((50.0, 52), 1, "largest ratio 0.52, goal 0.5: not reached"),
    ],
    ids=["reached", "time", "work"],
)
def test_the_verdict(
    ours: tuple[float, int],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_host, "_turn", turns(*ours))
    chosen = arguments()
    assert chosen.run(chosen) == status
    shown = capsys.readouterr().out
    assert f"decode step, whole layers   100.0  {ours[0]}  {ours[0] / 100:.2f}" in shown and said in shown
    assert f"decode step, whole layers        1000 100  10 {ours[1]}  {ours[1] / 100:.2f}" in shown
    assert "vllm/models/deepseek_v41/amd/model.py" in shown


def test_a_side_s_fastest_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([30.0, 9.0, 10.0, 2.0, 20.0, 3.0])
    monkeypatch.setattr(bench_host, "_turn", lambda *_: dict.fromkeys(bench_host.CASES, next(values)))
    figures = bench_host.measure({bench_host.VLLM: Path(), bench_host.OURS: Path()}, Path(), 1, turns=3)
    assert {(one.vllm_us, one.ours_us) for one in figures} == {(10.0, 2.0)}


def test_a_missing_tree_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"ours: .*vllm is missing"):
        bench_host._turn("ours", tmp_path, HARNESS, 1)


def test_a_side_that_fails_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    with pytest.raises(OverlayError, match=r"No module named 'vllm\.models'"):
        bench_host._turn("ours", tmp_path, HARNESS, 1)


def test_nothing_to_measure_is_an_error() -> None:
    chosen = arguments("--steps", "0")
    with pytest.raises(OverlayError, match="nothing to measure"):
        chosen.run(chosen)


def test_the_series_adds_fewer_lines_to_each_model_file_than_the_base_spends_on_mono() -> None:
    lines = {Path(one.path).name: one for one in bench_host.model_lines(PROJECT.base, PROJECT.patches)}
    assert all(lines[name].added < lines[name].base for name in ("model.py", "dspark.py", "rocm.py"))
    # The base has no mono line where its served class names its state; ours counts replays there.
    assert (lines["vl_model.py"].base, lines["vl_model.py"].added) == (0, 2)
    assert sum(one.added for one in lines.values()) < sum(one.base for one in lines.values())


def test_lines_that_name_mono_decode_are_counted_with_what_they_guard() -> None:
    source = "import mono\nx = 1\nif x:\n    y = self.mono(\n        x)\n    z = 2\n"
    source += "if self.mono:\n    a = 1\n    b = 2\nelse:\n    c = 3\n"
    assert bench_host.mono_lines(source) == 1 + 2 + 3
