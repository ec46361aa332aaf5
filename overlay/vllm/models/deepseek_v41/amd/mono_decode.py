# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash decode steps on mono kernels (CDNA3 and CDNA4): which steps and layers, and with what.

A whole layer is two launches, K1 and K2, from one attention seam to the next, with both TP sums inside.
vLLM's compressor and indexer run between them on an index source. The FFN launch is one launch from wo_b's
unreduced output on, for layers whose attention vLLM runs. Every path hands on the same five tensors, so that
layers may take different ones.

The kernels stand behind ``MonoKernels``; ``_open_kernels`` is the one place that names an implementation.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.models.common.specialized_decode.decode import (
    Decline,
    Launch,
    LayerPlan,
    SpecializedDecode,
    Step,
    contiguous,
    not_decode_only,
)
from vllm.models.common.specialized_decode.kv_cache import RecordCache
from vllm.models.common.specialized_decode.replay import counting
from vllm.models.common.specialized_decode.spec import Check, DecodeSpec, refusal, rocm_device
from vllm.models.common.specialized_decode.weights import CopyAtLoad, as_bytes, gather, loaded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RECORD = 584  # bytes of an fp8_ds_mla record: 448 e4m3, 64 bf16, 8 scale bytes
SWA_WIDTH = 128  # keys that a row of the target's causal window has at most
CDNA3, CDNA4 = 3, 4
MAX_ROWS = 48  # 8 requests of one token and five drafts
# Six rows at a time go through a CDNA3 workgroup's 64 KB of LDS, and beyond seven times six the shared expert
# needs more tasks than the launch has workgroups. vLLM captures graphs of 36 and 42 rows with five drafts, so
# no captured size is lost between the two limits but 48 itself.
MAX_ROWS_GFX942 = 42
WORKGROUPS = 256
TARGET, DRAFT = "target", "draft"
# Dimensions of what a model hands its first layer: the embedding, or its broadcast to the streams.
ENTRY_DIMS = {TARGET: 2, DRAFT: 3}

STAGE_INPUT = Decline("first layer of a pipeline stage")
NOT_CONTIGUOUS = Decline("inputs not contiguous", expected=False)


@dataclass(frozen=True)
class Routing:
    """Routed experts of a layer and how many of them a token picks."""

    experts: int
    picks: int


TARGET_ROUTING = Routing(384, 6)


@dataclass(frozen=True)
class Generation:
    """How the kernels of one CDNA generation differ from the other's.

    Args:
        max_rows: rows of the largest step.
        tp_sizes: tensor parallel sizes that they are built for.
        indexer: the indexer that they run an index source with, as module and class.
        reads_copies: whether they read copies of the weights, made at load, rather than the weights.
        needs_fused_seam: whether vLLM's path must run AITER's fused seam, for both paths to round alike.
        draft_launch: what they run of a DSpark draft layer.
    """

    max_rows: int
    tp_sizes: frozenset[int]
    indexer: tuple[str, str]
    reads_copies: bool
    needs_fused_seam: bool
    draft_launch: Launch


GENERATIONS = {
    # Its draft layers' FFN launch changes which drafts are accepted at most: the target's output is its own.
    CDNA3: Generation(
        MAX_ROWS_GFX942, frozenset({4}), ("vllm.models.deepseek_v41.attention", "DeepseekV4Indexer"),
        reads_copies=True, needs_fused_seam=False, draft_launch=Launch.PART,
    ),
    CDNA4: Generation(
        MAX_ROWS, frozenset({2, 4}), ("vllm.models.deepseek_v41.amd.rocm", "DeepseekV41RocmMxfp4Indexer"),
        reads_copies=False, needs_fused_seam=True, draft_launch=Launch.WHOLE,
    ),
}  # fmt: skip


class MonoKernels(Protocol):
    """One rank's kernels, and what they hold. Outputs are (x, residual, post_mix, res_mix, pre_mix)."""

    def scratch(self, tokens: int) -> Tensor:
        """Make the scratch of steps of ``tokens`` rows, or give it."""

    def first_pre_mix(self, tokens: int) -> Tensor:
        """f32 [tokens, 4]: the pre-mix that selects stream 0."""

    def forward(self, weights: Any, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """A whole layer. Inputs: x, residual, post_mix, res_mix, pre_mix, positions, slots, the SWA records
        and their indices, lengths and requests. Options: ``fold``, whether the residual still owes the
        post-mix; the compressed keys' ``topk_indices``, ``comp_cache``, ``comp_block_table``; ``select``, an
        index source's selection from K1's normed input and query rank."""

    def ffn(self, weights: Any, *inputs: Tensor, topk: int) -> tuple[Tensor, ...]:
        """The FFN launch. Inputs: wo_b's unreduced output, residual, post_mix, res_mix, pre_mix."""


@dataclass(frozen=True)
class KernelBuild:
    """What one set of kernels is built for; a process opens each once."""

    tp_size: int
    routing: Routing
    swa_width: int


_open: dict[KernelBuild, MonoKernels] = {}


def _open_kernels(build: KernelBuild) -> MonoKernels:
    """The process's kernels for ``build``. The first call is collective over the TP group."""
    if build not in _open:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
        from vllm.models.deepseek_v41.amd.mono.runner import DSV41MonoLayer

        # Few of the draft's experts are active at once: one FP4 group a task spreads them over more
        # workgroups.
        groups = {} if build.routing == TARGET_ROUTING else {"ug_groups": 1}
        _open[build] = DSV41MonoLayer(
            tp=build.tp_size,
            rank=get_tensor_model_parallel_rank(),
            group=get_tp_group().cpu_group,
            device=torch.device("cuda", torch.accelerator.current_device_index()),
            experts=build.routing.experts,
            topk=build.routing.picks,
            swa_width=build.swa_width,
            **groups,
        )
    return _open[build]


def _kernels_reason(_: VllmConfig) -> str | None:
    try:
        from vllm.models.deepseek_v41.amd.mono import runner
        from vllm.models.deepseek_v41.amd.mono.common.arch import target_arch
    except ImportError as error:
        return f"the kernels need FlyDSL and AITER's FlyDSL helpers: {error}"
    if runner.BLOCKS > WORKGROUPS:
        return f"the kernels launch {runner.BLOCKS} workgroups, wanted at most {WORKGROUPS}"
    built, device = target_arch(), _architecture()
    if built != device:
        return (
            f"FlyDSL builds for {built}, wanted the GPU's {device}: unset the environment variable ARCH "
            f"({os.environ.get('ARCH', 'not set')})"
        )
    return None


def _architecture() -> str:
    properties = torch.cuda.get_device_properties(torch.accelerator.current_device_index())
    return properties.gcnArchName.partition(":")[0].lower()


def _expert_format_reason(_: VllmConfig) -> str | None:
    if envs.VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4:
        return "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 is set: the kernels read AITER's A8W4 experts, unset it"
    return None


SPEC = DecodeSpec(
    name="DeepSeek-V4.1 mono decode",
    architectures=frozenset({"DeepseekV41ForCausalLM", "DSparkV41DraftModel"}),
    dtypes=frozenset({torch.bfloat16}),
    kv_cache_dtypes=None,  # a layer of another cache keeps vLLM's attention and takes the FFN launch
    tp_sizes=frozenset({2, 4}),
    max_rows={cdna: generation.max_rows for cdna, generation in GENERATIONS.items()},
    resident_workgroups=WORKGROUPS,
    graph_modes=frozenset({"NONE", "FULL"}),
    runs_alongside=frozenset(
        {
            # They choose, name or watch tokens, before or after the decoder layers.
            "prompt embeddings", "speculative_config", "watermark_config", "reasoning_config",
            "ec_transfer_config",
            # Their work is in the hand-over between layers, in tables or in block numbers that the kernels
            # keep to.
            "pipeline parallelism", "prefix caching", "engram_config", "kv_events_config",
            # A reload writes into the tensors, or the copies, whose addresses the kernels have.
            "weight_transfer_config",
            # The model is not compiled, whatever the mode.
            "torch.compile",
        }
    ),
    checks=(Check("the kernels", _kernels_reason), Check("the expert format", _expert_format_reason)),
    device=rocm_device,
)  # fmt: skip


def _moe_backend_reason(layer: Any, _: VllmConfig) -> str | None:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    experts = getattr(getattr(layer.ffn, "experts", None), "routed_experts", None)
    generation = GENERATIONS.get(rocm_device().cdna_version or 0)
    if experts is None or generation is None or generation.reads_copies:
        # No routed MoE, which the layer's plan says, or a GPU that is refused anyway; or the kernels read
        # copies from before the backend's conversion.
        return None
    seen, wanted = experts.quant_method.mxfp4_backend, Mxfp4MoeBackend.AITER_MXFP4_BF16
    return None if seen is wanted else f"MoE backend: {seen}, wanted {wanted.name} (--moe-backend aiter)"


def _generation() -> Generation:
    return GENERATIONS[rocm_device().cdna_version or 0]


class MonoDecode(SpecializedDecode["MonoKernels"]):
    """The mono decode of one model: the target's layers, or the draft's."""

    def __init__(self, role: str, vllm_config: VllmConfig, build: KernelBuild) -> None:
        super().__init__(SPEC, role, vllm_config)
        self.vllm_config = weakref.ref(vllm_config)
        self.build = build
        # Names in the attention metadata, each once; dicts keep the layers' order.
        self._swa_names: dict[str, None] = {}
        self._compressed_names: dict[str, None] = {}

    def read_metadata_of(self, swa_name: str, compressed_name: str | None) -> None:
        """Have every step checked for a layer's metadata; ``compressed_name`` where the kernels read those
        keys."""
        self._swa_names[swa_name] = None
        if compressed_name is not None:
            self._compressed_names[compressed_name] = None

    def open_kernels(self) -> MonoKernels:
        return _open_kernels(self.build)

    def prepare_width(self, kernels: MonoKernels, rows: int) -> None:
        kernels.scratch(rows)

    def read_step(self, metadata: Mapping[str, Any], rows: int) -> tuple[Decline | None, Decline | None]:
        groups = {}
        for name in self._swa_names:
            swa = metadata.get(name)
            if swa is None:
                missing = Decline("metadata missing", name, expected=False)
                return missing, missing
            groups[id(swa)] = swa  # the layers of a KV cache group share one
        for swa in groups.values():
            if (why := not_decode_only(swa, rows)) is not None:
                return why, why
        return self._not_whole(metadata, groups.values()), None

    def _not_whole(self, metadata: Mapping[str, Any], groups: Any) -> Decline | None:
        for swa in groups:
            if swa.decode_swa_width != self.build.swa_width:
                seen = f"{swa.decode_swa_width} keys a row, wanted {self.build.swa_width}"
                return Decline("sliding window", seen, expected=False)
            if (
                swa.decode_swa_indices is None
                or swa.decode_swa_lens is None
                or swa.token_to_req_indices is None
            ):
                return Decline("metadata missing", "the rows' keys, lengths or requests", expected=False)
        for name in self._compressed_names:
            if metadata.get(name) is None:
                return Decline("metadata missing", name, expected=False)
        return None


def _routing(vllm_config: VllmConfig, role: str) -> Routing:
    config = vllm_config.model_config.hf_config
    if role == TARGET:
        return TARGET_ROUTING
    return Routing(
        getattr(config, "dspark_n_routed_experts", 0) or TARGET_ROUTING.experts,
        getattr(config, "dspark_num_experts_per_tok", 0) or TARGET_ROUTING.picks,
    )


def _plan(layer: Any, vllm_config: VllmConfig, role: str) -> tuple[LayerPlan, Routing]:
    """What the kernels run of a decoder layer, and its routing."""
    attn, routing = layer.attn, _routing(vllm_config, role)
    launch: Launch | None = Launch.WHOLE
    if why := _outside_every_launch(layer, vllm_config, routing):
        launch = None
    elif role == DRAFT and _generation().draft_launch is Launch.PART:
        launch, why = Launch.PART, ["attention of the DSpark draft"]
    elif why := _outside_whole_launch(attn, role):
        # The FFN launch of the draft's routing is built where it is the draft's only one.
        launch = None if role == DRAFT else Launch.PART
    return LayerPlan(attn.swa_cache_layer.prefix, attn.layer_id, launch, ", ".join(why)), routing


def _outside_every_launch(layer: Any, vllm_config: VllmConfig, routing: Routing) -> list[str]:
    ffn, generation = layer.ffn, _generation()
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    seen = (ffn.n_routed_experts, ffn.n_activated_experts, ffn.scoring_func, ffn.routed_scaling_factor)
    wanted = (routing.experts, routing.picks, "sqrtsoftplus", 1.5)
    reasons = {
        "sequence parallelism": layer.use_sequence_parallel,
        "a seam that rounds otherwise than AITER's fused one": generation.needs_fused_seam
        and not layer.fuse_seam_norm,
        f"tensor parallel size {tp_size}, for which this GPU's kernels are not built": tp_size
        not in generation.tp_sizes,
        "no shared expert": ffn.shared_experts is None,
        "routing by token id": ffn.gate.tid2eid is not None,
        f"routing {seen}, wanted {wanted}": seen != wanted,
        "weights of the picks not renormalised": not ffn.renormalize,
        f"SwiGLU limit {ffn.swiglu_limit}, wanted 10": ffn.swiglu_limit != 10.0,
    }
    return [reason for reason, holds in reasons.items() if holds]


def _outside_whole_launch(attn: Any, role: str) -> list[str]:
    module, name = _generation().indexer
    indexer = getattr(importlib.import_module(module), name)
    reasons = {
        "a compressor without an indexer": attn.compressor is not None and attn.indexer is None,
        f"a {type(attn.indexer).__name__}": attn.indexer is not None
        and not isinstance(attn.indexer, indexer),
        f"compress ratio {attn.compress_ratio}": attn.compress_ratio not in (0, 1, 2),
        f"{'an MXFP8' if attn.kv_mxfp8 else attn.kv_cache_dtype} KV cache": attn.kv_mxfp8
        or attn.kv_cache_dtype != "fp8_ds_mla",
        "compressed keys in a draft": role == DRAFT and (attn.compress_ratio or attn.indexer is not None),
    }
    return [reason for reason, holds in reasons.items() if holds]


class MonoDecodeLayer:
    """One decoder layer's mono decode: the whole layer by calling it, or the FFN launch by ``ffn``.

    Both return (x bf16 [rows, 5120], residual bf16 [rows, 4, 5120], post_mix f32 [rows, 4, 1], res_mix f32
    [rows, 4, 4], pre_mix f32 [rows, 4]), or None when the step takes vLLM's path.

    Args:
        layer: the DeepseekV4DecoderLayer.
        plan: what the kernels run of it; it has a launch.
        routing: the layer's routed experts.
        decode: what the model's layers share.
    """

    def __init__(self, layer: Any, plan: LayerPlan, routing: Routing, decode: MonoDecode) -> None:
        attn = layer.attn
        # A module's submodules are slow to reach, and a step reaches them for every layer.
        self._attn, self._window_layer, self._indexer = attn, attn.swa_cache_layer, attn.indexer
        self.plan, self.routing, self.decode = plan, routing, decode
        self.ffn_only = plan.launch is Launch.PART
        # vLLM's entry seam has a folded form for the embedding, which on CDNA3 no AITER kernel runs.
        self.unfolded_entry = not self.ffn_only and _generation().reads_copies
        self.weights: Any = None
        self._layer = weakref.ref(layer)
        self._entry_dims = ENTRY_DIMS[decode.role]
        self._swa_name = attn.swa_cache_layer.prefix
        self._compressed_name = attn.compressed_cache_prefix if attn.compress_ratio else None
        self._window = RecordCache(plan.name, "sliding-window cache", RECORD)
        self._compressed = RecordCache(plan.name, "compressed cache", RECORD)
        self.copies = _copy_at_load(layer, plan) if _generation().reads_copies else {}
        decode.read_metadata_of(self._swa_name, None if self.ffn_only else self._compressed_name)

    @staticmethod
    def create(layer: Any, vllm_config: VllmConfig) -> MonoDecodeLayer | None:
        """A decoder layer's mono decode; None when it is not asked for, or does not run any of the layer.

        Raises:
            SpecializedDecodeError: it is asked for and this deployment cannot run it; with every reason.
        """
        from vllm.models.deepseek_v41.amd import ops

        ops.record_monokernel(vllm_config)
        if not vllm_config.kernel_config.monokernel:
            return None
        role = (
            DRAFT if layer.attn.layer_id >= vllm_config.model_config.hf_config.num_hidden_layers else TARGET
        )
        decode = _decode_of(layer, vllm_config, role)
        plan, routing = _plan(layer, vllm_config, role)
        mono = None if plan.launch is None else MonoDecodeLayer(layer, plan, routing, decode)
        decode.add_layer(plan, mono)
        return mono

    def __call__(
        self,
        layer: Any,
        x: Tensor,
        positions: Tensor,
        residual: Tensor | None,
        post_mix: Tensor | None,
        res_mix: Tensor | None,
        pre_mix: Tensor | None,
        engram_hashes: Tensor | None = None,
        engram_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...] | None:
        """The whole layer, from the inputs of the decoder layer's ``forward``."""
        if self.ffn_only:
            return None
        decode = self.decode
        step = decode.whole_step(x.size(0))
        if step is None:
            return None
        owes_post_mix = residual is not None
        if residual is None:
            if x.dim() != self._entry_dims:
                return decode.decline(STAGE_INPUT)
            x, residual = self._broadcast(x, layer.hc_mult)
            # Without a fold the kernels read only the pre-mix.
            post_mix = res_mix = pre_mix = decode.kernels.first_pre_mix(x.size(0))
        elif layer.engram is not None and engram_hashes is not None:
            settled = layer.mhc_post(x, residual, post_mix, res_mix)
            residual = layer.engram(settled, engram_hashes[:, layer.engram.layer_hash_index], engram_mask)
            owes_post_mix = False
        if not contiguous(x, residual, post_mix, res_mix, pre_mix):
            return decode.decline(NOT_CONTIGUOUS)
        swa = step.metadata[self._swa_name]
        options = {} if self._compressed_name is None else self._compressed_keys(step)
        if self._indexer is not None:
            options["select"] = functools.partial(_select_keys, self._attn, positions)
        return decode.kernels.forward(
            self.weights, x, residual, post_mix, res_mix, pre_mix, positions, swa.slot_mapping,
            self._window.view(self._window_layer.kv_cache, swa.block_size),
            swa.decode_swa_indices, swa.decode_swa_lens, swa.token_to_req_indices,
            fold=owes_post_mix, **options,
        )  # fmt: skip

    def ffn(
        self,
        layer: Any,
        part: Tensor,
        residual: Tensor,
        post_mix: Tensor,
        res_mix: Tensor,
        pre_mix: Tensor,
    ) -> tuple[Tensor, ...] | None:
        """The FFN launch, from ``part`` (bf16 [rows, 5120], this rank's unreduced wo_b output) and the
        attention seam's outputs. On None the caller reduces ``part`` itself."""
        decode = self.decode
        if decode.part_step(part.size(0)) is None:
            return None
        if not contiguous(part, residual, post_mix, res_mix, pre_mix):
            return decode.decline(NOT_CONTIGUOUS)
        return decode.kernels.ffn(
            self.weights, part, residual, post_mix, res_mix, pre_mix, topk=self.routing.picks
        )

    def _broadcast(self, x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
        """The embedding and its broadcast to the hyper-connection streams, from whichever of them arrives."""
        if x.dim() == ENTRY_DIMS[DRAFT]:
            return x[:, 0].contiguous(), x
        return x, x.unsqueeze(1).repeat(1, streams, 1)

    def _compressed_keys(self, step: Step) -> dict[str, Any]:
        attn, keys = self._attn, step.metadata[self._compressed_name]
        records = keys.block_size // attn.compress_ratio
        return {
            "topk_indices": attn.topk_indices_buffer,
            "comp_cache": self._compressed.view(attn._compressed_kv_cache(), records),
            "comp_block_table": keys.block_table,
        }

    def take_weights(self) -> None:
        layer = self._layer()
        if layer is None:
            raise ValueError("the layer is gone")
        self.weights = _weights(layer, self)


def _select_keys(attn: Any, positions: Tensor, normed: Tensor, query_rank: Tensor) -> None:
    """An index source's own keys and its choice of compressed ones, between K1 and K2.

    Args:
        attn: the layer's attention.
        positions: int64 [rows].
        normed: bf16 [rows, 5120], the attention's input.
        query_rank: bf16 [rows, 1280], the normed query projection.
    """
    indexer, rotary = attn.indexer, attn.indexer_rotary_emb
    if (compressor := attn.compressor) is not None:
        gate = compressor.fused_wkv_wgate.weight
        latent = compressor(torch.mm(normed, gate.T, out_dtype=torch.float32), positions)
        compressor.insert_cache(latent, positions, attn.rotary_emb)
        indexer._produce_k(latent, positions, rotary)
    head_weights = indexer.weights_proj(normed)[0]
    query, scale, head_weights = indexer.forward_q(query_rank, None, head_weights, positions, rotary)
    indexer.indexer_op(normed, query if scale is None else (query, scale), None, head_weights)


_decodes: dict[str, MonoDecode] = {}


def _decode_of(layer: Any, vllm_config: VllmConfig, role: str) -> MonoDecode:
    """What the layers of this model share; the first of them decides whether the deployment can run it."""
    option = f"--specialized-decode {vllm_config.kernel_config.specialized_decode}"
    backend = Check("the MoE backend", functools.partial(_moe_backend_reason, layer))
    decode = _decodes.get(role)
    if decode is None or decode.vllm_config() is not vllm_config:
        replace(SPEC, checks=(*SPEC.checks, backend)).require(vllm_config, option)
        if _generation().reads_copies:
            from vllm.models.deepseek_v41.amd.ops import topk

            topk.build()  # a build that fails then shows now, and vLLM's top-k serves from the first step on
        decode = _decodes[role] = _new_decode(vllm_config, role)
    elif reason := backend.reason(vllm_config):
        raise refusal(f"{option}: {SPEC.name}", (f"{layer.attn.swa_cache_layer.prefix}: {reason}",))
    return decode


def counting_model_state(state: type[Any]) -> type[Any]:
    """The model state of a target whose replayed steps are counted."""
    return counting(state, lambda: decode.counters if (decode := _decodes.get(TARGET)) else None)


def _new_decode(vllm_config: VllmConfig, role: str) -> MonoDecode:
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    tp_size, config = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.hf_config
    build = KernelBuild(tp_size, TARGET_ROUTING, SWA_WIDTH)
    if role == DRAFT and _generation().draft_launch is Launch.WHOLE:
        drafts = vllm_config.speculative_config.num_speculative_tokens
        width = get_dspark_swa_index_width(config.sliding_window, drafts)
        build = KernelBuild(tp_size, _routing(vllm_config, role), width)
    return MonoDecode(role, vllm_config, build)


# Where the kernels' tensors are below a decoder layer. The linears have a scale beside their weight.
SEAMS = {
    "hc_attn_fn": "hc_attn_fn", "hc_attn_scale": "hc_attn_scale", "hc_attn_base": "hc_attn_base",
    "hc_ffn_fn": "hc_ffn_fn", "hc_ffn_scale": "hc_ffn_scale", "hc_ffn_base": "hc_ffn_base",
    "attn_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight",
    "gate_w": "ffn.gate.weight", "bias": "ffn.gate.e_score_correction_bias",
}  # fmt: skip
ATTENTION = {
    "q_norm": "attn.q_norm.weight", "kv_norm": "attn.kv_norm.weight",
    "attn_sink": "attn.attn_sink", "cos_sin": "attn.rotary_emb.cos_sin_cache",
}  # fmt: skip
ATTENTION_LINEARS = {
    ("wqkv", "wqkv_scale"): "attn.fused_wqa_wkv", ("wq_b", "wq_b_scale"): "attn.wq_b",
    ("wo_a", "wo_a_scale"): "attn.wo_a", ("wo_b", "wo_b_scale"): "attn.wo_b",
}  # fmt: skip
SHARED_EXPERT = {
    ("sgu", "sgu_s"): "ffn.shared_experts.gate_up_proj",
    ("sw2", "sw2_s"): "ffn.shared_experts.down_proj",
}
EXPERTS = "ffn.experts.routed_experts"
EXPERT_TENSORS = {
    "w13": "w13_weight", "w13_s": "w13_weight_scale", "w2": "w2_weight", "w2_s": "w2_weight_scale",
}  # fmt: skip
# A rank's part of the routed experts' width at TP 4. vLLM pads it, and the copies leave the padding out.
EXPERT_WIDTH_TP4 = 576


def _linears(launch: Launch | None) -> dict[tuple[str, str], str]:
    return SHARED_EXPERT | (ATTENTION_LINEARS if launch is Launch.WHOLE else {})


def _copy_at_load(layer: Any, plan: LayerPlan) -> dict[str, CopyAtLoad]:
    """The copies that CDNA3 kernels read, by the path of what is copied."""

    def copy_linear(linear: Any) -> tuple[Tensor, ...]:
        from vllm.models.deepseek_v41.amd.mono.weights942 import linear_copy

        return linear_copy(linear.weight, linear.weight_scale)

    def copy_experts(experts: Any) -> tuple[Tensor, ...]:
        from vllm.models.deepseek_v41.amd.mono.weights942 import moe_copies

        tensors = gather(experts, EXPERT_TENSORS)
        codes = {name: as_bytes(tensor) for name, tensor in tensors.items() if name.endswith("_s")}
        return moe_copies(*(tensors | codes).values(), EXPERT_WIDTH_TP4)

    copies = {
        path: CopyAtLoad(attrgetter(path)(layer), copy_linear) for path in _linears(plan.launch).values()
    }
    # vLLM's MoE backend frees the experts' scales when it converts them.
    return copies | {EXPERTS: CopyAtLoad(attrgetter(EXPERTS)(layer), copy_experts, before=True)}


def _weights(layer: Any, mono: MonoDecodeLayer) -> Any:
    """The layer's weights as the kernels take them, checked by them."""
    from vllm.models.deepseek_v41.amd.mono.attention.plan import Dims
    from vllm.models.deepseek_v41.amd.mono.runner import AttnWeights, MonoLayerWeights

    tp_size, attn = mono.decode.build.tp_size, None
    whole = not mono.ffn_only
    tensors = gather(layer, SEAMS | (ATTENTION if whole else {}))
    for names, path in _linears(mono.plan.launch).items():
        tensors |= zip(names, loaded(layer, path, ("weight", "weight_scale"), mono.copies), strict=True)
    tensors |= zip(EXPERT_TENSORS, loaded(layer, EXPERTS, EXPERT_TENSORS.values(), mono.copies), strict=True)
    if whole:
        names = [*ATTENTION, *(name for pair in ATTENTION_LINEARS for name in pair)]
        attn = AttnWeights(
            layer_id=layer.attn.layer_id,
            ratio=layer.attn.compress_ratio,
            **{name: tensors.pop(name) for name in names},
        )
        attn.check(Dims(tp_size))
    weights = MonoLayerWeights(attn=attn, **tensors)
    if mono.copies:
        weights.check_942(mono.routing.experts)
    else:
        weights.check(tp_size, mono.routing.experts)
    return weights
