# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 on mono kernels, step by step: which steps they take, and what they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_mono_decode_startup import (
    DRAFT_ROUTING,
    Node,
    an,
    decoder_layer,
    draft_layer,
    gpu,  # noqa: F401
    with_drafts,
)
from tests.unit.test_specialized_decode_tree import EAGER, FULL, PIECEWISE, deployment, in_step

from vllm.models.deepseek_v41.amd import mono_decode  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode import MAX_ROWS, MAX_ROWS_GFX942, RECORD, MonoDecodeLayer  # isort: skip
from vllm.models.deepseek_v41.amd.rocm import DeepseekV41RocmMxfp4Indexer  # isort: skip

ROWS = 6
HIDDEN, STREAMS = 5120, 4
BLOCK = 64
TARGET_WIDTH, DRAFT_WIDTH = 128, 192


class Recorder:
    """A launch that keeps what it was called with."""

    def __init__(self, build: mono_decode.KernelBuild, layers: tuple[str, ...]) -> None:
        self.build, self.layers = build, layers
        self.widths: list[int] = []
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def prepare(self, rows: int) -> None:
        self.widths.append(rows)


class FfnRecorder(Recorder):
    def __call__(self, weights: Any, *inputs: Any, **options: Any) -> tuple[str]:
        self.calls.append(("ffn", inputs, options))
        return ("ffn",)


class WholeRecorder(Recorder):
    def first_pre_mix(self, rows: int) -> torch.Tensor:
        return torch.eye(STREAMS)[:1].expand(rows, -1).contiguous()

    def __call__(self, weights: Any, activations: Any, keys: Any, **options: Any) -> tuple[str]:
        self.calls.append(("whole", (*activations, keys), options))
        return ("whole",)


@pytest.fixture
def opened(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:  # noqa: F811
    """The launches that were opened, recorders all."""
    launches: list[Recorder] = []

    def opening(kind: type[Recorder]) -> Any:
        def open_them(build: mono_decode.KernelBuild, layers: tuple[str, ...]) -> Recorder:
            launches.append(kind(build, layers))
            return launches[-1]

        return open_them

    monkeypatch.setattr(mono_decode, "_open_whole", opening(WholeRecorder))
    monkeypatch.setattr(mono_decode, "_open_ffn", opening(FfnRecorder))
    monkeypatch.setattr(mono_decode, "layer_weights", lambda layer, mono: f"weights of {mono.plan.name}")
    return launches


def cache(blocks: int = 4) -> torch.Tensor:
    return torch.zeros(blocks, BLOCK, RECORD, dtype=torch.uint8)


def served(layer: Node) -> Node:
    """The layer with its caches bound."""
    layer.attn.swa_cache_layer.kv_cache = cache()
    compressed = cache().view(4, -1)[:, : BLOCK * RECORD]
    layer.attn._compressed_kv_cache = lambda: compressed
    layer.attn.topk_indices_buffer = torch.zeros(64, 512, dtype=torch.int32)
    return layer


def window(width: int = TARGET_WIDTH, **changes: Any) -> SimpleNamespace:
    """The sliding-window metadata of a decode step of one request."""
    fields = {
        "num_prefills": 0, "num_decodes": 1, "num_decode_tokens": ROWS, "decode_swa_width": width,
        "decode_swa_indices": torch.zeros(64, 1, width, dtype=torch.int32),
        "decode_swa_lens": torch.zeros(64, dtype=torch.int32),
        "token_to_req_indices": torch.zeros(64, dtype=torch.int32),
        "slot_mapping": torch.zeros(64, dtype=torch.int64), "block_size": BLOCK,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def metadata(layer: Node, width: int = TARGET_WIDTH, **changes: Any) -> dict[str, Any]:
    attn = layer.attn
    compressed = SimpleNamespace(block_size=BLOCK, block_table=torch.zeros(1, 4, dtype=torch.int32))
    return {attn.swa_cache_layer.prefix: window(width, **changes), attn.compressed_cache_prefix: compressed}


def stream(rows: int = ROWS) -> dict[str, torch.Tensor]:
    """A later layer's inputs, without the positions."""
    return {
        "x": torch.zeros(rows, HIDDEN, dtype=torch.bfloat16),
        "residual": torch.zeros(rows, STREAMS, HIDDEN, dtype=torch.bfloat16),
        "post_mix": torch.zeros(rows, STREAMS, 1),
        "res_mix": torch.zeros(rows, STREAMS, STREAMS),
        "pre_mix": torch.zeros(rows, STREAMS),
    }


NOTHING_OWED = {"residual": None, "post_mix": None, "res_mix": None, "pre_mix": None}


def created(layer: Node, config: Any = None) -> MonoDecodeLayer:
    mono = MonoDecodeLayer.create(served(layer), config or with_drafts(deployment()))
    assert mono is not None
    return mono


def run(
    layer: Node, mono: MonoDecodeLayer, step: Any, mode: Any = EAGER, rows: int = ROWS, **inputs: Any
) -> Any:
    """What the layer's ``forward`` gets of the mono decode in a step."""
    arguments = stream(rows) | inputs
    with in_step(step, mode):
        if mono.ffn_only:
            part = arguments.pop("x")
            return mono.ffn(layer, part, **arguments)
        positions = torch.arange(arguments["x"].shape[0])
        return mono(layer, positions=positions, **arguments)


def whole_layer(**attn: Any) -> tuple[Node, MonoDecodeLayer]:
    layer = decoder_layer(**attn)
    return layer, created(layer)


def ffn_layer() -> tuple[Node, MonoDecodeLayer]:
    layer = decoder_layer(kv_cache_dtype="auto")
    return layer, created(layer)


@pytest.mark.parametrize("mode", [EAGER, FULL])
def test_a_decode_step_runs_the_whole_layer(opened: list[Recorder], mode: Any) -> None:
    layer, mono = whole_layer()
    step = metadata(layer)
    assert run(layer, mono, step, mode) == ("whole",)
    (launch,) = opened
    assert launch.widths == [ROWS] and mono.weights == "weights of layers.21.window"
    ((_, inputs, options),) = launch.calls
    swa, keys = step["layers.21.window"], inputs[5]
    assert torch.equal(keys.positions, torch.arange(ROWS)) and keys.slots is swa.slot_mapping
    assert keys.window_cache is layer.attn.swa_cache_layer.kv_cache
    assert keys.window_indices is swa.decode_swa_indices and keys.window_lens is swa.decode_swa_lens
    assert keys.requests is swa.token_to_req_indices
    assert options == {"fold": True, "select": None}
    assert keys.selected is layer.attn.topk_indices_buffer
    assert keys.compressed_cache.shape == (4, BLOCK, RECORD)
    assert keys.block_table is step["layers.21.compressed"].block_table


def test_the_compressed_cache_has_one_record_for_each_compressed_row(opened: list[Recorder]) -> None:
    layer, mono = whole_layer(compress_ratio=2)
    run(layer, mono, metadata(layer))
    assert opened[0].calls[0][1][5].compressed_cache.shape == (4, BLOCK // 2, RECORD)


def test_a_window_only_layer_reads_no_compressed_keys(opened: list[Recorder]) -> None:
    layer, mono = whole_layer(compress_ratio=0, compressed_cache_prefix=None)
    assert run(layer, mono, metadata(layer)) == ("whole",)
    keys = opened[0].calls[0][1][5]
    assert keys.selected is keys.compressed_cache is keys.block_table is None


def test_the_first_layer_starts_from_the_embedding(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    x = torch.randn(ROWS, HIDDEN).bfloat16()
    assert run(layer, mono, metadata(layer), x=x, **NOTHING_OWED) == ("whole",)
    ((_, inputs, options),) = opened[0].calls
    assert inputs[0] is x and options["fold"] is False
    assert torch.equal(inputs[1], torch.stack([x] * STREAMS, dim=1)) and inputs[1].is_contiguous()
    assert torch.equal(inputs[4], torch.tensor([[1.0, 0.0, 0.0, 0.0]] * ROWS))


def test_an_engram_layer_starts_from_the_settled_residual(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    seen = []

    class Engram:
        layer_hash_index = 1

        def __call__(self, residual: Any, hashes: Any, mask: Any) -> torch.Tensor:
            seen.append((residual, hashes.tolist(), mask))
            return torch.full((ROWS, STREAMS, HIDDEN), 7.0, dtype=torch.bfloat16)

    layer.engram = Engram()
    layer.mhc_post = lambda *inputs: ("settled", len(inputs))
    hashes = torch.arange(ROWS * 2).view(ROWS, 2)
    out = run(layer, mono, metadata(layer), engram_hashes=hashes, engram_mask="mask")
    assert out == ("whole",)
    assert seen == [(("settled", 4), hashes[:, 1].tolist(), "mask")]
    ((_, inputs, options),) = opened[0].calls
    assert options["fold"] is False and bool((inputs[1] == 7).all())


def test_an_engram_layer_without_hashes_folds_as_the_others(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    layer.engram = object()
    run(layer, mono, metadata(layer))
    assert opened[0].calls[0][2]["fold"] is True


def test_an_index_source_selects_between_the_launches(opened: list[Recorder]) -> None:
    layer, mono = whole_layer(indexer=an(DeepseekV41RocmMxfp4Indexer))
    run(layer, mono, metadata(layer))
    select = opened[0].calls[0][2]["select"]
    assert select.func is mono_decode._select_keys and select.args[0] is layer.attn
    assert torch.equal(select.args[1], torch.arange(ROWS))


@pytest.mark.parametrize("has_scale", [True, False], ids=["mxfp4", "fp8"])
@pytest.mark.parametrize("has_compressor", [True, False], ids=["key-source", "index-source"])
def test_selection_runs_vllm_s_compressor_and_indexer_in_order(has_scale: bool, has_compressor: bool) -> None:
    calls: list[tuple[Any, ...]] = []

    class Indexer:
        def _produce_k(self, *arguments: Any) -> None:
            calls.append(("produce_k", *arguments))

        def weights_proj(self, normed: Any) -> Any:
            return ("head weights", None)

        def forward_q(self, *arguments: Any) -> Any:
            calls.append(("forward_q", *arguments))
            return "q", "scale" if has_scale else None, "scaled weights"

        def indexer_op(self, *arguments: Any) -> None:
            calls.append(("indexer_op", *arguments))

    class Compressor:
        fused_wkv_wgate = SimpleNamespace(weight=torch.ones(3, 2, device="meta"))

        def __call__(self, scores: torch.Tensor, positions: Any) -> str:
            assert scores.dtype == torch.float32 and scores.shape == (1, 3)
            return "latent"

        def insert_cache(self, *arguments: Any) -> None:
            calls.append(("insert_cache", *arguments))

    compressor = Compressor() if has_compressor else None
    attn = SimpleNamespace(
        indexer=Indexer(), compressor=compressor, rotary_emb="rotary", indexer_rotary_emb="indexer rotary"
    )
    # No CPU kernel multiplies bf16 into f32; the shapes and dtypes are what counts here.
    normed = torch.ones(1, 2, device="meta")
    mono_decode._select_keys(attn, "positions", normed, "query rank")  # type: ignore[arg-type]
    keys = [
        ("insert_cache", "latent", "positions", "rotary"),
        ("produce_k", "latent", "positions", "indexer rotary"),
    ]
    query = ("q", "scale") if has_scale else "q"
    assert calls == [
        *(keys if has_compressor else []),
        ("forward_q", "query rank", None, "head weights", "positions", "indexer rotary"),
        ("indexer_op", normed, query, None, "scaled weights"),
    ]


def test_a_draft_layer_runs_whole_on_kernels_of_its_own(opened: list[Recorder]) -> None:
    config = with_drafts(deployment())
    target, draft = decoder_layer(), draft_layer()
    mono, drafting = created(target, config), created(draft, config)
    assert run(target, mono, metadata(target)) == ("whole",)
    assert run(draft, drafting, metadata(draft, DRAFT_WIDTH)) == ("whole",)
    assert [kernels.build.swa_width for kernels in opened] == [TARGET_WIDTH, DRAFT_WIDTH]
    assert opened[1].build.routing == DRAFT_ROUTING and len(opened[1].calls) == 1


def test_the_first_draft_layer_starts_from_the_broadcast_embedding(opened: list[Recorder]) -> None:
    layer = draft_layer()
    mono = created(layer)
    x = torch.randn(ROWS, STREAMS, HIDDEN).bfloat16()
    assert run(layer, mono, metadata(layer, DRAFT_WIDTH), x=x, **NOTHING_OWED) == ("whole",)
    ((_, inputs, options),) = opened[0].calls
    assert torch.equal(inputs[0], x[:, 0]) and inputs[0].is_contiguous() and inputs[1] is x
    assert options == {"fold": False, "select": None}


def test_target_and_draft_take_only_their_own_windows(opened: list[Recorder]) -> None:
    target, draft = decoder_layer(), draft_layer()
    mono, drafting = created(target), created(draft)
    assert run(target, mono, metadata(target, DRAFT_WIDTH)) is None
    assert run(draft, drafting, metadata(draft, TARGET_WIDTH)) is None
    assert not opened and mono.decode.counters.declines == {"sliding window": 1}


def test_a_padded_step_of_a_full_graph_is_taken(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    assert run(layer, mono, metadata(layer, num_decode_tokens=ROWS - 2)) == ("whole",)


LONG = stream(MAX_ROWS + 6)
GENERAL_DECLINES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "piecewise": ({}, {"mode": PIECEWISE}, "graph mode"),
    "prefill": ({"num_prefills": 1}, {}, "not decode only"),
    "no-decodes": ({"num_decodes": 0}, {}, "not decode only"),
    "tokens-past-rows": ({"num_decode_tokens": ROWS + 1}, {}, "rows of metadata"),
    "rows": ({}, LONG, "rows"),
    "dummy": ({}, {"step": {}}, "no attention metadata"),
    "profile": ({}, {"step": None}, "no attention metadata"),
    "microbatches": ({}, {"step": [{}, {}]}, "no attention metadata"),
    "missing": ({}, {"step": {"another": 0}}, "metadata missing"),
}
WHOLE_DECLINES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "window": ({"decode_swa_width": 256}, {}, "sliding window"),
    "no-indices": ({"decode_swa_indices": None}, {}, "metadata missing"),
    "no-lengths": ({"decode_swa_lens": None}, {}, "metadata missing"),
    "no-requests": ({"token_to_req_indices": None}, {}, "metadata missing"),
    "no-compressed": ({}, {"step": {"layers.21.window": window()}}, "metadata missing"),
    "stage-input": (
        {}, {"x": torch.zeros(ROWS, STREAMS, HIDDEN, dtype=torch.bfloat16), "residual": None},
        "inputs of another shape",
    ),
    "strided": (
        {}, {"residual": torch.zeros(STREAMS, ROWS, HIDDEN).bfloat16().transpose(0, 1)},
        "inputs not contiguous",
    ),
    "no-mix": ({}, {"post_mix": None}, "inputs not contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GENERAL_DECLINES, *WHOLE_DECLINES])
def test_other_steps_take_vllm_s_layer(opened: list[Recorder], name: str) -> None:
    changes, inputs, reason = (GENERAL_DECLINES | WHOLE_DECLINES)[name]
    layer, mono = whole_layer()
    step = inputs.get("step", metadata(layer, **changes))
    assert run(layer, mono, step, **{key: value for key, value in inputs.items() if key != "step"}) is None
    assert not any(kernels.calls for kernels in opened)
    assert mono.decode.counters.declines == {reason: 1}


@pytest.mark.parametrize("mode", [EAGER, FULL])
def test_a_decode_step_runs_the_ffn_launch(opened: list[Recorder], mode: Any) -> None:
    layer, mono = ffn_layer()
    part = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    assert run(layer, mono, metadata(layer), mode, x=part) == ("ffn",)
    ((what, inputs, options),) = opened[0].calls
    assert what == "ffn" and inputs[0] is part and len(inputs) == 5 and not options


def test_an_ffn_layer_never_runs_whole(opened: list[Recorder]) -> None:
    layer, mono = ffn_layer()
    with in_step(metadata(layer)):
        assert mono(layer, positions=torch.arange(ROWS), **stream()) is None
    assert not opened


@pytest.mark.parametrize("name", GENERAL_DECLINES)
def test_on_other_steps_vllm_reduces_wo_b_itself(opened: list[Recorder], name: str) -> None:
    changes, inputs, reason = GENERAL_DECLINES[name]
    layer, mono = ffn_layer()
    step = inputs.get("step", metadata(layer, **changes))
    assert run(layer, mono, step, **{key: value for key, value in inputs.items() if key != "step"}) is None
    assert not opened and mono.decode.counters.declines == {reason: 1}


def test_the_ffn_launch_needs_no_windows(opened: list[Recorder]) -> None:
    layer, mono = ffn_layer()
    step = {"layers.21.window": window(width=256, decode_swa_indices=None)}
    assert run(layer, mono, step) == ("ffn",)


def test_a_whole_layer_needs_no_compressed_keys_of_a_layer_whose_attention_vllm_runs(
    opened: list[Recorder],
) -> None:
    config = with_drafts(deployment())
    whole, part = decoder_layer(3), decoder_layer(4, kv_cache_dtype="auto")
    monos = [created(whole, config), created(part, config)]
    step = metadata(whole) | {"layers.4.window": window()}
    assert [run(whole, monos[0], step), run(part, monos[1], step)] == [("whole",), ("ffn",)]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape whose rows lie apart."""
    return torch.stack([tensor, tensor], dim=1)[:, 0]


@pytest.mark.parametrize("make", [whole_layer, ffn_layer], ids=["whole", "ffn"])
@pytest.mark.parametrize("name", stream())
def test_every_input_must_be_contiguous(opened: list[Recorder], make: Any, name: str) -> None:
    layer, mono = make()
    odd = strided(stream()[name])
    assert odd.shape == stream()[name].shape and not odd.is_contiguous()
    assert run(layer, mono, metadata(layer), **{name: odd}) is None
    assert mono.decode.counters.declines == {"inputs not contiguous": 1}
    assert not any(kernels.calls for kernels in opened)


@pytest.mark.parametrize("name", ["post_mix", "res_mix", "pre_mix"])
def test_every_mix_must_be_there_for_a_residual(opened: list[Recorder], name: str) -> None:
    layer, mono = whole_layer()
    assert run(layer, mono, metadata(layer), **{name: None}) is None
    assert mono.decode.counters.declines == {"inputs not contiguous": 1}


@pytest.mark.parametrize("name", ["post_mix", "res_mix", "pre_mix"])
def test_the_ffn_launch_needs_every_mix(opened: list[Recorder], name: str) -> None:
    layer, mono = ffn_layer()
    assert run(layer, mono, metadata(layer), **{name: None}) is None
    assert mono.decode.counters.declines == {"inputs not contiguous": 1}


def test_a_draft_does_not_start_from_an_embedding_of_one_stream(opened: list[Recorder]) -> None:
    layer = draft_layer()
    mono = created(layer)
    assert run(layer, mono, metadata(layer, DRAFT_WIDTH), **NOTHING_OWED) is None
    assert mono.decode.counters.declines == {"inputs of another shape": 1}


def test_the_first_layer_s_embedding_must_be_contiguous(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    odd = strided(stream()["x"])
    assert run(layer, mono, metadata(layer), x=odd, **NOTHING_OWED) is None
    assert mono.decode.counters.declines == {"inputs not contiguous": 1}


def test_an_engram_layer_s_inputs_are_checked_before_the_engram_runs(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    layer.engram = SimpleNamespace(layer_hash_index=0)
    layer.mhc_post = lambda *_: pytest.fail("vLLM's path would run it again")
    hashes = torch.zeros(ROWS, 1)
    odd = strided(stream()["res_mix"])
    assert run(layer, mono, metadata(layer), res_mix=odd, engram_hashes=hashes) is None


def test_an_engram_s_output_reaches_the_kernels_contiguous(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    out = strided(torch.randn(ROWS, STREAMS, HIDDEN).bfloat16())
    engram = lambda *_: out  # noqa: E731
    layer.engram = type("Engram", (), {"layer_hash_index": 0, "__call__": engram})()
    layer.mhc_post = lambda *_: None
    assert run(layer, mono, metadata(layer), engram_hashes=torch.zeros(ROWS, 1)) == ("whole",)
    residual = opened[0].calls[0][1][1]
    assert residual.is_contiguous() and torch.equal(residual, out)


@pytest.mark.parametrize(
    ("cdna", "tp", "rows", "taken"),
    [
        (3, 4, MAX_ROWS_GFX942, True),
        (3, 4, MAX_ROWS_GFX942 + 1, False),
        (3, 2, 32, True),
        (3, 2, 33, False),
        (4, 4, MAX_ROWS, True),
        (4, 2, MAX_ROWS, True),
    ],
)
def test_steps_up_to_the_row_limit_of_gpu_and_ranks(
    gpu: Any, opened: list[Recorder], cdna: int, tp: int, rows: int, taken: bool  # noqa: F811
) -> None:  # fmt: skip
    gpu(cdna=cdna)
    layer = decoder_layer()
    mono = created(layer, deployment(tensor_parallel_size=tp))
    assert (run(layer, mono, metadata(layer, num_decode_tokens=rows), rows=rows) == ("whole",)) is taken


def test_one_layer_s_odd_group_puts_the_whole_step_on_vllm_s_path(opened: list[Recorder]) -> None:
    config = with_drafts(deployment())
    first, second = decoder_layer(3), decoder_layer(4)
    monos = [created(first, config), created(second, config)]
    step = metadata(first) | metadata(second, num_prefills=1)
    assert [run(layer, mono, step) for layer, mono in zip((first, second), monos, strict=True)] == [
        None,
        None,
    ]


def test_layers_of_a_step_share_its_decision(opened: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_drafts(deployment())
    layers = [decoder_layer(i) for i in range(3, 8)]
    monos = [created(layer, config) for layer in layers]
    step: dict[str, Any] = {}
    for layer in layers:
        step |= metadata(layer)
    read = []
    original = mono_decode.MonoDecode.read_step
    monkeypatch.setattr(
        mono_decode.MonoDecode, "read_step", lambda *arguments: (read.append(1), original(*arguments))[1]
    )
    with in_step(step):
        for layer, mono in zip(layers, monos, strict=True):
            assert mono(layer, positions=torch.arange(ROWS), **stream()) == ("whole",)
    assert len(read) == 1 and len(opened) == 1
    assert monos[0].decode.counters.taken_steps == 1


def test_a_cache_whose_blocks_overlap_is_an_error_with_the_layer_s_name(opened: list[Recorder]) -> None:
    layer, mono = whole_layer()
    flat = torch.zeros(4 * BLOCK * RECORD, dtype=torch.uint8)
    layer.attn.swa_cache_layer.kv_cache = flat.as_strided((3, BLOCK, RECORD), (BLOCK * RECORD - 1, RECORD, 1))
    with pytest.raises(ValueError, match=r"layers\.21\.window: .* sliding-window cache: block stride 37375"):
        run(layer, mono, metadata(layer))
    layer.attn.swa_cache_layer.kv_cache = cache()
    layer.attn._compressed_kv_cache = lambda: cache().bfloat16()
    with pytest.raises(ValueError, match=r"layers\.21\.window: .* compressed cache: dtype torch\.bfloat16"):
        run(layer, mono, metadata(layer))


def test_a_replay_batch_with_the_last_layers_metadata_alone_belongs_on_vllm_s_path(
    opened: list[Recorder],
) -> None:
    """As SWA bounded replay runs the last layers: a context of their own, and the rows of prefills."""
    config = with_drafts(deployment())
    config.kernel_config.specialized_decode_strict = True
    layers = [decoder_layer(i) for i in (3, 4)]
    monos = [created(layer, config) for layer in layers]
    assert run(layers[1], monos[1], metadata(layers[1], num_prefills=1)) is None
    assert monos[1].decode.counters.declines == {"not decode only": 1}
    with pytest.raises(RuntimeError, match=r"metadata missing: layers\.3\.window"):
        run(layers[1], monos[1], metadata(layers[1]))


def test_strict_mode_rejects_a_fallback_of_one_layer(opened: list[Recorder]) -> None:
    config = with_drafts(deployment())
    config.kernel_config.specialized_decode_strict = True
    layer = decoder_layer()
    mono = created(layer, config)
    with pytest.raises(RuntimeError, match="should have taken .*: inputs not contiguous"):  # noqa: RUF043
        run(layer, mono, metadata(layer), post_mix=None)
    assert run(layer, mono, metadata(layer, num_prefills=1)) is None


# Of the steps on vLLM's path, those that belong there: prefills, other graphs, no metadata.
EXPECTED = {"piecewise", "prefill", "no-decodes", "rows", "dummy", "profile", "microbatches"}


@pytest.mark.parametrize("name", [*GENERAL_DECLINES, *WHOLE_DECLINES])
def test_strict_mode_rejects_every_decline_but_those_that_belong_on_vllm_s_path(
    opened: list[Recorder], name: str
) -> None:
    changes, inputs, reason = (GENERAL_DECLINES | WHOLE_DECLINES)[name]
    config = with_drafts(deployment())
    config.kernel_config.specialized_decode_strict = True
    layer = decoder_layer()
    mono = created(layer, config)
    step = inputs.get("step", metadata(layer, **changes))
    given = {key: value for key, value in inputs.items() if key != "step"}
    if name in EXPECTED:
        assert run(layer, mono, step, **given) is None
    else:
        with pytest.raises(RuntimeError, match=f"should have taken .*: {reason}"):
            run(layer, mono, step, **given)
    assert mono.decode.counters.declines == {reason: 1}


def test_weights_that_the_kernels_cannot_read_are_all_named(
    opened: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(layer: Any, mono: Any) -> Any:
        raise AssertionError(f"MoE w13: (1,), want (2,) of {layer.attn.layer_id}")

    monkeypatch.setattr(mono_decode, "layer_weights", broken)
    config = with_drafts(deployment())
    layers = [decoder_layer(i) for i in (3, 4)]
    monos = [created(layer, config) for layer in layers]
    step = metadata(layers[0]) | metadata(layers[1])
    with pytest.raises(
        ValueError, match=r"2 reason\(s\):\n  - layers\.3\.window: MoE w13.*\n  - layers\.4\.window"
    ):
        run(layers[0], monos[0], step)
    assert not opened
