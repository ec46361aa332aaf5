# SPDX-License-Identifier: Apache-2.0
"""Every behaviour that the pinned base tests of its mono decode, and the test of ours that holds it.

The base's file is read for the names of its tests: one that a later base adds, or renames, has no entry here
and fails.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rocm_overlay.project import Project

BASE_TESTS = Project.find().base / "tests" / "models" / "test_dsv41_mono_decode.py"
HERE = Path(__file__).parent
STEP, STARTUP, HELPERS = "test_mono_decode_step", "test_mono_decode_startup", "test_mono_decode_helpers"
CDNA3 = "test_mono_decode_cdna3"

# The base's test, then ours as (file, test).
BEHAVIOURS = {
    "test_decode_step_runs_mono": [
        (STEP, "test_a_decode_step_runs_the_whole_layer"),
        (STEP, "test_the_compressed_cache_has_one_record_for_each_compressed_row"),
        ("test_specialized_decode_kv_cache", "test_other_forms_of_the_same_bytes_are_viewed_as_records"),
    ],
    "test_first_layer_runs_mono_from_the_embedding": [
        (STEP, "test_the_first_layer_starts_from_the_embedding")
    ],
    "test_draft_layer_runs_mono_on_its_own_runner": [
        (STEP, "test_a_draft_layer_runs_whole_on_kernels_of_its_own"),
        (STARTUP, "test_draft_layers_run_whole_with_kernels_of_their_own"),
    ],
    "test_draft_first_layer_takes_the_broadcast_embedding": [
        (STEP, "test_the_first_draft_layer_starts_from_the_broadcast_embedding")
    ],
    "test_draft_and_target_layers_take_only_their_own_swa_rows": [
        (STEP, "test_target_and_draft_take_only_their_own_windows")
    ],
    "test_index_source_selects_between_the_kernels": [
        (STEP, "test_an_index_source_selects_between_the_launches"),
        (STEP, "test_selection_runs_vllm_s_compressor_and_indexer_in_order"),
    ],
    "test_padded_decode_step_runs_mono": [(STEP, "test_a_padded_step_of_a_full_graph_is_taken")],
    "test_other_steps_take_the_original_path": [(STEP, "test_other_steps_take_vllm_s_layer")],
    "test_layers_take_whole_or_ffn_launch": [(STARTUP, "test_what_the_kernels_run_of_a_layer")],
    "test_decode_step_runs_ffn_launch": [(STEP, "test_a_decode_step_runs_the_ffn_launch")],
    "test_ffn_layer_never_runs_whole": [(STEP, "test_an_ffn_layer_never_runs_whole")],
    "test_other_steps_reduce_wo_b_themselves": [(STEP, "test_on_other_steps_vllm_reduces_wo_b_itself")],
    "test_off_without_the_flag": [(STARTUP, "test_nothing_without_the_option")],
    "test_create_records_the_flag_for_the_gfx942_helpers": [
        (STARTUP, "test_the_option_is_recorded_for_the_decode_helpers")
    ],
    "test_opt_in_outside_the_kernels_cdna_raises": [(STARTUP, "test_each_reason_alone_refuses")],
    # Ours differs: a kernel is compiled for the GPU, whatever the variable ARCH says.
    "test_opt_in_with_another_arch_for_flydsl_raises": [
        ("test_kernel_cache", "test_a_kernel_is_compiled_for_its_gpu_whatever_the_environment_which_stays")
    ],
    "test_opt_in_outside_the_kernels_moe_raises": [
        (STARTUP, "test_each_reason_alone_refuses"),
        (STARTUP, "test_all_reasons_refuse_at_once"),
    ],
    "test_gfx942_decode_steps_of_up_to_42_rows": [(STEP, "test_steps_up_to_the_row_limit_of_gpu_and_ranks")],
    "test_gfx942_layers": [
        (STARTUP, "test_what_the_kernels_run_of_a_layer"),
        (STARTUP, "test_draft_layers_run_whole_with_kernels_of_their_own"),
    ],
    # Ours differs: the kernels run at this size too, up to rows of its own.
    "test_gfx942_tp2_runs_vllm_path": [
        (STARTUP, "test_each_gpu_runs_at_the_tensor_parallel_sizes_of_its_kernels"),
        (STEP, "test_steps_up_to_the_row_limit_of_gpu_and_ranks"),
    ],
    # Ours differ: they read the experts where one backend leaves them, and vLLM's own dense bytes.
    "test_gfx942_takes_any_moe_backend": [(CDNA3, "test_experts_of_another_layout_are_refused")],
    "test_gfx942_copies_dense_linears_at_load": [
        (CDNA3, "test_dense_bytes_are_kept_without_negative_zero_and_vllm_s_values_stay"),
        (CDNA3, "test_experts_are_read_where_the_backend_left_them"),
    ],
    "test_gfx942_reload_writes_the_copies_in_place": [
        (CDNA3, "test_a_reload_is_written_to_the_addresses_of_the_first_and_cleaned"),
        (CDNA3, "test_a_reload_of_experts_keeps_the_first_memory_for_the_kernels_and_for_vllm"),
    ],
    "test_gfx942_indexer_runs_vllm_op_off_decode_steps": [
        (HELPERS, "test_only_decode_steps_leave_vllm_s_indexer")
    ],
    "test_rocm_attention_takes_the_gfx942_indexer_with_the_flag": [
        (HELPERS, "test_the_attention_builds_cdna3_s_indexer_with_the_option")
    ],
    "test_dspark_speculator_asks_the_draft_model_first": [
        (HELPERS, "test_the_speculator_lets_the_draft_model_sample")
    ],
    "test_dspark_draft_model_samples_with_fused_markov": [
        (HELPERS, "test_the_draft_model_samples_with_the_fused_launches")
    ],
}


def named_tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_table_has_every_test_of_the_base_and_no_other() -> None:
    assert set(BEHAVIOURS) == named_tests(BASE_TESTS)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_each_behaviour_is_held_by_tests_that_exist(behaviour: str) -> None:
    assert BEHAVIOURS[behaviour]
    for file, test in BEHAVIOURS[behaviour]:
        assert test in named_tests(HERE / f"{file}.py"), f"{file}.py has no {test}"
