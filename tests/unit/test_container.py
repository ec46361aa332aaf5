# SPDX-License-Identifier: Apache-2.0
"""A recipe's server as a docker line and a compose file."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rocm_overlay import __version__
from rocm_overlay.container import CONTAINER_HOME, DEFAULT_IMAGE, compose_text, docker_line
from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe, load
from rocm_overlay.render import build_command

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
WEIGHTS = f"{CONTAINER_HOME}/.cache/huggingface"


@pytest.fixture
def mi355x() -> Recipe:
    return load(RECIPES, "mi355x-tp4")


def docker_words(recipe: Recipe, *overrides: str, image: str = DEFAULT_IMAGE) -> list[str]:
    return shlex.split(docker_line(recipe, overrides, image).replace("\\\n", " "))


def mounts(words: list[str]) -> dict[str, str]:
    """Folder in the container by what is mounted there."""
    pairs = [value.split(":") for flag, value in itertools.pairwise(words) if flag == "-v"]
    return {inside: source for source, inside in pairs}


def test_the_docker_line_gives_the_container_what_rocm_needs(mi355x: Recipe) -> None:
    words = docker_words(mi355x, image="registry/vllm-openai-rocm:1")
    assert words[:3] == ["docker", "run", "--rm"]
    pairs = list(itertools.pairwise(words))
    for pair in [
        ("--device", "/dev/kfd"),
        ("--device", "/dev/dri"),
        ("--group-add", "video"),
        ("--security-opt", "seccomp=unconfined"),
        ("-p", "8000:8000"),
        ("-v", f"$HOME/.cache/huggingface:{WEIGHTS}"),
        ("-e", "HF_TOKEN"),
    ]:
        assert pair in pairs
    assert "--ipc=host" in words
    assert words[-3:] == ["registry/vllm-openai-rocm:1", "--recipe", "mi355x-tp4"]
    # Unquoted home folders would split, quoted singly they would not be filled in.
    assert '"$HOME/.cache/huggingface:' in docker_line(mi355x)


def test_the_image_is_the_one_that_make_image_tags(mi355x: Recipe) -> None:
    assert docker_words(mi355x)[-3] == f"vllm-openai-rocm:{__version__}"
    service = yaml.safe_load(compose_text(mi355x))["services"]["server"]
    assert service["image"] == f"vllm-openai-rocm:{__version__}"


def test_every_cache_folder_of_the_image_is_in_the_mounted_volume(mi355x: Recipe) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(?:ENV)?\s+(\w+(?:CACHE\w*|_HOME))=(\S+)", dockerfile, re.MULTILINE))
    folders = {name: Path(value) for name, value in variables.items() if name != "ROCM_OVERLAY_HOME"}
    assert set(folders) >= {"VLLM_CACHE_ROOT", "TRITON_HOME", "FLYDSL_RUNTIME_CACHE_DIR"}
    (inside,) = set(mounts(docker_words(mi355x))) - {WEIGHTS}
    for name, folder in folders.items():
        assert folder.is_relative_to(inside), name
    # Nothing moves the Hub's cache out of the home folder, where the other mount is.
    assert "HF_HOME" not in dockerfile and "HF_HUB_CACHE" not in dockerfile


def test_docker_and_compose_share_one_cache(mi355x: Recipe) -> None:
    compose = yaml.safe_load(compose_text(mi355x))
    volumes = dict(reversed(entry.split(":")) for entry in compose["services"]["server"]["volumes"])
    assert volumes.keys() == mounts(docker_words(mi355x)).keys()
    (name,) = compose["volumes"]
    assert compose["volumes"][name] == {"name": name}
    assert name in mounts(docker_words(mi355x)).values()


def test_overrides_reach_the_container_and_its_port(mi355x: Recipe) -> None:
    overrides = ["--port", "9000", "--engram-config", '{"cpu_offload":true}']
    words = docker_words(mi355x, *overrides)
    assert words[-7:] == ["--recipe", "mi355x-tp4", "--", *overrides]
    assert "9000:9000" in words


def test_the_compose_file_says_the_same_as_the_docker_line(mi355x: Recipe) -> None:
    overrides = ["--served-model-name", "a$b"]
    service = yaml.safe_load(compose_text(mi355x, overrides))["services"]["server"]
    assert service["command"] == ["--recipe", "mi355x-tp4", "--", "--served-model-name", "a$$b"]
    assert service["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert service["group_add"] == ["video"]
    assert service["ipc"] == "host"
    assert service["security_opt"] == ["seccomp=unconfined"]
    assert service["ports"] == ["8000:8000"]
    assert service["environment"] == ["HF_TOKEN"]
    assert f"${{HOME}}/.cache/huggingface:{WEIGHTS}" in service["volumes"]


@pytest.mark.parametrize("render", [docker_line, compose_text])
def test_a_port_out_of_range_is_not_rendered(mi355x: Recipe, render) -> None:
    with pytest.raises(OverlayError, match="--port is not a port number"):
        render(mi355x, ["--port", "70000"])


# Secrets.

SECRETS = [
    ["--api-key", "hush"],
    ["--api-key=hush"],
    ["--hf-token", "hush"],
    ["--hf_token", "hush"],
    ["--HF-TOKEN", "hush"],
    ["--hf-token.x", "hush"],
    ["--some-password", "hush"],
    ["--kv-transfer-config.kv_connector_extra_config.redis_password", "hush"],
    ["--kv-transfer-config", '{"kv_connector_extra_config":{"redis_password":"hush"}}'],
    ["--kv-transfer-config", '{"password":"hush",}'],
]


@pytest.mark.parametrize("words", SECRETS)
def test_a_secret_is_passed_on_but_never_printed(mi355x: Recipe, words: list[str]) -> None:
    command = build_command(mi355x, words)
    assert "hush" in " ".join(command.argv())
    assert "hush" not in " ".join([command.line(), *command.shown_argv(), *map(str, command.overrides)])
    for render in (docker_line, compose_text):
        with pytest.raises(OverlayError, match="would be written into the rendered text") as caught:
            render(mi355x, words)
        assert "hush" not in caught.value.render()


@pytest.mark.parametrize(("name", "variable"), [("hf-token", "HF_TOKEN"), ("api-key", "VLLM_API_KEY")])
def test_a_refused_secret_says_which_variable_carries_it(mi355x: Recipe, name: str, variable: str) -> None:
    with pytest.raises(OverlayError) as caught:
        docker_line(mi355x, [f"--{name}", "hush"])
    assert caught.value.fix == f"drop --{name} and pass -e {variable}"


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "some/model"],
        ["--max-num-batched-tokens", "4096"],
        ["--long-prefill-token-threshold", "512"],
        ["--ssl-keyfile", "/run/key.pem"],
        ["--return-tokens-as-token-ids"],
        ["--speculative-config.num_speculative_tokens", "4"],
    ],
)
def test_what_only_sounds_like_a_secret_is_shown(mi355x: Recipe, words: list[str]) -> None:
    assert docker_words(mi355x, *words)[-len(words) :] == words
    assert "***" not in build_command(mi355x, words).line()


def test_the_token_is_passed_by_name(mi355x: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    for text in (docker_line(mi355x), compose_text(mi355x), build_command(mi355x).line()):
        assert "hush" not in text
