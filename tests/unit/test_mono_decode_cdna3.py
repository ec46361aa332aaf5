# SPDX-License-Identifier: Apache-2.0
"""CDNA3: what is kept of the weights at load, through vLLM's own processing and reloads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import (
    DRAFT_ROUTING,
    Node,
    decoder_layer,
    draft_layer,
    gpu,  # noqa: F401
    with_backend,
    with_drafts,
)
from tests.unit.test_specialized_decode_tree import deployment

import vllm.model_executor.layers.quantization.utils.mxfp4_utils as mxfp4_utils  # isort: skip
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel  # isort: skip
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend  # isort: skip
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # isort: skip
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16  # isort: skip
from vllm.model_executor.model_loader.reload import layerwise  # isort: skip
from vllm.models.common.specialized_decode.decode import Launch  # isort: skip
from vllm.models.common.specialized_decode.spec import SpecializedDecodeError  # isort: skip
from vllm.models.common.specialized_decode.weights import KeptAtLoad  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode, mono_decode_cdna3 as cdna3  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode_weights as weights  # isort: skip
from vllm.models.deepseek_v41.amd.mono import ffn_launch, layer_launch  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer  # isort: skip
from vllm.v1.attention.ops import rocm_aiter_mla_sparse  # isort: skip

WIDENING = "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"
N, K = 64, 96


@pytest.fixture
def mi300(gpu: Any) -> None:  # noqa: F811
    gpu(cdna=3)


# ---- what runs


@pytest.mark.usefixtures("mi300")
def test_a_whole_layer_keeps_all_that_vllm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    mono = MonoDecodeLayer.create(decoder_layer(), deployment())
    assert mono is not None
    linears = {*weights.ATTENTION_HALF.linears.values(), *weights.FFN_HALF.linears.values()}
    assert set(mono.kept) == linears | {weights.EXPERTS}
    assert mono.decode.max_rows == 42 and mono.unfolded_entry
    monkeypatch.setattr(mono_decode, "_open_whole", lambda build, layers: (build, layers))
    opened = mono.decode.open_kernels().launches
    assert opened == {Launch.WHOLE: (mono.decode.build, ("layers.21.window",))}


@pytest.mark.usefixtures("mi300")
@pytest.mark.parametrize("tp, rows", [(4, 42), (2, 32)])
def test_drafts_run_whole_up_to_the_rows_of_the_ranks(tp: int, rows: int) -> None:
    drafting = MonoDecodeLayer.create(draft_layer(), with_drafts(deployment(tensor_parallel_size=tp)))
    assert drafting is not None and drafting.plan.launch is Launch.WHOLE
    assert drafting.decode.build == mono_decode.KernelBuild(tp, DRAFT_ROUTING, 192)
    assert drafting.decode.max_rows == rows and max(drafting.decode.widths_ahead(), default=0) <= rows


@pytest.mark.usefixtures("mi300")
@pytest.mark.parametrize("backend", [Mxfp4MoeBackend.TRITON_UNFUSED, Mxfp4MoeBackend.AITER_MXFP4_BF16])
def test_experts_of_another_layout_are_refused(backend: Mxfp4MoeBackend) -> None:
    wanted = (
        rf"MoE backend: {backend}, wanted AITER_TRITON_MXFP4_BF16 \(--moe-backend aiter, with VLLM_ROCM_USE"
    )
    with pytest.raises(SpecializedDecodeError, match=wanted):
        MonoDecodeLayer.create(with_backend(backend), deployment())


@pytest.mark.parametrize("cdna", [3, 4])
def test_the_widths_of_captured_graphs_are_known_ahead(gpu: Any, cdna: int) -> None:  # noqa: F811
    """Each captured size, and those of whole requests of the target (6 rows) and of the draft (5)."""
    gpu(cdna=cdna)
    config = with_drafts(deployment())
    mono = MonoDecodeLayer.create(decoder_layer(), config)
    assert mono is not None and mono.decode.widths_ahead() == [], "no graph is captured"
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 768]
    wanted = [1, 2, 4, 5, 6, 8, 10, 12, 16, 18, 20, 24, 25, 32, 35, 36, 40, 42, 48]
    assert mono.decode.widths_ahead() == [rows for rows in wanted if rows <= (48 if cdna == 4 else 42)]
    config.speculative_config = None
    assert mono.decode.widths_ahead() == [1, 2, 4, 8, 16, 24, 32, 40, 48][: 9 if cdna == 4 else 8]


# ---- dense linears, through vLLM's emulation and its reload
class Emulated(QuantizeMethodBase):
    """Of an MXFP8 linear as vLLM has it on gfx942: the scheme and the kernel that it selects there."""

    def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        layer.weight = parameter(torch.zeros(N, K, dtype=torch.float8_e4m3fn))
        layer.weight_scale = parameter(torch.zeros(N, K // 32, dtype=torch.uint8))

    def apply(self, layer: torch.nn.Module, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        EmulationMxfp8LinearKernel.process_weights_after_loading(None, layer)  # type: ignore[arg-type]


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def checkpoint(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bytes with many -0, none of them NaN, and a code for each 32 x 32 block, in each of its rows."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (N, K), generator=random, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x80
    codes = torch.randint(100, 140, (N // 32, K // 32), generator=random, dtype=torch.uint8)
    return values, codes.repeat_interleave(32, dim=0)


def first_load(linear: torch.nn.Module, seed: int) -> None:
    values, codes = checkpoint(seed)
    linear.weight.data.copy_(values.view(torch.float8_e4m3fn))
    linear.weight_scale.data.copy_(codes)
    linear.quant_method.process_weights_after_loading(linear)


def reload(linear: torch.nn.Module, seed: int) -> None:
    """As ``reload_weights`` and weight transfers do it."""
    layerwise.initialize_layerwise_reload(linear)
    values, codes = checkpoint(seed)
    linear.weight.weight_loader(linear.weight, values.view(torch.float8_e4m3fn))
    linear.weight_scale.weight_loader(linear.weight_scale, codes)
    layerwise.finalize_layerwise_reload(linear, None)


def cleaned(seed: int) -> torch.Tensor:
    values = checkpoint(seed)[0]
    assert (values == 0x80).any(), "the case has no -0"
    return torch.where(values == 0x80, 0, values)


@pytest.fixture(params=["1", "0"], ids=["widened at load", "widened at each call"])
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A linear, what is kept of it, and whether vLLM widens it at load."""
    monkeypatch.setenv(WIDENING, request.param)
    linear = torch.nn.Module()
    linear.quant_method = Emulated()
    linear.quant_method.create_weights(linear)
    layerwise.record_metadata_for_reloading(linear)
    kept = KeptAtLoad(linear, cdna3.dense_linear, loaded=cdna3.as_loaded, place=cdna3.widen_again)
    yield SimpleNamespace(linear=linear, kept=kept, at_load=request.param == "1")


def test_dense_bytes_are_kept_without_negative_zero_and_vllm_s_values_stay(dense: Any) -> None:
    first_load(dense.linear, 1)
    kept = dense.kept.taken("wo_b")
    assert torch.equal(kept["weight"].view(torch.uint8), cleaned(1))
    assert torch.equal(kept["weight_scale"], checkpoint(1)[1][::32])
    values, codes = checkpoint(1)
    wide = dequant_mxfp8_to_bf16(values.view(torch.float8_e4m3fn), codes)
    seen = dense.linear.weight.data
    if dense.at_load:
        assert seen.dtype == torch.bfloat16 and torch.equal(seen, wide)
        assert seen.data_ptr() != kept["weight"].data_ptr()
    else:
        assert seen.data_ptr() == kept["weight"].data_ptr(), "one copy"
        assert torch.equal(dequant_mxfp8_to_bf16(seen, dense.linear.weight_scale.data), wide)
    assert torch.equal(dense.linear.weight_scale.data, codes), "vLLM's codes are untouched"


def test_a_reload_is_written_to_the_addresses_of_the_first_and_cleaned(dense: Any) -> None:
    first_load(dense.linear, 1)
    kept = dict(dense.kept.taken("wo_b"))
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    reload(dense.linear, 2)
    again = dense.kept.taken("wo_b")
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert torch.equal(kept["weight"].view(torch.uint8), cleaned(2))
    assert torch.equal(kept["weight_scale"], checkpoint(2)[1][::32])
    values, codes = checkpoint(2)
    seen = dense.linear.weight.data
    wide = seen if dense.at_load else dequant_mxfp8_to_bf16(seen, dense.linear.weight_scale.data)
    assert torch.equal(wide, dequant_mxfp8_to_bf16(values.view(torch.float8_e4m3fn), codes))
    if not dense.at_load:
        assert seen.data_ptr() == places["weight"], "still one copy"


def test_the_wo_a_that_vllm_widened_once_follows_a_reload_at_its_address(dense: Any) -> None:
    assert cdna3.WIDENED_WO_A in inspect.getsource(rocm_aiter_mla_sparse._get_cached_wo_a_bf16)
    first_load(dense.linear, 1)
    widened = rocm_aiter_mla_sparse._get_cached_wo_a_bf16(dense.linear, 2, N // 2, K)
    place = widened.data_ptr()
    reload(dense.linear, 2)
    again = rocm_aiter_mla_sparse._get_cached_wo_a_bf16(dense.linear, 2, N // 2, K)
    values, codes = checkpoint(2)
    assert again.data_ptr() == place
    assert torch.equal(again.view(N, K), dequant_mxfp8_to_bf16(values.view(torch.float8_e4m3fn), codes))


def linear_with(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    return SimpleNamespace(weight=parameter(weight), weight_scale=parameter(scale))


E4M3_ZEROS = torch.zeros(N, K, dtype=torch.float8_e4m3fn)
CODES = torch.full((N // 32, K // 32), 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("weight", "scale", "said"),
    [
        (torch.zeros(N, K, dtype=torch.bfloat16), CODES, f"wanted torch.float8_e4m3fn .*{WIDENING}=0"),
        (E4M3_ZEROS, CODES[:1], r"shape \(1, 3\), wanted \(2, 3\), or \(64, 3\)"),
        (E4M3_ZEROS, torch.arange(3 * N, dtype=torch.uint8).view(N, 3), "differs within blocks of 32 rows"),
        (E4M3_ZEROS, torch.full_like(CODES, 254), "a code of 254, wanted at most 253"),
    ],
    ids=["bf16", "shape", "rows", "code"],
)
def test_dense_weights_that_cannot_be_read_are_named(
    weight: torch.Tensor, scale: torch.Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        cdna3.dense_linear(linear_with(weight, scale), weight)


def test_codes_of_blocks_are_read_in_place() -> None:
    assert cdna3.block_codes(CODES, N, K).data_ptr() == CODES.data_ptr()


# ---- routed experts, as the base's Triton backend wraps them
@dataclass
class Storage:
    data: torch.Tensor


@dataclass
class Wrapped:
    storage: Storage


E, COLUMNS, HIDDEN = 2, 64, 128


class Converting:
    """vLLM's experts on gfx942: plain parameters become triton_kernels' tensors, in other memory."""

    w13_precision_config: Any = None
    w2_precision_config: Any = None

    def process_weights_after_loading(self, experts: Any) -> None:
        def wrapped(plain: torch.Tensor, of_codes: bool) -> Wrapped:
            turned = plain.transpose(-2, -1)  # k before rows; codes are then laid out as they are shaped
            return Wrapped(Storage(turned.contiguous() if of_codes else turned))

        for name in ("w13", "w2"):
            plain = getattr(experts, f"{name}_plain")
            setattr(experts, f"{name}_weight", wrapped(plain, False))
            scale = wrapped(getattr(experts, f"{name}_codes"), True)
            setattr(self, f"{name}_precision_config", SimpleNamespace(scale=scale))


def experts_of(value: int, experts: Any = None) -> Any:
    """Experts as loaded, every byte ``value`` plus its place."""
    experts = experts or SimpleNamespace(quant_method=Converting())
    shapes = {
        "w13_plain": (E, 2 * COLUMNS, HIDDEN // 2), "w13_codes": (E, 2 * COLUMNS, HIDDEN // 32),
        "w2_plain": (E, HIDDEN, COLUMNS // 2), "w2_codes": (E, HIDDEN, COLUMNS // 32),
    }  # fmt: skip
    for name, shape in shapes.items():
        filled = (torch.arange(torch.Size(shape).numel()) + value).to(torch.uint8).view(shape)
        setattr(experts, name, filled)
    return experts


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of a precision configuration, which vLLM finds by triton_kernels' version."""
    monkeypatch.setattr(mxfp4_utils, "weight_mx_scale", lambda precision: precision.scale)


@pytest.mark.usefixtures("triton")
def test_experts_are_read_where_the_backend_left_them() -> None:
    experts = experts_of(1)
    kept = KeptAtLoad(experts, cdna3.routed_experts, place=cdna3.place_experts)
    experts.quant_method.process_weights_after_loading(experts)
    found = kept.taken("experts")
    assert torch.equal(found["w13_weight"], experts.w13_plain) and found["w13_weight"].is_contiguous()
    assert torch.equal(found["w2_weight"], experts.w2_plain) and found["w2_weight"].is_contiguous()
    assert torch.equal(found["w13_weight_scale"], experts.w13_codes.transpose(1, 2))
    assert torch.equal(found["w2_weight_scale"], experts.w2_codes.transpose(1, 2))
    method = experts.quant_method
    in_vllm = {
        "w13_weight": experts.w13_weight,
        "w13_weight_scale": method.w13_precision_config.scale,
        "w2_weight": experts.w2_weight,
        "w2_weight_scale": method.w2_precision_config.scale,
    }
    for name, wrapped in in_vllm.items():
        assert found[name].data_ptr() == wrapped.storage.data.data_ptr(), "no copy"


@pytest.mark.usefixtures("triton")
def test_a_reload_of_experts_keeps_the_first_memory_for_the_kernels_and_for_vllm() -> None:
    experts = experts_of(1)
    kept = KeptAtLoad(experts, cdna3.routed_experts, place=cdna3.place_experts)
    experts.quant_method.process_weights_after_loading(experts)
    first = dict(kept.taken("experts"))
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    shapes = experts.w13_weight.storage.data.shape, experts.w13_weight.storage.data.stride()
    experts_of(77, experts)
    experts.quant_method.process_weights_after_loading(experts)
    again = kept.taken("experts")
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert torch.equal(first["w13_weight"], experts.w13_plain)
    assert torch.equal(first["w2_weight_scale"], experts.w2_codes.transpose(1, 2))
    held = experts.w13_weight.storage.data
    assert held.data_ptr() == places["w13_weight"] and (held.shape, held.stride()) == shapes
    scale = experts.quant_method.w2_precision_config.scale.storage.data
    assert scale.data_ptr() == places["w2_weight_scale"]


@pytest.mark.usefixtures("triton")
def test_a_reload_of_another_shape_raises_rather_than_move() -> None:
    experts = experts_of(1)
    kept = KeptAtLoad(experts, cdna3.routed_experts, place=cdna3.place_experts)
    experts.quant_method.process_weights_after_loading(experts)
    experts.w2_plain = experts.w2_plain[:, :, :-1].contiguous()
    with pytest.raises(ValueError, match=r"w2_weight is torch\.uint8 \(2, 128, 31\), wanted .*128, 32\)"):
        experts.quant_method.process_weights_after_loading(experts)
    assert kept.taken("experts")["w2_weight"].shape == (E, HIDDEN, COLUMNS // 2)


@pytest.mark.usefixtures("triton")
def test_experts_of_another_backend_are_named_when_they_are_taken() -> None:
    experts = SimpleNamespace(
        quant_method=SimpleNamespace(process_weights_after_loading=lambda module: None),
        w13_weight=torch.zeros(1),
    )
    kept = KeptAtLoad(experts, cdna3.routed_experts, place=cdna3.place_experts)
    experts.quant_method.process_weights_after_loading(experts)
    said = r"^ffn\.experts: w13_weight is a Tensor, .*w2_weight is a NoneType.*--moe-backend aiter"
    with pytest.raises(ValueError, match=said):
        kept.taken("ffn.experts")


# ---- the kernels' checks of what they are handed
def handed(tp: int, **changes: Any) -> ffn_launch.FfnWeights:
    wanted = ffn_launch.expected(FfnGeometry(1, tp), "row_major")
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in wanted.items()
    }
    return ffn_launch.FfnWeights("layers.3", **(tensors | changes))


@pytest.mark.parametrize(("tp", "columns"), [(2, 1280), (4, 768)])
def test_experts_of_gfx942_are_taken_with_their_padding(tp: int, columns: int) -> None:
    handed(tp).check(tp, 384, 6, "row_major")
    assert handed(tp).w13.shape == (384, 2 * columns, 2560)
    assert handed(tp).w2_scale.shape == (384, columns // 32, 5120)


@pytest.mark.parametrize("name", ["w13", "w13_scale", "w2", "w2_scale"])
def test_experts_of_another_shape_dtype_or_stride_are_named_with_the_way_out(name: str) -> None:
    shape, dtype = ffn_launch.expected(FfnGeometry(1, 4), "row_major")[name]
    turned = (*shape[:1], shape[2], shape[1])
    cases = {
        f"{name} has strides": torch.empty(turned, dtype=dtype, device="meta").transpose(1, 2),
        f"{name} is torch.int8, wanted torch.uint8": torch.empty(shape, dtype=torch.int8, device="meta"),
        f"{name} has shape {turned}, wanted {shape}": torch.empty(turned, dtype=dtype, device="meta"),
    }
    for said, tensor in cases.items():
        with pytest.raises(ValueError) as caught:
            handed(4, **{name: tensor}).check(4, 384, 6, "row_major")
        assert said in str(caught.value) and "--moe-backend aiter" in str(caught.value)


def test_a_dense_weight_that_vllm_widened_is_named_with_the_way_out() -> None:
    wide = torch.empty(1152, 5120, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=f"shared_w13 is torch.bfloat16, wanted .*: set {WIDENING}=0"):
        handed(4, shared_w13=wide).check(4, 384, 6, "row_major")
    assert set(layer_launch.expected(4)) >= {"wqkv", "wo_a"}


# ---- a layer's weights, from what was kept of them
def put(root: Any, path: str, tensor: torch.Tensor) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(root, owner):
            setattr(root, owner, Node())
        root = getattr(root, owner)
    setattr(root, name, tensor)


def whole_layer(tp: int) -> MonoDecodeLayer:
    """A layer with all weights as vLLM and ``KeptAtLoad`` have them, without their memory."""
    layer = decoder_layer()
    mono = MonoDecodeLayer.create(layer, deployment(tensor_parallel_size=tp))
    assert mono is not None
    shapes = layer_launch.expected(tp) | {"sink": ((64,), torch.float32), "cos_sin": ((9, 64), torch.float32)}
    attention = {name: torch.empty(s, dtype=d, device="meta") for name, (s, d) in shapes.items()}
    ffn = handed(tp).tensors()
    for half, tensors in ((weights.ATTENTION_HALF, attention), (weights.FFN_HALF, ffn)):
        for name, path in half.places.items():
            put(layer, path, tensors[name])
        for path, own in half.processed.items():
            mono.kept[path]._kept = {leaf: tensors[name] for name, leaf in own.items()}
    mono._layer = lambda: layer  # type: ignore[assignment,method-assign]
    return mono


@pytest.mark.usefixtures("mi300")
def test_a_layer_s_kernels_are_handed_what_was_kept() -> None:
    mono = whole_layer(4)
    mono.take_weights()
    kept = mono.kept
    assert mono.weights.wo_a is kept["attn.wo_a"].taken("")["weight"]
    assert mono.weights.wqkv_scale is kept["attn.fused_wqa_wkv"].taken("")["weight_scale"]
    assert mono.weights.ffn.shared_w2 is kept["ffn.shared_experts.down_proj"].taken("")["weight"]
    assert mono.weights.ffn.w2_scale is kept[weights.EXPERTS].taken("")["w2_weight_scale"]


@pytest.mark.usefixtures("mi300")
def test_all_that_cannot_be_read_of_a_layer_is_in_one_error() -> None:
    mono = whole_layer(4)
    mono.kept["ffn.shared_experts.down_proj"]._fault = ValueError("weight is torch.bfloat16")
    mono.kept[weights.EXPERTS]._kept = None
    wanted = (
        r"ffn\.shared_experts\.down_proj: weight is torch\.bfloat16; ffn\.experts\.routed_experts: vLLM did "
    )
    with pytest.raises(ValueError, match=wanted):
        mono.take_weights()


@pytest.mark.usefixtures("mi300")
def test_experts_of_the_other_generation_s_layout_are_refused() -> None:
    mono = whole_layer(4)
    other = ffn_launch.expected(FfnGeometry(1, 4))
    mono.kept[weights.EXPERTS]._kept = {
        leaf: torch.empty(other[name][0], dtype=other[name][1], device="meta")
        for name, leaf in weights.FFN_HALF.experts.items()
    }
    with pytest.raises(ValueError, match=r"w13 has shape .*1280, 2560.* wanted .*1536, 2560.*w2_scale has "):
        mono.take_weights()
