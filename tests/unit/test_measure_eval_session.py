# SPDX-License-Identifier: Apache-2.0
"""The gate over arms: each is served in turn, asked the same and compared with the first; nothing is lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from rocm_overlay.cli import main
from rocm_overlay.measure import accuracy, bench, evaluate
from rocm_overlay.measure import server as server_module
from rocm_overlay.project import Project

ROOT = Project.find().root
TASKS = ["--needle-tokens", "256", "--shots", "4"]
# Of the 20 questions behind 4 shots: one, and ten.
ONE_WRONG, MANY_WRONG = r"7 boxes with 9 pears each. 3 pears", r"[12] pears are eaten"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


class Arms:
    """A session file of two arms. What a server does beside answering rightly is words of a file: its command
    stays the same when it does something else."""

    def __init__(self, folder, arms=("base", "pr")):
        self.folder, self.port, self.file = folder, free_port(), folder / "arms.yaml"
        self.out = folder / "set"
        words = [sys.executable, "-m", "tests.scripted_server", "--port", "{port}", "--solve"]
        self.document = {
            "ready_timeout_s": 60,
            "halves": {"node": {"port": self.port, "env": {"HIP_VISIBLE_DEVICES": "0"}}},
            "arms": {
                name: {"command": [*words, f"@{folder / name}-words"], "env": {"PYTHONPATH": str(ROOT)}}
                for name in arms
            },
        }
        for name in arms:
            self.does(name)
        self.write()

    def write(self):
        self.file.write_text(yaml.safe_dump(self.document, sort_keys=False))

    def does(self, arm, *words):
        (self.folder / f"{arm}-words").write_text("".join(f"{word}\n" for word in words))

    def words(self, *words):
        return ["eval", "mi355x-tp4", "--session", str(self.file), "--out", str(self.out), *TASKS, *words]

    def eval(self, *words):
        status = main(self.words(*words))
        assert not listens(self.port), "a server was left"
        return status

    def answers(self, arm):
        return accuracy.read_answers(self.out / "arms" / arm)


@pytest.fixture
def arms(tmp_path):
    return Arms(tmp_path)


def test_arms_that_answer_alike_pass_and_are_compared_by_question(arms, capsys):
    assert arms.eval() == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    for task, size in (("two-pass-1", 20), ("two-pass-2", 20), ("needle-256", 4)):
        same = f"1.0000 ± 0.0000 ({size})"
        assert f"| {task} | {same} | {same} | +0.0000 ± 0.0000 | inside the error |" in printed.out
    assert printed.out == (arms.out / "compare.md").read_text()
    assert "| pr | ok | second pass | 100.0% prefix hits, wanted 90% |" in printed.out
    progress = re.findall(r"^(arm \w+ \(\d/2\)): (started|ready)", printed.err, re.MULTILINE)
    assert progress == [
        ("arm base (1/2)", "started"), ("arm base (1/2)", "ready"),
        ("arm pr (2/2)", "started"), ("arm pr (2/2)", "ready"),
    ]  # fmt: skip


def test_an_arm_that_answers_wrongly_is_called_lower(arms, capsys):
    arms.does("pr", "--wrong", MANY_WRONG)
    assert arms.eval("--task", "two-pass") == 1
    printed = capsys.readouterr()
    assert len(re.findall(r"\| two-pass-[12] \|.*\| lower \|", printed.out)) == 2
    assert "called lower:\n  pr against base: two-pass-1 -0." in printed.err and "faults:" not in printed.err


def test_the_first_arm_is_the_one_that_others_are_held_to(arms, capsys):
    arms.does("base", "--wrong", MANY_WRONG)
    assert arms.eval("--task", "two-pass") == 0
    assert len(re.findall(r"\| two-pass-[12] \|.*\| higher \|", capsys.readouterr().out)) == 2


def test_a_difference_inside_the_error_is_not_called(arms, capsys):
    arms.does("pr", "--wrong", ONE_WRONG)
    assert arms.eval("--task", "two-pass") == 0
    assert "| -0.0500 ± 0.0500 | inside the error |" in capsys.readouterr().out


def test_an_arm_that_fails_its_gate_fails_the_session_though_it_is_not_lower(arms, capsys):
    for arm in ("base", "pr"):
        arms.does(arm, "--wrong", "cellar")
    assert arms.eval("--task", "needles") == 1
    printed = capsys.readouterr()
    assert "| needle-256 | 0.0000 ± 0.0000 (4) | 0.0000 ± 0.0000 (4) |" in printed.out
    assert "faults:\n  base: needle-256: 0 of 4 found\n  pr: needle-256: 0 of 4 found\n" in printed.err


def test_every_arm_is_compared_with_the_first(tmp_path, capsys):
    """The third is as the first, and would be called lower than the second."""
    arms = Arms(tmp_path, ("base", "better", "same"))
    for arm in ("base", "same"):
        arms.does(arm, "--wrong", MANY_WRONG)
    assert arms.eval("--task", "two-pass") == 0
    out = capsys.readouterr().out
    better, same = out.partition("## better against base")[2].split("## same against base")
    assert better.count("| higher |") == 2 and same.count("| inside the error |") == 2


def test_what_eval_prints_as_arms_is_a_session_of_one_port(arms, capsys, monkeypatch):
    assert main(["eval", "mi325x-tp4", "--arms"]) == 0
    arms.file.write_text(capsys.readouterr().out)
    found, halves, ready = bench.read_arms(arms.file, in_turn=True)
    assert len(found) == 4 and [half.port for half in halves] == [8000] and ready == 3600
    # Here is no such program, which is said of the first arm before any is served.
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["eval", "mi325x-tp4", "--session", str(arms.file), "--out", str(arms.out)]) == 2
    error = capsys.readouterr().err
    assert (
        "arms.full_decode_only-kernels.command" in error
        and "rocm-overlay-entrypoint, which is no prog" in error
    )
    assert not arms.out.exists()


def test_a_complete_arm_is_not_served_again(arms, capsys):
    assert arms.eval() == 0
    kept = {arm: arms.answers(arm) for arm in ("base", "pr")}
    first = capsys.readouterr().out
    for arm in ("base", "pr"):
        arms.does(arm, "--no-such-word")
    assert arms.eval() == 0
    printed = capsys.readouterr()
    assert printed.out == first and "started" not in printed.err
    assert f"arm pr (2/2): complete in {arms.out}/arms/pr, not served again" in printed.err
    assert {arm: arms.answers(arm) for arm in ("base", "pr")} == kept


def test_a_fault_that_was_found_is_still_one_when_the_arm_is_complete(arms):
    arms.does("pr", "--wrong", "cellar")
    assert arms.eval("--task", "needles") == 1
    arms.does("pr")
    assert arms.eval("--task", "needles") == 1


def test_a_task_more_is_asked_and_the_finished_one_is_not(arms, capsys):
    assert arms.eval("--task", "two-pass") == 0
    capsys.readouterr()
    assert arms.eval("--task", "two-pass", "--task", "needles") == 0
    printed = capsys.readouterr()
    assert "asked needles\n" in printed.err and "two-pass-1:" not in printed.err
    assert "| pr | ok | second pass |" in printed.out and "| needle-256 |" in printed.out


def test_a_server_that_dies_is_named_and_its_answers_are_gone_on_with(arms, capsys):
    arms.does("pr", "--die-after", "7")
    assert arms.eval("--task", "two-pass", "--parallel", "1") == 2
    error = capsys.readouterr().err
    assert "arm pr (2/2) ended" in error and "exit status 3" in error
    assert f"1 of 2 arms are complete, 47 answers are kept in {arms.out}" in error
    assert not (arms.out / "compare.md").exists()
    kept = arms.answers("pr")
    assert len(kept) == 7
    arms.does("pr")
    assert arms.eval("--task", "two-pass", "--parallel", "1") == 0
    printed = capsys.readouterr()
    assert "arm base (1/2): complete" in printed.err and "two-pass-1: 13 asked, 7 kept" in printed.err
    assert arms.answers("pr")[:7] == kept and len(arms.answers("pr")) == 40
    # The other server's cache is gone, so that this pass proves nothing of prefix hits.
    assert "| pr | unknown | second pass | resumed" in printed.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_server_and_the_same_command_goes_on(arms, number):
    arms.does("pr", "--slow-s", "0.3")
    command = [sys.executable, "-m", "rocm_overlay.cli", *arms.words("--task", "two-pass", "--parallel", "1")]
    log, file = arms.folder / "log", arms.out / "arms" / "pr" / "answers.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + 100
    while not file.exists() or file.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.05)
    os.killpg(process.pid, number)
    assert process.wait(60) == 130
    assert not listens(arms.port)
    assert "interrupted; run the same command again to go on: 1 of 2 arms are complete" in log.read_text()
    kept = arms.answers("pr")
    assert 3 <= len(kept) < 40
    arms.does("pr")
    assert arms.eval("--task", "two-pass", "--parallel", "1") == 0
    assert arms.answers("pr")[: len(kept)] == kept and len(arms.answers("pr")) == 40


def test_a_killed_session_leaves_no_server(arms):
    arms.does("base", "--slow-s", "0.3")
    command = [sys.executable, "-m", "rocm_overlay.cli", *arms.words("--task", "two-pass", "--parallel", "1")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 100
    while not listens(arms.port):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    while listens(arms.port):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_does_not_start_is_named_with_its_log(arms, capsys):
    arms.does("base", "--no-such-word")
    assert arms.eval() == 2
    error = capsys.readouterr().err
    assert "arm base (1/2) ended" in error and "unrecognized arguments: --no-such-word" in error
    assert "0 of 2 arms are complete, 0 answers" in error


def test_a_server_that_is_never_ready_is_waited_for_with_progress(arms, capsys, monkeypatch):
    monkeypatch.setattr(server_module, "TELL_S", 0.3)
    arms.document["ready_timeout_s"] = 1
    arms.document["arms"]["base"]["command"] = ["sleep", "60"]
    arms.write()
    assert arms.eval() == 2
    error = capsys.readouterr().err
    assert re.search(r"arm base \(1/2\): no answer from http://127.0.0.1:\d+/health after 0 s of 1 s", error)
    assert "arm base (1/2) is not ready" in error and "ready_timeout_s" in error


def test_a_port_that_is_taken_is_refused(arms, capsys, monkeypatch):
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", arms.port)):
        assert main(arms.words()) == 2
    error = capsys.readouterr().err
    assert (
        "arm base (1/2) cannot be started" in error
        and f"something answers at http://127.0.0.1:{arms.port}" in error
    )
    assert not (arms.out / "arms" / "base" / "server.log").exists()


def changed_command(arms):
    arms.document["arms"]["pr"]["command"].insert(-1, "--interval-s=1")
    return []


def changed_env(arms):
    arms.document["arms"]["pr"]["env"]["VLLM_X"] = "1"
    return []


def changed_half(arms):
    arms.document["halves"]["node"]["env"]["HIP_VISIBLE_DEVICES"] = "1"
    return []


OTHERWISE = {
    "a word of a command": (changed_command, "pr: command ", "--interval-s=1"),
    "a variable": (changed_env, "pr: env ", "VLLM_X=1"),
    "the half's variable": (changed_half, "base: env HIP_VISIBLE_DEVICES=0", "HIP_VISIBLE_DEVICES=1"),
    "shots": (lambda arms: ["--shots", "3"], "two-pass shots 4", "two-pass shots 3"),
    "limit": (lambda arms: ["--limit", "5"], "two-pass limit none", "two-pass limit 5"),
    "the least score": (lambda arms: ["--least", "0.5"], "two-pass least none", "two-pass least 0.5"),
    "the model's name": (lambda arms: ["--model", "x"], "two-pass model ", "two-pass model x"),
    "needles": (lambda arms: ["--needle-tokens", "300"], "needle-tokens [256]", "needle-tokens [300]"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    arms = Arms(tmp_path_factory.mktemp("finished"))
    assert arms.eval() == 0
    return arms


@pytest.mark.parametrize(("change", "seen", "wanted"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_set_is_not_gone_on_with_when_an_arm_is_served_or_asked_otherwise(
    finished, capsys, change, seen, wanted
):
    before, document = (
        {f: f.read_bytes() for f in finished.out.rglob("*.json*")},
        json.dumps(finished.document),
    )
    words = change(finished)
    finished.write()
    try:
        assert finished.eval(*words) == 2
    finally:
        finished.document = json.loads(document)
        finished.write()
    error = capsys.readouterr().err
    assert "was begun otherwise" in error and "--out another folder" in error and "started" not in error
    assert seen in error.partition("wanted:")[0] and wanted in error.partition("wanted:")[2]
    assert {f: f.read_bytes() for f in finished.out.rglob("*.json*")} == before


def test_the_command_and_variables_of_each_arm_are_evidence_without_their_secrets(finished):
    evidence = json.loads((finished.out / "arms" / "pr" / "arm.json").read_text())["evidence"]
    assert "--port '{port}' --solve" in evidence["command"] and "HIP_VISIBLE_DEVICES=0" in evidence["env"]
    assert evidence["recipe"] == "mi355x-tp4" and len(evidence["recipe_hash"]) == 64
    assert "--port '{port}' --solve" in (finished.out / "compare.md").read_text()


BROKEN = {
    "no JSON": "{",
    "no map": "[]",
    "a finding of two": '{"evidence": {}, "options": {}, "findings": {"a": [[true, "x"]]}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_record_of_another_form_is_named(arms, capsys, text):
    (arms.out / "arms" / "pr").mkdir(parents=True)
    (arms.out / "arms" / "pr" / "arm.json").write_text(text)
    assert arms.eval() == 2
    error = capsys.readouterr().err
    assert "arms/pr/arm.json is no record of an arm" in error and "started" not in error


def test_answers_of_which_nothing_says_how_they_were_asked_are_not_gone_on_with(arms, capsys):
    kept = accuracy.AnswerSet(arms.out / "arms" / "pr")
    kept.append(accuracy.Answer("pr", "two-pass-1", "0", 1, 1.0))
    assert arms.eval() == 2
    assert "command not recorded" in capsys.readouterr().err


COMMAND, SERVED = {"command": ["true", "{port}"]}, {"urls": {"node": "http://h:1"}}
WRONG_FILES = {
    "no arms": ({"arms": {}}, "arms is not as a session has it"),
    "an unknown field": ({"arm": {}}, "the session is not as a session has it"),
    "one arm": ({"arms": {"a": COMMAND}}, "a alone"),
    "an arm that somebody serves": ({"arms": {"a": COMMAND, "b": SERVED}}, "--url URL --arm b"),
    "traces": ({"arms": {"a": COMMAND, "b": {**COMMAND, "traces": "x"}}}, "arms.b.traces"),
    "no such program": ({"arms": {"a": COMMAND, "b": {"command": ["no-such"]}}}, "no-such, which"),
    "another path": ({"arms": {"a": COMMAND, "b": {**COMMAND, "env": {"PATH": "/x"}}}}, "arms.b.command"),
    "no port": ({"halves": {"node": {}}}, "a port for each half"),
    "a folder for a name": ({"arms": {"../a": COMMAND, "b": COMMAND}}, "a name of letters"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "says"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_file_that_is_wrong_is_refused_before_a_server_is_started(arms, capsys, change, says):
    arms.document |= change
    arms.write()
    assert arms.eval() == 2
    error = capsys.readouterr().err
    assert says in error and "wanted:" in error and "fix:" in error
    assert not arms.out.exists()


WRONG_WORDS = {
    "an address too": (["--url", "http://h:1"], "eval takes one of its ways to a server"),
    "a list too": (["--arms"], "eval takes one of its ways to a server"),
    "a name of one arm": (["--arm", "x"], "--arm is for one server"),
    "a range to store": (["--store-acceptance", "x.json"], "--store-acceptance is for one server"),
    "a task that is none": (["--task", "mmlu"], "no lm-eval profile mmlu"),
    "no such data": (["--data", "/nowhere.jsonl"], "/nowhere.jsonl is missing"),
    "no such range": (["--acceptance", "/nowhere.json"], "/nowhere.json is missing"),
    "no such file": (["--session", "/nowhere.yaml"], "/nowhere.yaml is missing"),
    "a file for a folder": (["--out", __file__], "--out is no folder"),
}


@pytest.mark.parametrize(("words", "says"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_words_are_named_before_a_server_is_started(arms, capsys, words, says):
    assert arms.eval(*words) == 2
    assert says in capsys.readouterr().err
    assert not arms.out.exists()


def test_the_gate_names_the_tasks_that_its_answers_are_kept_under():
    gate = evaluate.Gate("m", ("needles", "gsm8k"), (), (256, 512), 1, 1.0)
    assert gate.answer_tasks() == {"needle-256", "needle-512", "gsm8k"}
