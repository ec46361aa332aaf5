# SPDX-License-Identifier: Apache-2.0
"""The AMD CI steps: jobs on both generations, agents that vLLM's CI has, files and tests that exist."""

import copy
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rocm_overlay.project import Project

PROJECT = Project.find()
STEPS = PROJECT.root / "ci/buildkite/swa_decode_meta.yaml"
UPSTREAM = PROJECT.base / ".buildkite"
FIELDS = {
    "label": str, "key": str, "device": str, "dind": bool, "num_devices": int, "timeout_in_minutes": int,
    "working_dir": str, "source_file_dependencies": list, "commands": list,
}  # fmt: skip
GENERATIONS = {"mi300", "mi355"}


@pytest.fixture(scope="module")
def agents():
    """The devices that vLLM's own steps run on."""
    texts = (file.read_text() for file in (UPSTREAM / "test_areas").glob("*.yaml"))
    return {name for text in texts for name in re.findall(r"^\s*device: (mi\w+)$", text, re.MULTILINE)}


def problems(pipeline, agents):
    """All that is wrong with a pipeline, a line each."""
    steps = pipeline["steps"]
    found = [f"{name} twice" for field in ("label", "key") for name in _repeated(steps, field)]
    missing = GENERATIONS - {step["device"].partition("_")[0] for step in steps}
    found += [f"no step on {generation}" for generation in sorted(missing)]
    for key in pipeline["depends_on"]:
        if not re.search(rf"^\s*(- )?key: {re.escape(key)}$", _amd_builds(), re.MULTILINE):
            found.append(f"no step has the key {key}")
    for step in steps:
        wrong = [name for name, kind in FIELDS.items() if not isinstance(step.get(name), kind)]
        found += [f"{step['key']}: {name}" for name in wrong + sorted(set(step) - set(FIELDS))]
        found += [f"no agent {step['device']}"] if step["device"] not in agents else []
        found += _missing_files(step)
        found += [line for command in step["commands"] for line in _command_problems(step, command)]
    return found


def _repeated(steps, field):
    names = [step[field] for step in steps]
    return {name for name in names if names.count(name) > 1}


def _amd_builds():
    return (UPSTREAM / "hardware_tests/amd.yaml").read_text()


def _missing_files(step):
    """Dependencies that neither the laid tree nor the base's tests hold."""
    places = {"vllm": PROJECT.tree, "tests": PROJECT.base}
    paths = step["source_file_dependencies"]
    return [f"no file {path}" for path in paths if not (places[Path(path).parts[0]] / path).exists()]


def _command_problems(step, command):
    """A pytest command has to name a file of the base, listed as a dependency, and tests in it."""
    program, *rest = shlex.split(command)
    files = [one for one in rest if one.endswith(".py")]
    if program != "pytest" or not files or step["working_dir"] != "/vllm-workspace":
        return [f"no pytest run of a file in /vllm-workspace: {command}"]
    found = []
    for name in files:
        file = PROJECT.base / name
        if not file.is_file():
            found.append(f"no file {name}")
            continue
        if name not in step["source_file_dependencies"]:
            found.append(f"{name} is no dependency")
        chosen = rest[rest.index("-k") + 1] if "-k" in rest else ""
        if not re.search(rf"^def test_\w*{chosen}", file.read_text(), re.MULTILINE):
            found.append(f"no test {chosen} in {name}")
    return found


def test_the_steps_are_right(agents):
    assert {"mi300_1", "mi355_1"} <= agents
    pipeline = yaml.safe_load(STEPS.read_text())
    assert set(pipeline) == {"group", "depends_on", "steps"}
    assert problems(pipeline, agents) == []


def test_both_generations_run_the_same_commands(agents):
    first, second = yaml.safe_load(STEPS.read_text())["steps"]
    assert (first["device"], second["device"]) == ("mi300_1", "mi355_1")
    for field in ("commands", "source_file_dependencies"):
        assert first[field] == second[field]


FAULTS = {
    "label twice": (lambda p: p["steps"][1].update(label=p["steps"][0]["label"]), "SWA .* twice"),
    "key twice": (lambda p: p["steps"][1].update(key=p["steps"][0]["key"]), "swa-.* twice"),
    "one generation": (lambda p: p["steps"].pop(), "no step on mi355"),
    "unknown agent": (lambda p: p["steps"][0].update(device="mi300_9"), "no agent mi300_9"),
    "unknown build": (lambda p: p.update(depends_on=["image-build-nobody"]), "no step has the key"),
    "no timeout": (lambda p: p["steps"][0].pop("timeout_in_minutes"), "timeout_in_minutes"),
    "misspelt field": (lambda p: p["steps"][0].update(comands=[]), "comands"),
    "moved test": (
        lambda p: p["steps"][0].update(commands=["pytest tests/moved.py"]),
        "no file tests/moved.py",
    ),
    "moved source": (
        lambda p: p["steps"][0]["source_file_dependencies"].append("vllm/moved.py"),
        "no file vllm/moved.py",
    ),
    "test that is not there": (
        lambda p: p["steps"][0].update(commands=[p["steps"][0]["commands"][0] + "_of_all"]),
        "no test swa_decode_meta_of_all",
    ),
    "other program": (lambda p: p["steps"][0].update(commands=["true"]), "no pytest run"),
}


@pytest.mark.parametrize(("spoil", "says"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(agents, spoil, says):
    # Aliased lists are one object; a copy of each step keeps a fault in its own step.
    pipeline = yaml.safe_load(STEPS.read_text())
    pipeline["steps"] = [copy.deepcopy(step) for step in pipeline["steps"]]
    spoil(pipeline)
    assert [line for line in problems(pipeline, agents) if re.search(says, line)]
