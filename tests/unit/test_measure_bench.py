# SPDX-License-Identifier: Apache-2.0
"""``bench``: rounds with swapped halves, runs that prove themselves, faults that lose nothing, resumption.

Each test talks HTTP to a scripted server. vLLM's own client runs in ``test_measure_client``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rocm_overlay.cli import main
from rocm_overlay.measure import compare, records, traced
from rocm_overlay.measure import server as server_module
from rocm_overlay.measure.quantities import QUANTITIES
from rocm_overlay.measure.server import Server
from rocm_overlay.measure.workload import load_profile, pass_of
from rocm_overlay.project import Project
from tests.scripted_server import Script, ScriptedServer
from tests.unit.test_measure_trace import Trace

ROOT = Project.find().root
CLIENT = f"{sys.executable} {ROOT / 'tests/scripted_client.py'}"
EVIDENCE = ["--image", "vllm-openai-rocm:test", "--image-digest", "sha256:0", "--sku", "MI355X"]


def profiles(folder, **changes):
    point = {"input_tokens": 32, "output_tokens": 8, "concurrency": 2, "prompts": 4, "seed": 101}
    profile = {
        "rounds": 1, "runs": 2, "repeats": "fresh", "prefix_hit_rate": [0.0, 0.05], "run_timeout_s": 30,
        "warmup": {**point, "prompts": 1, "seed": 7},
        "points": [point, {**point, "concurrency": 1, "seed": 102}],
    }  # fmt: skip
    file = folder / "profiles.yaml"
    file.write_text(yaml.safe_dump({"test": {**profile, **changes}}))
    return file


def bench(folder, *words, profile=None, client=CLIENT):
    file = profile or profiles(folder)
    common = ["--profile", "test", "--profiles", str(file), "--client", client, "--out", str(folder / "set")]
    return main(["bench", "mi355x-tp4", *common, *EVIDENCE, *words])


def read(folder):
    return records.read(folder / "set")


def false_proofs(record):
    return {name: proof["says"] for name, proof in record.proofs.items() if proof["ok"] is False}


@pytest.fixture
def server():
    with ScriptedServer() as running:
        yield running


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def session_file(folder, **faults):
    """Two arms whose servers the session starts; the second one's tokens come slower.

    A fault is no word of a command, but of a file that the command names: the next session's can be without.
    """
    ports = free_ports(2)
    for arm in ("base", "pr"):
        (folder / f"{arm}-words").write_text("".join(f"{word}\n" for word in faults.get(arm, ())))

    def command(arm, interval):
        words = ["-m", "tests.scripted_server", "--port", "{port}", "--interval-s", interval]
        return [sys.executable, *words, f"@{folder / arm}-words"]

    document = {
        "ready_timeout_s": 60,
        "halves": {"0-3": {"port": ports[0]}, "4-7": {"port": ports[1], "env": {"HIP_VISIBLE_DEVICES": "4"}}},
        "arms": {
            "base": {"command": command("base", "0.002"), "env": {"PYTHONPATH": str(ROOT)}},
            "pr": {"command": command("pr", "0.012"), "env": {"PYTHONPATH": str(ROOT)}},
        },
    }
    file = folder / "session.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_two_arms_two_rounds_with_the_halves_swapped_and_compared(tmp_path, capsys):
    file = profiles(tmp_path, rounds=2)
    assert bench(tmp_path, "--session", str(session_file(tmp_path)), profile=file) == 0, (
        capsys.readouterr().err
    )
    found = read(tmp_path)
    assert len(found) == 2 * 2 * 2 * 2
    placed = {(record.arm, record.round): record.half for record in found}
    assert placed == {
        ("base", 1): "0-3", ("pr", 1): "4-7", ("base", 2): "4-7", ("pr", 2): "0-3",
    }  # fmt: skip
    # Both arms got the same prompts, another set each round and run.
    seeds = {(record.point, record.round, record.run, record.seed) for record in found}
    assert len(seeds) == 8
    assert len({seed for *_, seed in seeds}) == 8

    arms = [[record for record in found if record.arm == arm] for arm in ("base", "pr")]
    report = compare.make_report(*arms, [QUANTITIES["itl_p50_ms"]])
    assert {str(c.verdict) for c in report.comparisons["itl_p50_ms"]} == {"slower"}
    assert all(ratio.median > 1.5 for ratio in report.paired.values())
    assert not report.failed


def test_a_record_holds_what_a_reviewer_asks_for(server, tmp_path):
    assert bench(tmp_path, "--url", server.url, "--arm", "base") == 0
    record = read(tmp_path)[0]
    wanted = {
        f"{name}_{kind}_ms" for name in ("itl", "tpot", "ttft") for kind in ("p50", "p90", "p99", "mean")
    }
    assert wanted | {"output_tok_s", "total_tok_s", "acceptance_length"} <= set(record.figures)
    assert record.figures["acceptance_length"] == pytest.approx(3.5)
    assert [len(r.error) for r in record.requests] == [0] * 4
    assert {r.output_tokens for r in record.requests} == {8}
    assert record.evidence["image_digest"] == "sha256:0"
    assert record.evidence["sku"] == "MI355X"
    assert len(record.evidence["recipe_hash"]) == 64
    assert record.evidence["acceptance_by_position"] == pytest.approx([1, 1, 0.5, 0, 0])
    assert {proof["ok"] for proof in record.proofs.values()} == {True}
    assert set(record.proofs) == {
        "requests", "text", "tokens", "evidence", "acceptance", "prefix", "kernels", "fallback", "metrics",
    }  # fmt: skip


FAULTY = {
    "empty text": (Script(text=""), "text", "4 of 4 answers are empty"),
    "fallback": (Script(kernel_share=0.5), "fallback", "sliding window"),
    "kernels off": (Script(kernel_share=0.0), "kernels", "0 steps for at least"),
    "acceptance": (Script(accepted=6.5), "acceptance", "7.500, wanted 1.00 to 6.00"),
    "malformed metrics": (Script(metrics="malformed"), "metrics", "is no Prometheus page"),
    "metrics of another server": (Script(metrics="foreign"), "metrics", "holds none of vLLM's metrics"),
    "no metrics": (Script(metrics="missing"), "metrics", "HTTP 404"),
} | {
    f"a counter {kind}": (Script(metrics=kind), "metrics", "holds a counter that is none")
    for kind in ("not a number", "without end", "below zero", "no position")
}


@pytest.mark.parametrize(("script", "name", "says"), FAULTY.values(), ids=FAULTY)
def test_a_run_that_does_not_prove_itself_is_kept_and_named(tmp_path, capsys, script, name, says):
    with ScriptedServer(script) as server:
        assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, runs=1)) == 1
    found = read(tmp_path)
    assert len(found) == 2
    assert all(record.figures["output_tok_s"] > 0 for record in found)
    assert says in false_proofs(found[0])[name]
    assert f"{name}: " in capsys.readouterr().err


def test_counters_that_are_not_served_are_not_taken_for_proof(tmp_path):
    with ScriptedServer(Script(metrics="without counters")) as server:
        assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, runs=1)) == 0
    assert read(tmp_path)[0].proofs["kernels"]["ok"] is None
    assert "PROMETHEUS_MULTIPROC_DIR" in read(tmp_path)[0].proofs["kernels"]["says"]


def test_a_batch_beyond_the_kernels_rows_is_promised_nothing(tmp_path):
    point = {"input_tokens": 8, "output_tokens": 4, "concurrency": 9, "prompts": 9, "seed": 1}
    with ScriptedServer(Script(kernel_share=0.0)) as server:
        file = profiles(tmp_path, runs=1, points=[point])
        assert bench(tmp_path, "--url", server.url, profile=file) == 0
    assert "nothing is promised" in read(tmp_path)[0].proofs["kernels"]["says"]


def test_missing_evidence_is_said(server, tmp_path):
    file = profiles(tmp_path, runs=1)
    words = ["--profile", "test", "--profiles", str(file), "--client", CLIENT, "--out", str(tmp_path / "set")]
    assert main(["bench", "mi355x-tp4", *words, "--url", server.url]) == 0
    assert read(tmp_path)[0].proofs["evidence"] == {"ok": None, "says": "not recorded: image_digest, sku"}


def test_a_dead_server_is_named_before_anything_is_run(tmp_path, capsys):
    (port,) = free_ports(1)
    assert bench(tmp_path, "--url", f"http://127.0.0.1:{port}") == 2
    error = capsys.readouterr().err
    assert "arm server is not ready" in error and f"127.0.0.1:{port}/health" in error
    assert "0 of 4 runs are kept" in error


def test_a_server_that_dies_keeps_what_was_measured_and_the_session_resumes(tmp_path, capsys):
    # The warm-up and two runs of each point's four requests: the third run meets the end.
    broken = session_file(tmp_path, pr=("--die-after", "10"))
    assert bench(tmp_path, "--session", str(broken)) == 2
    error = capsys.readouterr().err
    assert "arm pr on half 4-7 ended" in error and "exit status 3" in error
    kept = read(tmp_path)
    # base is measured before pr in each turn, so that it is one run ahead.
    assert [record.identity for record in kept if record.arm == "pr"] == [
        ("pr", "32/8 c2", 1, 1), ("pr", "32/8 c2", 1, 2),
    ]  # fmt: skip
    assert f"{len(kept)} of 8 runs are kept" in error

    before = (tmp_path / "set" / "runs.jsonl").read_text()
    assert bench(tmp_path, "--session", str(session_file(tmp_path))) == 0
    assert f"{len(kept)} of 8 runs are in" in capsys.readouterr().err
    assert (tmp_path / "set" / "runs.jsonl").read_text().startswith(before)
    identities = [record.identity for record in read(tmp_path)]
    assert len(identities) == len(set(identities)) == 8


def nothing_serves(session, limit_s=0.0):
    """Wait until no half's port is answered; whether that was in time."""
    deadline = time.monotonic() + limit_s
    ports = [half["port"] for half in yaml.safe_load(session.read_text())["halves"].values()]
    while ports:
        try:
            socket.create_connection(("127.0.0.1", ports[0]), timeout=2).close()
        except OSError:
            ports.pop(0)
            continue
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def started_session(tmp_path):
    """A session in a process of its own whose third run has begun: process, log, words, session file."""
    file, session = profiles(tmp_path, rounds=2), session_file(tmp_path)
    words = ["--profile", "test", "--profiles", str(file), "--client", CLIENT, "--out", str(tmp_path / "set")]
    command = [sys.executable, "-m", "rocm_overlay.cli", "bench", "mi355x-tp4", *words, *EVIDENCE]
    command += ["--session", str(session)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 120
    while "[3/16]" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)
    return process, log, session, file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_session_ends_its_processes_and_resumes(tmp_path, number):
    process, log, session, file = started_session(tmp_path)
    # A terminal sends it to the session's own group; its servers lead groups of their own.
    os.killpg(process.pid, number)
    assert process.wait(60) == 130
    assert "interrupted; run the same command again" in log.read_text()
    assert nothing_serves(session)
    kept = read(tmp_path)
    assert 3 <= len(kept) < 16
    assert bench(tmp_path, "--session", str(session), profile=file) == 0
    assert read(tmp_path)[: len(kept)] == kept
    assert len(read(tmp_path)) == 16


def test_a_killed_session_leaves_no_server_behind_and_resumes(tmp_path):
    process, _, session, file = started_session(tmp_path)
    process.kill()
    process.wait()
    kept = read(tmp_path)
    assert bench(tmp_path, "--session", str(session), profile=file) == 0
    assert read(tmp_path)[: len(kept)] == kept
    assert len(read(tmp_path)) == 16
    assert nothing_serves(session, 30)


@pytest.mark.parametrize("other", ["a server", "what answers no request"])
def test_a_port_that_is_taken_is_named(tmp_path, capsys, monkeypatch, other):
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 1)
    monkeypatch.setattr(server_module, "PAGE_TIMEOUT_S", 2)
    session = session_file(tmp_path)
    document = yaml.safe_load(session.read_text())
    with ScriptedServer() as server, socket.create_server(("127.0.0.1", 0)) as silent:
        port = server.server_port if other == "a server" else silent.getsockname()[1]
        document["halves"]["0-3"]["port"] = port
        session.write_text(yaml.safe_dump(document))
        assert bench(tmp_path, "--session", str(session)) == 2
        assert server.completions == 0
    error = capsys.readouterr().err
    assert "arm base on half 0-3 cannot be started" in error
    assert f"something answers at http://127.0.0.1:{port}" in error
    # Nor is a server started that would find the port taken by itself.
    assert not list((tmp_path / "set").glob("raw/round-1/base-server.log"))


def test_two_sessions_do_not_write_one_set(tmp_path, capsys):
    process, _, _, _ = started_session(tmp_path)
    try:
        with ScriptedServer() as server:
            assert bench(tmp_path, "--url", server.url, "--arm", "other") == 2
        assert "another process is measuring" in capsys.readouterr().err
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    assert {record.arm for record in read(tmp_path)} == {"base", "pr"}


def test_a_slow_server_is_stopped_at_the_limit_and_its_client_with_it(tmp_path, capsys):
    fast = profiles(tmp_path, runs=1)
    with ScriptedServer() as server:
        point = yaml.safe_load(fast.read_text())["test"]["points"][0]
        assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, runs=1, points=[point])) == 0
        server.script.slow_s = 30
        both = profiles(tmp_path, runs=1, run_timeout_s=2)
        started = time.monotonic()
        assert bench(tmp_path, "--url", server.url, profile=both) == 2
        assert time.monotonic() - started < 25
    error = capsys.readouterr().err
    assert "took too long" in error and "more than 2 s" in error and "1 of 2 runs are kept" in error
    assert len(read(tmp_path)) == 1


def test_dropped_requests_are_counted_kept_and_stop_the_session_above_a_tenth(tmp_path, capsys):
    with ScriptedServer(Script(drop_every=3)) as server:
        assert bench(tmp_path, "--url", server.url) == 2
    error = capsys.readouterr().err
    assert "fails requests at 32/8 c2" in error and "wanted: at most 10%" in error
    (record,) = read(tmp_path)
    assert "of 4 requests failed" in false_proofs(record)["requests"]
    assert sum(1 for request in record.requests if request.error) in (1, 2)
    assert record.figures["itl_p50_ms"] > 0


def test_when_every_request_fails_there_is_no_figure(tmp_path, capsys):
    with ScriptedServer() as server:
        server.script.drop_every = 1
        assert bench(tmp_path, "--url", server.url) == 2
    assert "every request failed" in capsys.readouterr().err
    assert not (tmp_path / "set" / "runs.jsonl").exists()


def test_a_slow_metrics_page_costs_the_proof_and_not_the_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(Server.get, "__defaults__", (0.5, "GET"))
    with ScriptedServer(Script(metrics="slow")) as server:
        assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, runs=1)) == 1
    assert "no answer in 0.5 s" in false_proofs(read(tmp_path)[0])["metrics"]


def test_repeated_passes_give_no_acceptance_length_and_salted_ones_do(server, tmp_path):
    assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, repeats="same")) == 0
    by_run = {record.run: record for record in read(tmp_path)}
    assert "acceptance_length" in by_run[1].figures and "acceptance_length" not in by_run[2].figures
    assert by_run[2].proofs["prefix"]["says"] == "100.00% on a repeated pass"

    before = len(server.bodies)
    (tmp_path / "salted").mkdir()
    assert bench(tmp_path / "salted", "--url", server.url, profile=profiles(tmp_path, repeats="salted")) == 0
    found = read(tmp_path / "salted")
    assert all("acceptance_length" in record.figures for record in found)
    assert all(record.proofs["prefix"]["says"].startswith("0.00%") for record in found)
    salts = {body.get("cache_salt") for body in server.bodies[before:]} - {None}
    assert len(salts) == 4


def test_a_prefix_hit_that_was_not_wanted_is_found(server, tmp_path):
    file = profiles(tmp_path, runs=1)
    assert bench(tmp_path, "--url", server.url, profile=file) == 0
    (tmp_path / "again").mkdir()
    assert bench(tmp_path / "again", "--url", server.url, profile=file) == 1
    assert "100.00%, wanted 0.00% to 5.00%" in false_proofs(read(tmp_path / "again")[0])["prefix"]


def test_points_whose_prompts_would_be_the_same_are_refused(tmp_path, capsys):
    point = {"input_tokens": 8, "output_tokens": 4, "concurrency": 1, "prompts": 9, "seed": 1}
    for twin in ({"concurrency": 2}, {"seed": 1_000_001}):
        assert (
            bench(tmp_path, "--plan", "--url", "x", profile=profiles(tmp_path, points=[point, point | twin]))
            == 2
        )
        assert "another seed for each point" in capsys.readouterr().err


def test_no_two_runs_of_the_tools_profiles_have_the_same_prompts():
    text = (ROOT / "src/rocm_overlay/measure/profiles.yaml").read_text()
    for name in yaml.safe_load(text):
        profile = load_profile(name)
        passes = [
            (point.input_tokens, pass_of(profile, point, number, run, "").seed)
            for point in profile.points
            for number in range(1, profile.rounds + 1)
            for run in range(1, profile.runs + 1)
        ]
        assert len(set(passes)) == len(passes)


def test_a_half_by_hand_is_one_round_of_several_calls(server, tmp_path):
    for number, half in ((1, "0-3"), (2, "4-7")):
        words = ["--url", server.url, "--arm", "base", "--half", half, "--round", str(number)]
        assert bench(tmp_path, *words, profile=profiles(tmp_path, runs=1, rounds=2)) == 0
    assert [(r.round, r.half) for r in read(tmp_path)] == [(1, "0-3")] * 2 + [(2, "4-7")] * 2


def test_the_plan_lists_every_run_and_asks_no_server(tmp_path, capsys):
    assert bench(tmp_path, "--url", "http://127.0.0.1:9", "--plan") == 0
    assert "32/8 c2" in capsys.readouterr().out
    assert not (tmp_path / "set").exists()


def test_the_published_matrix_is_the_published_one():
    names = {point.name for point in load_profile("published").points}
    assert names == {f"{w} c{c}" for w in ("1k/512", "32k/1k", "64k/1k") for c in (1, 2, 4, 8, 64)}
    swa = load_profile("swa")
    assert [(p.name, p.prompts, p.seed) for p in swa.points] == [
        ("32k/1k c1", 32, 101),
        ("32k/1k c2", 32, 102),
    ]
    assert (swa.warmup.concurrency, swa.warmup.prompts, swa.warmup.output_tokens, swa.warmup.seed) == (
        2,
        4,
        256,
        7,
    )
    assert (swa.rounds, swa.runs) == (2, 3)


WRONG_SESSIONS = {
    "no arms": ({"arms": {}}, "arms is not as a session has it"),
    "unknown field": ({"arm": {}}, "arm"),
    "fewer halves than arms": ({"halves": {"0-3": {"port": 1}}}, "a half for each arm"),
    "neither command nor urls": ({"arms": {"a": {}}}, "either command or urls"),
    "no port": ({"halves": {"a": {}, "b": {}}}, "a port for each half"),
    "a number in env": ({"halves": {"a": {"port": 1, "env": {"X": 1}}, "b": {"port": 2}}}, "quote numbers"),
    "a port that is text": ({"halves": {"a": {"port": "x"}, "b": {"port": 2}}}, "halves.a.port"),
    "a port that no machine has": ({"halves": {"a": {"port": 99999}, "b": {"port": 2}}}, "halves.a.port"),
    "a port that is true": ({"halves": {"a": {"port": True}, "b": {"port": 2}}}, "halves.a.port"),
    "one port of two halves": ({"halves": {"a": {"port": 2}, "b": {"port": 2}}}, "a port of its own"),
    "an arm that names a folder": ({"arms": {"../x": {"command": ["true"]}}}, "a name of letters"),
    "an arm that SET:ARM cannot name": ({"arms": {"a:b": {"command": ["true"]}}}, "a name of letters"),
    "traces that are a number": ({"arms": {"a": {"command": ["true"], "traces": 1}}}, "arms.a.traces"),
    "limit of zero": ({"ready_timeout_s": 0}, "seconds above zero"),
}


@pytest.mark.parametrize(("change", "says"), WRONG_SESSIONS.values(), ids=WRONG_SESSIONS)
def test_a_session_file_that_is_wrong_is_refused(tmp_path, capsys, change, says):
    file = session_file(tmp_path)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | change))
    assert bench(tmp_path, "--session", str(file)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_other_wrong_words_are_refused(server, tmp_path, capsys):
    assert bench(tmp_path) == 2
    assert bench(tmp_path, "--url", server.url, client="/nowhere/vllm") == 2
    assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, repeats="often")) == 2
    assert bench(tmp_path, "--url", server.url, profile=profiles(tmp_path, points=[{"input_tokens": 1}])) == 2
    error = capsys.readouterr().err
    for says in ("bench needs servers", "client cannot be started", "repeats", "points.0"):
        assert says in error


@pytest.mark.parametrize("rate", [[1, 0], [0], [0, 5], [0, "1"], [0, 0.5, 1]])
def test_a_range_of_prefix_hits_that_nothing_can_be_in_is_refused(tmp_path, capsys, rate):
    file = profiles(tmp_path, prefix_hit_rate=rate)
    assert bench(tmp_path, "--url", "http://127.0.0.1:9", profile=file) == 2
    assert "prefix_hit_rate is not as a profile has it" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["rounds", "runs", "concurrency", "seed"])
def test_true_is_no_number_of_a_profile(tmp_path, capsys, key):
    point = {"input_tokens": 8, "output_tokens": 4, "concurrency": 1, "prompts": 9, "seed": 1}
    changes = {"points": [point | {key: True}]} if key in point else {key: True}
    assert bench(tmp_path, "--url", "http://127.0.0.1:9", profile=profiles(tmp_path, **changes)) == 2
    assert f"{key} is not as a profile has it" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [0, -1, 1e9, True])
def test_a_limit_that_no_run_can_keep_is_refused(tmp_path, capsys, limit):
    file = profiles(tmp_path, run_timeout_s=limit)
    assert bench(tmp_path, "--url", "http://127.0.0.1:9", profile=file) == 2
    assert "run_timeout_s is not as a profile has it" in capsys.readouterr().err


def test_a_client_that_fails_is_told_with_its_log(server, tmp_path, capsys):
    script = tmp_path / "client.py"
    script.write_text("import sys; print('no tokenizer named that'); sys.exit(4)")
    assert bench(tmp_path, "--url", server.url, client=f"{sys.executable} {script}") == 2
    error = capsys.readouterr().err
    assert "exit status 4" in error and "no tokenizer named that" in error


def test_a_result_of_another_form_is_refused(server, tmp_path, capsys):
    script = tmp_path / "client.py"
    script.write_text(
        "import sys, pathlib as p; w = sys.argv\n"
        "p.Path(w[w.index('--result-dir') + 1], w[w.index('--result-filename') + 1]).write_text('{}')\n"
    )
    assert bench(tmp_path, "--url", server.url, client=f"{sys.executable} {script}") == 2
    assert "is no result of the run" in capsys.readouterr().err


def test_the_lines_are_one_json_map_each(server, tmp_path):
    assert bench(tmp_path, "--url", server.url) == 0
    lines = Path(tmp_path / "set" / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["format"] for line in lines] == [1] * 4


WRONG_WORDS = {
    "an address without http": (["--url", "localhost:8000"], "--url is no address of a server"),
    "no host": (["--url", "http://"], "--url is no address of a server"),
    "a port that is none": (["--url", "http://127.0.0.1:99999"], "--url is no address of a server"),
    "round 0": (["--url", "http://x", "--round", "0"], "--round: '0' is no whole number above zero"),
    "an open quote": (["--url", "http://x", "--client", "'vllm"], '--client: "\'vllm" cannot be split'),
    "an arm that names a folder": (["--url", "http://x", "--arm", "../x"], "--arm: '../x' is not letters"),
    "a half that names a folder": (["--url", "http://x", "--half", "/x"], "--half: '/x' is not letters"),
    "no client": (["--url", "http://x", "--client", ""], "--client: '' names no program"),
    "an open quote in flags": (["--url", "http://x", "--client-flags", "'"], "--client-flags"),
}


@pytest.mark.parametrize(("words", "says"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_wrong_words_are_named_before_anything_is_made(tmp_path, capsys, words, says):
    out = tmp_path / "set"
    try:
        status = main(["bench", "mi355x-tp4", "--out", str(out), *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_sessions_address_is_checked_before_a_server_is_started(tmp_path, capsys):
    file = session_file(tmp_path)
    document = yaml.safe_load(file.read_text())
    document["arms"]["pr"] = {"urls": {"0-3": "http://127.0.0.1:1", "4-7": "localhost:8001"}}
    file.write_text(yaml.safe_dump(document))
    assert bench(tmp_path, "--session", str(file)) == 2
    assert "arms.pr.urls.4-7 is no address of a server" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def profiler(folder, launches, calls):
    """A server's profiler that leaves a trace of decode steps in ``folder``."""

    def called(what):
        calls.append(what)
        if what == "stop":
            folder.mkdir(exist_ok=True)
            events = Trace().step(launches).step(launches).step(launches).end()
            (folder / f"rank0-{len(calls)}.json").write_text(json.dumps({"traceEvents": events}))

    return called


def test_a_round_ends_with_a_trace_of_each_point_and_its_launches_are_kept(server, tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    calls = []
    server.script.on_profile = profiler(tmp_path / "traces", {"mono": 2, "copy": 1}, calls)
    words = ["--url", server.url, "--arm", "base", "--traces", str(tmp_path / "traces")]
    assert bench(tmp_path, *words) == 0
    assert "base, 32/8 c2: 3 launches a step, in 3 steps of a trace" in capsys.readouterr().err
    assert calls == ["start", "stop"] * 2
    launches = {record.point: record.launches for record in read(tmp_path) if record.launches}
    assert launches == {name: {"mono": 2, "copy": 1} for name in ("32/8 c2", "32/8 c1")}
    # What is kept is not traced again, and the traced passes are no runs.
    assert len(read(tmp_path)) == 4
    assert bench(tmp_path, *words) == 0 and len(calls) == 4


WITHOUT_TRACE = {
    "no profiler": (True, None, "does not serve"),
    "no folder": (False, lambda what: None, "has no folder of traces"),
    "another folder": (True, lambda what: None, "left no trace"),
}


@pytest.mark.parametrize(("made", "called", "says"), WITHOUT_TRACE.values(), ids=WITHOUT_TRACE)
def test_a_trace_that_does_not_come_is_named_and_the_runs_stay(
    tmp_path, capsys, monkeypatch, made, called, says
):
    monkeypatch.setattr(traced, "FILE_LIMIT_S", 0.5)
    if made:
        (tmp_path / "traces").mkdir()
    with ScriptedServer(Script(on_profile=called)) as server:
        assert bench(tmp_path, "--url", server.url, "--traces", str(tmp_path / "traces")) == 2
    error = capsys.readouterr().err
    assert says in error and "4 of 4 runs are kept" in error
    assert len(read(tmp_path)) == 4
    # The same command goes on from there.
    (tmp_path / "traces").mkdir(exist_ok=True)
    with ScriptedServer(Script(on_profile=profiler(tmp_path / "traces", {"mono": 2}, []))) as server:
        assert bench(tmp_path, "--url", server.url, "--traces", str(tmp_path / "traces")) == 0
    assert sum(1 for record in read(tmp_path) if record.launches) == 2
