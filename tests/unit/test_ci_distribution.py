# SPDX-License-Identifier: Apache-2.0
"""The distribution's pipeline: agents and files that exist, verbs that the tool has, steps that run here."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rocm_overlay.ci_local import Step, choose, read_steps, run_step
from rocm_overlay.cli import build_parser, main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.bench import read_arms
from rocm_overlay.project import Project

PROJECT = Project.find()
FILE = PROJECT.root / "ci/buildkite/distribution.yaml"
PIPELINE = yaml.safe_load(FILE.read_text())
STEPS = [step for step in read_steps(PROJECT.root) if step.file == FILE.name]
IN_IMAGE = "/opt/vllm-openai-rocm"
AREAS = PROJECT.base / ".buildkite/test_areas"


def faults(step):
    """A line for each thing of a step that does not exist."""
    text = "".join(file.read_text() for file in AREAS.glob("*.yaml"))
    found = [] if re.search(rf"device: {step.device}$", text, re.MULTILINE) else [f"no agent {step.device}"]
    for command in step.commands:
        program, *words = shlex.split(command)
        if program == "env":
            program, *words = (word for word in words if "=" not in word)
        if program == "pytest":
            root = PROJECT.base if step.key.startswith("distribution-vllm") else PROJECT.root
            found += [f"no file {w}" for w in words if w.startswith("tests/") and not (root / w).exists()]
        elif program == "rocm-overlay":
            try:
                parsed = build_parser().parse_args(words)
            except SystemExit:
                found.append(f"the tool does not take {command}")
                continue
            session = getattr(parsed, "session", None)
            found += [f"no file {session}"] if session and not (PROJECT.root / session).is_file() else []
        elif program == "sh":
            inside = Path(words[0]).relative_to(IN_IMAGE)
            found += [] if (PROJECT.root / inside).is_file() else [f"no file {inside}"]
        elif program != "make":
            found.append(f"no program {program}")
    return found


def test_every_step_names_what_exists():
    assert [line for step in STEPS for line in faults(step)] == []


FAULTS = {
    "agent": ({"device": "mi300_9"}, "no agent mi300_9"),
    "file behind env": (
        {"commands": ("env A=1 pytest tests/device/moved.py",)},
        "no file tests/device/moved.py",
    ),
    "file": ({"commands": ("pytest tests/device/moved.py",)}, "no file tests/device/moved.py"),
    "flag": ({"commands": ("rocm-overlay compare a b --fail-slow",)}, None),
    "unknown flag": ({"commands": ("rocm-overlay compare a b --quick",)}, "does not take"),
    "program": ({"commands": ("curl x",)}, "no program curl"),
    "script": ({"commands": ("sh /opt/vllm-openai-rocm/ci/moved.sh",)}, "no file ci/moved.sh"),
}


@pytest.mark.parametrize(("change", "says"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(change, says):
    step = Step(**{**STEPS[-1].__dict__, **change})
    found = faults(step)
    assert (says is None and not found) or any(says in line for line in found)


def test_both_generations_have_kernels_numerics_layers_and_a_nightly():
    for kind in ("kernels", "numerics", "race-stress", "layers", "nightly"):
        assert {f"distribution-{kind}-mi300", f"distribution-{kind}-mi355"} <= {step.key for step in STEPS}
    nightly = [step for step in PIPELINE["steps"] if "nightly" in step["key"]]
    assert all(step["optional"] and "--fail-slower" in step["commands"][-1] for step in nightly)


def test_the_race_stress_asks_for_a_hundred_thousand_replays():
    """Both steps run the one test that reads ``MONO_REPLAYS``, by a word that its name has."""
    stress = [step for step in STEPS if "race-stress" in step.key]
    text = (PROJECT.root / "tests/device/test_mono_on_gpu.py").read_text()
    for one in stress:
        (command,) = one.commands
        assert "MONO_REPLAYS=100000" in shlex.split(command)
        word = shlex.split(command)[-1]
        (test,) = re.findall(rf"^def (test_\w*{word}\w*)", text, re.MULTILINE)
        assert "MONO_REPLAYS" in text and test
    assert len(stress) == 2


def device_files(step):
    """The files of tests/device that a step runs; the folder itself where it names that."""
    words = [word for command in step.commands for word in shlex.split(command)]
    return [word for word in words if word.startswith("tests/device")]


def test_a_step_whose_agent_shows_no_gpu_is_not_green():
    """Cases of tests/device are skipped without their GPUs: steps that run them say that none may be."""
    with_device = [step for step in STEPS if device_files(step)]
    assert len(with_device) >= 8
    assert [step.key for step in with_device if "--no-skips" not in " ".join(step.commands).split()] == []
    named = {word for step in with_device for word in device_files(step)}
    assert named == {
        f"tests/device/{file.name}" for file in (PROJECT.root / "tests/device").glob("test_*.py")
    }


def test_a_skipped_case_fails_where_none_may_be(tmp_path):
    (tmp_path / "conftest.py").write_text((PROJECT.root / "tests/device/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.skipif(True, reason='no GPU')\ndef test_marked(): pass\n\n"
        "def test_in_it(): pytest.skip('too few GPUs')\n\n"
        "def test_run(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE"]
    plain, strict = (
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
        for more in ([], ["--no-skips"])
    )
    assert plain.returncode == 0 and "1 passed, 2 skipped" in plain.stdout
    assert strict.returncode == 1 and "1 failed, 1 passed, 1 error" in strict.stdout
    assert "--no-skips, but: Skipped: no GPU" in strict.stdout
    assert "--no-skips, but: Skipped: too few GPUs" in strict.stdout


@pytest.mark.parametrize("file", sorted((PROJECT.root / "ci/sessions").glob("*.yaml")), ids=lambda f: f.stem)
def test_a_nightly_session_serves_its_recipe(file):
    arms, halves, _ = read_arms(file)
    assert len(arms) == len(halves) == 1
    assert file.stem == f"nightly-{arms[0].command[arms[0].command.index('--recipe') + 1]}"
    assert (PROJECT.recipes / f"{file.stem.removeprefix('nightly-')}.yaml").is_file()


def step(*commands, timeout_s=60.0):
    return Step("f", "k", "l", "cpu-small", commands, timeout_s)


def test_a_step_stops_at_its_first_failure_or_its_time():
    assert run_step(step("true", "true"), Path("/tmp"))[0] is True
    assert run_step(step("exit 3", "touch /nowhere/x"), Path("/tmp"))[0] is False
    passed, seconds = run_step(step("sleep 30", timeout_s=0.5), Path("/tmp"))
    assert (passed, seconds < 10) == (False, True)


def test_what_a_step_started_ends_with_its_time(tmp_path):
    passed, _ = run_step(step(f"(sleep 3; touch {tmp_path}/late) & wait", timeout_s=0.5), tmp_path)
    assert not passed
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_steps_are_listed_and_those_that_need_a_gpu_are_not_run_here(capsys):
    assert main(["ci"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"distribution-check +cpu-medium +here", out)
    assert re.search(r"distribution-kernels-mi300 +mi300_1 +on an agent", out)
    assert {chosen.device for chosen in choose(STEPS, [])} == {"cpu-medium"}
    for key in ("distribution-kernels-mi300", "none"):
        with pytest.raises(OverlayError, match="cannot run here"):
            choose(STEPS, [key])
