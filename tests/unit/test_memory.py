# SPDX-License-Identifier: Apache-2.0
"""The memory plan against the figures that were published for this model (GiB)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_overlay.memory import (
    HEAD_ROOM_GIB,
    FlagChange,
    ServerShape,
    changes_that_fit,
    changes_that_help,
    gfx942_excess_gib,
    plan,
    published_indexer_gib,
    weights_gib,
)

CONTEXT = 1048576

MI355X_TP4 = ServerShape(
    architecture="gfx950",
    card_gib=288,
    utilization=0.9,
    tensor_parallel=4,
    max_model_len=CONTEXT,
    max_num_batched_tokens=16384,
    max_num_seqs=256,
    drafts=5,
    engram_on_host=False,
    monokernel=True,
)
MI300X_TP4 = replace(
    MI355X_TP4,
    architecture="gfx942",
    card_gib=192,
    max_num_batched_tokens=8192,
    max_num_seqs=128,
    engram_on_host=True,
    monokernel=False,
)
ON_MI300X = replace(MI300X_TP4, monokernel=True)


def smallest_change(shape: ServerShape) -> FlagChange:
    return changes_that_fit(shape)[0]


@pytest.mark.parametrize(("ranks", "published"), [(2, 145), (4, 81)])
def test_resident_weights_a_rank(ranks: int, published: float) -> None:
    assert weights_gib("gfx950", ranks) == pytest.approx(published, abs=0.5)


@pytest.mark.parametrize(("ranks", "published"), [(2, 94.4), (4, 47.2)])
def test_engram_tables_on_the_device(ranks: int, published: float) -> None:
    assert plan(replace(MI355X_TP4, tensor_parallel=ranks)).engram == pytest.approx(published)
    assert plan(replace(MI355X_TP4, engram_on_host=True)).engram == 0


def test_the_indexers_buffer_is_in_proportion_to_tokens_and_context() -> None:
    assert published_indexer_gib(8192, CONTEXT) == 16
    assert published_indexer_gib(4096, CONTEXT) == 8
    assert published_indexer_gib(8192, CONTEXT // 4) == 4


def test_the_base_bounds_the_indexers_buffer_by_the_rows_of_a_decode_step() -> None:
    # 256 sequences x 6 rows x 1M positions x 4 bytes.
    assert plan(MI355X_TP4).indexer == 6
    # With more rows than tokens the published figure holds.
    assert plan(replace(MI355X_TP4, max_num_batched_tokens=8192, max_num_seqs=2048)).indexer == 16


def test_gfx950_keeps_no_copies() -> None:
    planned = plan(MI355X_TP4)
    assert planned.copies == 0 and 0.2 < planned.steps < 0.5
    assert plan(replace(MI355X_TP4, monokernel=False)).kernels == 0


def test_two_ranks_on_a_192_gib_card_end_13_5_gib_below_zero() -> None:
    # The published run: Engram tables on the host, 4096 batched tokens, vLLM's default of 1024
    # sequences, so that the tokens decide the indexer's buffer.
    published_run = replace(MI300X_TP4, tensor_parallel=2, max_num_batched_tokens=4096, max_num_seqs=1024)
    planned = plan(published_run)
    assert planned.indexer == 8
    assert planned.kv_left == pytest.approx(-13.51)
    assert smallest_change(published_run).words == ("--tensor-parallel-size", "4")


def test_what_gfx942_holds_beyond_the_formula_agrees_between_the_two_published_runs() -> None:
    # In proportion to 1 / TP within 7 %.
    assert gfx942_excess_gib(2) == pytest.approx(2 * gfx942_excess_gib(4), rel=0.07)


def test_two_ranks_fit_on_288_gib_with_the_tables_on_the_host_only() -> None:
    on_host = replace(MI355X_TP4, tensor_parallel=2, engram_on_host=True)
    assert plan(on_host).fits
    tight = replace(on_host, engram_on_host=False, utilization=0.85)
    assert not plan(tight).fits
    assert smallest_change(tight).flag == "--gpu-memory-utilization"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"utilization": 0.3, "engram_on_host": True}, "--gpu-memory-utilization"),
        ({"card_gib": 144}, "--engram-config"),
        ({"card_gib": 100, "max_num_seqs": 8192, "engram_on_host": True}, "--max-model-len"),
        ({"card_gib": 150, "tensor_parallel": 2, "engram_on_host": True}, "--tensor-parallel-size"),
    ],
)
def test_the_smallest_change_is_one_flag_that_makes_it_fit(changes: dict[str, float], flag: str) -> None:
    shape = replace(MI355X_TP4, **changes)
    assert not plan(shape).fits
    change = smallest_change(shape)
    assert change.flag == flag
    assert plan(change.shape).fits


def test_a_change_is_advised_only_with_head_room() -> None:
    # On a small card: what is advised leaves room for activations.
    changes = changes_that_fit(replace(ON_MI300X, card_gib=128))
    assert changes
    for change in changes:
        planned = plan(change.shape)
        assert planned.kv_left >= planned.kv_needed + HEAD_ROOM_GIB


def test_a_cache_too_small_for_one_request_does_not_fit() -> None:
    # Something is left, but less than one request of the full context needs.
    tight = plan(replace(MI355X_TP4, utilization=0.472))
    assert 0 < tight.kv_left < tight.kv_needed
    assert not tight.fits
    assert plan(replace(MI355X_TP4, utilization=0.48)).fits


def test_nothing_is_advised_where_no_single_flag_is_enough() -> None:
    assert changes_that_fit(replace(MI355X_TP4, card_gib=24)) == []


def test_the_plans_rows_add_up() -> None:
    planned = plan(MI355X_TP4)
    rows = {what: float(gib) for what, gib, _ in planned.rows()}
    parts = ("usable", "weights", "weight copies of the kernels", "steps of the kernels", "Engram tables")
    left = sum(rows[part] for part in (*parts, "indexer buffer"))
    assert left == pytest.approx(rows["KV left"], abs=0.2) and rows["steps of the kernels"] < 0


def test_the_kernels_on_gfx942_leave_a_192_gib_card_what_it_had() -> None:
    without, with_ours = plan(MI300X_TP4), plan(ON_MI300X)
    assert without.kernels == 0 and with_ours.weights == without.weights
    assert 0 < with_ours.kernels <= 4, "the target at TP 4, a rank"
    assert with_ours.kv_left == pytest.approx(without.kv_left - with_ours.kernels)
    assert with_ours.kv_left >= with_ours.kv_needed + HEAD_ROOM_GIB
    assert [source for what, _, source in with_ours.rows() if "copies" in what] == [
        "dense weights alone, from the checkpoint's shapes"
    ]


def test_one_copy_of_the_dense_weights_is_less_than_vllm_holds_without_the_kernels() -> None:
    assert plan(replace(ON_MI300X, widened_at_load=False)).kernels < 0


def test_kernels_are_advised_off_only_where_they_take_memory() -> None:
    for widened in (True, False):
        flags = {change.flag for change in changes_that_help(replace(ON_MI300X, widened_at_load=widened))}
        assert ("--monokernel" in flags) is widened
