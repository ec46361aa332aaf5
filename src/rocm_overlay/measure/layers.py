# SPDX-License-Identifier: Apache-2.0
"""The layer test's judgement: every decoder layer's outputs at every decode token, kernels on against off.

A model of five layers is served twice on the same random weights and the outputs of its layers are kept,
hidden state and residual, by prompt length and position: a request's row and step differ between two engines.
Layer 0 at a request's first decode token has the same input on both sides and must match to the kernels' own
error; what comes later inherits small differences, which random weights amplify, and gets a wider bound. A
token whose routing is a near-tie may take another expert on the other path, and carries that on: of it, only
the layers before the tie are compared.

``layer_recorder`` records them in vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_overlay.errors import OverlayError

if TYPE_CHECKING:
    import torch

# Relative errors: of the kernels against vLLM's operations on one input, and of what inherits differences.
OWN_BOUND = 0.015
INHERITED_BOUND = 0.08
# Gap between the scores of the last expert that is picked and the first that is not.
NEAR_TIE = 3.2e-3
# Below it, an output is rubbish of zero weights, on which any two paths agree.
LEAST_NORM = 1e-6


@dataclass(frozen=True)
class Token:
    """One decode token: the length of its request's prompt, and its position in the sequence."""

    prompt: int
    position: int

    @property
    def is_first(self) -> bool:
        """Whether it is its request's first decode token."""
        return self.position == self.prompt


@dataclass(frozen=True)
class LayerOutput:
    """A layer's output at one token, both flat; ``gap`` is vLLM's router's, None where that did not run."""

    hidden: torch.Tensor
    residual: torch.Tensor
    gap: float | None = None


Recording = Mapping[Token, Mapping[int, LayerOutput]]


@dataclass(frozen=True)
class Mismatch:
    """An output beyond its bound."""

    token: Token
    layer: int
    what: str
    error: float
    bound: float

    def __str__(self) -> str:
        where = f"prompt {self.token.prompt}, position {self.token.position}, layer {self.layer}"
        return f"{where}: {self.what} is off by {self.error:.4f}, bound {self.bound}"


@dataclass(frozen=True)
class LayerReport:
    """What was compared, what was left out behind near-ties, and what does not match."""

    compared: int
    left_out: int
    mismatches: tuple[Mismatch, ...]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, of float64 norms; infinite where the actual is not finite."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    value = float(difference)
    return value if value == value else float("inf")


def check_paths(off: Recording, on: Recording) -> None:
    """Refuse recordings whose layers did not run on the paths that they stand for.

    vLLM's path runs each layer's router, and our kernels pick the experts by themselves.

    Raises:
        OverlayError: a layer on the other path at some token.
    """
    sides = {"off": (off, "no router ran", True), "on": (on, "vLLM's router ran", False)}
    for name, (recorded, says, wants_router) in sides.items():
        wrong = [
            (layer, token)
            for token, layers in recorded.items()
            for layer, one in layers.items()
            if (one.gap is not None) != wants_router
        ]
        if wrong:
            raise OverlayError(
                f"with the kernels {name}, layers ran on another path",
                seen=f"{says} in layers {sorted({layer for layer, _ in wrong})}, {len(wrong)} times; "
                f"the first: {wrong[0][1]}",
                wanted="every layer on vLLM's path with the kernels off, on ours with them on",
                fix="read the log beside the recording: it says which layers the kernels take, and why not",
            )


def compare_layers(off: Recording, on: Recording) -> LayerReport:
    """Compare a recording with the kernels off and one with them on.

    Raises:
        OverlayError: nothing recorded, other tokens or layers in one of them, or outputs of zeros.
    """
    if not off or off.keys() != on.keys():
        raise OverlayError(
            "the recordings hold other tokens",
            seen=f"{len(off)} off, {len(on)} on, {len(off.keys() & on.keys())} in both",
            wanted="the same decode tokens in both, at least one",
            fix="record the same prompts and lengths, and decode-only steps alone",
        )
    mismatches: list[Mismatch] = []
    compared = left_out = 0
    for token, expected in off.items():
        if expected.keys() != on[token].keys():
            raise OverlayError(
                f"the recordings hold other layers at {token}",
                seen=f"{sorted(expected)} and {sorted(on[token])}",
                wanted="the same layers in both",
                fix="hook every decoder layer",
            )
        tied = False
        for layer in sorted(expected):
            if tied:
                left_out += 1
                continue
            compared += 1
            mismatches += _compare(token, layer, expected[layer], on[token][layer])
            gap = expected[layer].gap
            tied = gap is not None and gap <= NEAR_TIE
    return LayerReport(compared, left_out, tuple(mismatches))


def _compare(token: Token, layer: int, expected: LayerOutput, actual: LayerOutput) -> list[Mismatch]:
    bound = OWN_BOUND if layer == 0 and token.is_first else INHERITED_BOUND
    # The output of a layer with a near-tie is the first that may differ.
    tied = expected.gap is not None and expected.gap <= NEAR_TIE
    pairs = {"residual": (actual.residual, expected.residual)}
    if not tied:
        pairs["hidden"] = (actual.hidden, expected.hidden)
    found = []
    for what, (own, wanted) in pairs.items():
        if float(wanted.double().norm()) < LEAST_NORM:
            raise OverlayError(
                f"layer {layer} at {token} has a {what} of zeros",
                seen=float(wanted.double().norm()),
                wanted=f"a norm of at least {LEAST_NORM}",
                fix="fill the weights: plain dummy ones leave next to nothing",
            )
        error = relative_error(own, wanted)
        if error > bound:
            found.append(Mismatch(token, layer, what, error, bound))
    return found
