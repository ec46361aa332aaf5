# SPDX-License-Identifier: Apache-2.0
"""Recipe files: what is accepted, what is refused and how it is said, and what extends gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.kernel_arches import most_rows
from rocm_overlay.memory import plan
from rocm_overlay.recipe import Hardware, load, load_all, recipe_names
from rocm_overlay.render import build_command
from rocm_overlay.settings import read_settings

RECIPES = Path(__file__).parents[2] / "recipes"

BASE = """\
name: base
summary: A server.
hardware: {skus: [MI355X], architecture: gfx950, memory_gib: 288}
gpus: 4
image: gfx950
model: some/model
env: {OMP_NUM_THREADS: "1", VLLM_ROCM_USE_AITER: "1"}
args:
  max-num-seqs: 8
  speculative-config: {method: dspark, num_speculative_tokens: 5}
notes:
  max-num-seqs: As many as fit.
published:
  - {source: somebody, hardware: four cards, image: a nightly, figures: {ITL p50 ms: 5.5}}
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "base", BASE)
    return tmp_path


def refusal(folder: Path, name: str) -> str:
    with pytest.raises(OverlayError) as caught:
        load(folder, name)
    return caught.value.render()


def test_a_recipe_resolves_to_its_fields(folder: Path) -> None:
    recipe = load(folder, "base")
    assert recipe.hardware == Hardware(("MI355X",), "gfx950", 288)
    assert recipe.gpus == 4
    assert recipe.env == {"OMP_NUM_THREADS": "1", "VLLM_ROCM_USE_AITER": "1"}
    assert recipe.args["speculative-config"] == {"method": "dspark", "num_speculative_tokens": 5}
    assert recipe.published[0].figures == {"ITL p50 ms": 5.5}
    assert recipe.lineage == ()


def test_a_resolved_recipe_cannot_be_changed(folder: Path) -> None:
    recipe = load(folder, "base")
    with pytest.raises(AttributeError):
        recipe.gpus = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        recipe.args["max-num-seqs"] = 9  # type: ignore[index]


def test_extends_joins_maps_by_key_and_replaces_values_whole(folder: Path) -> None:
    write(
        folder,
        "own",
        "name: own\nsummary: Another.\nextends: base\ngpus: 2\n"
        "env: {OMP_NUM_THREADS: '2'}\n"
        "args: {max-num-seqs: 4, speculative-config: {method: dspark}}\n",
    )
    recipe = load(folder, "own")
    assert (recipe.name, recipe.summary, recipe.gpus, recipe.model) == ("own", "Another.", 2, "some/model")
    assert recipe.env == {"OMP_NUM_THREADS": "2", "VLLM_ROCM_USE_AITER": "1"}
    assert recipe.args == {"max-num-seqs": 4, "speculative-config": {"method": "dspark"}}
    assert recipe.notes == {"max-num-seqs": "As many as fit."}
    assert recipe.lineage == ("base",)


def test_published_figures_are_not_inherited(folder: Path) -> None:
    write(folder, "own", "name: own\nsummary: Another.\nextends: base\n")
    assert load(folder, "own").published == ()


def test_null_removes_an_inherited_key_and_its_note(folder: Path) -> None:
    write(
        folder,
        "own",
        "name: own\nsummary: Another.\nextends: base\n"
        "args: {max-num-seqs: null}\nenv: {OMP_NUM_THREADS: null}\n",
    )
    recipe = load(folder, "own")
    assert "max-num-seqs" not in recipe.args
    assert "max-num-seqs" not in recipe.notes
    assert recipe.env == {"VLLM_ROCM_USE_AITER": "1"}


def test_extends_reaches_through_a_chain(folder: Path) -> None:
    write(folder, "middle", "name: middle\nsummary: M.\nextends: base\nargs: {block-size: 64}\n")
    write(folder, "own", "name: own\nsummary: O.\nextends: middle\n")
    recipe = load(folder, "own")
    assert recipe.args["block-size"] == 64
    assert recipe.lineage == ("middle", "base")


def test_an_unknown_recipe_suggests_near_names(folder: Path) -> None:
    message = refusal(folder, "bass")
    assert "no recipe named bass" in message
    assert "did you mean base?" in message


def test_an_unknown_extended_recipe_is_named(folder: Path) -> None:
    write(folder, "own", "name: own\nsummary: Another.\nextends: bose\n")
    assert "no recipe named bose" in refusal(folder, "own")


def test_a_cycle_of_extends_is_shown(folder: Path) -> None:
    write(folder, "one", "name: one\nsummary: S.\nextends: two\n")
    write(folder, "two", "name: two\nsummary: S.\nextends: one\n")
    assert "seen:   one -> two -> one\n" in refusal(folder, "one")


def test_malformed_yaml_is_placed(folder: Path) -> None:
    write(folder, "own", "name: own\nsummary: [unclosed\nargs: {}\n")
    message = refusal(folder, "own")
    assert "own.yaml, line 3" in message
    assert "malformed YAML" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: own\nsummary: S.\nname: own\nextends: base\n", 3),
        ("name: own\nsummary: S.\nextends: base\nargs:\n  max-num-seqs: 1\n  max-num-seqs: 2\n", 6),
        ("name: own\nsummary: S.\nextends: base\nargs:\n  a-config:\n    k: 1\n    k: 2\n", 7),
    ],
)
def test_a_key_written_twice_is_an_error_at_any_depth(folder: Path, text: str, line: int) -> None:
    write(folder, "own", text)
    message = refusal(folder, "own")
    assert f"own.yaml, line {line}" in message
    assert "written twice" in message


def test_a_file_that_is_no_map_is_refused(folder: Path) -> None:
    write(folder, "own", "- name\n- summary\n")
    assert "not a recipe" in refusal(folder, "own")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("arg: {}", ("unknown field arg", "did you mean args?")),
        (
            "hardware: {skus: [A], architecture: gfx950, memory_gb: 1}",
            ("memory_gb in hardware", "memory_gib?"),
        ),
        ("hardware: {skus: [A], architecture: gfx90a, memory_gib: 1}", ("hardware.architecture", "gfx942")),
        ("env: {OMP_NUM_THREADS: 1}", ("env.OMP_NUM_THREADS", "string")),
        ("gpus: 0", ("gpus", "minimum 1")),
        ("args: {max_num_seqs: 1}", ("args", "max_num_seqs")),
    ],
)
def test_a_field_out_of_the_schema_is_named(folder: Path, line: str, said: tuple[str, ...]) -> None:
    write(folder, "own", f"name: own\nsummary: S.\nextends: base\n{line}\n")
    message = refusal(folder, "own")
    assert "own.yaml" in message
    for part in said:
        assert part in message


def test_a_recipe_that_extends_nothing_must_say_everything(folder: Path) -> None:
    write(folder, "own", BASE.replace("name: base", "name: own").replace("model: some/model\n", ""))
    assert "the field model" in refusal(folder, "own")


def test_a_name_other_than_the_files_is_refused(folder: Path) -> None:
    write(folder, "own", BASE)
    assert "name is not its file's" in refusal(folder, "own")


@pytest.mark.parametrize("extends", ["extends: base\n", ""])
def test_a_removal_that_removes_nothing_is_refused(folder: Path, extends: str) -> None:
    rest = "" if extends else BASE.split("summary: A server.\n")[1].split("args:")[0]
    write(folder, "own", f"name: own\nsummary: S.\n{extends}{rest}args: {{block-size: null}}\n")
    assert "args.block-size removes what nothing set" in refusal(folder, "own")


def test_a_note_on_a_flag_that_is_not_set_is_refused(folder: Path) -> None:
    write(folder, "own", "name: own\nsummary: S.\nextends: base\nnotes: {block-size: Gone.}\n")
    message = refusal(folder, "own")
    assert "notes on what it does not set" in message
    assert "block-size" in message


def test_a_note_kept_on_a_removed_flag_is_refused_not_dropped(folder: Path) -> None:
    write(
        folder,
        "own",
        "name: own\nsummary: S.\nextends: base\nargs: {max-num-seqs: null}\nnotes: {max-num-seqs: Mine.}\n",
    )
    message = refusal(folder, "own")
    assert "notes on what it does not set" in message
    assert "max-num-seqs" in message


def test_a_file_that_is_not_utf8_is_named_with_its_byte(folder: Path) -> None:
    (folder / "own.yaml").write_bytes(b"name: own\nsummary: caf\xe9\n")
    message = refusal(folder, "own")
    assert "own.yaml is not UTF-8 text" in message
    assert "byte 0xe9 at position 22" in message


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, **_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    message = refusal(folder, "base")
    assert "base.yaml cannot be read" in message
    assert "Permission denied" in message


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("args: {some-config: {since: 2026-01-02}}", "args.some-config.since"),
        ("args: {some-config: {share: .nan}}", "args.some-config.share"),
        ("args: {some-config: {list: [1, .inf]}}", "args.some-config.list.1"),
        ("args: {some-config: {raw: !!binary aGk=}}", "args.some-config.raw"),
        ("args: {some-config: !!set {a, b}}", "args.some-config"),
    ],
)
def test_what_yaml_has_and_json_has_not_is_placed(folder: Path, line: str, place: str) -> None:
    write(folder, "own", f"name: own\nsummary: S.\nextends: base\n{line}\n")
    message = refusal(folder, "own")
    assert "cannot be written as JSON" in message
    assert place in message


@pytest.mark.parametrize("value", ["2026-13-45", "!!int many", "[" * 3000, "&own [*own]"])
def test_a_value_that_yaml_itself_cannot_make_is_malformed(folder: Path, value: str) -> None:
    write(folder, "own", f"name: own\nsummary: S.\nextends: base\nargs: {{a: {value}}}\n")
    assert "own.yaml" in refusal(folder, "own")
    assert "malformed YAML" in refusal(folder, "own")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('env: {HF_TOKEN: ""}', "HF_TOKEN"),
        ("env: {VLLM_API_KEY: hush}", "VLLM_API_KEY"),
        ("env: {REDIS_PASSWORD: hush}", "REDIS_PASSWORD"),
        ("args: {hf-token: hush}", "hf-token"),
        ("args: {api-key: [hush]}", "api-key"),
    ],
)
def test_a_secret_has_no_place_in_a_recipe(folder: Path, line: str, name: str) -> None:
    write(folder, "own", f"name: own\nsummary: S.\nextends: base\n{line}\n")
    message = refusal(folder, "own")
    assert name in message
    assert "no secret in a recipe" in message
    assert "hush" not in message


def test_a_fault_beside_a_secret_does_not_tell_it(folder: Path) -> None:
    write(folder, "own", "name: own\nsummary: S.\nextends: base\nenv: [HF_TOKEN, {HF_TOKEN: hush}]\n")
    assert "hush" not in refusal(folder, "own")


# The project's own recipes.

WANTED = [
    "agentx-mi355x-tp4",
    "bench-gfx942-7seqs",
    "bench-gfx950-32k",
    "mi300x-tp4",
    "mi325x-tp2",
    "mi325x-tp4",
    "mi355x-tp2",
    "mi355x-tp4",
]

# Values that decide memory, numerics or whether the server starts.
LOAD_BEARING = {
    "tensor-parallel-size",
    "monokernel",
    "moe-backend",
    "max-model-len",
    "block-size",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-cudagraph-capture-size",
    "gpu-memory-utilization",
    "language-model-only",
    "tokenizer-mode",
    "attention-config",
    "engram-config",
    "speculative-config",
    "compilation-config",
    "enable-prefix-caching",
    "swa-bounded-replay",
}
LOAD_BEARING_KEYS = {
    "attention-config": {"indexer_kv_dtype", "indexer_sparse_logits"},
    "engram-config": {"cpu_offload"},
    "compilation-config": {"cudagraph_mode"},
    "speculative-config": {
        "method",
        "num_speculative_tokens",
        "draft_sample_method",
        "rejection_sample_method",
        "enable_adaptive_verification",
    },
}


def test_the_project_has_the_recipes_it_promises() -> None:
    assert recipe_names(RECIPES) == WANTED


@pytest.mark.parametrize("name", WANTED)
def test_load_bearing_values_are_written_out(name: str) -> None:
    recipe = load(RECIPES, name)
    assert set(recipe.args) >= LOAD_BEARING
    for flag, keys in LOAD_BEARING_KEYS.items():
        value = recipe.args[flag]
        assert isinstance(value, dict)
        assert set(value) >= keys
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" in recipe.env
    assert recipe.args["tensor-parallel-size"] == recipe.gpus


@pytest.mark.parametrize("name", WANTED)
def test_every_json_argument_and_variable_is_explained(name: str) -> None:
    recipe = load(RECIPES, name)
    maps = {key for key, value in recipe.args.items() if isinstance(value, dict)}
    assert set(recipe.notes) >= {*maps, *recipe.env, "monokernel", "max-cudagraph-capture-size"}


@pytest.mark.parametrize("name", WANTED)
def test_every_recipe_says_what_it_was_published_with(name: str) -> None:
    assert load(RECIPES, name).published


def test_gfx942_recipes_capture_whole_decode_steps_only() -> None:
    on_gfx942 = [recipe for recipe in load_all(RECIPES) if recipe.hardware.architecture == "gfx942"]
    assert len(on_gfx942) == 4
    for recipe in on_gfx942:
        assert recipe.args["compilation-config"] == {"cudagraph_mode": "FULL_DECODE_ONLY"}
        assert recipe.env["VLLM_USE_BREAKABLE_CUDAGRAPH"] == "0"


def test_no_recipe_replays_the_window_of_a_cached_prefix() -> None:
    # The MI300X lane passes --no-swa-bounded-replay, and the base turns the replay off on ROCm.
    assert {recipe.args["swa-bounded-replay"] for recipe in load_all(RECIPES)} == {False}


def test_tp_2_on_gfx942_says_to_which_step_the_kernels_reach_and_serves_more() -> None:
    """A limit of five requests would keep a server of two cards from most of what it is bought for."""
    recipe = load(RECIPES, "mi325x-tp2")
    rows = most_rows("gfx942", 2)
    assert f"up to {rows} rows at TP 2" in recipe.notes["monokernel"]
    assert read_settings(recipe, build_command(recipe), {}).shape.decode_rows > rows
    for key in ("max-num-seqs", "max-cudagraph-capture-size"):
        assert recipe.args[key] == load(RECIPES, "mi325x-tp4").args[key]


def test_gfx942_serves_with_the_kernels_at_ordinary_memory_and_says_what_they_take() -> None:
    for name in ("mi300x-tp4", "mi325x-tp2", "mi325x-tp4"):
        recipe = load(RECIPES, name)
        assert recipe.args["monokernel"] is True and recipe.args["gpu-memory-utilization"] == 0.9
        taken = plan(read_settings(recipe, build_command(recipe), {}).shape).kernels
        assert f"{taken:.1f} GiB a rank" in recipe.notes["monokernel"]
