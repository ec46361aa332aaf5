# SPDX-License-Identifier: Apache-2.0
"""What a spec refuses, reason by reason, all at once, and what it cannot check. On the toy model's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_specialized_decode_tree import PIECEWISE, deployment

from tests import toy_model  # isort: skip
from vllm.config import CUDAGraphMode, VllmConfig  # isort: skip
from vllm.models.common.specialized_decode.features import (  # isort: skip
    NOT_FEATURES, SWITCHES, optional_configs, reported_features,
)  # fmt: skip
from vllm.models.common.specialized_decode.spec import Check, Device, SpecializedDecodeError  # isort: skip

SPEC = toy_model.SPEC


def config(**changes: Any) -> VllmConfig:
    """A deployment that the toy runs in, with ``changes`` by dotted path
    ("parallel_config.data_parallel_size")."""
    made = deployment(tensor_parallel_size=1)
    made.model_config = SimpleNamespace(
        architectures=["ToyForCausalLM"], dtype=torch.float32, enable_sleep_mode=False,
        disable_sliding_window=False, enable_cumem_allocator=False,
        enable_prompt_embeds=False, hf_config=SimpleNamespace(bias=0.5),
    )  # fmt: skip
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        target = made
        for part in owner.split("__") if owner else []:
            target = getattr(target, part)
        setattr(target, name, value)
    return made


def test_a_deployment_inside_the_spec_is_not_refused() -> None:
    assert SPEC.refuse(config()) == ()
    SPEC.require(config(), "--specialized-decode")


SINGLE_REASONS = {
    "architecture": ({"model_config__architectures": ["Other"]}, "model architecture: Other, wanted Toy"),
    "dtype": ({"model_config__dtype": torch.bfloat16}, "activation dtype: torch.bfloat16, wanted torch."),
    "kv-dtype": ({"cache_config__cache_dtype": "fp8"}, "KV cache dtype: fp8, wanted auto"),
    "tp": ({"parallel_config__tensor_parallel_size": 2}, "tensor parallel size: 2, wanted 1 on CDNA4"),
    "graph-mode": (
        {"compilation_config__cudagraph_mode": PIECEWISE},
        "CUDA graph mode of decode steps: PIECEWISE, wanted FULL or NONE",
    ),
    "own-check": ({"model_config__hf_config": SimpleNamespace(bias=float("inf"))}, "bias: inf, wanted"),
    "sleep": ({"model_config__enable_sleep_mode": True}, "sleep mode is on"),
    "embeddings": ({"model_config__enable_prompt_embeds": True}, "prompt embeddings is on"),
    "pp": ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism is on"),
    "dp": ({"parallel_config__data_parallel_size": 2}, "data parallelism is on"),
    "ep": ({"parallel_config__enable_expert_parallel": True}, "expert parallelism is on"),
    "eplb": ({"parallel_config__enable_eplb": True}, "expert load balancing is on"),
    "dcp": ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism is on"),
    "pcp": ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism is on"),
    "dbo": ({"parallel_config__enable_dbo": True}, "microbatches is on"),
    "hc-sp": ({"parallel_config__enable_hc_sp": True}, "hyper-connection sequence parallelism is on"),
    "fast-prefill": (
        {"cache_config__kv_sharing_fast_prefill": True},
        "fast prefill of shared KV is on",
    ),
    "replayssm": ({"cache_config__use_replayssm": True}, "state replay is on"),
    "kv-offload": ({"cache_config__kv_offloading_size": 1.0}, "KV cache offloading is on"),
    "uva-offload": ({"offload_config__uva__cpu_offload_gb": 1.0}, "weight offloading is on"),
    "prefetch-offload": ({"offload_config__prefetch__offload_group_size": 2}, "weight offloading is on"),
    "capture": ({"aux_output_config__enable_return_routed_experts": True}, "routed-expert capture is on"),
} | {name: ({name: object()}, f"{name} is set") for name in optional_configs(VllmConfig())}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE_REASONS)
def test_each_reason_alone(name: str) -> None:
    changes, reason = SINGLE_REASONS[name]
    (found,) = SPEC.refuse(config(**changes))
    assert found.startswith(reason)


def test_all_reasons_at_once() -> None:
    changes: dict[str, Any] = {}
    for one, _ in SINGLE_REASONS.values():
        changes |= one
    found = SPEC.refuse(config(**changes))
    # Expert parallelism of a TP group also makes its MoE sequence parallel.
    expected = {reason for _, reason in SINGLE_REASONS.values()} | {"sequence-parallel MoE is on"}
    assert len(found) == len(expected)
    assert all(sum(line.startswith(reason) for line in found) == 1 for reason in expected)
    with pytest.raises(SpecializedDecodeError) as error:
        SPEC.require(config(**changes), "--monokernel")
    message = str(error.value)
    assert message.startswith("--monokernel: toy decode cannot run here")
    assert all(f"\n  - {line}" in message for line in found) and "drop the option" in message


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device(2, 304), "GPU: CDNA2, wanted CDNA3 or CDNA4"),
        (Device(None, 304), "GPU: another GPU, wanted CDNA3 or CDNA4"),
        (Device(4, 1), "GPU: 1 compute units, wanted at least 2"),
    ],
)
def test_each_gpu_outside_the_spec(device: Device, reason: str) -> None:
    (found,) = dataclasses.replace(SPEC, device=lambda: device).refuse(config())
    assert found.startswith(reason)


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", None])
def test_graph_modes_whose_decode_steps_are_full_or_eager(mode: str | None) -> None:
    chosen = None if mode is None else CUDAGraphMode[mode]
    assert SPEC.refuse(config(compilation_config__cudagraph_mode=chosen)) == ()


def test_full_graphs_of_mixed_batches_refuse() -> None:
    """vLLM captures them on batches that look like decodes, and replays them for prefills."""
    (found,) = SPEC.refuse(config(compilation_config__cudagraph_mode=CUDAGraphMode.FULL))
    assert found.startswith("CUDA graph mode: FULL, which replays")
    assert found.endswith("wanted FULL_AND_PIECEWISE or FULL_DECODE_ONLY")


def test_a_check_that_cannot_be_made_is_a_reason() -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("gone")

    spec = dataclasses.replace(SPEC, device=broken, checks=(Check("the experts", broken),))
    made = config()
    del made.model_config.dtype, made.model_config.enable_sleep_mode
    found = spec.refuse(made)
    assert [line.partition(":")[0] for line in found] == [
        "cannot check the activation dtype",
        "cannot check the GPU",
        "cannot check the tensor parallel size",
        "sleep mode cannot be read from the configuration",
        "cannot check the experts",
    ]
    assert all("gone" in line for line in (found[1], found[2], found[4]))


def test_no_configuration_is_a_reason_and_no_crash() -> None:
    found = SPEC.refuse(None)  # type: ignore[arg-type]
    assert "cannot check the activation dtype" in found[1]
    assert any(line.startswith("the optional configurations cannot be read") for line in found)


def test_batch_invariance_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (found,) = SPEC.refuse(config())
    assert found.startswith("batch invariance is on")


def test_a_spec_s_rows_do_not_change() -> None:
    rows = {4: {1: 8}}
    spec = dataclasses.replace(SPEC, max_rows=rows)
    rows[3] = {1: 8}
    rows[4][2] = 8
    assert spec.max_rows == {4: {1: 8}}
    with pytest.raises(TypeError):
        spec.max_rows[3] = {1: 8}  # type: ignore[index]
    with pytest.raises(TypeError):
        spec.max_rows[4][2] = 8  # type: ignore[index]


@pytest.mark.parametrize(("size", "rows"), [(1, 8), (2, 6)])
def test_the_row_limit_is_that_of_the_tensor_parallel_size(size: int, rows: int) -> None:
    spec = dataclasses.replace(SPEC, max_rows={3: {1: 4}, 4: {1: 8, 2: 6}})
    made = config(parallel_config__tensor_parallel_size=size)
    assert spec.refuse(made) == () and spec.row_limit(made) == rows


@pytest.mark.parametrize(
    ("cdna", "reasons"),
    [
        (4, ("tensor parallel size: 8, wanted 1 or 2 on CDNA4",)),
        (3, ("tensor parallel size: 8, wanted 4 on CDNA3",)),
        (2, ("GPU: CDNA2, wanted CDNA3 or CDNA4", "tensor parallel size: 8, wanted 1 or 2 or 4")),
    ],
)
def test_a_size_is_refused_beside_those_of_its_gpu(cdna: int, reasons: tuple[str, ...]) -> None:
    spec = dataclasses.replace(
        SPEC, max_rows={3: {4: 4}, 4: {1: 8, 2: 6}}, device=lambda: Device(cdna, compute_units=2)
    )
    assert spec.refuse(config(parallel_config__tensor_parallel_size=8)) == reasons


def test_a_spec_that_names_a_feature_runs_alongside_it() -> None:
    spec = dataclasses.replace(SPEC, runs_alongside=SPEC.runs_alongside | {"lora_config", "data parallelism"})
    made = config(
        lora_config=object(), parallel_config__data_parallel_size=2, parallel_config__enable_eplb=True
    )
    (found,) = spec.refuse(made)
    assert found.startswith("expert load balancing is on")


def test_an_optional_configuration_that_vllm_may_add_refuses_unread() -> None:
    """The list stays closed without an entry for what does not exist yet."""

    @dataclasses.dataclass
    class Grown(VllmConfig):
        telepathy_config: Any = None

    grown = object.__new__(Grown)
    vars(grown).update(vars(config()) | {"telepathy_config": None})
    assert SPEC.refuse(grown) == ()
    grown.telepathy_config = object()
    (found,) = SPEC.refuse(grown)
    assert found.startswith("telepathy_config is set")


def test_what_is_no_feature_exists_and_is_optional() -> None:
    """An entry that vLLM no longer has is dead weight, and would hide a feature that takes its name."""
    fields = {field.name: field for field in dataclasses.fields(VllmConfig)}
    assert all(fields[name].default is None for name in NOT_FEATURES)


def test_every_switch_can_be_read_from_a_configuration() -> None:
    on, unreadable = reported_features(config())
    assert not unreadable
    assert set(on) == {"prefix caching", "torch.compile"} and set(on) < set(SWITCHES)
