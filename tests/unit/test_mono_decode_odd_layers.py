# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 on mono kernels, where single layers of a step, or all of a model, run on vLLM's path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import decoder_layer, draft_layer, gpu, with_drafts  # noqa: F401
from tests.unit.test_mono_decode_step import (
    DRAFT_WIDTH,
    ROWS,
    Recorder,
    created,
    metadata,
    opened,  # noqa: F401
    run,
    stream,
)
from tests.unit.test_specialized_decode_tree import deployment, in_step

from vllm.models.common.specialized_decode import decode as decode_module  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip


def odd_layers(count: int, config: Any) -> tuple[MonoDecodeLayer, Any]:
    """The mono decode of ``count`` layers, and a call that runs a step of them with inputs that no kernel
    reads."""
    layers = [decoder_layer(i) for i in range(3, 3 + count)]
    monos = [created(layer, config) for layer in layers]
    step = {name: value for layer in layers for name, value in metadata(layer).items()}

    def run_step() -> None:
        with in_step(step):
            for layer, mono in zip(layers, monos, strict=True):
                inputs = stream() | {"post_mix": None}
                assert mono(layer, positions=torch.arange(ROWS), **inputs) is None

    return monos[0], run_step


def test_a_step_with_five_odd_layers_is_one_declined_step(opened: list[Recorder]) -> None:  # noqa: F811
    mono, run_step = odd_layers(5, with_drafts(deployment()))
    for steps in (1, 2):
        run_step()
        counters = mono.decode.counters
        assert counters.declines == {"inputs not contiguous": steps} and counters.taken_steps == steps


def test_layers_that_a_graph_keeps_on_vllm_s_path_count_at_its_replays(
    opened: list[Recorder],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mono, run_step = odd_layers(5, with_drafts(deployment()))
    run_step()
    monkeypatch.setattr(decode_module, "_capturing", lambda: True)
    run_step()
    counters = mono.decode.counters
    assert counters.declines == {"inputs not contiguous": 1}, "a capture is no step"
    mono.decode.replayed(ROWS, ROWS)
    assert counters.declines == {"inputs not contiguous": 2} and counters.taken_steps == 2


@pytest.mark.parametrize("captured", [True, False])
def test_strict_mode_rejects_a_layer_that_a_graph_would_keep_on_vllm_s_path(
    opened: list[Recorder],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    captured: bool,
) -> None:
    """Even where an eager step may decline it."""
    config = with_drafts(deployment())
    layer = decoder_layer()
    mono = created(layer, config)
    assert run(layer, mono, metadata(layer)) == ("whole",)
    mono.decode.strict = True
    monkeypatch.setattr(decode_module, "_capturing", lambda: captured)
    with in_step(metadata(layer)):
        assert mono.decode.decision(ROWS).whole is not None
        allowed = decode_module.Decline("allowed in an eager step")
        if captured:
            with pytest.raises(RuntimeError, match="should have taken .*: allowed in an eager"):  # noqa: RUF043
                mono.decode.decline(allowed)
        else:
            assert mono.decode.decline(allowed) is None


@pytest.mark.parametrize("strict", [True, False])
def test_a_draft_of_which_no_layer_runs_a_launch_counts_no_step(opened: list[Recorder], strict: bool) -> None:  # noqa: F811
    """An MXFP8 KV cache on CDNA4: the target takes the FFN launch, and the draft's routing has none. Such a
    draft is served, so strict mode serves it too."""
    config = with_drafts(deployment())
    config.kernel_config.specialized_decode_strict = strict
    target, draft = decoder_layer(kv_mxfp8=True), draft_layer(kv_mxfp8=True)
    mono = created(target, config)
    assert mono.ffn_only and MonoDecodeLayer.create(draft, config) is None
    target_decode, draft_decode = (decode_module.current(role) for role in ("target", "draft"))
    for decode in (target_decode, draft_decode):
        decode.settle()
    with in_step(metadata(draft, DRAFT_WIDTH)):
        assert draft_decode.decision(ROWS).part is None
    draft_decode.replayed(ROWS, ROWS)
    assert draft_decode.counters.values() == {("taken_steps", ""): 0, ("taken_rows", ""): 0}
    # The target does run one: a replay of a graph without it is what strict mode is for.
    if strict:
        with pytest.raises(RuntimeError, match="captured on vLLM's path"):
            target_decode.replayed(ROWS, ROWS)
