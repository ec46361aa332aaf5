# SPDX-License-Identifier: Apache-2.0
"""Recipes as commands: the words, what the user changes, and the forms for docker and compose."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
import yaml

from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe, Value, load, load_all
from rocm_overlay.render import argument, build_command, compose_text, docker_line

RECIPES = Path(__file__).parents[2] / "recipes"

# The server of the published gfx950 benchmark, as its authors wrote it.
GFX950_SERVER = """\
VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_MOE=1 VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA=True \
VLLM_USE_BREAKABLE_CUDAGRAPH=1 VLLM_USE_RUST_FRONTEND=1 AITER_TRITON_LOG_LEVEL=ERROR OMP_NUM_THREADS=1 \
VLLM_ENGINE_READY_TIMEOUT_S=3600 \
vllm serve deepseek-ai/DeepSeek-V4.1-Flash --tensor-parallel-size 4 --monokernel --moe-backend aiter \
  --max-model-len 1048576 --block-size 128 --max-num-batched-tokens 16384 --max-num-seqs 256 \
  --max-cudagraph-capture-size 1024 --gpu-memory-utilization 0.9 --language-model-only \
  --tokenizer-mode deepseek_v41 --tool-call-parser deepseek_v41 --reasoning-parser deepseek_v41 \
  --enable-auto-tool-choice \
  --attention-config '{"indexer_kv_dtype":"mxfp4","indexer_sparse_logits":true}' \
  --engram-config '{"cpu_offload":false}' \
  --speculative-config '{"method":"dspark","num_speculative_tokens":6,\
"draft_sample_method":"probabilistic","rejection_sample_method":"synthetic",\
"synthetic_acceptance_length":3.87,"enable_adaptive_verification":false}'
"""

# The server of the published gfx942 benchmark.
GFX942_SERVER = """\
VLLM_ROCM_USE_AITER=1 \
vllm serve deepseek-ai/DeepSeek-V4.1-Flash \
  --tensor-parallel-size 4 --tokenizer-mode deepseek_v41 --trust-remote-code --language-model-only \
  --max-num-seqs 7 --block-size 64 --no-enable-prefix-caching --gpu-memory-utilization 0.97 \
  --moe-backend aiter --speculative-config '{"method":"dspark","num_speculative_tokens":5}' \
  --specialized-decode
"""


def read_line(line: str) -> tuple[dict[str, str], str, dict[str, object]]:
    """A published command as variables, model and flags, read without the code under test."""
    words = shlex.split(line.replace("\\\n", " "))
    start = words.index("vllm")
    env = dict(word.split("=", 1) for word in words[:start])
    flags: dict[str, object] = {}
    rest = words[start + 3 :]
    while rest:
        flag = rest.pop(0).removeprefix("--")
        value = rest.pop(0) if rest and not rest[0].startswith("--") else None
        flags[flag] = json.loads(value) if value and value[0] == "{" else value
    return env, words[start + 2], flags


@pytest.fixture
def mi355x() -> Recipe:
    return load(RECIPES, "mi355x-tp4")


def test_the_gfx950_benchmark_is_the_published_server_key_by_key() -> None:
    rendered = read_line(build_command(load(RECIPES, "bench-gfx950-32k")).line())
    assert rendered == read_line(GFX950_SERVER)


def test_mi355x_tp4_is_the_published_server_with_real_verification(mi355x: Recipe) -> None:
    env, model, flags = read_line(build_command(mi355x).line())
    published_env, published_model, published = read_line(GFX950_SERVER)
    assert (env, model) == (published_env, published_model)
    speculative = {
        "method": "dspark",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
        "enable_adaptive_verification": False,
    }
    assert flags == published | {"speculative-config": speculative}


def test_the_gfx942_benchmark_differs_from_the_published_server_only_where_it_says() -> None:
    recipe = load(RECIPES, "bench-gfx942-7seqs")
    env, model, flags = read_line(build_command(recipe).line())
    published_env, published_model, published = read_line(GFX942_SERVER)
    assert model == published_model
    added_env = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_ENGINE_READY_TIMEOUT_S": "3600"}
    assert env == published_env | added_env
    # This base's name of the same switch.
    published["monokernel"] = published.pop("specialized-decode")
    written_out = {
        "max-model-len": "1048576",
        "max-num-batched-tokens": "16384",
        "max-cudagraph-capture-size": "42",
        "attention-config": {"indexer_kv_dtype": "fp8", "indexer_sparse_logits": False},
        "engram-config": {"cpu_offload": True},
        "compilation-config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "speculative-config": {
            "method": "dspark",
            "num_speculative_tokens": 5,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "enable_adaptive_verification": False,
        },
    }
    assert flags == published | written_out


def test_the_agentx_lane_keeps_its_contract() -> None:
    command = build_command(load(RECIPES, "agentx-mi355x-tp4"))
    values = command.values
    speculative = values["speculative-config"]
    assert isinstance(speculative, dict)
    assert speculative["num_speculative_tokens"] == 5
    assert speculative["synthetic_acceptance_length"] == 3.51
    assert speculative["enable_adaptive_verification"] is False
    assert values["host"] == "0.0.0.0"
    assert values["served-model-name"] == command.model
    assert values["disable-uvicorn-access-log"] is True
    seqs, capture = values["max-num-seqs"], values["max-cudagraph-capture-size"]
    assert isinstance(seqs, int) and isinstance(capture, int)
    assert capture & (capture - 1) == 0
    assert seqs * 6 <= capture <= 2048
    wanted = {"VLLM_ENGINE_READY_TIMEOUT_S": "3600", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    assert command.env.items() >= wanted.items()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, ["--some-flag"]),
        (False, ["--no-some-flag"]),
        (3, ["--some-flag", "3"]),
        (0.9, ["--some-flag", "0.9"]),
        ("text", ["--some-flag", "text"]),
        (["a", 1], ["--some-flag", "a", "1"]),
        ({"k": True, "n": 3.87, "s": "it's"}, ["--some-flag", '{"k":true,"n":3.87,"s":"it\'s"}']),
    ],
)
def test_a_value_becomes_its_words(value: Value, words: list[str]) -> None:
    assert list(argument("some-flag", value).words) == words


@pytest.mark.parametrize("recipe", load_all(RECIPES), ids=lambda recipe: recipe.name)
def test_the_line_reads_back_through_a_shell_as_the_words(recipe: Recipe) -> None:
    command = build_command(recipe)
    words = shlex.split(command.line().replace("\\\n", " "))
    assert words == [f"{name}={value}" for name, value in command.env.items()] + command.argv()


def test_a_users_flag_replaces_the_recipes_and_is_shown(mi355x: Recipe) -> None:
    command = build_command(mi355x, ["--max-num-seqs", "64", "--seed=7"])
    assert command.argv().count("--max-num-seqs") == 1
    assert command.argv()[-3:] == ["--max-num-seqs", "64", "--seed=7"]
    assert [str(override) for override in command.overrides] == [
        "max-num-seqs: 256 -> 64",
        "seed: not set -> 7",
    ]


@pytest.mark.parametrize(
    ("words", "key", "shown"),
    [
        (["-tp", "2"], "tensor-parallel-size", "4 -> 2"),
        (["--tensor_parallel_size=2"], "tensor-parallel-size", "4 -> 2"),
        (["--no-monokernel"], "monokernel", "true -> false"),
        (["--gpu-memory-utilization", "0.95"], "gpu-memory-utilization", "0.9 -> 0.95"),
        (
            ["--engram-config", '{"cpu_offload":true}'],
            "engram-config",
            '{"cpu_offload":false} -> {"cpu_offload":true}',
        ),
    ],
)
def test_every_spelling_of_a_flag_replaces_it(mi355x: Recipe, words: list[str], key: str, shown: str) -> None:
    command = build_command(mi355x, words)
    assert [str(override) for override in command.overrides] == [f"{key}: {shown}"]
    assert [a.words for a in command.arguments if a.key == key] == [tuple(words)]


def test_a_dotted_flag_changes_one_key_of_the_recipes_map(mi355x: Recipe) -> None:
    command = build_command(mi355x, ["--speculative-config.num_speculative_tokens", "4"])
    speculative = command.values["speculative-config"]
    assert isinstance(speculative, dict)
    assert speculative["num_speculative_tokens"] == 4
    assert speculative["rejection_sample_method"] == "block"
    assert str(command.overrides[0]) == "speculative-config.num_speculative_tokens: 5 -> 4"
    # The recipe itself is untouched.
    assert mi355x.args["speculative-config"] != speculative


def test_a_dotted_flag_on_a_plain_value_is_refused(mi355x: Recipe) -> None:
    with pytest.raises(OverlayError, match="value that is no map"):
        build_command(mi355x, ["--max-num-seqs.depth", "4"])


@pytest.mark.parametrize("words", [["./weights", "--seed", "1"], ["--model", "./weights"]])
def test_the_model_can_be_replaced(mi355x: Recipe, words: list[str]) -> None:
    command = build_command(mi355x, words)
    assert command.argv()[:3] == ["vllm", "serve", "./weights"]
    assert "--model" not in command.argv()
    assert "model: deepseek-ai/DeepSeek-V4.1-Flash -> ./weights" in map(str, command.overrides)


def test_a_stray_word_is_refused(mi355x: Recipe) -> None:
    with pytest.raises(OverlayError, match="more than one word before the first flag"):
        build_command(mi355x, ["one", "two"])


@pytest.mark.parametrize("words", [["--api-key", "s3cret"], ["--api-key=s3cret"], ["--hf-token", "s3cret"]])
def test_a_secret_is_passed_on_but_never_printed(mi355x: Recipe, words: list[str]) -> None:
    command = build_command(mi355x, words)
    assert "s3cret" in " ".join(command.argv())
    assert "s3cret" not in " ".join([command.line(), *command.shown_argv(), *map(str, command.overrides)])
    for render in (docker_line, compose_text):
        with pytest.raises(OverlayError, match="would be written into the rendered text") as caught:
            render(mi355x, words)
        assert "s3cret" not in caught.value.render()


def test_the_docker_line_gives_the_container_what_rocm_needs(mi355x: Recipe) -> None:
    line = docker_line(mi355x, image="registry/vllm-openai-rocm:1")
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:3] == ["docker", "run", "--rm"]
    pairs = list(itertools.pairwise(words))
    for pair in [
        ("--device", "/dev/kfd"),
        ("--device", "/dev/dri"),
        ("--group-add", "video"),
        ("--security-opt", "seccomp=unconfined"),
        ("-p", "8000:8000"),
        ("-v", "$HOME/.cache/huggingface:/root/.cache/huggingface"),
        ("-e", "HF_TOKEN"),
    ]:
        assert pair in pairs
    assert "--ipc=host" in words
    assert words[-3:] == ["registry/vllm-openai-rocm:1", "--recipe", "mi355x-tp4"]
    # Unquoted home folders would split, quoted singly they would not be filled in.
    assert '"$HOME/.cache/huggingface:' in line


def test_the_token_is_passed_by_name(mi355x: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    for text in (docker_line(mi355x), compose_text(mi355x), build_command(mi355x).line()):
        assert "s3cret" not in text


def test_overrides_reach_the_container_and_its_port(mi355x: Recipe) -> None:
    overrides = ["--port", "9000", "--engram-config", '{"cpu_offload":true}']
    words = shlex.split(docker_line(mi355x, overrides).replace("\\\n", " "))
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
    assert "${HOME}/.cache/huggingface:/root/.cache/huggingface" in service["volumes"]


def test_a_port_that_is_no_number_is_refused(mi355x: Recipe) -> None:
    with pytest.raises(OverlayError, match="--port is not a number"):
        docker_line(mi355x, ["--port", "many"])
