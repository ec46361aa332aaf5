# SPDX-License-Identifier: Apache-2.0
"""Weights found by name, and kept from when vLLM processes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit import test_specialized_decode_tree as tree  # noqa: F401

from vllm.models.common.specialized_decode.weights import KeptAtLoad, as_bytes, gather  # isort: skip


def linear(value: float = 1.0) -> Any:
    module = SimpleNamespace(weight=torch.full((2,), value), processed=[])

    def process(processed: Any) -> str:
        module.processed.append(processed)
        processed.weight = processed.weight * 10
        return "result"

    module.quant_method = SimpleNamespace(process_weights_after_loading=process)
    return module


def test_tensors_are_found_by_their_paths() -> None:
    root = SimpleNamespace(a=SimpleNamespace(b=torch.zeros(1)), c=torch.ones(1))
    found = gather(root, {"x": "a.b", "y": "c"})
    assert found == {"x": root.a.b, "y": root.c}


def test_every_missing_tensor_is_named() -> None:
    root = SimpleNamespace(a=SimpleNamespace(b=None, g="a name"), c=torch.ones(1))
    with pytest.raises(AttributeError, match=r"no tensor at a\.b, a\.d, e\.f, a\.g$"):
        gather(root, {"x": "a.b", "y": "a.d", "z": "e.f", "c": "c", "w": "a.g"})


def test_codes_become_bytes_in_place() -> None:
    codes = torch.full((3,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    seen = as_bytes(codes)
    assert seen.dtype == torch.uint8 and seen.data_ptr() == codes.data_ptr()
    assert as_bytes(seen) is seen


def kept_of(module: Any, **options: Any) -> KeptAtLoad:
    """The processed weight, and twice the loaded one."""
    return KeptAtLoad(
        module,
        lambda processed, loaded: {"weight": processed.weight, "twice": 2 * loaded},
        loaded=lambda one: one.weight,
        **options,
    )


def test_weights_are_kept_from_when_vllm_processes_them() -> None:
    module = linear()
    kept = kept_of(module)
    assert module.quant_method.process_weights_after_loading(module) == "result"
    assert module.processed == [module]
    found = kept.taken("layer")
    assert found["weight"] is module.weight and torch.equal(found["weight"], torch.full((2,), 10.0))
    assert torch.equal(found["twice"], torch.full((2,), 2.0))


def test_weights_that_vllm_did_not_process_are_named() -> None:
    module = linear()
    kept = kept_of(module)
    module.quant_method.process_weights_after_loading(linear())
    with pytest.raises(ValueError, match=r"^layers\.3\.wo_b: vLLM did not process its weights after loading"):
        kept.taken("layers.3.wo_b")


def test_a_reload_writes_into_the_first_memory_and_is_placed_there() -> None:
    module, placed = linear(), []
    kept = kept_of(module, place=lambda one, found: placed.append((one, found)))
    process = module.quant_method.process_weights_after_loading
    process(module)
    first = dict(kept.taken("layer"))
    assert not placed
    module.weight = torch.full((2,), 3.0)
    process(module)
    again = kept.taken("layer")
    assert all(again[name] is first[name] for name in first)
    assert torch.equal(first["weight"], torch.full((2,), 30.0))
    assert torch.equal(first["twice"], torch.full((2,), 6.0))
    assert placed == [(module, again)]


def test_a_reload_of_another_shape_is_an_error_and_changes_nothing() -> None:
    module = linear()
    kept = kept_of(module)
    process = module.quant_method.process_weights_after_loading
    process(module)
    module.weight = torch.full((3,), 3.0)
    with pytest.raises(ValueError, match=r"as the first: weight is torch\.float32 \(3,\), wanted .*\(2,\)"):
        process(module)
    assert torch.equal(kept.taken("layer")["weight"], torch.full((2,), 10.0))


def test_weights_that_cannot_be_read_are_an_error_of_who_takes_them() -> None:
    module = linear()
    kept = KeptAtLoad(module, lambda processed, loaded: {"weight": processed.gone})
    module.quant_method.process_weights_after_loading(module)
    with pytest.raises(ValueError, match=r"^layer: .*no attribute 'gone'"):
        kept.taken("layer")
