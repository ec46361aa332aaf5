# SPDX-License-Identifier: Apache-2.0
"""The layer test's judgement on recorded tensors: bounds, near-ties, and recordings that prove nothing."""

import copy
import dataclasses

import pytest
import torch

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.layers import NEAR_TIE, LayerOutput, Token, compare_layers

HIDDEN, LAYERS = 64, 5
TOKENS = [Token(prompt, prompt + step) for prompt in (7, 19) for step in range(3)]


def recording(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def output():
        values = torch.randn(2, HIDDEN, generator=generator)
        return LayerOutput(values[0].bfloat16(), values[1].bfloat16(), gap=0.1)

    return {token: {layer: output() for layer in range(LAYERS)} for token in TOKENS}


def disturbed(recorded, token, layer, share, what="hidden"):
    """A copy in which one output is off by ``share`` of its norm."""
    changed = copy.deepcopy(recorded)
    own = changed[token][layer]
    value = getattr(own, what).double()
    noise = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = value + share * value.norm() * noise / noise.norm()
    changed[token][layer] = dataclasses.replace(own, **{what: moved.float()})
    return changed


def test_equal_recordings_match_at_every_layer_and_token():
    report = compare_layers(recording(), recording())
    assert (report.compared, report.left_out, report.mismatches) == (LAYERS * len(TOKENS), 0, ())


@pytest.mark.parametrize("what", ["hidden", "residual"])
@pytest.mark.parametrize(
    ("token", "layer", "passes", "fails"),
    [(TOKENS[0], 0, 0.014, 0.016), (TOKENS[1], 0, 0.07, 0.09), (TOKENS[0], 3, 0.07, 0.09)],
)
def test_the_first_token_of_layer_0_is_held_to_the_kernels_own_error(what, token, layer, passes, fails):
    off = recording()
    assert not compare_layers(off, disturbed(off, token, layer, passes, what)).mismatches
    (found,) = compare_layers(off, disturbed(off, token, layer, fails, what)).mismatches
    assert (found.token, found.layer, found.what) == (token, layer, what)
    assert f"layer {layer}: {what} is off by" in str(found)


def test_a_routed_scale_off_by_three_percent_fails_at_layer_0():
    off = recording()
    on = {
        token: {layer: dataclasses.replace(o, hidden=o.hidden * 1.03) for layer, o in layers.items()}
        for token, layers in off.items()
    }
    found = compare_layers(off, on).mismatches
    assert {(one.token, one.layer) for one in found} == {(token, 0) for token in TOKENS if token.is_first}


def test_behind_a_near_tie_nothing_is_compared_and_before_it_everything():
    off = recording()
    off[TOKENS[0]][2] = dataclasses.replace(off[TOKENS[0]][2], gap=NEAR_TIE)
    for layer in (2, 3, 4):
        assert not compare_layers(off, disturbed(off, TOKENS[0], layer, 0.9)).mismatches
    assert compare_layers(off, disturbed(off, TOKENS[0], 1, 0.9)).mismatches
    assert compare_layers(off, disturbed(off, TOKENS[0], 2, 0.9, "residual")).mismatches
    assert compare_layers(off, disturbed(off, TOKENS[1], 3, 0.9)).mismatches
    assert compare_layers(off, off).left_out == 2


def test_an_output_that_is_not_finite_does_not_match():
    off, on = recording(), recording()
    on[TOKENS[2]][4] = dataclasses.replace(on[TOKENS[2]][4], hidden=torch.full((HIDDEN,), float("nan")))
    assert [found.layer for found in compare_layers(off, on).mismatches] == [4]


def test_recordings_that_prove_nothing_are_refused():
    off = recording()
    with pytest.raises(OverlayError, match="other tokens"):
        compare_layers({}, {})
    with pytest.raises(OverlayError, match="other tokens"):
        compare_layers(off, {token: off[token] for token in TOKENS[1:]})
    missing = {token: dict(layers) for token, layers in off.items()}
    del missing[TOKENS[0]][4]
    with pytest.raises(OverlayError, match="other layers"):
        compare_layers(off, missing)
    zeros = copy.deepcopy(off)
    zeros[TOKENS[0]][0] = LayerOutput(torch.zeros(HIDDEN), torch.ones(HIDDEN))
    with pytest.raises(OverlayError, match="hidden of zeros"):
        compare_layers(zeros, zeros)
