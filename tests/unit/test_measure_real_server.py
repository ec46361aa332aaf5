# SPDX-License-Identifier: Apache-2.0
"""End to end on this machine: two vLLM servers on a CPU, vLLM's own client, two arms of one build, swapped.

The arms are the same build, so that a verdict other than noise would be a false one of ours.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from rocm_overlay import dashboard
from rocm_overlay.measure import accuracy, records
from rocm_overlay.measure.layer_recorder import read_recording
from rocm_overlay.measure.layers import compare_layers
from rocm_overlay.measure.metrics_page import PREFIX_HITS, Page
from rocm_overlay.measure.record_layers import PROMPTS, STEPS
from rocm_overlay.project import Project
from tests import cpu_server
from tests.unit import test_inferencex as inferencex

ROOT = Project.find().root
place = inferencex.place
pytestmark = [pytest.mark.timeout(1500), pytest.mark.xdist_group("cpu-server")]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cpu_server.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    cpu_server.build()
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        own = [
            stack.enter_context(cpu_server.start(model, free_port(), folder / f"{name}.log")) for name in "ab"
        ]
        for one in own:
            one.server.wait(cpu_server.READY_S, one)
        yield [one.server for one in own]


def tool(*words):
    return [sys.executable, "-m", "rocm_overlay.cli", *words]


def run(*words):
    env = os.environ | cpu_server.environment()
    return subprocess.run(tool(*words), env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def bench_words(folder, model, servers):
    point = {"input_tokens": 64, "output_tokens": 16, "concurrency": 2, "prompts": 6, "seed": 101}
    profile = {
        "rounds": 2, "runs": 1, "repeats": "fresh", "prefix_hit_rate": [0.0, 0.05], "run_timeout_s": 300,
        "warmup": {**point, "prompts": 2, "seed": 7}, "points": [point],
    }  # fmt: skip
    (folder / "profiles.yaml").write_text(yaml.safe_dump({"test": profile}))
    urls = {half: server.url for half, server in zip(("a", "b"), servers, strict=True)}
    session = {"halves": {"a": {}, "b": {}}, "arms": {"base": {"urls": urls}, "same": {"urls": urls}}}
    (folder / "session.yaml").write_text(yaml.safe_dump(session))
    client = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    return [
        "bench", "tiny-cpu", "--recipes", str(ROOT / "tests/recipes"), "--profile", "test",
        "--profiles", str(folder / "profiles.yaml"), "--session", str(folder / "session.yaml"),
        "--client", client, "--client-flags", "", "--tokenizer", str(model), "--out", str(folder / "set"),
    ]  # fmt: skip


def test_bench_is_interrupted_resumed_and_compared(model, servers, tmp_path):
    words = bench_words(tmp_path, model, servers)
    log = tmp_path / "log"
    with log.open("w") as output:
        env = os.environ | cpu_server.environment()
        process = subprocess.Popen(
            tool(*words), env=env, stderr=output, stdout=output, cwd=ROOT, start_new_session=True
        )
    while "[1/4]" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    kept = records.read(tmp_path / "set")
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 4 runs are in" in done.stderr
    found = records.read(tmp_path / "set")
    assert found[: len(kept)] == kept
    assert [(r.arm, r.round, r.half) for r in found] == [
        ("base", 1, "a"), ("same", 1, "b"), ("base", 2, "b"), ("same", 2, "a"),
    ]  # fmt: skip
    assert all(proof["ok"] is not False for record in found for proof in record.proofs.values())
    assert all(record.figures["itl_p50_ms"] > 0 for record in found)
    assert {request.output_tokens for record in found for request in record.requests} == {16}

    compared = run(
        "compare", f"{tmp_path / 'set'}:base", f"{tmp_path / 'set'}:same", "--out", str(tmp_path / "out")
    )
    assert compared.returncode == 0, compared.stderr
    assert re.search(r"\| 64/16 c2 \|.*\| (faster|slower|within noise) \|", compared.stdout)
    assert (tmp_path / "out" / "compare.png").exists() and "decode, same requests" in compared.stdout


def test_the_gate_sees_the_second_pass_as_prefix_hits(servers, tmp_path):
    words = ["eval", "tiny-cpu", "--recipes", str(ROOT / "tests/recipes"), "--model", cpu_server.MODEL]
    words += ["--url", servers[0].url, "--task", "two-pass", "--shots", "12", "--max-tokens", "8"]
    words += ["--limit", "12"]
    done = run(*words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"ok: second pass: 9\d\.\d% prefix hits", done.stdout), done.stdout
    answers = accuracy.by_task(accuracy.read_answers(tmp_path))
    assert {task: len(own) for task, own in answers.items()} == {"two-pass-1": 12, "two-pass-2": 12}
    # Random weights answer nothing right, and greedily the same twice.
    texts = [{answer.question: answer.text for answer in own} for own in answers.values()]
    assert texts[0] == texts[1] and all(texts[0].values())


def test_a_needle_reaches_the_server_in_its_length(servers, tmp_path):
    words = ["eval", "tiny-cpu", "--recipes", str(ROOT / "tests/recipes"), "--model", cpu_server.MODEL]
    done = run(
        *words, "--url", servers[0].url, "--task", "needles", "--needle-tokens", "700", "--out", str(tmp_path)
    )
    assert done.returncode == 1
    assert "FAULT: needle-700: 0 of 4 found\n" in done.stdout, (
        "of random weights, and of the length that was meant"
    )


def test_the_servers_metrics_are_the_ones_that_are_read(servers):
    page = servers[0].metrics()
    assert isinstance(page, Page) and page.total(PREFIX_HITS) is not None
    served = {name for name, _ in page.samples}
    asked = {name for query in dashboard.queries() for name in re.findall(r"vllm:[a-z0-9_]+", query)}
    # A server without drafts and without our kernels has neither's counters.
    assert all("spec_decode" in name or "specialized_decode" in name for name in asked - served)
    assert len(asked & served) > 10


@pytest.mark.full
def test_the_layer_tests_recorder_sees_every_decode_token_of_vllms_engine(model, tmp_path):
    """Two runs of one build; a Llama has no router, and its layers have to match all the same."""
    cpu_server.build()
    found = []
    for name in ("a", "b"):
        words = [str(model), "--dtype", "float32", "--max-num-seqs", "4", "--block-size", "32"]
        command = [
            sys.executable,
            "-m",
            "rocm_overlay.measure.record_layers",
            "--out",
            f"{tmp_path / name}.pt",
        ]
        env = os.environ | cpu_server.environment()
        done = subprocess.run([*command, "--", *words], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(read_recording(tmp_path / f"{name}.pt"))
    report = compare_layers(*found)
    assert (report.compared, report.left_out, report.mismatches) == (2 * len(PROMPTS) * STEPS, 0, ())


def test_the_inferencex_script_runs_over_vllm_itself(model, place):
    """``vllm`` on its path serves the tiny model by the lane's name and port, without its flags."""
    cpu_server.build()
    words = shlex.join(cpu_server.command(model, 0)).replace("--port 0", '--port "$PORT"')
    named = f"--served-model-name {cpu_server.MODEL}"
    words = words.replace(named, '--served-model-name "$MODEL"')
    exports = "\n".join(
        f"export {key}={shlex.quote(value)}" for key, value in cpu_server.environment().items()
    )
    inferencex.program(place / "bin" / "vllm", f"unset ${{!VLLM_*}}\n{exports}\nexec {words}")
    done = inferencex.run(place, limit_s=cpu_server.READY_S)
    assert done.returncode == 0, done.stderr
    assert json.loads((place / "results" / "benchmark.log").read_text())["usage"]["completion_tokens"] == 4
    metrics = (place / "results" / "aiperf_artifacts" / "server_metrics_export.csv").read_text()
    assert "vllm:generation_tokens_total" in metrics
