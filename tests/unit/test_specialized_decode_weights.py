# SPDX-License-Identifier: Apache-2.0
"""Weights found by name, and copies made when vLLM processes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit import test_specialized_decode_tree as tree  # noqa: F401

from vllm.models.common.specialized_decode.weights import CopyAtLoad, as_bytes, gather  # isort: skip


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


@pytest.mark.parametrize(("before", "value"), [(True, 1.0), (False, 10.0)], ids=["loaded", "processed"])
def test_a_copy_is_made_where_vllm_processes_the_weights(before: bool, value: float) -> None:
    module = linear()
    copy = CopyAtLoad(module, lambda one: (one.weight.clone(),), name="copies", before=before)
    assert copy.tensors is None
    assert module.quant_method.process_weights_after_loading(module) == "result"
    assert module.processed == [module]
    assert copy.tensors is not None and torch.equal(copy.tensors[0], torch.full((2,), value))
    assert module.copies is copy.tensors


def test_another_module_of_the_same_method_is_not_copied() -> None:
    module = linear()
    copy = CopyAtLoad(module, lambda one: (one.weight.clone(),), name="copies")
    module.quant_method.process_weights_after_loading(linear())
    assert copy.tensors is None


def test_a_reload_writes_into_the_first_copies() -> None:
    module = linear()
    copy = CopyAtLoad(module, lambda one: (one.weight.clone(),), name="copies")
    process = module.quant_method.process_weights_after_loading
    process(module)
    first = copy.tensors
    assert first is not None
    address = first[0].data_ptr()
    module.weight = torch.full((2,), 3.0)
    process(module)
    assert copy.tensors is first and first[0].data_ptr() == address
    assert torch.equal(first[0], torch.full((2,), 30.0))


def test_a_reload_of_another_number_of_tensors_is_an_error() -> None:
    module = linear()
    made = iter([(torch.zeros(1),), (torch.zeros(1), torch.zeros(1))])
    CopyAtLoad(module, lambda _: next(made), name="copies")
    module.quant_method.process_weights_after_loading(module)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        module.quant_method.process_weights_after_loading(module)
