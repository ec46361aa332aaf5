# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash decode steps on mono kernels (CDNA3 and CDNA4): which steps and layers, and with what.

A whole layer is two launches, K1 and K2, from one attention seam to the next, with both TP sums inside.
vLLM's compressor and indexer run between them on an index source. The FFN launch is one launch from wo_b's
unreduced output on, for layers whose attention vLLM runs. Every path hands on the same five tensors, so that
layers may take different ones.

``mono_decode_spec`` says what the kernels can run, ``mono_decode_weights`` what they read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.models.common.specialized_decode.decode import (
    DRAFT,
    TARGET,
    Decline,
    Launch,
    LayerPlan,
    SpecializedDecode,
    Step,
    current,
    forget,
    not_decode_only,
)
from vllm.models.common.specialized_decode.fail_stop import before_tokens
from vllm.models.common.specialized_decode.kv_cache import RecordCache
from vllm.models.common.specialized_decode.replay import counting
from vllm.models.common.specialized_decode.spec import asked, refusal
from vllm.models.deepseek_v41.amd.mono.geometry import MAX_ROWS, MAX_ROWS_GFX942
from vllm.models.deepseek_v41.amd.mono.layer_launch import Keys
from vllm.models.deepseek_v41.amd.mono_decode_spec import (
    SPEC,
    TARGET_ROUTING,
    Routing,
    generation,
    gpu_architecture,
    layer_checks,
    plan_layer,
    routing_of,
)
from vllm.models.deepseek_v41.amd.mono_decode_weights import ATTENTION_HALF, kept_at_load, layer_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What other files of vLLM and ours take from here.
__all__ = ["MAX_ROWS", "MAX_ROWS_GFX942", "MonoDecodeLayer", "counting_model_state"]

RECORD = 584  # bytes of an fp8_ds_mla record: 448 e4m3, 64 bf16, 8 scale bytes
SWA_WIDTH = 128  # keys that a row of the target's causal window has at most
# Dimensions of what a model hands its first layer: the embedding, or its broadcast to the streams.
ENTRY_DIMS = {TARGET: 2, DRAFT: 3}

STAGE_INPUT = Decline("inputs of another shape", expected=False)
NOT_CONTIGUOUS = Decline("inputs not contiguous", expected=False)


@dataclass(frozen=True)
class KernelBuild:
    """What a model's kernels are built for."""

    tp_size: int
    routing: Routing
    swa_width: int


class MonoKernels:
    """One rank's launches of one model.

    Args:
        launches: those that some layer's plan has, a ``LayerLaunch`` and an ``FfnLaunch``.
    """

    def __init__(self, launches: Mapping[Launch, Any]) -> None:
        self.launches = launches

    def prepare(self, rows: int) -> None:
        """Make the memory of steps of ``rows`` rows, once."""
        for launch in self.launches.values():
            launch.prepare(rows)

    @property
    def epoch(self) -> list[int]:  # vLLM's own GPU tests see by it that the kernels ran
        return self.launches[Launch.WHOLE].epoch


def _open_whole(build: KernelBuild, layers: tuple[str, ...]) -> Any:
    """Whole layers for ``build``, whose failures are looked for before tokens are returned."""
    from vllm.models.deepseek_v41.amd.mono.layer_launch import LayerLaunch

    launch = LayerLaunch(_deployment(build, layers), build.swa_width)
    before_tokens(launch.check)
    return launch


def _open_ffn(build: KernelBuild, layers: tuple[str, ...]) -> Any:
    """The FFN launch for ``build``, whose failures are looked for before tokens are returned."""
    from vllm.models.deepseek_v41.amd.mono.ffn_launch import FfnLaunch

    launch = FfnLaunch(_deployment(build, layers))
    before_tokens(launch.fail_stop.check)
    return launch


def _deployment(build: KernelBuild, layers: tuple[str, ...]) -> Any:
    from vllm.distributed import get_tp_group
    from vllm.models.common.amd.persistent.peers import Group
    from vllm.models.deepseek_v41.amd.mono.ffn_launch import Deployment

    return Deployment(
        group=Group.of(get_tp_group().cpu_group),
        device=torch.device("cuda", torch.accelerator.current_device_index()),
        arch=gpu_architecture(),
        experts=build.routing.experts,
        picks=build.routing.picks,
        layers=layers,
    )


class MonoDecode(SpecializedDecode[MonoKernels]):
    """The mono decode of one model: the target's layers, or the draft's."""

    def __init__(self, role: str, vllm_config: VllmConfig, build: KernelBuild) -> None:
        super().__init__(SPEC, role, vllm_config)
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
        opened = {}
        for launch, open_them in ((Launch.WHOLE, _open_whole), (Launch.PART, _open_ffn)):
            if layers := tuple(plan.name for plan in self.plans if plan.launch is launch):
                opened[launch] = open_them(self.build, layers)
        return MonoKernels(opened)

    def widths_ahead(self) -> list[int]:
        """Of captured graphs: each size, which vLLM warms up, and that of its whole requests."""
        config = self.vllm_config()
        if config is None:
            return []
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        drafting = config.speculative_config
        drafts = 0 if drafting is None else drafting.num_speculative_tokens
        # The target verifies drafts and one more a request; the draft model has a row less, or as many.
        requests = (1, drafts + 1, max(drafts, 1))
        widths = {-(-size // rows) * rows for size in sizes for rows in requests}
        return sorted(rows for rows in widths if rows <= self.max_rows)

    def prepare_width(self, kernels: MonoKernels, rows: int) -> None:
        kernels.prepare(rows)

    def read_step(self, metadata: Mapping[str, Any], rows: int) -> tuple[Decline | None, Decline | None]:
        groups, missing = {}, None
        for name in self._swa_names:
            if (swa := metadata.get(name)) is None:
                missing = Decline("metadata missing", name, expected=False)
            else:
                groups[id(swa)] = swa  # the layers of a KV cache group share one
        # A replay batch of SWA bounded replay has the last layers' metadata alone, and prefills.
        for swa in groups.values():
            if (why := not_decode_only(swa, rows)) is not None:
                return why, why
        if missing is not None:
            return missing, missing
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
        self.unfolded_entry = not self.ffn_only and generation().unfolded_entry
        self.weights: Any = None
        self._launch: Any = None  # the layer's, bound at the first taken step
        self._layer = weakref.ref(layer)
        self._entry_dims = ENTRY_DIMS[decode.role]
        self._swa_name = attn.swa_cache_layer.prefix
        self._compressed_name: Any = attn.compressed_cache_prefix if attn.compress_ratio else None
        self._window = RecordCache(plan.name, "sliding-window cache", RECORD)
        self._compressed = RecordCache(plan.name, "compressed cache", RECORD)
        self.kept = kept_at_load(layer, plan) if generation().cleans_negative_zero else {}
        decode.read_metadata_of(self._swa_name, None if self.ffn_only else self._compressed_name)

    @staticmethod
    def create(layer: Any, vllm_config: VllmConfig) -> MonoDecodeLayer | None:
        """A decoder layer's mono decode; None when it is not asked for, or does not run any of the layer.

        Raises:
            SpecializedDecodeError: it is asked for and this deployment cannot run it; with every reason.
        """
        from vllm.models.deepseek_v41.amd import ops

        ops.record_monokernel(vllm_config)
        layers = vllm_config.model_config.hf_config.num_hidden_layers
        role = DRAFT if layer.attn.layer_id >= layers else TARGET
        if not vllm_config.kernel_config.monokernel:
            forget(role)
            return None
        decode = _decode_of(layer, vllm_config, role)
        plan, routing = plan_layer(layer, vllm_config, role)
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
        step = decode.decision(x.shape[0]).whole
        if step is None:
            return None
        owes_post_mix = residual is not None
        if residual is None and x.dim() != self._entry_dims:
            decode.decline(STAGE_INPUT)
            return None
        # Before anything runs that vLLM's path would run again. Spelled out here and below: a call and a loop
        # for each layer would cost as much as the checks.
        if not (
            x.is_contiguous()
            if residual is None
            else x.is_contiguous()
            and residual.is_contiguous()
            and (post_mix is not None and post_mix.is_contiguous())
            and (res_mix is not None and res_mix.is_contiguous())
            and (pre_mix is not None and pre_mix.is_contiguous())
        ):
            decode.decline(NOT_CONTIGUOUS)
            return None
        launch = self._launch or self._bind()
        if residual is None:
            x, residual = self._broadcast(x, layer.hc_mult)
            # Without a fold the kernels read only the pre-mix.
            post_mix = res_mix = pre_mix = launch.first_pre_mix(x.shape[0])
        elif layer.engram is not None and engram_hashes is not None:
            settled = layer.mhc_post(x, residual, post_mix, res_mix)
            hashes = engram_hashes[:, layer.engram.layer_hash_index]
            residual = layer.engram(settled, hashes, engram_mask).contiguous()
            owes_post_mix = False
        swa = step.metadata[self._swa_name]
        selected, compressed, block_table = (
            (None, None, None) if self._compressed_name is None else self._compressed_keys(step)
        )
        select = None
        if self._indexer is not None:
            select = functools.partial(_select_keys, self._attn, positions)
        window = self._window.view(self._window_layer.kv_cache, swa.block_size)
        keys = Keys(
            positions, swa.slot_mapping, window, swa.decode_swa_indices, swa.decode_swa_lens,
            swa.token_to_req_indices, selected, compressed, block_table,
        )  # fmt: skip
        activations = (x, residual, post_mix, res_mix, pre_mix)
        return launch(self.weights, activations, keys, fold=owes_post_mix, select=select)

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
        if self.decode.decision(part.shape[0]).part is None:
            return None
        if not (
            part.is_contiguous()
            and residual.is_contiguous()
            and (post_mix is not None and post_mix.is_contiguous())
            and (res_mix is not None and res_mix.is_contiguous())
            and (pre_mix is not None and pre_mix.is_contiguous())
        ):
            self.decode.decline(NOT_CONTIGUOUS)
            return None
        launch = self._launch or self._bind()
        return launch(self.weights, part, residual, post_mix, res_mix, pre_mix)

    def _bind(self) -> Any:
        self._launch = self.decode.kernels.launches[Launch.PART if self.ffn_only else Launch.WHOLE]
        return self._launch

    def _broadcast(self, x: Tensor, streams: int) -> tuple[Tensor, Tensor]:
        """The embedding and its broadcast to the hyper-connection streams, from whichever of them arrives."""
        if x.dim() == ENTRY_DIMS[DRAFT]:
            return x[:, 0].contiguous(), x
        return x, x.unsqueeze(1).repeat(1, streams, 1)

    def _compressed_keys(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        attn, keys = self._attn, step.metadata[self._compressed_name]
        cache = self._compressed.view(attn._compressed_kv_cache(), keys.block_size // attn.compress_ratio)
        return attn.topk_indices_buffer, cache, keys.block_table

    @property
    def _weights(self) -> Any:  # the name that vLLM's own GPU tests know
        return self.weights

    def take_weights(self) -> None:
        layer = self._layer()
        if layer is None:
            raise ValueError("the layer is gone")
        self.weights = layer_weights(layer, self)


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


def _decode_of(layer: Any, vllm_config: VllmConfig, role: str) -> MonoDecode:
    """What the layers of this model share; the first of them decides whether the deployment can run it."""
    option, checks, decode = asked(vllm_config), layer_checks(layer), current(role)
    if isinstance(decode, MonoDecode) and decode.vllm_config() is vllm_config:
        if reasons := [reason for check in checks if (reason := check.attempt(vllm_config))]:
            name = layer.attn.swa_cache_layer.prefix
            raise refusal(f"{option}: {SPEC.name}", tuple(f"{name}: {reason}" for reason in reasons))
        return decode
    replace(SPEC, checks=(*SPEC.checks, *checks)).require(vllm_config, option)
    if generation().own_top_k:
        from vllm.models.deepseek_v41.amd.ops import topk

        topk.build()  # a build that fails then shows now, and vLLM's top-k serves from the first step on
    return _new_decode(vllm_config, role)


def counting_model_state(state: type[Any]) -> type[Any]:
    """The model state of a target whose replayed steps are counted."""
    return counting(state)


def _new_decode(vllm_config: VllmConfig, role: str) -> MonoDecode:
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    tp_size, config = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.hf_config
    build = KernelBuild(tp_size, TARGET_ROUTING, SWA_WIDTH)
    if role == DRAFT:
        drafts = vllm_config.speculative_config.num_speculative_tokens  # type: ignore[union-attr]
        width = get_dspark_swa_index_width(config.sliding_window, drafts)
        build = KernelBuild(tp_size, routing_of(vllm_config, role), width)
    return MonoDecode(role, vllm_config, build)


# vLLM's own GPU test of the layers reads it by this name.
ATTN_LINEARS_942 = tuple(path.removeprefix("attn.") for path in ATTENTION_HALF.linears.values())


def __getattr__(name: str) -> Any:
    if name == "_runner":  # the target's kernels once they are open
        decode = current(TARGET)
        return None if decode is None else decode.opened
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
