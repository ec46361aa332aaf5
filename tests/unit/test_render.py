# SPDX-License-Identifier: Apache-2.0
"""Recipes as commands: the words, what the user changes, and the forms for docker and compose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe, Value, load, load_all
from rocm_overlay.render import argument, build_command

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


# Defaults of the base that the gfx950 recipes write out, and the replay that the base turns off on
# ROCm by itself.
WRITTEN_OUT_GFX950: dict[str, object] = {
    "compilation-config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "enable-prefix-caching": None,
    "no-swa-bounded-replay": None,
}
# Beside the published keys of every benchmark: it changes no kernel, and stops a run whose steps fall back.
STRICT: dict[str, object] = {"kernel-config": {"specialized_decode_strict": True}}


@pytest.fixture
def mi355x() -> Recipe:
    return load(RECIPES, "mi355x-tp4")


def test_the_gfx950_benchmark_is_the_published_server_key_by_key() -> None:
    env, model, flags = read_line(build_command(load(RECIPES, "bench-gfx950-32k")).line())
    published_env, published_model, published = read_line(GFX950_SERVER)
    assert (env, model) == (published_env, published_model)
    assert flags == published | WRITTEN_OUT_GFX950 | STRICT


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
    assert flags == published | WRITTEN_OUT_GFX950 | {"speculative-config": speculative}


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
        "no-swa-bounded-replay": None,
        "speculative-config": {
            "method": "dspark",
            "num_speculative_tokens": 5,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "enable_adaptive_verification": False,
        },
    }
    assert flags == published | written_out | STRICT


@pytest.mark.parametrize("recipe", load_all(RECIPES), ids=lambda recipe: recipe.name)
def test_benchmarks_and_no_others_stop_at_a_silent_fallback(recipe: Recipe) -> None:
    _, _, flags = read_line(build_command(recipe).line())
    strict = flags.get("kernel-config") == STRICT["kernel-config"] and "monokernel" in flags
    assert strict is recipe.name.startswith("bench-")


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


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["-cc.cudagraph_mode=PIECEWISE"], "compilation-config", {"cudagraph_mode": "PIECEWISE"}),
        (["-cc.cudagraph_mode", "NONE"], "compilation-config", {"cudagraph_mode": "NONE"}),
        (["--engram_config.cpu_offload=0"], "engram-config", {"cpu_offload": 0}),
        (
            ["--compilation-config.max_cudagraph_capture_size", "1k"],
            "compilation-config",
            {"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": 1000},
        ),
        (
            ["--compilation-config.splitting_ops+", "a,b"],
            "compilation-config",
            {"cudagraph_mode": "FULL_AND_PIECEWISE", "splitting_ops": ["a", "b"]},
        ),
        (["-cc.cudagraph_mode", "null"], "compilation-config", {"cudagraph_mode": None}),
    ],
)
def test_dotted_flags_are_read_as_the_base_reads_them(
    mi355x: Recipe, words: list[str], key: str, value: Value
) -> None:
    command = build_command(mi355x, words)
    assert command.values[key] == value
    # One argument in the spelling that the base's parser knows: a second would replace it whole.
    argv = command.argv()
    assert argv.count(f"--{key}") == 1
    assert json.loads(argv[argv.index(f"--{key}") + 1]) == value


def test_a_dotted_flag_on_a_plain_value_is_refused(mi355x: Recipe) -> None:
    with pytest.raises(OverlayError, match="value that is no map"):
        build_command(mi355x, ["--max-num-seqs.depth", "4"])


@pytest.mark.parametrize("words", [["./weights", "--seed", "1"], ["--model", "./weights"]])
def test_the_model_can_be_replaced(mi355x: Recipe, words: list[str]) -> None:
    command = build_command(mi355x, words)
    assert command.argv()[:3] == ["vllm", "serve", "./weights"]
    assert "--model" not in command.argv()
    assert "model: deepseek-ai/DeepSeek-V4.1-Flash -> ./weights" in map(str, command.overrides)


def test_a_stray_word_is_refused_and_not_repeated(mi355x: Recipe) -> None:
    with pytest.raises(OverlayError, match="more than one word before the first flag") as caught:
        build_command(mi355x, ["one", "hush"])
    assert "hush" not in caught.value.render()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-num-seqs"], "--max-num-seqs cannot be read"),
        (["--max-num-seqs", "4", "5"], "2 values"),
        (["--monokernel", "yes"], "the flag alone"),
        (["--no-monokernel=true"], "the flag alone"),
        (["--seed", "1", "--", "--seed", "2"], "a second --"),
    ],
)
def test_a_flag_takes_as_many_values_as_the_base_gives_it(
    mi355x: Recipe, words: list[str], said: str
) -> None:
    with pytest.raises(OverlayError) as caught:
        build_command(mi355x, words)
    assert said in caught.value.render()


@pytest.mark.parametrize("words", [["--config", "more.yaml"], ["--config=more.yaml"]])
def test_a_file_of_flags_is_refused_with_the_way_out(mi355x: Recipe, words: list[str]) -> None:
    with pytest.raises(OverlayError, match="preflight does not see") as caught:
        build_command(mi355x, words)
    assert "behind --" in str(caught.value.fix)


def test_a_recipe_cannot_name_a_file_of_flags_either() -> None:
    with pytest.raises(OverlayError, match="preflight does not see"):
        argument("config", "more.yaml")


@pytest.mark.parametrize("port", ["0", "70000", "-1", "many", "8000.5"])
def test_a_port_out_of_range_is_refused(mi355x: Recipe, port: str) -> None:
    with pytest.raises(OverlayError, match="--port is not a port number"):
        build_command(mi355x, ["--port", port])


@pytest.mark.parametrize("port", [1, 65535])
def test_a_port_within_range_is_taken(mi355x: Recipe, port: int) -> None:
    assert build_command(mi355x, ["--port", str(port)]).port == port
