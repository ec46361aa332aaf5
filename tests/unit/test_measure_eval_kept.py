# SPDX-License-Identifier: Apache-2.0
"""What an evaluation keeps is what was asked: other questions are not taken for it, and no end loses any."""

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from rocm_overlay.cli import main
from rocm_overlay.measure import accuracy, tasks
from rocm_overlay.measure.accuracy import Answer
from rocm_overlay.project import Project
from tests.scripted_server import Script, ScriptedServer, solver
from tests.unit.test_measure_eval import gate, second_pass_is_wrong

ROOT = Project.find().root


@pytest.fixture
def server():
    with ScriptedServer(Script(answers=solver())) as running:
        yield running


def problems(folder, eaten):
    lines = [
        {
            "question": f"4 boxes with {each} pears each. {eaten} are eaten.",
            "answer": f"#### {4 * each - eaten}",
        }
        for each in range(2, 12)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["--data", str(folder / "data.jsonl")]


@pytest.mark.parametrize("change", [["--shots", "3"], ["--max-tokens", "7"], "other data"])
def test_answers_to_other_questions_are_not_gone_on_with(server, tmp_path, capsys, change):
    words = ["--task", "two-pass", *problems(tmp_path, 1)]
    assert gate(server, tmp_path / "set", *words) == 0
    before, asked = (tmp_path / "set" / "answers.jsonl").read_text(), server.completions
    changed = problems(tmp_path, 2) if change == "other data" else change
    assert gate(server, tmp_path / "set", *words, *changed) == 2
    error = capsys.readouterr().err
    assert "was begun otherwise" in error and "base, two-pass-1, question 0 was another one" in error
    assert (tmp_path / "set" / "answers.jsonl").read_text() == before and server.completions == asked
    # Another arm asks them; and arms that were asked other things are not compared.
    assert gate(server, tmp_path / "set", *words, *changed, arm="other") == 0
    assert main(["eval-compare", f"{tmp_path / 'set'}:base", f"{tmp_path / 'set'}:other"]) == 2
    count = change == ["--shots", "3"]
    assert f"two-pass-1: the arms {'answered other questions' if count else 'were asked other things'}" in (
        capsys.readouterr().err
    )


def test_more_questions_are_gone_on_with(server, tmp_path, capsys):
    assert gate(server, tmp_path, "--task", "two-pass", "--limit", "5") == 0
    capsys.readouterr()
    assert gate(server, tmp_path, "--task", "two-pass", "--limit", "8") == 0
    printed = capsys.readouterr()
    assert "3 asked, 5 kept" in printed.err
    assert "unknown: second pass: resumed, so that its hits are not those of a whole pass" in printed.out


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_server_that_writes_nothing_fails_the_gate(tmp_path, capsys, text):
    with ScriptedServer(Script(answers=lambda prompt: text)) as server:
        assert gate(server, tmp_path, "--task", "two-pass") == 1
    out = capsys.readouterr().out
    assert "FAULT: text: 40 of 40 answers are empty" in out


def test_passes_in_which_nothing_is_right_prove_nothing(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver(lambda prompt: True))) as server:
        assert gate(server, tmp_path, "--task", "two-pass") == 0
    assert "unknown: passes:" in capsys.readouterr().out


def test_a_single_question_proves_nothing_of_the_passes(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver(second_pass_is_wrong()))) as server:
        assert gate(server, tmp_path, "--task", "two-pass", "--limit", "1") == 0
    assert "unknown: passes: second less first pass -1.0000 ± N/A" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_at_once_and_keeps_what_came(tmp_path, number):
    late = tasks.arithmetic(tasks.made_problems(28), 8)[1].prompt

    def answer(prompt):
        if prompt == late:
            time.sleep(60)
        return solver()(prompt)

    with ScriptedServer(Script(answers=answer)) as server:
        words = ["--url", server.url, "--out", str(tmp_path / "set"), "--task", "two-pass", "--parallel", "2"]
        command = [sys.executable, "-m", "rocm_overlay.cli", "eval", "mi355x-tp4", *words]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline, file = time.monotonic() + 50, tmp_path / "set" / "answers.jsonl"
        # All but the late one, of which an early place in the order must keep none of the others back.
        while not file.exists() or file.read_bytes().count(b"\n") < 19:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        started = time.monotonic()
        os.killpg(process.pid, number)
        assert process.wait(30) == 130
        assert time.monotonic() - started < 15, "not after the late answer"
        kept = accuracy.read_answers(tmp_path / "set")
        server.script.answers = solver()
        assert main(["eval", "mi355x-tp4", *words]) == 0
    assert accuracy.read_answers(tmp_path / "set")[: len(kept)] == kept


@pytest.mark.parametrize(
    "words, says",
    [
        (["--task", "two-pass", "--task", "mmlu"], "no lm-eval profile mmlu"),
        (["--acceptance", "nowhere.json"], "nowhere.json is missing"),
        (["--store-acceptance", "nowhere/range.json"], "--store-acceptance has no folder"),
    ],
)
def test_what_would_fail_at_the_end_is_said_before_anything_is_asked(server, tmp_path, capsys, words, says):
    assert gate(server, tmp_path, *words) == 2
    assert says in capsys.readouterr().err
    assert server.completions == 0


@pytest.mark.parametrize(
    "positions", ["[]", "[[NaN, 1]]", "[[0.5, 0.4]]", "[[0, 2]]", '[["a", 1]]', "[1]", "3"]
)
def test_a_range_that_is_none_is_refused(server, tmp_path, capsys, positions):
    (tmp_path / "range.json").write_text(f'{{"positions": {positions}}}')
    assert gate(server, tmp_path, "--acceptance", str(tmp_path / "range.json")) == 2
    assert "holds no acceptance range" in capsys.readouterr().err and server.completions == 0


def test_no_range_is_stored_of_a_resumed_pass(server, tmp_path, capsys):
    file = tmp_path / "range.json"
    assert gate(server, tmp_path / "set", "--task", "two-pass", "--limit", "2") == 0
    assert gate(server, tmp_path / "set", "--task", "two-pass", "--store-acceptance", str(file)) == 0
    assert "unknown: acceptance: resumed" in capsys.readouterr().out and not file.exists()
    # Nor is it judged, though this range would refuse any.
    file.write_text('{"positions": [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]]}')
    assert gate(server, tmp_path / "set", "--task", "two-pass", "--acceptance", str(file)) == 0
    assert "unknown: acceptance: resumed" in capsys.readouterr().out


GOOD = '{"arm": "a", "task": "t", "question": "0", "sample": 1, "score": 1}\n'
BAD = {
    "twice": (GOOD + GOOD, "holds an answer twice"),
    "a number for a name": (GOOD.replace('"0"', "0"), "line 1 is no answer"),
    "a text that is a list": (GOOD.replace("1}", '1, "text": []}'), "line 1 is no answer"),
    "half a sample": (GOOD.replace('"sample": 1', '"sample": 1.5'), "line 1 is no answer"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_a_set_that_is_wrong_is_named(tmp_path, capsys, text, says):
    (tmp_path / "answers.jsonl").write_text(text)
    assert main(["eval-compare", str(tmp_path), str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_lm_eval_is_not_run_again_for_what_is_kept(server, tmp_path, monkeypatch, capsys):
    """Its answers would be thrown away: the kept ones stand under their names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "lm-eval").write_text("#!/bin/sh\nexit 3\n")
    (folder / "lm-eval").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    kept = accuracy.AnswerSet(tmp_path / "set")
    for question in range(2):
        kept.append(Answer("base", "gsm8k", str(question), 1, 1.0))
    assert gate(server, tmp_path / "set", "--task", "gsm8k", "--limit", "2") == 0
    assert gate(server, tmp_path / "set", "--task", "gsm8k", "--limit", "3") == 2
    assert "lm-eval did not finish gsm8k" in capsys.readouterr().err


def test_a_profile_of_many_samples_is_a_call_each_with_a_seed_of_its_own(
    server, tmp_path, monkeypatch, capsys
):
    """One set with the number of samples; a call that failed is the one that the next command begins with."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (folder / "lm-eval").write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\n[ "$(wc -l < {calls})" != 3 ] || exit 3\n'
        'while [ "$1" != --output_path ]; do shift; done\nmkdir -p "$2/m"\n'
        'for i in 0 1; do echo "{\\"doc_id\\": $i, \\"filter\\": \\"none\\", '
        '\\"exact_match\\": $i}"; done > "$2/m/samples_aime25_1.jsonl"\n'
    )
    (folder / "lm-eval").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    words = [server, tmp_path / "set", "--task", "aime25", "--limit", "2"]
    assert gate(*words) == 2
    kept = accuracy.read_answers(tmp_path / "set")
    assert [(one.question, one.sample) for one in kept] == [("0", 1), ("1", 1), ("0", 2), ("1", 2)]
    assert gate(*words) == 0
    printed = capsys.readouterr()
    assert "aime25  0.5000 ± 0.5000 (2 x 16)" in printed.out
    assert "base, aime25, sample 2 of 16: 2 kept" in printed.err
    seeds = re.findall(r"(?<=,)seed=(\d+)", calls.read_text())
    assert seeds == [str(seed) for seed in (1234, 1235, 1236, *range(1236, 1250))]


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers completions with what its server's ``body`` is, or sends them on where that is an address."""

    def log_message(self, *_):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, b"vllm:prefix_cache_queries_total 1\n" if self.path == "/metrics" else b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = self.server.body
        if body.startswith("/"):
            self.answer(302, b"", Location=body)
        else:
            self.answer(200, body.encode())


ODD = {
    "sent on": ("/health", "a redirect to http"),
    "a page": ("<html>not found", "seen:   <html>not found"),
    "no text": ('{"choices": [{"text": null}]}', "wanted: a completion with a text"),
    "a count of letters": (
        '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "x"}}',
        "wanted: a completion",
    ),
    "no map": ("[1]", "wanted: a completion"),
}


@pytest.mark.parametrize(("body", "says"), ODD.values(), ids=ODD)
def test_an_answer_that_is_no_completion_is_shown(tmp_path, capsys, body, says):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as running:
        running.body = body
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        words = ["--url", f"http://127.0.0.1:{running.server_port}", "--out", str(tmp_path), "--limit", "2"]
        assert main(["eval", "mi355x-tp4", "--task", "two-pass", *words]) == 2
        running.shutdown()
    assert says in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_full_disk_loses_what_it_has_no_room_for_and_nothing_else(tmp_path):
    """A limit on this process's files stands for the disk's end: a part of the second line would fit."""
    file = tmp_path / "answers.jsonl"
    code = """
import resource, signal, sys
from pathlib import Path
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.lines import append_line
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (15, 15))
append_line(Path(sys.argv[1]), "0123456789")
try:
    append_line(Path(sys.argv[1]), "0123456789")
except OverlayError as error:
    print(error.render())
"""
    done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert f"{file} cannot be written" in done.stdout and "free space" in done.stdout, done.stderr
    assert file.read_bytes() == b"0123456789\n"
