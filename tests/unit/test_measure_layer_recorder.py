# SPDX-License-Identifier: Apache-2.0
"""The layer test's recorder on toy layers and the verb around it; the real-server tests have the engine."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rocm_overlay.cli import main
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import layer_test
from rocm_overlay.measure.layer_recorder import LayerRecorder, read_recording, routing_gap
from rocm_overlay.measure.layer_weights import clear_padding, fill_floats
from rocm_overlay.measure.layers import Token, check_paths, compare_layers
from rocm_overlay.measure.record_layers import EXTENSION, MAX_MODEL_LEN, PROMPTS, STEPS
from rocm_overlay.project import Project
from rocm_overlay.recipe import load
from tests import toy_layers

PROJECT = Project.find()
TOKENS = {Token(prompt, prompt + step) for prompt in toy_layers.PROMPTS for step in range(toy_layers.STEPS)}


def recorded(file, model=None, run=toy_layers.decode):
    model = model or toy_layers.ToyModel()
    recorder = LayerRecorder(model, toy_layers.PROMPTS, toy_layers.STEPS)
    run(model)
    return recorder.finish(file)


def test_every_layer_of_every_decode_token_is_recorded_and_no_prefill(tmp_path):
    assert recorded(tmp_path / "off.pt") == []
    found = read_recording(tmp_path / "off.pt")
    assert found.keys() == TOKENS
    assert {tuple(own) for own in found.values()} == {tuple(range(toy_layers.LAYERS))}
    model = toy_layers.ToyModel()
    x = model.embed(torch.tensor([21]))[0].detach()
    first, block = found[Token(20, 21)][0], model.layers[0].ffn
    assert torch.equal(first.residual, x)
    with torch.no_grad():
        torch.testing.assert_close(first.hidden, block.up(x))
        gap = routing_gap(block.gate(x), block.gate.e_score_correction_bias, toy_layers.PICKS)
    assert first.gap == pytest.approx(float(gap))
    # The hooks are off the model: what it runs after the recording is not kept.
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_the_gap_is_between_the_last_pick_and_the_next_best_score_with_the_bias():
    # Scores are the root of softplus: 0 gives 0.8326, 1 gives 1.1460, 2 gives 1.4585.
    logits, bias = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0.0, 0.5, 0.0])
    assert float(routing_gap(logits, None, 1)) == pytest.approx(1.4585 - 1.1460, abs=1e-3)
    assert float(routing_gap(logits, bias, 1)) == pytest.approx(1.4585 - 1.3326, abs=1e-3)


def test_the_padding_of_routed_experts_is_cleared_and_nothing_else():
    """At TP 4 an expert's 576 are padded to 640; here 2 to 4."""
    experts = torch.nn.Module()
    experts.moe_config = SimpleNamespace(intermediate_size_per_partition_unpadded=2)
    experts.w13_weight = torch.nn.Parameter(torch.ones(2, 8, 3, dtype=torch.uint8), requires_grad=False)
    experts.w2_weight = torch.nn.Parameter(torch.ones(2, 5, 2, dtype=torch.uint8), requires_grad=False)
    clear_padding(torch.nn.Sequential(experts))
    assert experts.w13_weight[0, :, 0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert experts.w2_weight[1, 4].tolist() == [1, 0]
    # What vLLM calls these in the base.
    text = (PROJECT.base / "vllm/model_executor/layers/quantization/mxfp4.py").read_text()
    assert 'register_parameter("w13_weight"' in text and 'register_parameter("w2_weight"' in text
    config = (PROJECT.base / "vllm/model_executor/layers/fused_moe/config.py").read_text()
    assert "intermediate_size_per_partition_unpadded" in config


class ToyRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4096,), 1e-3))


def test_weights_have_a_checkpoints_size_and_each_process_draws_the_same():
    def filled():
        model = torch.nn.Module()
        model.norm, model.proj = ToyRMSNorm(), torch.nn.Linear(256, 64)
        model.proj.weight_scale = torch.nn.Parameter(torch.full((2, 2), 0.5))
        model.codes = torch.nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
        fill_floats(model)
        return model

    model = filled().requires_grad_(False)
    assert model.norm.weight.mean() == pytest.approx(1, abs=0.02)
    assert (model.proj(torch.ones(256)) - model.proj.bias).std() == pytest.approx(1, rel=0.3)
    assert model.proj.bias.abs().max() < 0.25
    assert model.proj.weight_scale.unique().tolist() == [0.5] and model.codes.tolist() == [1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), filled().parameters(), strict=True))


def mixed_step(model):
    toy_layers.decode(model, steps=3)
    # The last tokens of both come with a new prompt's first rows.
    model(torch.tensor([6, 23, 0, 1, 2]))


def chunk_inside_an_answer(model):
    toy_layers.decode(model, steps=3)
    model(torch.tensor([3, 4, 5]))
    model(torch.tensor([6, 23]))


def test_a_step_with_a_prefill_is_left_out_and_what_is_missing_is_said(tmp_path):
    assert recorded(tmp_path / "a.pt", run=mixed_step) == [
        "2 of 8 tokens were not seen whole in a decode-only step"
    ]
    assert len(read_recording(tmp_path / "a.pt")) == 6


def test_a_prefills_chunk_at_an_answers_positions_is_no_decode_step(tmp_path):
    assert recorded(tmp_path / "a.pt", run=chunk_inside_an_answer) == []


def test_a_token_that_runs_twice_is_a_problem(tmp_path):
    def again(model):
        toy_layers.decode(model)
        model(torch.tensor([3, 20]))

    problems = recorded(tmp_path / "a.pt", run=again)
    assert len(problems) == 2 * toy_layers.LAYERS and "layer 0 ran twice" in problems[0]


def test_a_router_of_an_earlier_step_is_not_taken_for_this_steps(tmp_path):
    model = toy_layers.ToyModel()

    def kernels_from_the_second_step(model):
        model(torch.cat([torch.arange(length) for length in toy_layers.PROMPTS]))
        for layer in model.layers:
            layer.kernels = True
        toy_layers.decode(model)

    recorded(tmp_path / "a.pt", model, kernels_from_the_second_step)
    found = read_recording(tmp_path / "a.pt")
    assert {one.gap for own in found.values() for one in own.values()} == {None}


def test_each_arm_has_to_run_on_its_own_path(tmp_path):
    sides = {}
    for arm in ("off", "on"):
        recorded(tmp_path / f"{arm}.pt", toy_layers.ToyModel(kernels=arm == "on"))
        sides[arm] = read_recording(tmp_path / f"{arm}.pt")
    check_paths(sides["off"], sides["on"])
    assert compare_layers(sides["off"], sides["on"]).mismatches == ()
    with pytest.raises(OverlayError, match="kernels on") as caught:
        check_paths(sides["off"], sides["off"])
    assert "vLLM's router ran in layers [0, 1, 2, 3, 4], 40 times" in str(caught.value)
    with pytest.raises(OverlayError, match="kernels off"):
        check_paths(sides["on"], sides["on"])


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with pytest.raises(OverlayError, match="answers share positions"):
        LayerRecorder(toy_layers.ToyModel(), [3, 6], 4)
    with pytest.raises(OverlayError, match="no decoder layers"):
        LayerRecorder(torch.nn.Linear(1, 1), [3], 4)
    (tmp_path / "a.pt").write_bytes(b"no recording")
    for name in ("a.pt", "none.pt"):
        with pytest.raises(OverlayError, match="is no recording of layers"):
            read_recording(tmp_path / name)


def verb(folder, monkeypatch, fault="", *words):
    monkeypatch.setattr(layer_test, "PROGRAM", "tests.fake_record_layers")
    monkeypatch.setenv("FAKE_LAYERS", fault)
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT.root / 'src'}:{PROJECT.root}")
    return main(["layer-test", "mi355x-tp2", "--out", str(folder), *words])


def test_the_verb_records_both_arms_and_compares_every_output(tmp_path, monkeypatch, capsys):
    assert verb(tmp_path, monkeypatch) == 0
    assert "40 outputs compared, 0 left out" in capsys.readouterr().out


def test_a_scale_off_by_three_percent_fails_it(tmp_path, monkeypatch, capsys):
    assert verb(tmp_path, monkeypatch, "scale") == 1
    assert "MISMATCH: prompt 3, position 3, layer 0: hidden is off by 0.0300" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "says"),
    {
        "fails": "no GPU that runs this",
        "another path": "with the kernels on, layers ran on another path",
        "short": "could not be recorded",
        "hangs": "none in 5 s",
    }.items(),
)
def test_an_arm_that_did_not_run_is_no_result(tmp_path, monkeypatch, capsys, fault, says):
    limit = ["--limit-s", "5"] if fault == "hangs" else []
    assert verb(tmp_path, monkeypatch, fault, *limit) == 2
    assert says in capsys.readouterr().err
    if fault != "another path":
        assert not (tmp_path / ("off.pt" if fault == "short" else "on.pt")).exists()


def test_a_recipe_without_kernels_is_refused(tmp_path, capsys):
    words = ["--recipes", str(PROJECT.root / "tests/recipes"), "--out", str(tmp_path)]
    assert main(["layer-test", "tiny-cpu", *words]) == 2
    assert "has no kernels to test" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mi355x-tp2", "mi355x-tp4", "mi300x-tp4", "mi325x-tp4"])
def test_the_arms_serve_five_layers_that_differ_in_the_kernels_alone(name):
    off, on = (layer_test.arm_words(load(PROJECT.recipes, name), arm)[0] for arm in ("off", "on"))
    assert [word for word in off if word not in on] == ["--no-monokernel"]
    assert [word for word in on if word not in off] == ["--monokernel"]
    assert json.loads(off[off.index("--hf-overrides") + 1])["num_hidden_layers"] == 5
    assert not any("speculative" in word or "compilation" in word for word in on)


def test_the_five_layers_are_each_kind_that_the_model_has():
    five = layer_test.FIVE_LAYERS
    kinds = {
        (ratio, layer in five["kv_source_layer_ids"]) for layer, ratio in enumerate(five["compress_ratios"])
    }
    assert kinds == {(0, False), (2, True), (2, False), (1, True), (1, False)}
    # What the base's model reads of its configuration.
    models = PROJECT.base / "vllm/models/deepseek_v41"
    text = "".join(file.read_text() for file in models.rglob("*.py"))
    assert all(re.search(rf"config\.{name}\b|\"{name}\"", text) for name in five)


def test_the_answers_reach_beyond_the_window_and_fit_the_model():
    assert any(length < 128 for length in PROMPTS) and any(length > 128 for length in PROMPTS)
    assert max(PROMPTS) + STEPS < MAX_MODEL_LEN
    module, _, name = EXTENSION.rpartition(".")
    assert name in Path(PROJECT.root / "src" / f"{module.replace('.', '/')}.py").read_text()
