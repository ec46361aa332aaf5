# SPDX-License-Identifier: Apache-2.0
"""Our FFN launch in the model's mono decode: which layers get it, with which weights, and beside what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import decoder_layer, gpu, with_drafts  # noqa: F401
from tests.unit.test_mono_decode_step import metadata, opened, run, served, whole_layer  # noqa: F401
from tests.unit.test_mono_decode_weights import FFN_PLACES, loaded
from tests.unit.test_specialized_decode_tree import deployment

from vllm.models.common.specialized_decode import fail_stop  # isort: skip
from vllm.models.common.specialized_decode.decode import Launch  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode, mono_decode_weights  # isort: skip
from vllm.models.deepseek_v41.amd.mono import ffn_launch  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip

# A cache that the whole-layer kernels do not read: the layer's attention is vLLM's.
FFN_ONLY = {"kv_cache_dtype": "auto"}


def layers(*made: Any) -> list[tuple[Any, MonoDecodeLayer]]:
    """Decoder layers of one model, with their mono decode."""
    config = with_drafts(deployment())
    pairs = [(served(layer), MonoDecodeLayer.create(layer, config)) for layer in made]
    assert all(mono is not None for _, mono in pairs)
    return pairs  # type: ignore[return-value]


def test_a_launch_is_opened_for_the_layers_that_take_it(opened: list[Any]) -> None:  # noqa: F811
    (whole, whole_mono), (part, part_mono) = layers(decoder_layer(20), decoder_layer(21, **FFN_ONLY))
    step = metadata(whole) | metadata(part)
    assert run(whole, whole_mono, step) == ("whole",) and run(part, part_mono, step) == ("ffn",)
    wholes, parts = opened
    assert [what for what, *_ in wholes.calls] == ["whole"] and [what for what, *_ in parts.calls] == ["ffn"]
    assert wholes.layers == (whole_mono.plan.name,) and parts.layers == (part_mono.plan.name,)
    assert wholes.widths == parts.widths == [6]


@pytest.mark.parametrize(
    ("changes", "launch"), [(FFN_ONLY, Launch.PART), ({}, Launch.WHOLE)], ids=["part", "whole"]
)
def test_a_launch_that_no_layer_takes_is_not_opened(
    opened: list[Any],  # noqa: F811
    changes: dict[str, Any],
    launch: Launch,
) -> None:
    ((layer, mono),) = layers(decoder_layer(21, **changes))
    run(layer, mono, metadata(layer))
    assert mono.decode.kernels.launches == {launch: opened[0]} and len(opened) == 1
    assert opened[0].layers == (mono.plan.name,)


def test_the_layers_of_a_step_are_in_the_order_that_they_launch_in(opened: list[Any]) -> None:  # noqa: F811
    pairs = layers(*(decoder_layer(i, **FFN_ONLY) for i in (3, 7, 39)))
    run(*pairs[0], {name: one for layer, _ in pairs for name, one in metadata(layer).items()})
    assert opened[0].layers == tuple(mono.plan.name for _, mono in pairs)


class Loose(ffn_launch.FfnWeights):
    """Weights that are not looked at."""

    def check(self, *given: Any) -> None:
        checked.append(given)


checked: list[Any] = []


def test_each_weight_is_taken_from_its_place_and_checked(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    checked.clear()
    monkeypatch.setattr(ffn_launch, "FfnWeights", Loose)
    mono = MonoDecodeLayer.create(layer := loaded(decoder_layer(21, **FFN_ONLY)), deployment())
    assert mono is not None and layer is not None
    mono.take_weights()
    tags = {name: tensor.tag for name, tensor in mono.weights.tensors().items()}
    assert tags == FFN_PLACES and mono.weights.layer == mono.plan.name
    assert checked == [(4, 384, 6, "aiter_shuffle")]


def test_codes_are_handed_on_as_bytes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(ffn_launch, "FfnWeights", Loose)
    layer = loaded(decoder_layer(21, **FFN_ONLY))
    layer.ffn.shared_experts.down_proj.weight_scale = torch.zeros(2, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )
    mono = MonoDecodeLayer.create(layer, deployment())
    assert mono is not None
    mono.take_weights()
    codes = {name for name, tensor in mono.weights.tensors().items() if tensor.dtype == torch.uint8}
    assert "shared_w2_scale" in codes and mono.weights.mix_scale.dtype == torch.float32


def test_missing_and_misshapen_weights_are_named_before_the_kernels_are_opened(gpu: Any) -> None:  # noqa: F811
    layer = loaded(decoder_layer(21, **FFN_ONLY))
    mono = MonoDecodeLayer.create(layer, deployment())
    assert mono is not None
    with pytest.raises(ValueError, match=r"FFN launch of layers\.21\.window: .*w13 has shape \(1,\)"):
        mono.take_weights()
    del layer.hc_ffn_fn, layer.ffn_norm.weight
    with pytest.raises(AttributeError, match=r"no tensor at hc_ffn_fn, ffn_norm\.weight"):
        mono.take_weights()


def test_every_weight_of_the_kernel_has_a_place() -> None:
    assert set(mono_decode_weights.FFN_HALF.in_place) == set(ffn_launch.expected(FfnGeometry(1, 4)))


def test_ours_is_opened_for_this_rank_and_its_failures_are_looked_for(
    gpu: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.distributed
    from vllm.models.common.amd.persistent import peers

    monkeypatch.setattr(fail_stop, "_checks", [])
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: SimpleNamespace(cpu_group="the TP group"))
    group = peers.Group(1, 4, list)
    monkeypatch.setattr(
        peers.Group, "of", classmethod(lambda cls, given: group if given == "the TP group" else None)
    )
    build = mono_decode.KernelBuild(4, mono_decode.TARGET_ROUTING, 128)
    part = mono_decode._open_ffn(build, ("layers.21",))
    whole = mono_decode._open_whole(build, ("layers.20",))
    for launch, layer in ((part, "layers.21"), (whole, "layers.20")):
        place = launch.deployment
        assert (place.group, place.arch, place.experts, place.picks) == (group, "gfx950", 384, 6)
        assert place.layers == (layer,) and place.device == torch.device("cuda", 0)
    assert whole.window == 128
    assert fail_stop._checks == [part.fail_stop.check, whole.check]
