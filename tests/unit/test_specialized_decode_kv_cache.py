# SPDX-License-Identifier: Apache-2.0
"""Caches that the kernels can index, and each way in which one is not such a cache."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.unit import test_specialized_decode_tree as tree  # noqa: F401

from vllm.models.common.specialized_decode.kv_cache import RecordCache, cache_faults  # isort: skip

BLOCKS, BLOCK, RECORD = 3, 64, 584
PADDED = 576 * 65  # a page of 64 records, rounded up to vLLM's alignment


def cache(stride: int = PADDED, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """[BLOCKS, BLOCK, RECORD] with ``stride`` elements between blocks, as vLLM binds it."""
    storage = torch.zeros(BLOCKS * max(stride, BLOCK * RECORD), dtype=dtype)
    return storage.as_strided((BLOCKS, BLOCK, RECORD), (stride, RECORD, 1))


def view(kv: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    return RecordCache("model.layers.7.attn", "sliding-window cache", RECORD).view(kv, block)


@pytest.mark.parametrize("stride", [BLOCK * RECORD, PADDED], ids=["exact", "padded"])
def test_a_bound_cache_is_read_as_it_is(stride: int) -> None:
    kv = cache(stride)
    assert view(kv) is kv


@pytest.mark.parametrize(
    "kv",
    [
        torch.zeros(BLOCKS, BLOCK * RECORD, dtype=torch.uint8),
        cache(dtype=torch.float8_e4m3fn),
        cache(dtype=torch.float8_e4m3fnuz),
        cache(dtype=torch.float8_e5m2),
        torch.zeros(BLOCKS, 2 * BLOCK, RECORD, dtype=torch.uint8),
    ],
    ids=["bytes", "fp8", "fp8-fnuz", "bf8", "half-blocks"],
)
def test_other_forms_of_the_same_bytes_are_viewed_as_records(kv: torch.Tensor) -> None:
    seen = view(kv)
    assert seen.dtype == torch.uint8 and seen.shape == (BLOCKS, BLOCK, RECORD)
    assert seen.stride() == (kv.stride(0), RECORD, 1) and seen.data_ptr() == kv.data_ptr()


@pytest.mark.parametrize(
    ("kv", "fault"),
    [
        (cache(BLOCK * RECORD - 1), "block stride 37375, wanted at least 37376, 64 records of 584 bytes"),
        (cache(dtype=torch.bfloat16), "dtype torch.bfloat16, wanted one byte an element"),
        (torch.zeros(BLOCKS, BLOCK, 528, dtype=torch.uint8), "records of 528 bytes, wanted 584"),
        (torch.zeros(BLOCKS, BLOCK - 1, RECORD, dtype=torch.uint8), "blocks of 36792 bytes, wanted at least"),
        (cache().transpose(1, 2).contiguous().transpose(1, 2), "wanted each block contiguous"),
        (torch.tensor([]), "the cache is not allocated"),
        (torch.zeros(0, BLOCK, RECORD, dtype=torch.uint8), "the cache is not allocated"),
        (torch.zeros(BLOCK * RECORD, dtype=torch.uint8), "shape (37376,), wanted blocks of records"),
        (torch.zeros(BLOCKS, BLOCK, 2, 292, dtype=torch.uint8), "records of 292 bytes, wanted 584"),
    ],
    ids=["stride", "dtype", "record", "block", "contiguity", "unbound", "empty", "flat", "halves"],
)
def test_a_cache_of_another_form_is_an_error_with_the_layer_s_name(kv: torch.Tensor, fault: str) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.7\.attn: .* sliding-window cache: ") as error:
        view(kv)
    assert fault in str(error.value)


@pytest.mark.parametrize("kv", [None, []], ids=["none", "list"])
@pytest.mark.parametrize("bound_before", [True, False])
def test_a_cache_that_is_not_bound_is_an_error_with_the_layer_s_name(kv: object, bound_before: bool) -> None:
    """Also after a cache that vLLM freed, whose reference is None as well."""
    records = RecordCache("model.layers.7.attn", "sliding-window cache", RECORD)
    if bound_before:
        records.view(cache(), BLOCK)
        gc.collect()
    with pytest.raises(
        ValueError, match=r"model\.layers\.7\.attn: .* cache: a (NoneType|list), wanted a tensor"
    ):
        records.view(kv, BLOCK)  # type: ignore[arg-type]


def test_every_fault_is_named_at_once() -> None:
    kv = torch.zeros(BLOCKS, BLOCK, 100, dtype=torch.bfloat16)
    faults = cache_faults(kv, BLOCK, RECORD)
    assert [fault.split()[0] for fault in faults] == ["dtype", "records", "blocks", "block"]


def test_a_cache_is_checked_when_it_is_bound_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    records = RecordCache("layer", "cache", RECORD)
    checked = []
    check = RecordCache._check
    monkeypatch.setattr(RecordCache, "_check", lambda *args: (checked.append(args[1:]), check(*args)))
    first, second = cache(), cache()
    for kv, block in ((first, BLOCK), (first, BLOCK), (second, BLOCK), (second, BLOCK // 2), (first, BLOCK)):
        records.view(kv, block)
    assert len(checked) == 4


def test_a_rebound_cache_is_checked_again() -> None:
    records = RecordCache("layer", "cache", RECORD)
    records.view(cache(), BLOCK)
    with pytest.raises(ValueError, match="blocks would overlap"):
        records.view(cache(BLOCK * RECORD - 1), BLOCK)


def test_a_cache_with_a_fault_is_an_error_every_time() -> None:
    records, kv = RecordCache("layer", "cache", RECORD), cache(BLOCK * RECORD - 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="blocks would overlap"):
            records.view(kv, BLOCK)


def test_no_view_keeps_a_cache_that_vllm_frees() -> None:
    records = RecordCache("layer", "cache", RECORD)
    kv = torch.zeros(BLOCKS, BLOCK * RECORD, dtype=torch.uint8)
    storage = weakref.ref(kv.untyped_storage())
    freed = weakref.ref(kv)
    records.view(kv, BLOCK)
    del kv
    gc.collect()
    assert freed() is None and storage() is None
