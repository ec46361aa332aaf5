# SPDX-License-Identifier: Apache-2.0
"""The image's entry point: what it starts, what it refuses, and that the server takes its place."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rocm_overlay import __version__, entrypoint
from rocm_overlay.entrypoint import Request, World, read_request, run
from rocm_overlay.errors import OverlayError
from rocm_overlay.machine import Gpu
from rocm_overlay.recipe import load, load_all
from rocm_overlay.rules import fitting_recipes
from tests.unit.test_machine import write_gpu

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
GIB = 1 << 30
IDENTITY = "vllm-openai-rocm 9.9.9, overlay 0123"


class Started(Exception):
    """Raised in place of becoming the server."""

    def __init__(self, program: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(program)
        self.argv = list(argv)
        self.environment = dict(environment)


def start(program: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    raise Started(program, argv, environment)


def world(sysfs: Path, environ: Mapping[str, str] | None = None) -> World:
    return World(
        environ=environ or {},
        sysfs=sysfs,
        recipes=RECIPES,
        out=io.StringIO(),
        execute=start,
        identity=lambda: IDENTITY,
    )


def printed(here: World) -> str:
    assert isinstance(here.out, io.StringIO)
    return here.out.getvalue()


@pytest.fixture
def mi355x(tmp_path: Path) -> Path:
    for node in range(2, 10):
        write_gpu(tmp_path, node, 90500, 256, memory=288 * GIB)
    return tmp_path


# Which of the three forms.


@pytest.mark.parametrize(
    "argv",
    [
        ["some/model", "--max-num-seqs", "4"],
        ["--model", "some/model"],
        ["--help"],
        [],
        ["--dry-run"],
        ["some/model", "--served-model-name", "doctor"],
        ["./doctor"],
        ["--", "--recipe", "mi355x-tp4"],
    ],
)
def test_anything_else_is_vllm_serve_word_for_word(tmp_path: Path, argv: list[str]) -> None:
    environ = {"PATH": "/bin", "VLLM_LOGGING_LEVEL": "INFO"}
    with pytest.raises(Started) as started:
        run(argv, world(tmp_path, environ))
    assert started.value.argv == ["vllm", "serve", *argv]
    assert started.value.environment == environ


@pytest.mark.parametrize(
    "argv", [["doctor", "--json"], ["doctor", "--recipe", "r"], ["verify"], ["recipes", "list"]]
)
def test_the_tools_verbs_are_the_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str]
) -> None:
    import types

    given: list[list[str]] = []
    tool = types.ModuleType("rocm_overlay.cli")
    tool.main = lambda argv: given.append(argv) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rocm_overlay.cli", tool)
    assert run(argv, world(tmp_path)) == 3
    assert given == [argv]


@pytest.mark.parametrize(
    ("argv", "request_"),
    [
        (["--recipe", "r"], Request("r", False, ())),
        (["--recipe=r", "--dry-run"], Request("r", True, ())),
        (["--dry-run", "--recipe", "r", "--seed", "1"], Request("r", True, ("--seed", "1"))),
        (["--recipe", "r", "--", "--seed", "1"], Request("r", False, ("--seed", "1"))),
        (["--recipe", "r", "--a", "--", "--dry-run"], Request("r", False, ("--a", "--dry-run"))),
        (["some/model"], None),
    ],
)
def test_the_request_is_read_before_the_dashes(argv: list[str], request_: Request | None) -> None:
    assert read_request(argv) == request_


@pytest.mark.parametrize("argv", [["--recipe"], ["--recipe", "--dry-run"], ["--recipe=a", "--recipe=b"]])
def test_recipe_wants_one_name(argv: list[str]) -> None:
    with pytest.raises(OverlayError, match="wants the name of one recipe"):
        read_request(argv)


# A recipe's server.


def test_a_recipe_starts_its_server_with_its_variables(mi355x: Path) -> None:
    with pytest.raises(Started) as started:
        run(["--recipe", "mi355x-tp4"], world(mi355x, {"PATH": "/bin"}))
    assert started.value.argv[:3] == ["vllm", "serve", "deepseek-ai/DeepSeek-V4.1-Flash"]
    assert "--monokernel" in started.value.argv
    assert started.value.environment["VLLM_ROCM_USE_AITER"] == "1"
    assert started.value.environment["PATH"] == "/bin"


def test_a_variable_of_the_container_stands_over_the_recipes_and_is_shown(mi355x: Path) -> None:
    here = world(mi355x, {"OMP_NUM_THREADS": "4"})
    with pytest.raises(Started) as started:
        run(["--recipe", "mi355x-tp4"], here)
    assert started.value.environment["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS=4  (yours; the recipe has 1)" in printed(here)


def test_a_dry_run_prints_everything_and_starts_nothing(mi355x: Path) -> None:
    here = world(mi355x, {"HF_TOKEN": "s3cret"})
    argv = ["--recipe", "mi355x-tp4", "--dry-run", "--max-num-seqs", "64", "--api-key", "hush"]
    assert run(argv, here) == 0
    text = printed(here)
    for part in (
        "recipe mi355x-tp4: ",
        "this machine: 8 GPUs (gfx950, 288 GiB)",
        "max-num-seqs: 256 -> 64",
        "KV left",
        "VLLM_ROCM_USE_AITER=1",
        "vllm serve deepseek-ai/DeepSeek-V4.1-Flash",
        "nothing started (dry run)",
    ):
        assert part in text
    assert "s3cret" not in text
    assert "hush" not in text


@pytest.mark.parametrize("argv", [[], ["--dry-run"]])
def test_a_recipe_start_says_first_what_is_installed(mi355x: Path, argv: list[str]) -> None:
    here = world(mi355x)
    with contextlib.suppress(Started):
        run(["--recipe", "mi355x-tp4", *argv], here)
    assert printed(here).splitlines()[0] == IDENTITY


def test_the_identity_is_that_of_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise OverlayError("no vllm package is installed for this Python")

    monkeypatch.setattr("rocm_overlay.install.find_site", nowhere)
    said = World().identity()
    assert said == f"vllm-openai-rocm {__version__}: no vllm package is installed for this Python"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = '1.2.3'\n")
    monkeypatch.setattr("rocm_overlay.install.find_site", lambda: tmp_path)
    assert "NOT LAID on the vLLM 1.2.3" in World().identity()
    (tmp_path / "vllm" / "_rocm_overlay.json").write_text("half")
    assert "is damaged" in World().identity()


SECRET_STARTS: list[tuple[list[str], dict[str, str]]] = [
    (["--hf-token", "hush"], {}),
    (["--hf-token.x", "hush"], {}),
    (["--HF-TOKEN", "hush"], {}),
    (["--kv-transfer-config.kv_connector_extra_config.redis_password", "hush"], {}),
    (["--kv-transfer-config", '{"kv_connector_extra_config":{"api_key":"hush"}}'], {}),
    # Refused rather than printed: vLLM would take them for the flags above.
    (["--hf-toke", "hush"], {}),
    (["--api-k=hush"], {}),
    (["one", "hush"], {}),
    ([], {"HF_TOKEN": "hush", "VLLM_API_KEY": "hush", "DB_PASSWORD": "hush"}),
]


@pytest.mark.parametrize(("words", "environ"), SECRET_STARTS)
def test_no_secret_is_printed_or_told_in_an_error(
    mi355x: Path, words: list[str], environ: dict[str, str]
) -> None:
    here = world(mi355x, environ)
    said = ""
    try:
        run(["--recipe", "mi355x-tp4", "--dry-run", "--", *words], here)
    except OverlayError as error:
        said = error.render()
    assert "hush" not in printed(here) + said


def test_a_containers_secret_stays_hidden_where_a_recipe_names_its_variable(mi355x: Path) -> None:
    recipe = replace(load(RECIPES, "mi355x-tp4"), env={"SOME_TOKEN": "of-the-recipe"})
    request = Request(recipe.name, True, ())
    prepared = entrypoint.prepare(request, world(mi355x))
    shown = replace(prepared, recipe=recipe, variables=(("SOME_TOKEN", "of-the-recipe", "hush"),))
    text = entrypoint.report(shown)
    assert "SOME_TOKEN=***  (yours; the recipe has ***)" in text


def test_a_dry_run_without_a_gpu_says_so_and_goes_on(tmp_path: Path) -> None:
    here = world(tmp_path)
    assert run(["--recipe", "mi300x-tp4", "--dry-run"], here) == 0
    assert "no AMD GPU is visible here" in printed(here)


def test_a_start_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="needs 4 GPUs, 0 visible"):
        run(["--recipe", "mi355x-tp4"], world(tmp_path))


def test_hidden_gpus_do_not_count(mi355x: Path) -> None:
    with pytest.raises(OverlayError, match="needs 4 GPUs, 2 visible"):
        run(["--recipe", "mi355x-tp4"], world(mi355x, {"HIP_VISIBLE_DEVICES": "0,1"}))


@pytest.mark.parametrize("argv", [[], ["--dry-run"]])
def test_gpus_that_are_all_hidden_are_not_missing(mi355x: Path, argv: list[str]) -> None:
    here = world(mi355x, {"HIP_VISIBLE_DEVICES": ""})
    said = ""
    try:
        run(["--recipe", "mi355x-tp4", *argv], here)
    except OverlayError as error:
        said = error.render()
    assert "unset HIP_VISIBLE_DEVICES" in printed(here) + said
    assert "--device" not in printed(here) + said


def test_a_recipe_for_another_architecture_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    for node in range(1, 9):
        write_gpu(tmp_path, node, 90402, 304, memory=256 * GIB)
    with pytest.raises(OverlayError) as caught:
        run(["--recipe", "mi355x-tp4"], world(tmp_path))
    message = caught.value.render()
    assert "is for gfx950, this machine has gfx942" in message
    assert "--recipe mi325x-tp4" in message
    assert "one reason" in message


def test_a_partitioned_machine_is_refused(tmp_path: Path) -> None:
    for node in range(1, 65):
        write_gpu(tmp_path, node, 90402, 38, memory=24 * GIB)
    with pytest.raises(OverlayError, match="is a partition, 38 of 304 compute units"):
        run(["--recipe", "mi300x-tp4"], world(tmp_path))


def test_preflight_stands_before_the_start(mi355x: Path) -> None:
    argv = ["--recipe", "mi355x-tp4", "--speculative-config.enable_adaptive_verification", "true"]
    with pytest.raises(OverlayError, match="cannot verify adaptively"):
        run(argv, world(mi355x))


def test_a_dry_run_of_a_server_that_would_be_refused_fails(mi355x: Path) -> None:
    here = world(mi355x, {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"})
    assert run(["--recipe", "mi355x-tp4", "--dry-run"], here) == 1
    assert "preflight would refuse:" in printed(here)
    assert "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4" in printed(here)


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([Gpu(0, "gfx942", 304, int(191.98 * GIB))] * 8, "mi300x-tp4"),
        ([Gpu(0, "gfx942", 304, int(255.98 * GIB))] * 8, "mi325x-tp4"),
        ([Gpu(0, "gfx942", 304, int(255.98 * GIB))] * 2, "mi325x-tp2"),
        ([Gpu(0, "gfx942", 304, int(191.98 * GIB))] * 2, ""),
        ([Gpu(0, "gfx950", 256, int(287.98 * GIB))] * 8, "mi355x-tp4"),
        ([Gpu(0, "gfx950", 256, int(287.98 * GIB))] * 2, "mi355x-tp2"),
        ([Gpu(0, "gfx90a", 104, 64 * GIB)] * 8, ""),
        ([Gpu(0, "gfx1036", 2, GIB), *[Gpu(1, "gfx950", 256, 288 * GIB)] * 2], "mi355x-tp2"),
        ([], ""),
    ],
)
def test_the_fitting_recipe_uses_most_of_the_machine(gpus: list[Gpu], name: str) -> None:
    assert (fitting_recipes(load_all(RECIPES), gpus) or [""])[0] == name


# The real thing, as a process.


def launch(folder: Path, script: str, *argv: str) -> subprocess.Popen[str]:
    """The entry point with a ``vllm`` on PATH that is ``script``."""
    program = folder / "vllm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "rocm_overlay.entrypoint", *argv]
    return subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_the_servers_exit_status_is_ours(tmp_path: Path) -> None:
    process = launch(tmp_path, 'echo "$@"; exit 42', "some/model", "--seed", "1")
    said, _ = process.communicate(timeout=60)
    assert said == "serve some/model --seed 1\n"
    assert process.returncode == 42


def test_a_signal_reaches_the_server_itself(tmp_path: Path) -> None:
    process = launch(tmp_path, "trap 'echo stopped; exit 7' TERM; echo $$; while :; do sleep 0.1; done", "m")
    assert process.stdout is not None
    # The server has our process number: there is nothing in between.
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert said == "stopped\n"
    assert process.returncode == 7


def test_a_missing_vllm_is_named(tmp_path: Path) -> None:
    here = World(environ={"PATH": str(tmp_path)}, sysfs=tmp_path, recipes=RECIPES)
    with pytest.raises(OverlayError, match="vllm cannot be started") as caught:
        run(["some/model"], here)
    assert caught.value.exit_code == 127


def test_errors_are_printed_and_give_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert entrypoint.main(["--recipe", "mi355x-tp5", "--dry-run"]) == 2
    assert "did you mean mi355x-tp4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied", "base.toml"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")],
)
def test_what_cannot_be_read_is_an_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def unreadable(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(entrypoint, "read_gpus", unreadable)
    assert entrypoint.main(["--recipe", "mi355x-tp4", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: something that the entry point needs cannot be read")
    assert str(error) in said
