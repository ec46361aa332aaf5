# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate: published errors and differences come out; none is called that is inside its error."""

import json
import shlex
import stat

import pytest

from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import accuracy, evaluate, lm_eval, tasks
from rocm_overlay.measure.accuracy import Answer, Call
from rocm_overlay.measure.arms import eval_arms
from rocm_overlay.measure.tasks import Question
from rocm_overlay.project import Project
from rocm_overlay.recipe import load
from rocm_overlay.transaction import exclusive
from tests.scripted_server import Script, ScriptedServer, solver

# Score, standard error and questions as lm-eval printed them in the published pull requests.
PUBLISHED_ERRORS = [
    (0.9249, 0.0073, 1319), (0.9363, 0.0067, 1319), (0.9257, 0.0072, 1319), (0.9227, 0.0074, 1319),
    (0.9295, 0.0071, 1319), (0.9750, 0.0043, 1319), (0.9719, 0.0045, 1319),
    (0.8333, 0.0266, 198), (0.8485, 0.0255, 198), (0.8636, 0.0245, 198), (0.0051, 0.0051, 198),
]  # fmt: skip
# Difference, its error by question, and whether it is one: GPQA and AIME in percent points, GSM8K.
PUBLISHED_DIFFERENCES = [(-0.2, 0.6, False), (-1.0, 0.7, False), (-0.0023, 0.0022, False)]


def answers(arm, scores, task="t"):
    return [Answer(arm, task, str(index), 1, float(score)) for index, score in enumerate(scores)]


@pytest.mark.parametrize(("mean", "error", "questions"), PUBLISHED_ERRORS)
def test_the_published_standard_errors_come_out(mean, error, questions):
    right = round(mean * questions)
    found = accuracy.score(answers("a", [1] * right + [0] * (questions - right)))
    assert (round(found.mean, 4), round(found.error, 4)) == (mean, error)


@pytest.mark.parametrize(("mean", "error", "called"), PUBLISHED_DIFFERENCES)
def test_no_published_difference_is_called_one(mean, error, called):
    assert (accuracy.call_difference(mean, error) is not Call.INSIDE) is called
    assert accuracy.call_difference(-2 * error, error) is Call.LOWER
    assert accuracy.call_difference(2 * error, error) is Call.HIGHER


def test_a_difference_is_called_above_1_96_standard_errors_to_both_sides():
    called = {size: accuracy.call_difference(size * 0.01, 0.01) for size in (-1.97, -1.95, 0.0, 1.95, 1.97)}
    assert list(called.values()) == [Call.LOWER, Call.INSIDE, Call.INSIDE, Call.INSIDE, Call.HIGHER]
    assert (
        accuracy.call_difference(1.0, 0.0) is Call.HIGHER
        and accuracy.call_difference(0.0, 0.0) is Call.INSIDE
    )


def test_a_difference_is_taken_question_by_question():
    first = answers("a", [1, 1, 0, 0] * 50)
    second = answers("b", [0, 1, 0, 1] + [1, 1, 0, 0] * 48 + [0, 1, 0, 0])
    found = accuracy.difference("t", first, second)
    assert found.mean == pytest.approx(-1 / 200)
    assert found.error < 0.01 < found.first.error
    assert found.call is Call.INSIDE
    worse = accuracy.difference("t", first, answers("b", [0, 1, 0, 0] * 10 + [1, 1, 0, 0] * 40))
    assert worse.call is Call.LOWER


def test_samples_of_a_question_are_one_value():
    many = [Answer("a", "t", str(q), s, float((q + s) % 2)) for q in range(10) for s in range(1, 17)]
    found = accuracy.score(many)
    assert (found.mean, found.error, found.questions, found.samples) == (0.5, 0.0, 10, 16)


def test_arms_that_answered_other_questions_are_refused():
    with pytest.raises(OverlayError, match="other questions"):
        accuracy.difference("t", answers("a", [1, 0]), answers("b", [1]))
    twice = [*answers("b", [1, 0]), Answer("b", "t", "0", 2, 1.0)]
    with pytest.raises(OverlayError, match="number of samples"):
        accuracy.difference("t", answers("a", [1, 0]), twice)


def test_a_single_question_is_never_called():
    assert accuracy.difference("t", answers("a", [1]), answers("b", [0])).call is Call.NOT_CALLED


SCORED = {
    "marked": ("6 - 2 = 4.\n#### 4", 1), "last number": ("so 6 - 2 is 4", 1), "thousands": ("#### 4.0", 1),
    "wrong": ("#### 5", 0), "none": ("no idea", 0), "next question": ("#### 4\nQuestion: what of 9?", 1),
    "mark alone": ("it is 4 ####", 1),
}  # fmt: skip


@pytest.mark.parametrize(("text", "points"), SCORED.values(), ids=SCORED)
def test_an_answer_is_scored_by_its_number(text, points):
    assert tasks.score_arithmetic(Question("0", "", "4", 8), text) == points


def test_a_needle_is_as_long_as_wanted_and_stands_where_wanted():
    for tokens in (200, 2048):
        for depth in tasks.NEEDLE_DEPTHS:
            own = tasks.needle(1.0, tokens, depth, seed=1)
            words = own.prompt.split()
            assert len(words) == pytest.approx(tokens, rel=0.15)
            assert own.prompt.count(own.answer) == 1
            assert words.index(f"{own.answer}.") / len(words) == pytest.approx(depth, abs=0.12)
    assert tasks.needle(1.0, 500, 0.5, seed=1).prompt[:40] != tasks.needle(1.0, 500, 0.5, seed=2).prompt[:40]
    assert tuple(1024 * k for k in (2, 6, 10, 32, 85, 128)) == tasks.NEEDLE_TOKENS


def gate(server, folder, *words, arm="base"):
    common = ["--url", server.url, "--arm", arm, "--out", str(folder), "--needle-tokens", "256", "512"]
    return main(["eval", "mi355x-tp4", *common, "--shots", "4", *words])


def test_the_gate_passes_a_right_server(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver())) as server:
        assert gate(server, tmp_path) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert "two-pass-1  1.0000 ± 0.0000 (20)" in out
    assert "ok: second pass: 100.0% prefix hits" in out
    assert "ok: needle-256: 4 of 4 found" in out and "ok: needle-512: 4 of 4 found" in out


def second_pass_is_wrong():
    seen = set()

    def wrong(prompt):
        known = prompt in seen
        seen.add(prompt)
        return known

    return wrong


def test_a_fault_of_cached_prefixes_fails_the_gate(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver(second_pass_is_wrong()))) as server:
        # Every other question is wrong on its second pass, so that the difference has an error.
        odd = solver(second_pass_is_wrong())
        turn = iter(range(10**6))
        server.script.answers = lambda prompt: odd(prompt) if next(turn) % 2 else solver()(prompt)
        assert gate(server, tmp_path, "--task", "two-pass", "--parallel", "1") == 1
    assert "FAULT: passes: second less first pass -0.5000" in capsys.readouterr().out


def test_a_needle_that_is_not_found_or_of_another_length_fails_the_gate(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver(lambda prompt: len(prompt.split()) > 400))) as server:
        assert gate(server, tmp_path, "--task", "needles") == 1
    out = capsys.readouterr().out
    assert "ok: needle-256" in out and "FAULT: needle-512: 0 of 4 found" in out


def test_one_needle_that_is_not_found_fails_the_gate(tmp_path, capsys):
    late = tasks.needle(1.0, 256, 0.85, seed=256 + 850).answer
    with ScriptedServer(Script(answers=solver(lambda prompt: late in prompt))) as server:
        assert gate(server, tmp_path, "--task", "needles") == 1
    out = capsys.readouterr().out
    assert "FAULT: needle-256: 3 of 4 found" in out and "ok: needle-512" in out


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_prompt_that_is_longer_or_shorter_than_meant_fails_the_gate(tmp_path, capsys, monkeypatch, factor):
    """As with a tokenizer that cuts the notes otherwise than the sample that they are made by."""
    monkeypatch.setattr(evaluate.Asker, "count_tokens", lambda self, text: round(factor * len(text.split())))
    with ScriptedServer(Script(answers=solver())) as server:
        assert gate(server, tmp_path, "--task", "needles") == 1
    assert "FAULT: needle-256: 4 of 4 found; prompts of [" in capsys.readouterr().out


def test_acceptance_is_held_to_a_stored_range(tmp_path, capsys):
    stored = tmp_path / "acceptance.json"
    with ScriptedServer(Script(answers=solver())) as server:
        words = ["--task", "two-pass", "--store-acceptance", str(stored)]
        assert gate(server, tmp_path / "a", *words) == 0
    assert json.loads(stored.read_text())["positions"][2] == [0.45, 0.55]
    for accepted, status in ((2.52, 0), (2.3, 1)):
        with ScriptedServer(Script(answers=solver(), accepted=accepted)) as server:
            words = ["--task", "two-pass", "--acceptance", str(stored)]
            assert gate(server, tmp_path / str(accepted), *words) == status
    assert "FAULT: acceptance: position 2 0.300, wanted 0.450 to 0.550" in capsys.readouterr().out


def test_a_least_score_is_held(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver(lambda prompt: True))) as server:
        assert gate(server, tmp_path, "--task", "two-pass", "--least", "0.9") == 1
    assert "FAULT: score: 0.0000" in capsys.readouterr().out


def test_a_server_that_stops_answering_keeps_the_answers_and_resumes(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver())) as server:
        server.script.drop_every = 13
        assert gate(server, tmp_path, "--task", "two-pass", "--parallel", "1") == 2
        assert "did not answer /v1/completions" in capsys.readouterr().err
        kept = accuracy.read_answers(tmp_path)
        assert len(kept) == 12
        server.script.drop_every = 0
        assert gate(server, tmp_path, "--task", "two-pass", "--parallel", "1") == 0
    assert "8 asked, 12 kept" in capsys.readouterr().err
    assert accuracy.read_answers(tmp_path)[:12] == kept


FAILING = {
    "malformed metrics": (Script(metrics="malformed"), [], "is no Prometheus page"),
    "no metrics": (Script(metrics="missing"), [], "HTTP 404"),
    "slow": (Script(slow_s=5), ["--timeout", "0.5"], "TimeoutError"),
}


@pytest.mark.parametrize(("script", "words", "says"), FAILING.values(), ids=FAILING)
def test_a_server_that_cannot_be_judged_is_named_and_the_answers_stay(tmp_path, capsys, script, words, says):
    script.answers = solver()
    with ScriptedServer(Script(answers=solver())) as server:
        assert gate(server, tmp_path, "--task", "two-pass", "--limit", "2") == 0
    kept = (tmp_path / "answers.jsonl").read_bytes()
    with ScriptedServer(script) as server:
        assert gate(server, tmp_path, "--task", "two-pass", "--limit", "4", *words) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "answers.jsonl").read_bytes() == kept


def test_a_dead_server_is_named(tmp_path, capsys):
    assert main(["eval", "mi355x-tp4", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is not ready" in error and "start it, or correct its address" in error


WRONG_WORDS = {
    "no question": (["--limit", "0"], "--limit: '0' is no whole number above zero"),
    "no request at once": (["--parallel", "0"], "--parallel: '0' is no whole number"),
    "a needle of no length": (["--needle-tokens", "2000", "0"], "--needle-tokens: '0' is no whole number"),
    "shots below zero": (["--shots", "-1"], "--shots: '-1' is no whole number"),
    "an answer of no token": (["--max-tokens", "0"], "--max-tokens: '0' is no whole number"),
    "no time": (["--timeout", "nan"], "--timeout: 'nan' is no number of seconds above 0"),
    "a score above 1": (["--least", "90"], "--least: '90' is not between 0 and 1"),
    "an address without http": (["--url", "localhost"], "--url is no address of a server"),
}


@pytest.mark.parametrize(("words", "says"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_words_are_named_before_anything_is_made(tmp_path, capsys, words, says):
    out = tmp_path / "set"
    try:
        status = main(["eval", "mi355x-tp4", "--url", "http://127.0.0.1:9", "--out", str(out), *words])
    except SystemExit as error:
        status = error.code
    assert status == 2 and says in capsys.readouterr().err
    assert not out.exists()


def test_two_evaluations_do_not_write_one_set(tmp_path, capsys):
    with ScriptedServer(Script(answers=solver())) as server, exclusive(tmp_path, "evaluating"):
        assert gate(server, tmp_path, "--task", "two-pass") == 2
        assert "another process is evaluating" in capsys.readouterr().err
        assert server.completions == 0


def test_two_arms_are_compared_and_a_lower_one_fails(tmp_path, capsys):
    for arm, wrong in (
        ("on", lambda prompt: "2 pears are eaten" in prompt[-200:]),
        ("off", lambda prompt: False),
    ):
        with ScriptedServer(Script(answers=solver(wrong))) as server:
            gate(server, tmp_path, "--task", "two-pass", arm=arm)
    assert main(["eval-compare", f"{tmp_path}:off", f"{tmp_path}:off"]) == 0
    assert main(["eval-compare", f"{tmp_path}:off", f"{tmp_path}:on"]) == 1
    out = capsys.readouterr().out
    assert "| lower |" in out and "+0.0000 ± 0.0000 | inside the error |" in out
    assert main(["eval-compare", str(tmp_path), f"{tmp_path}:on"]) == 2


def test_a_recipes_arms_are_each_graph_mode_with_the_kernels_on_and_off():
    names = {
        name: [arm for arm, _ in eval_arms(load(Project.find().recipes, name))]
        for name in ("mi355x-tp4", "mi325x-tp4", "mi300x-tp4")
    }
    assert names["mi355x-tp4"] == [
        "full_and_piecewise-kernels", "full_and_piecewise-without", "full_decode_only-kernels",
        "full_decode_only-without", "piecewise-without", "none-kernels", "none-without",
    ]  # fmt: skip
    for name in ("mi325x-tp4", "mi300x-tp4"):
        assert names[name] == [
            "full_decode_only-kernels", "full_decode_only-without", "none-kernels", "none-without",
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["mi355x-tp4", "mi325x-tp4", "mi300x-tp4"])
def test_every_arm_is_a_command_that_the_recipe_takes(name):
    from rocm_overlay.render import build_command

    recipe = load(Project.find().recipes, name)
    for arm, words in eval_arms(recipe):
        command = build_command(recipe, [word.replace("{port}", "8000") for word in words[4:]])
        assert command.values["monokernel"] is arm.endswith("-kernels")
        assert command.values["compilation-config"]["cudagraph_mode"].lower() == arm.rpartition("-")[0]


def test_the_lm_eval_profiles_are_the_published_settings():
    found = {
        name: shlex.join(p.command("M", "http://h:8000", "OUT")) for name, p in lm_eval.profiles().items()
    }
    assert "--model local-completions" in found["gsm8k"] and "--num_fewshot 5" in found["gsm8k"]
    assert (
        "model=M,base_url=http://h:8000/v1/completions,tokenized_requests=False,trust_remote_code=True,"
        "num_concurrent=16,max_retries=5,timeout=3600" in found["gsm8k"]
    )
    gpqa = found["gpqa-diamond"]
    assert "--tasks gpqa_diamond_cot_zeroshot --batch_size auto --apply_chat_template" in gpqa
    assert (
        """--gen_kwargs '{"max_gen_toks":64000}' --seed 42""" in gpqa and "think_end_token=</think>" in gpqa
    )
    assert (
        """--tasks niah_single_2 --metadata '{"max_seq_lengths":[131072]}' --seed 1234"""
        in found["niah-128k"]
    )
    assert "max_length=140000" in found["niah-128k"]
    assert "--tasks aime25" in found["aime25"] and '"temperature":0.6' in found["aime25"]


def test_without_lm_eval_the_long_tasks_say_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with ScriptedServer() as server:
        assert gate(server, tmp_path / "out", "--task", "gsm8k") == 2
        assert gate(server, tmp_path / "out", "--task", "gsm9k") == 2
    error = capsys.readouterr().err
    assert f"pip install 'lm-eval[api]=={lm_eval.VERSION}'" in error and "no lm-eval profile gsm9k" in error


def test_samples_of_lm_eval_become_answers(tmp_path, monkeypatch, capsys):
    """A program of that name writes what lm-eval writes: a line a question and filter."""
    program = tmp_path / "bin" / "lm-eval"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != --output_path ]; do shift; done\nmkdir -p $2/m\n'
        "for i in 0 1 2; do for f in strict-match flexible-extract; do\n"
        '  echo "{\\"doc_id\\": $i, \\"filter\\": \\"$f\\", \\"exact_match\\": $((i % 2))}"\n'
        "done; done > $2/m/samples_gsm8k_1.jsonl\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    with ScriptedServer() as server:
        assert gate(server, tmp_path / "out", "--task", "gsm8k") == 0
    assert "gsm8k  0.3333 ± 0.3333 (3)" in capsys.readouterr().out


def test_a_needle_scored_by_length_is_read_from_its_one_length(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"doc_id": 0, "filter": "none", "4096": -1, "131072": 1.0}\n')
    assert accuracy.read_samples(file, "a", "t", "none")[0].score == 1.0
    with pytest.raises(OverlayError, match="no sample of filter"):
        accuracy.read_samples(file, "a", "t", "strict")
    file.write_text('{"doc": 0}\n')
    with pytest.raises(OverlayError, match="no sample of lm-eval"):
        accuracy.read_samples(file, "a", "t", "none")


def test_problems_in_gsm8ks_form_are_read_and_others_refused(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "1,000 + 1\n#### 1,001"}) + "\n")
    assert tasks.read_problems(file)[0].number == "1001"
    file.write_text(json.dumps({"question": "How many?", "answer": "many"}) + "\n")
    with pytest.raises(OverlayError, match="is no problem"):
        tasks.read_problems(file)
    with pytest.raises(OverlayError, match="too few problems"):
        tasks.arithmetic(tasks.made_problems(5), shots=4)
