# SPDX-License-Identifier: Apache-2.0
"""The InferenceX lane that recipes give: its script runs under a stub of that repository's library."""

import copy
import itertools
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys

import pytest
import yaml

from rocm_overlay import base_flags, inferencex
from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.project import Project
from rocm_overlay.recipe import load

PROJECT = Project.find()
STUB = PROJECT.root / "tests" / "inferencex_stub" / "benchmark_lib.sh"
LANES = {"mi355x": ("mi355x-tp4", "mi355x-tp2"), "mi325x": ("mi325x-tp4",), "mi300x": ("mi300x-tp4",)}


def lane(sku="mi355x"):
    return inferencex.lane([load(PROJECT.recipes, name) for name in LANES[sku]])


@pytest.fixture
def place(tmp_path):
    """A checkout as InferenceX has it, the script two folders below the library; our programs on the path."""
    folder = tmp_path / "benchmarks" / "single_node" / "agentic"
    folder.mkdir(parents=True)
    shutil.copy(STUB, tmp_path / "benchmarks" / "benchmark_lib.sh")
    (folder / "lane.sh").write_text(inferencex.script(lane()))
    programs = tmp_path / "bin"
    programs.mkdir()
    # Keeps its words and serves; a child beside it stands for the engine's workers.
    program(
        programs / "vllm",
        f'printf "%s\\n" "$@" > "$STUB_LOG.vllm"; env > "$STUB_LOG.env"\n'
        f'sleep 600 & echo $! > "$STUB_LOG.worker"\ncd {PROJECT.root}\n'
        f'exec {sys.executable} -m tests.scripted_server --port "$PORT"',
    )
    program(programs / "hf", 'echo "hf $*" >> "$STUB_LOG"')
    (tmp_path / "results").mkdir()
    return tmp_path


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(place, limit_s=120, **changes):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    variables = {
        "MODEL": inferencex.MODEL, "TP": "4", "CONC": "1", "KV_OFFLOADING": "none",
        "TOTAL_CPU_DRAM_GB": "1000", "RESULT_DIR": str(place / "results"), "DURATION": "900",
        "EVAL_ONLY": "false", "PORT": str(port),
        "RESULT_FILENAME": "result", "STUB_LOG": str(place / "log"),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "PYTHONPATH": str(PROJECT.root),
    } | changes  # fmt: skip
    command = ["bash", str(place / "benchmarks/single_node/agentic/lane.sh")]
    env = {name: value for name, value in variables.items() if value is not None}
    return subprocess.run(
        command, env=env, cwd=place, capture_output=True, text=True, check=False, timeout=limit_s
    )


def served(place):
    words = (place / "log.vllm").read_text().splitlines()
    return dict(itertools.pairwise(words))


def test_a_throughput_run_calls_the_library_in_order_and_leaves_its_files(place):
    done = run(place)
    assert done.returncode == 0, done.stderr
    called = [line.split()[0] for line in (place / "log").read_text().splitlines()]
    assert called == [
        "check_env_vars", "hf", "resolve_trace_source", "install_agentic_deps", "wait_for_server_ready",
        "build_replay_cmd", "run_agentic_replay_and_write_outputs",
    ]  # fmt: skip
    results = place / "results"
    assert (results / "server.log").exists() and (place / "result.json").exists()
    assert json.loads((results / "benchmark.log").read_text())["usage"]["completion_tokens"] == 4
    assert shlex.split((results / "vllm_command.txt").read_text())[:2] == ["vllm", "serve"]
    words = served(place)
    assert json.loads(words["--speculative-config"])["synthetic_acceptance_length"] == 3.51
    assert (words["--host"], words["--served-model-name"]) == ("0.0.0.0", inferencex.MODEL)
    assert (words["--max-num-seqs"], words["--max-cudagraph-capture-size"]) == ("128", "1024")
    environment = (place / "log.env").read_text().splitlines()
    assert {"GPU_COUNT=4", "VLLM_ROCM_USE_AITER=1", "PYTHONUNBUFFERED=1"} <= set(environment)


def test_an_evaluation_verifies_for_real(place):
    assert run(place, EVAL_ONLY="true").returncode == 0
    config = json.loads(served(place)["--speculative-config"])
    assert config["rejection_sample_method"] == "block" and "synthetic_acceptance_length" not in config
    assert "run_eval --port" in (place / "log").read_text() and "replay" not in (place / "log").read_text()


def test_the_size_chooses_the_recipe(place):
    assert run(place, TP="2", MODEL_PATH="/weights", ROCR_VISIBLE_DEVICES="2,3").returncode == 0
    words = served(place)
    assert words["serve"] == "/weights" and words["--tensor-parallel-size"] == "2"
    assert json.loads(words["--engram-config"]) == {"cpu_offload": True}
    assert "HIP_VISIBLE_DEVICES=2,3" in (place / "log.env").read_text()
    assert "hf " not in (place / "log").read_text()


def test_the_server_and_its_workers_are_gone_when_the_script_ends(place):
    assert run(place).returncode == 0
    worker = int((place / "log.worker").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


WRONG = {
    "a variable is missing": ({"DURATION": None}, 1, "missing: DURATION"),
    "offloading": ({"KV_OFFLOADING": "dram"}, 2, "KV_OFFLOADING is dram"),
    "a size that it has not": ({"TP": "8"}, 2, "TP is 8; this lane has 2 and 4"),
}


@pytest.mark.parametrize(("changes", "status", "says"), WRONG.values(), ids=WRONG)
def test_what_it_cannot_run_is_said_before_anything_is_started(place, changes, status, says):
    done = run(place, **changes)
    assert (done.returncode, says in done.stderr) == (status, True)
    assert not (place / "log.vllm").exists()


def test_a_server_that_ends_at_its_start_ends_the_script(place):
    program(place / "bin" / "vllm", "echo no such device; exit 7")
    done = run(place)
    assert done.returncode == 92 and "no such device" in done.stderr


@pytest.mark.parametrize("sku", LANES)
def test_every_lane_keeps_the_contract(sku):
    own = lane(sku)
    assert inferencex.script_problems(inferencex.script(own)) == []
    assert inferencex.fragment_problems(inferencex.fragment(own)) == []
    assert inferencex.entry_problems(inferencex.entry(own, "ghcr.io/ours/image:1", "ours")) == []


def test_the_base_takes_every_lanes_flags():
    cases = []
    for recipe in (recipe for sku in LANES for recipe in lane(sku).recipes):
        for evaluation in (False, True):
            lines = inferencex._flag_lines(inferencex.server_args(recipe))
            words = [word for line in lines for word in shlex.split(line)]
            words += ["--speculative-config", json.dumps(inferencex.speculative(recipe, evaluation))]
            cases.append(base_flags.Case(recipe.name, (recipe.model, *words), dict(recipe.env)))
    assert base_flags.find_problems(PROJECT.tree, cases) == []


SPOILT_SCRIPTS = {
    "a default": (lambda t: t.replace('"$PORT"', '"${PORT:-8888}"', 1), "default"),
    "set -u": (lambda t: t.replace("set -eo", "set -euo"), "set -u"),
    "no check": (lambda t: t.replace(" DURATION", ""), "DURATION is not checked"),
    "no replay": (lambda t: t.replace("build_replay_cmd", "true"), "build_replay_cmd is never called"),
    "no export": (lambda t: t.replace("export WEKA", "WEKA"), "WEKA_LOADER_OVERRIDE is not exported"),
    "no command file": (lambda t: t.replace("vllm_command.txt", "x"), "vllm_command.txt is not written"),
    "a folder": (lambda t: t + "mkdir -p /workspace/x\n", "a folder is made"),
    "no trap": (lambda t: t.replace("trap stop_server EXIT", "true"), "is not stopped"),
}


@pytest.mark.parametrize(("spoil", "says"), SPOILT_SCRIPTS.values(), ids=SPOILT_SCRIPTS)
def test_a_script_that_breaks_the_contract_is_found(spoil, says):
    assert any(says in line for line in inferencex.script_problems(spoil(inferencex.script(lane()))))


def first(value):
    return value["override_tp2_c1"]


SPOILT_FRAGMENTS = {
    "a model": (lambda v: v["base"].update(model={"path": "/x"}), "model is set"),
    "a bound variable": (lambda v: first(v)["env"].update(RESULT_DIR="/x"), "the launcher binds RESULT_DIR"),
    "no concurrency": (lambda v: first(v)["env"].pop("CONC"), "no CONC"),
    "twice": (lambda v: first(v)["env"].update(CONC="2"), "several variants match"),
    "another size": (lambda v: v["base"]["roles"]["agg"].update(gpus=4), "is not the tensor-parallel size"),
    "dashes": (lambda v: v["base"]["roles"]["agg"]["args"].update({"--x": "1"}), "has dashes"),
    "a map": (lambda v: v["base"]["roles"]["agg"]["args"].update(x={}), "no single text"),
    "acceptance": (
        lambda v: v["base"]["roles"]["agg"]["args"].update(
            {"speculative-config": '{"method": "dspark", "synthetic_acceptance_length": 3.51}'}
        ),
        "hard-coded",
    ),
}


@pytest.mark.parametrize(("spoil", "says"), SPOILT_FRAGMENTS.values(), ids=SPOILT_FRAGMENTS)
def test_a_fragment_that_breaks_the_contract_is_found(spoil, says):
    value = copy.deepcopy(inferencex.fragment(lane()))
    spoil(value)
    assert any(says in line for line in inferencex.fragment_problems(value))


def test_an_entry_that_breaks_the_contract_is_found():
    value = inferencex.entry(lane(), "ghcr.io/ours/image:1", "ours")
    (own,) = value.values()
    own["image"], own["color"] = "image", "red"
    del own["runner"]
    own["scenarios"]["agentic-coding"]["search-space"][0]["dp"] = 2
    found = " ".join(inferencex.entry_problems(value))
    for says in ("no runner", "unknown field color", "unknown field dp", "is no repository:tag"):
        assert says in found


def test_our_image_is_no_vllm_lane():
    with pytest.raises(OverlayError, match="as vLLM ships it"):
        inferencex.entry(lane(), "vllm-openai-rocm:0.1.0", "vllm")
    assert inferencex.entry(lane(), "vllm/vllm-openai-rocm:nightly-1", "vllm")


def test_recipes_that_are_no_lane_are_refused(capsys):
    assert main(["inferencex", "mi355x-tp4", "mi300x-tp4"]) == 2
    assert main(["inferencex", "bench-gfx950-32k"]) == 2
    error = capsys.readouterr().err
    assert "are no lane" in error and "with 6 drafts" in error


def test_the_verb_prints_each_form_and_the_policy(capsys):
    for form in ("srt-slurm", "entry"):
        assert main(["inferencex", *LANES["mi355x"], "--as", form]) == 0
        printed = capsys.readouterr()
        assert yaml.safe_load(printed.out) and "as shipped" in printed.err
    assert lane().name == "dsv41flash_fp4_mi355x_vllm_mtp"


@pytest.mark.parametrize(
    ("form", "words", "check", "says"),
    [
        ("entry", ["--image", "no tag"], None, "image no tag is no repository:tag"),
        ("script", [], "script", "set -u is not allowed there"),
        ("srt-slurm", [], "fragment", "several variants match"),
    ],
)
def test_what_would_break_the_contract_is_not_printed(monkeypatch, capsys, form, words, check, says):
    if check:
        monkeypatch.setattr(inferencex, f"{check}_problems", lambda value: [says])
    assert main(["inferencex", *LANES["mi355x"], "--as", form, *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and not printed.out
