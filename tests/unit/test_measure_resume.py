# SPDX-License-Identifier: Apache-2.0
"""A result set is one measurement: a session that would measure something else does not go on in it."""

import dataclasses

import pytest
import yaml

from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import resume
from rocm_overlay.measure.records import ResultSet
from rocm_overlay.measure.workload import load_profile, pass_of
from tests.unit.test_measure_bench import CLIENT, EVIDENCE, bench, profiles, read, server, session_file
from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.entrypoints.generate.base.protocol import validate_cache_salt  # isort: skip

__all__ = ["server"]


def test_the_same_call_again_makes_no_run_and_changes_nothing(server, tmp_path, capsys):
    assert bench(tmp_path, "--url", server.url) == 0
    kept, asked = read(tmp_path), server.completions
    assert bench(tmp_path, "--url", server.url) == 0
    assert "4 of 4 runs are in" in capsys.readouterr().err
    assert read(tmp_path) == kept and server.completions == asked


def changed_profile(folder, **changes):
    point = yaml.safe_load(profiles(folder).read_text())["test"]["points"][0]
    return profiles(folder, points=[point | changes])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"seed": 5}, ("seed 101", "seed 5")),
        ({"prompts": 9}, ("requests 4", "requests 9")),
        ({"words": ["--image-digest", "sha256:1"]}, ("image_digest sha256:0", "image_digest sha256:1")),
        ({"words": ["--image", "other:test"]}, ("image vllm-openai-rocm:test", "image other:test")),
        ({"words": ["--sku", "MI350X"]}, ("sku MI355X", "sku MI350X")),
        ({"words": ["--half", "0-3"]}, ("half none", "half 0-3")),
        ({"words": ["--client-flags", "--trust-remote-code --backend openai"]}, ("client ", "--backend")),
        ({"recipe": "mi355x-tp2"}, ("recipe mi355x-tp4, recipe_hash ", "recipe mi355x-tp2, recipe_hash ")),
        ({"repeats": "same"}, ("repeats fresh", "repeats same")),
    ],
)
def test_a_set_is_not_gone_on_with_another_build_recipe_or_workload(server, tmp_path, capsys, change, says):
    words = ["--url", server.url, "--out", str(tmp_path / "set"), "--client", CLIENT, "--profile", "test"]
    first = changed_profile(tmp_path)
    assert main(["bench", "mi355x-tp4", *words, "--profiles", str(first), *EVIDENCE]) == 0
    before, asked = (tmp_path / "set" / "runs.jsonl").read_text(), server.completions
    capsys.readouterr()

    own = {key: value for key, value in change.items() if key in ("seed", "prompts")}
    file = changed_profile(tmp_path, **own)
    if "repeats" in change:
        document = yaml.safe_load(file.read_text())
        document["test"]["repeats"] = change["repeats"]
        file.write_text(yaml.safe_dump(document))
    words += ["--profiles", str(file), *EVIDENCE, *change.get("words", [])]
    assert main(["bench", change.get("recipe", "mi355x-tp4"), *words]) == 2
    error = capsys.readouterr().err
    assert "was begun otherwise" in error and "--out another folder" in error
    assert says[0] in error.partition("wanted:")[0] and says[1] in error.partition("wanted:")[2]
    assert (tmp_path / "set" / "runs.jsonl").read_text() == before and server.completions == asked


def test_another_arm_may_join_a_set_and_a_known_one_only_as_it_was(server, tmp_path, capsys):
    words = ["--url", server.url, "--arm"]
    file = profiles(tmp_path, runs=1)
    assert bench(tmp_path, *words, "base", profile=file) == 0
    # The same seeds are the same prompts, which this server has seen: a false proof, kept.
    assert bench(tmp_path, *words, "pr", "--image-digest", "sha256:1", profile=file) == 1
    assert bench(tmp_path, *words, "pr", "--round", "2", profile=file) == 2
    assert "pr, 32/8 c2, round 1, run 1: image_digest sha256:1" in capsys.readouterr().err


def test_arms_of_a_session_in_another_order_would_sit_on_the_other_halves(tmp_path, capsys):
    session = session_file(tmp_path)
    file = profiles(tmp_path, runs=1)
    assert bench(tmp_path, "--session", str(session), profile=file) == 0
    document = yaml.safe_load(session.read_text())
    document["arms"] = dict(reversed(document["arms"].items()))
    session.write_text(yaml.safe_dump(document, sort_keys=False))
    assert bench(tmp_path, "--session", str(session), profile=file) == 2
    assert "half 0-3" in (error := capsys.readouterr().err) and "half 4-7" in error


CHANGED = {
    "a word of its command": (lambda document: document["arms"]["pr"]["command"].append("--x"), "command "),
    "a variable of its own": (lambda document: document["arms"]["pr"]["env"].update(A="b"), "A=b"),
    "a variable of its half": (lambda document: document["halves"]["4-7"]["env"].update(A="b"), "A=b"),
}


@pytest.mark.parametrize(("change", "says"), CHANGED.values(), ids=CHANGED)
def test_a_set_is_not_gone_on_with_when_an_arms_server_is_another_one(tmp_path, capsys, change, says):
    session, file = session_file(tmp_path), profiles(tmp_path, runs=1)
    assert bench(tmp_path, "--session", str(session), profile=file) == 0
    record = next(record for record in read(tmp_path) if record.arm == "pr")
    assert "--port '{port}' --interval-s 0.012" in record.evidence["command"]
    assert record.evidence["env"].startswith("HIP_VISIBLE_DEVICES=4 PYTHONPATH=")
    before = (tmp_path / "set" / "runs.jsonl").read_text()

    document = yaml.safe_load(session.read_text())
    change(document)
    session.write_text(yaml.safe_dump(document))
    assert bench(tmp_path, "--session", str(session), profile=file) == 2
    error = capsys.readouterr().err
    assert "was begun otherwise" in error and "pr, 32/8 c2, round 1, run 1" in error
    assert says in error.partition("wanted:")[2]
    assert (tmp_path / "set" / "runs.jsonl").read_text() == before


def test_a_secret_of_a_servers_command_or_variables_is_not_kept():
    command, env = ["serve", "{port}", "--api-key", "opensesame"], {"HF_TOKEN": "hf_abcdefgh", "A": "b c"}
    kept = resume.command_evidence(command, env)
    assert kept == {"command": "serve '{port}' --api-key '***'", "env": "'A=b c' 'HF_TOKEN=***'"}


def test_what_ends_a_run_keeps_its_way_out_and_says_what_is_kept():
    with pytest.raises(OverlayError) as failed, resume.goes_on(lambda: "2 of 4 are kept", print):
        raise OverlayError("the server died", fix="look at its log")
    assert failed.value.fix == "look at its log; then run the same command again: 2 of 4 are kept"
    said = []
    with pytest.raises(KeyboardInterrupt), resume.goes_on(lambda: "2 of 4 are kept", said.append):
        raise KeyboardInterrupt
    assert said == ["interrupted; run the same command again to go on: 2 of 4 are kept"]


def interrupted_before(number, monkeypatch):
    """Have the session be interrupted with its record ``number`` measured and not yet kept."""
    append, seen = ResultSet.append, []

    def stop(results, record):
        seen.append(record)
        if len(seen) == number:
            raise KeyboardInterrupt
        append(results, record)

    monkeypatch.setattr(ResultSet, "append", stop)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("repeats", ["fresh", "salted", "same"])
def test_a_pass_that_was_interrupted_is_a_first_one_again(server, tmp_path, monkeypatch, repeats, number):
    file = profiles(tmp_path, repeats=repeats)
    with monkeypatch.context() as patch:
        interrupted_before(number, patch)
        # Of each point the server has seen every prompt of the pass that is made again.
        assert bench(tmp_path, "--url", server.url, profile=file) == 130
    assert number == 1 or len(read(tmp_path)) == number - 1
    sent = len(server.bodies)
    assert bench(tmp_path, "--url", server.url, profile=file) == 0
    found = read(tmp_path)
    assert len(found) == 4
    for record in found:
        repeated = repeats == "same" and record.run > 1
        says = record.proofs["prefix"]["says"]
        assert says == "100.00% on a repeated pass" if repeated else says.startswith("0.00%"), record.identity
    if repeats == "same" and number > 1:  # what was interrupted was a repeat, and is one
        return
    # The requests are the interrupted pass's own: a salt is all that differs.
    again = [body for body in server.bodies[sent:] if "attempt-2" in body.get("cache_salt", "")]
    assert len(again) >= 4 and {body["prompt"] for body in again} <= {
        body["prompt"] for body in server.bodies[:sent]
    }
    salts = {record.evidence.get("cache_salt") for record in found}
    assert any("attempt-2" in (salt or "") for salt in salts) and (repeats != "fresh" or None in salts)


def test_the_rounds_of_the_same_prompts_do_not_meet_each_other(server, tmp_path):
    file = profiles(tmp_path, repeats="same", rounds=2)
    assert bench(tmp_path, "--url", server.url, profile=file) == 0
    assert [r.proofs["prefix"]["says"].startswith("0.00%") for r in read(tmp_path) if r.run == 1] == [
        True
    ] * 4


@pytest.mark.parametrize("arm", ["server", "a/b", "a@b", "x" * 300, "\\x\0é"])
@pytest.mark.parametrize("repeats", ["fresh", "salted", "same"])
def test_vllm_takes_every_salt_and_no_two_passes_share_one(arm, repeats):
    profile = dataclasses.replace(load_profile("tiny"), repeats=repeats)
    salts = [
        pass_of(profile, point, number, run, name, attempt).extra["cache_salt"]
        for point in profile.points
        for number in (1, 2)
        for run in ((1,) if repeats == "same" else (1, 2))
        for name in (arm, arm.replace("/", "-") + "-", arm + "1")
        for attempt in (2, 3)
    ]
    for salt in salts:
        validate_cache_salt(salt)
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("mark, wanted", [(None, 1), ("1\n", 2), ("7\n", 8), ("", 2), ("\0x", 2), ("-3", 2)])
def test_a_torn_mark_counts_as_an_attempt(tmp_path, mark, wanted):
    file = tmp_path / "raw" / "arm.begun"
    if mark is not None:
        file.parent.mkdir()
        file.write_text(mark)
    assert resume.begin(file) == wanted and resume.attempts(file) == wanted
