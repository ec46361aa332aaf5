# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 on mono kernels, at start-up: deployments that cannot run them, and what they run of each
layer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_specialized_decode_tree import FULL, PIECEWISE, deployment

import vllm.platforms.rocm as rocm_platform  # isort: skip
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend  # isort: skip
from vllm.models.common.specialized_decode import decode as decode_module, features  # isort: skip
from vllm.models.common.specialized_decode.decode import Launch  # isort: skip
from vllm.models.common.specialized_decode.spec import SpecializedDecodeError  # isort: skip
from vllm.models.deepseek_v41.amd import mono_decode, ops  # isort: skip
from vllm.models.deepseek_v41.amd.mono import builds  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MonoDecodeLayer, Routing  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode_spec import SPEC  # isort: skip
from vllm.models.deepseek_v41.amd.ops import topk  # isort: skip
from vllm.models.deepseek_v41.amd.rocm import DeepseekV41RocmMxfp4Indexer  # isort: skip
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer  # isort: skip

KERNELS = "vllm.models.deepseek_v41.amd.mono"
TARGET_ROUTING, DRAFT_ROUTING = Routing(384, 6), Routing(128, 3)
DRAFTS = 5
ATTENTION_LINEARS = ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b")
# Of AITER, by CDNA version.
BACKENDS = {3: Mxfp4MoeBackend.AITER_TRITON_MXFP4_BF16, 4: Mxfp4MoeBackend.AITER_MXFP4_BF16}


class Node(SimpleNamespace):
    """A module's attributes; unlike its base it can be referred to weakly, as a module can."""


def linear() -> Node:
    method = SimpleNamespace(process_weights_after_loading=lambda module: None)
    return Node(weight=torch.zeros(4), weight_scale=torch.zeros(2, dtype=torch.uint8), quant_method=method)


def decoder_layer(index: int = 21, routing: Routing = TARGET_ROUTING, **changes: Any) -> Node:
    """A DeepseekV4DecoderLayer's attributes that the mono decode reads. ``changes`` are those of its
    attention, of ``moe_*`` its MoE, of ``layer_*`` its own."""
    of = {"attn": {}, "moe": {}, "layer": {}}
    for name, value in changes.items():
        owner, _, rest = name.partition("_")
        of[owner if owner in of else "attn"][rest if owner in of else name] = value
    attn = {
        "layer_id": index, "compressor": None, "indexer": None, "compress_ratio": 1, "kv_mxfp8": False,
        "kv_cache_dtype": "fp8_ds_mla", "compressed_cache_prefix": f"layers.{index}.compressed",
        "swa_cache_layer": Node(prefix=f"layers.{index}.window", kv_cache=None),
    }  # fmt: skip
    attn |= {name: linear() for name in ATTENTION_LINEARS} | of["attn"]
    experts = linear()
    experts.quant_method.mxfp4_backend = BACKENDS[3 if rocm_platform.get_cdna_version() == 3 else 4]
    moe = {
        "experts": Node(routed_experts=experts), "gate": Node(tid2eid=None), "renormalize": True,
        "shared_experts": Node(gate_up_proj=linear(), down_proj=linear()), "routed_scaling_factor": 1.5,
        "n_routed_experts": routing.experts, "n_activated_experts": routing.picks, "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus",
    }  # fmt: skip
    own = {"engram": None, "hc_mult": 4, "use_sequence_parallel": False, "fuse_seam_norm": True} | of["layer"]
    return Node(attn=Node(**attn), ffn=Node(**(moe | of["moe"])), **own)


def draft_layer(index: int = 40, **changes: Any) -> Node:
    return decoder_layer(index, **{"routing": DRAFT_ROUTING, "compress_ratio": 0} | changes)


def with_backend(backend: Mxfp4MoeBackend) -> Node:
    layer = decoder_layer()
    layer.ffn.experts.routed_experts.quant_method.mxfp4_backend = backend
    return layer


def an(indexer: type) -> Any:
    return object.__new__(indexer)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Choose the GPU: ``gpu(cdna=4)``."""

    def choose(cdna: int = 4, compute_units: int = 256) -> None:
        architecture = {3: "gfx942", 4: "gfx950"}.get(cdna, "gfx0")
        properties = SimpleNamespace(
            gcnArchName=f"{architecture}:sramecc+", multi_processor_count=compute_units
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: properties)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(rocm_platform, "get_cdna_version", lambda: cdna)

    monkeypatch.delenv("VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", raising=False)
    monkeypatch.setattr(decode_module, "_current", {})
    monkeypatch.setattr(ops, "_monokernel", ops._monokernel)
    monkeypatch.setattr(topk, "build", lambda: True)
    choose()
    return choose


def with_drafts(config: Any) -> Any:
    config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
    return config


def test_nothing_without_the_option(gpu: Any) -> None:
    config = deployment()
    config.kernel_config.monokernel, config.kernel_config.specialized_decode = False, None
    gpu(cdna=2)
    assert MonoDecodeLayer.create(decoder_layer(), config) is None


@pytest.mark.parametrize("on", [True, False])
def test_the_option_is_recorded_for_the_decode_helpers(gpu: Any, on: bool) -> None:
    gpu(cdna=3)
    config = deployment()
    config.kernel_config.monokernel = on
    MonoDecodeLayer.create(decoder_layer(), config)
    assert ops._monokernel is on


REFUSALS = {
    "cdna2": ({"gpu": {"cdna": 2}}, "GPU: CDNA2, wanted CDNA3 or CDNA4"),
    "cdna5": ({"gpu": {"cdna": 5}}, "GPU: CDNA5, wanted CDNA3 or CDNA4"),
    "other-gpu": ({"gpu": {"cdna": 0}}, "GPU: another GPU, wanted CDNA3 or CDNA4"),
    "partition": ({"gpu": {"compute_units": 128}}, "GPU: 128 compute units, wanted at least 256"),
    "tp": ({"tp": 8}, "tensor parallel size: 8, wanted 2 or 4 on CDNA4"),
    "tp-of-cdna3": ({"gpu": {"cdna": 3}, "tp": 1}, "tensor parallel size: 1, wanted 2 or 4 on CDNA3"),
    "seam": (
        {"layer": lambda: decoder_layer(layer_fuse_seam_norm=False)},
        "attention seam: vLLM's own, which rounds otherwise than the kernels, wanted AITER's",
    ),
    "mixed-graphs": (
        {"compilation": {"cudagraph_mode": FULL}},
        "CUDA graph mode: FULL, which replays what a decode step recorded for batches with prefills",
    ),
    "piecewise-graphs": (
        {"compilation": {"cudagraph_mode": PIECEWISE}},
        "CUDA graph mode of decode steps: PIECEWISE, wanted FULL or NONE",
    ),
    "expert-parallel": ({"parallel": {"enable_expert_parallel": True}}, "expert parallelism is on"),
    "data-parallel": ({"parallel": {"data_parallel_size": 2}}, "data parallelism is on"),
    "eplb": ({"parallel": {"enable_eplb": True}}, "expert load balancing is on"),
    "dcp": ({"parallel": {"decode_context_parallel_size": 2}}, "decode context parallelism is on"),
    "pcp": ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill context parallelism is on"),
    "non-causal-target": (
        {"attention": {"use_non_causal": True}},
        "non-causal attention is on, and the target's kernels run causal windows",
    ),
    "nvtx": ({"observability": {"enable_layerwise_nvtx_tracing": True}}, "layerwise NVTX tracing is on"),
    "cumem": ({"model": {"enable_cumem_allocator": True}}, "cumem allocator is on"),
    "no-window": ({"model": {"disable_sliding_window": True}}, "disabled sliding window is on"),
    "lora": ({"config": {"lora_config": object()}}, "lora_config is set"),
    "kv-transfer": ({"config": {"kv_transfer_config": object()}}, "kv_transfer_config is set"),
    "a4w4": ({"env": {"VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1"}}, "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 is set"),
    "peer-memory": (
        {"env": {"VLLM_MONO_PEER_MEMORY": "shm"}},
        "VLLM_MONO_PEER_MEMORY is shm, wanted aiter or torch",
    ),
    "backend": (
        {"layer": lambda: with_backend(Mxfp4MoeBackend.TRITON)},
        "MoE backend: Mxfp4MoeBackend.TRITON",
    ),
    "dtype": ({"model": {"dtype": torch.float16}}, "activation dtype: torch.float16, wanted torch.bfloat16"),
    "model": (
        {"model": {"architectures": ["Other"]}},
        "model architecture: Other, wanted DSparkV41DraftModel or",
    ),
}


def refused(gpu: Any, monkeypatch: pytest.MonkeyPatch, *cases: dict[str, Any]) -> str:
    """The error of a deployment that has every one of the faults."""
    faults: dict[str, Any] = {}
    for case in cases:
        for owner, fault in case.items():
            faults[owner] = faults[owner] | fault if isinstance(fault, dict) and owner in faults else fault
    config = deployment(faults.get("tp", 4))
    owners = {
        "parallel": config.parallel_config, "model": config.model_config, "config": config,
        "compilation": config.compilation_config, "attention": config.attention_config,
        "observability": config.observability_config,
    }  # fmt: skip
    for owner, target in owners.items():
        for name, value in faults.get(owner, {}).items():
            setattr(target, name, value)
    gpu(**faults.get("gpu", {}))
    for variable, value in faults.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SpecializedDecodeError) as error:
        MonoDecodeLayer.create(faults.get("layer", decoder_layer)(), config)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_each_reason_alone_refuses(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, reason = REFUSALS[name]
    message = refused(gpu, monkeypatch, case)
    assert message.startswith("--specialized-decode monokernel: DeepSeek-V4.1 mono decode cannot run here")
    assert "for 1 reason(s)" in message and f"\n  - {reason}" in message


def test_all_reasons_refuse_at_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["partition", "tp", "lora", "a4w4", "peer-memory", "backend", "dtype", "model", "expert-parallel"]
    message = refused(gpu, monkeypatch, *(REFUSALS[name][0] for name in names))
    assert all(f"\n  - {REFUSALS[name][1]}" in message for name in names)
    assert f"for {len(names)} reason(s)" in message


ALONGSIDE = {
    "non-causal attention",
    "prompt embeddings", "speculative_config", "watermark_config", "reasoning_config", "ec_transfer_config",
    "pipeline parallelism", "prefix caching", "engram_config", "kv_events_config", "weight_transfer_config",
    "torch.compile",
}  # fmt: skip
FEATURES = sorted(set(features.SWITCHES) | set(features.optional_configs(deployment())))


def test_the_kernels_run_alongside_what_was_reviewed_and_nothing_else() -> None:
    assert SPEC.runs_alongside == ALONGSIDE


@pytest.mark.parametrize("feature", FEATURES)
def test_every_other_feature_of_vllm_refuses(gpu: Any, monkeypatch: pytest.MonkeyPatch, feature: str) -> None:
    config = deployment()
    if feature in features.SWITCHES:
        monkeypatch.setitem(features.SWITCHES, feature, lambda config: True)
    else:
        setattr(config, feature, object())
    refused = [reason for reason in SPEC.refuse(config) if reason.startswith(f"{feature} is ")]
    assert len(refused) == (feature not in ALONGSIDE)


def test_missing_kernel_packages_refuse(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{KERNELS}.kernels.attention_front"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecializedDecodeError, match=r"for 1 reason\(s\):\n  - the kernels need FlyDSL: "):
        MonoDecodeLayer.create(decoder_layer(), deployment())


def test_our_kernels_fit_the_workgroups_that_must_be_resident() -> None:
    from vllm.models.deepseek_v41.amd.mono.geometry import WORKGROUPS

    assert SPEC.resident_workgroups >= WORKGROUPS


def test_a_gpu_without_kernels_of_ours_refuses(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "ARCHITECTURES", {})
    with pytest.raises(SpecializedDecodeError, match="no mono kernels for gfx950"):
        MonoDecodeLayer.create(decoder_layer(), deployment())


def test_a_gpu_that_cannot_be_read_refuses(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> int:
        raise OSError("no driver")

    # A configuration asks for the GPU itself where AITER was found.
    layer, config = decoder_layer(), deployment()
    monkeypatch.setattr(rocm_platform, "get_cdna_version", unreadable)
    with pytest.raises(SpecializedDecodeError, match=r"cannot check the GPU: OSError\('no driver'\)"):
        MonoDecodeLayer.create(layer, config)


def test_a_later_layer_of_another_moe_backend_refuses(gpu: Any) -> None:
    config = deployment()
    assert MonoDecodeLayer.create(decoder_layer(20), config) is not None
    with pytest.raises(
        SpecializedDecodeError, match=r"layers\.21\.window: MoE backend: Mxfp4MoeBackend\.TRITON"
    ):
        MonoDecodeLayer.create(with_backend(Mxfp4MoeBackend.TRITON), config)


def launch_of(layer: Node, config: Any) -> Launch | None:
    mono = MonoDecodeLayer.create(layer, config)
    return None if mono is None else mono.plan.launch


INDEXERS = {4: DeepseekV41RocmMxfp4Indexer, 3: DeepseekV4Indexer}
WHOLE, PART = Launch.WHOLE, Launch.PART
OWN_INDEXER = object()
# What is unlike a standard layer, what the kernels run of it, and why no more. OWN_INDEXER is the one that
# the GPU's kernels run with.
LAYERS: dict[str, tuple[dict[str, Any], Launch | None, str]] = {
    "standard": ({}, WHOLE, ""),
    "window": ({"compress_ratio": 0}, WHOLE, ""),
    "ratio-2": ({"compress_ratio": 2}, WHOLE, ""),
    "first": ({"index": 0, "compress_ratio": 0}, WHOLE, ""),
    "engram": ({"layer_engram": object()}, WHOLE, ""),
    "window-engram": ({"compress_ratio": 0, "layer_engram": object()}, WHOLE, ""),
    "key-source": ({"compressor": object(), "indexer": OWN_INDEXER}, WHOLE, ""),
    "index-source": ({"indexer": OWN_INDEXER}, WHOLE, ""),
    "compressor-only": ({"compressor": object()}, PART, "a compressor without an indexer"),
    "other-indexer": ({"indexer": object()}, PART, "a object"),
    "ratio-4": ({"compress_ratio": 4}, PART, "compress ratio 4"),
    "kv-dtype": ({"kv_cache_dtype": "auto"}, PART, "auto KV cache"),
    "mxfp8-kv": ({"kv_mxfp8": True}, PART, "an MXFP8 KV cache"),
    "sequence-parallel": ({"layer_use_sequence_parallel": True}, None, "sequence parallelism"),
    "no-routed-experts": ({"moe_experts": Node()}, None, "no routed experts"),
    "no-experts": ({"moe_experts": None}, None, "no routed experts"),
    "no-shared-expert": ({"moe_shared_experts": None}, None, "no shared expert"),
    "hash-routing": ({"moe_gate": Node(tid2eid=object())}, None, "routing by token id"),
    "experts": ({"moe_n_routed_experts": 256}, None, "routing (256, 6, 'sqrtsoftplus', 1.5)"),
    "picks": ({"moe_n_activated_experts": 8}, None, "routing (384, 8, 'sqrtsoftplus', 1.5)"),
    "scoring": ({"moe_scoring_func": "sigmoid"}, None, "routing (384, 6, 'sigmoid', 1.5)"),
    "scaling": ({"moe_routed_scaling_factor": 2.5}, None, "routing (384, 6, 'sqrtsoftplus', 2.5)"),
    "not-renormalised": ({"moe_renormalize": False}, None, "not renormalised"),
    "swiglu": ({"moe_swiglu_limit": 7.0}, None, "SwiGLU limit 7.0, wanted 10"),
    "draft-of-target-routing": ({"index": 40}, None, "routing (384, 6"),
}


@pytest.mark.parametrize("cdna", [3, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_what_the_kernels_run_of_a_layer(gpu: Any, name: str, cdna: int) -> None:
    gpu(cdna=cdna)
    changes, launch, why = LAYERS[name]
    if changes.get("indexer") is OWN_INDEXER:
        changes = changes | {"indexer": an(INDEXERS[cdna])}
    assert launch_of(decoder_layer(**changes), with_drafts(deployment())) is launch
    (decode,) = decode_module._current.values()
    (plan,) = decode.plans
    assert plan.launch is launch and why in plan.why and bool(plan.why) is bool(why)


@pytest.mark.parametrize("cdna", [3, 4])
def test_a_draft_attends_non_causally(gpu: Any, cdna: int) -> None:
    gpu(cdna=cdna)
    config = with_drafts(deployment())
    config.attention_config.use_non_causal = True
    assert launch_of(draft_layer(), config) is Launch.WHOLE


@pytest.mark.parametrize("cdna", [3, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_first_layer_of_a_later_pipeline_stage_keeps_vllm_s_attention(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, stage: int, cdna: int
) -> None:
    """Two stages of 20 layers; the second starts at layer 20, from a tensor of all streams."""
    import vllm.distributed as distributed

    monkeypatch.setattr(distributed, "get_pp_group", lambda: SimpleNamespace(rank_in_group=stage))
    gpu(cdna=cdna)
    config = with_drafts(deployment())
    config.parallel_config.pipeline_parallel_size = 2
    first, second = (launch_of(decoder_layer(20 * stage + i), config) for i in (0, 1))
    assert (first, second) == (Launch.PART if stage else Launch.WHOLE, Launch.WHOLE)
    whys = [plan.why for plan in decode_module._current["target"].plans]
    assert whys == ["the first layer of a later pipeline stage" if stage else "", ""]


def test_an_indexer_of_the_other_generation_keeps_vllm_s_attention(gpu: Any) -> None:
    assert launch_of(decoder_layer(indexer=an(DeepseekV4Indexer)), deployment()) is Launch.PART


def test_cdna3_needs_no_fused_seam(gpu: Any) -> None:
    gpu(cdna=3)
    assert launch_of(decoder_layer(layer_fuse_seam_norm=False), deployment()) is Launch.WHOLE


@pytest.mark.parametrize(("cdna", "sizes"), [(3, {2: 32, 4: 42}), (4, {2: 48, 4: 48})])
def test_each_gpu_runs_at_the_tensor_parallel_sizes_of_its_kernels(
    gpu: Any, cdna: int, sizes: dict[int, int]
) -> None:
    """The base has gfx942 at TP 2 on vLLM's path without a word, though the user asked for the kernels."""
    gpu(cdna=cdna)
    for size in (1, 2, 4, 8):
        config = deployment(tensor_parallel_size=size)
        if size in sizes:
            mono = MonoDecodeLayer.create(decoder_layer(), config)
            assert mono is not None and mono.plan.launch is Launch.WHOLE
            assert mono.decode.max_rows == sizes[size]
        else:
            wanted = f"tensor parallel size: {size}, wanted 2 or 4 on CDNA{cdna}"
            with pytest.raises(SpecializedDecodeError, match=wanted):
                MonoDecodeLayer.create(decoder_layer(), config)


def test_a_later_layer_with_another_seam_refuses(gpu: Any) -> None:
    config = deployment()
    assert MonoDecodeLayer.create(decoder_layer(20), config) is not None
    with pytest.raises(SpecializedDecodeError, match=r"layers\.21\.window: attention seam: vLLM's own"):
        MonoDecodeLayer.create(decoder_layer(layer_fuse_seam_norm=False), config)


def test_a_target_of_which_no_layer_runs_anything_is_refused_once_it_is_built(gpu: Any) -> None:
    config = with_drafts(deployment())
    for index in (0, 1, 3):
        assert MonoDecodeLayer.create(decoder_layer(index, moe_swiglu_limit=7.0), config) is None
    assert MonoDecodeLayer.create(decoder_layer(2, moe_shared_experts=None), config) is None
    assert MonoDecodeLayer.create(draft_layer(), config) is not None
    state = mono_decode.counting_model_state(object)
    with pytest.raises(SpecializedDecodeError):
        state()
    with pytest.raises(SpecializedDecodeError) as error:  # and not only the first time
        state()
    assert str(error.value).splitlines()[:3] == [
        "--specialized-decode monokernel: DeepSeek-V4.1 mono decode cannot run here, for 2 reason(s):",
        "  - layers 0-1,3: SwiGLU limit 7.0, wanted 10",
        "  - layers 2: no shared expert",
    ]


def test_a_draft_of_which_no_layer_runs_anything_keeps_vllm_s_path_beside_the_target(gpu: Any) -> None:
    config = with_drafts(deployment())
    assert MonoDecodeLayer.create(decoder_layer(), config) is not None
    assert MonoDecodeLayer.create(draft_layer(compress_ratio=1), config) is None
    mono_decode.counting_model_state(object)()


def test_a_draft_without_experts_of_its_own_is_routed_as_the_target(gpu: Any) -> None:
    config = with_drafts(deployment())
    del config.model_config.hf_config.dspark_n_routed_experts
    config.model_config.hf_config.dspark_num_experts_per_tok = 0
    drafting = MonoDecodeLayer.create(draft_layer(routing=TARGET_ROUTING), config)
    assert drafting is not None and drafting.routing == TARGET_ROUTING


def test_a_model_without_the_option_forgets_an_earlier_one_s_decode(gpu: Any) -> None:
    MonoDecodeLayer.create(decoder_layer(), deployment())
    assert decode_module.current("target") is not None
    config = deployment()
    config.kernel_config.monokernel, config.kernel_config.specialized_decode = False, None
    assert MonoDecodeLayer.create(decoder_layer(), config) is None
    assert decode_module.current("target") is None


@pytest.mark.parametrize("cdna", [3, 4])
def test_draft_layers_run_whole_with_kernels_of_their_own(gpu: Any, cdna: int) -> None:
    gpu(cdna=cdna)
    config = with_drafts(deployment())
    target, draft = decoder_layer(), draft_layer()
    mono = MonoDecodeLayer.create(target, config)
    drafting = MonoDecodeLayer.create(draft, config)
    assert mono is not None and drafting is not None
    assert drafting.plan.launch is Launch.WHOLE and drafting.routing == DRAFT_ROUTING
    assert mono.decode.build == mono_decode.KernelBuild(4, TARGET_ROUTING, 128)
    assert drafting.decode.build == mono_decode.KernelBuild(4, DRAFT_ROUTING, 192)


@pytest.mark.parametrize(
    "compressed", [{"compress_ratio": 1}, {"indexer": an(INDEXERS[4])}], ids=["ratio", "indexer"]
)
def test_a_draft_layer_with_compressed_keys_keeps_vllm_s_path(gpu: Any, compressed: dict[str, Any]) -> None:
    assert launch_of(draft_layer(**compressed), with_drafts(deployment())) is None


@pytest.mark.parametrize(("cdna", "unfolded"), [(3, True), (4, False)])
def test_only_a_whole_layer_of_cdna3_enters_unfolded(gpu: Any, cdna: int, unfolded: bool) -> None:
    gpu(cdna=cdna)
    mono = MonoDecodeLayer.create(decoder_layer(0), deployment())
    part = MonoDecodeLayer.create(decoder_layer(1, kv_cache_dtype="auto"), deployment())
    assert mono is not None and mono.unfolded_entry is unfolded
    assert part is not None and not part.unfolded_entry


def test_a_new_deployment_is_decided_anew(gpu: Any) -> None:
    first = MonoDecodeLayer.create(decoder_layer(), deployment())
    second = MonoDecodeLayer.create(decoder_layer(), deployment())
    assert first is not None and second is not None and first.decode is not second.decode


def test_the_top_k_extension_is_built_at_start_up_on_cdna3_only(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    monkeypatch.setattr(topk, "build", lambda: built.append(True))
    MonoDecodeLayer.create(decoder_layer(), deployment())
    assert not built
    gpu(cdna=3)
    MonoDecodeLayer.create(decoder_layer(), deployment())
    assert built == [True]


def test_cdna4_keeps_nothing_of_the_weights(gpu: Any) -> None:
    mono = MonoDecodeLayer.create(decoder_layer(), deployment())
    assert mono is not None and not mono.kept
