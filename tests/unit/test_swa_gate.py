# SPDX-License-Identifier: Apache-2.0
"""The SWA gate, the batches that ``build()`` takes behind it, and the object that it returns.

Each named mutant is our own file with a text replaced; the checks that the real files pass must find it.
"""

import pytest

from rocm_overlay.project import Project
from tests.harness.interpreter import Worker, WorkerError

CHECK = "tests.swa_gate_checks:failed_checks"
BUILD = "tests.swa_builder:compare"
ASK = "return get_cdna_version() in cdna_versions"

# Name: edits of the gate's file, edits of the kernel's file, the check that has to fail.
MUTANTS = {
    "any MI3xx instead of the version check": (
        [[ASK, "from vllm.platforms.rocm import on_mi3xx\n    return on_mi3xx()"]],
        [],
        "other_helpers_stay_on_cdna3",
    ),
    "any MI3xx instead of the version check, in this gate alone": (
        [
            [
                "return _mono_decode_on(SWA_DECODE_META_CDNA_VERSIONS)",
                "from vllm.platforms.rocm import on_mi3xx\n    return _monokernel and on_mi3xx()",
            ]
        ],
        [],
        "a_later_generation_is_one_entry",
    ),
    "gfx942 only": (
        [["SWA_DECODE_META_CDNA_VERSIONS = (3, 4)", "SWA_DECODE_META_CDNA_VERSIONS = (3,)"]],
        [],
        "on_with_the_flag_on_cdna3_and_cdna4_only",
    ),
    "gfx950 only": (
        [["SWA_DECODE_META_CDNA_VERSIONS = (3, 4)", "SWA_DECODE_META_CDNA_VERSIONS = (4,)"]],
        [],
        "on_with_the_flag_on_cdna3_and_cdna4_only",
    ),
    "any ROCm architecture": ([[ASK, "return True"]], [], "on_with_the_flag_on_cdna3_and_cdna4_only"),
    "any CDNA": ([[ASK, "return get_cdna_version() > 0"]], [], "on_with_the_flag_on_cdna3_and_cdna4_only"),
    "any platform": (
        [["(_monokernel and current_platform.is_rocm())", "_monokernel"]],
        [],
        "on_with_the_flag_on_cdna3_and_cdna4_only",
    ),
    "no flag check": (
        [["(_monokernel and current_platform.is_rocm())", "current_platform.is_rocm()"]],
        [],
        "off_without_the_flag",
    ),
    "no cache clear": ([["gate.cache_clear()", "pass"]], [], "recording_the_flag_forgets_the_answer"),
    "no cache clear of this gate": (
        [["for gate in (enabled, swa_decode_meta_enabled):", "for gate in (enabled,):"]],
        [],
        "recording_the_flag_forgets_the_answer",
    ),
    "no cache": (
        [
            [
                "@functools.cache\ndef swa_decode_meta_enabled",
                "@functools.lru_cache(maxsize=0)\ndef swa_decode_meta_enabled",
            ]
        ],
        [],
        "the_answer_is_kept",
    ),
    "the other helpers on this gate": (
        [["_mono_decode_on(GFX942_HELPERS_CDNA_VERSIONS)", "_mono_decode_on(SWA_DECODE_META_CDNA_VERSIONS)"]],
        [],
        "other_helpers_stay_on_cdna3",
    ),
    "build() on the other gate": (
        [],
        [["if not ops.swa_decode_meta_enabled():", "if not ops.enabled():"]],
        "build_asks_its_own_gate",
    ),
    "build() on no gate": (
        [],
        [["if not ops.swa_decode_meta_enabled():", "if False:"]],
        "build_asks_its_own_gate",
    ),
    "gfx950's rows on gfx942": (
        [],
        [["ROW_LIMITS = {CDNA3: MAX_ROWS_GFX942}", "ROW_LIMITS = {}"]],
        "rows_up_to_the_mono_kernels_limit_are_taken",
    ),
    "gfx942's rows on gfx950": (
        [],
        [["ROW_LIMITS.get(get_cdna_version(), MAX_ROWS)", "MAX_ROWS_GFX942"]],
        "rows_up_to_the_mono_kernels_limit_are_taken",
    ),
    "upstream's 32 rows": (
        [],
        [["not 0 < num_rows <= row_limit()", "not 0 < num_rows <= 32"]],
        "rows_up_to_the_mono_kernels_limit_are_taken",
    ),
    "mixed batches taken": (
        [],
        [["if num_prefills or not 0", "if not 0"]],
        "prefill_and_mixed_batches_are_declined",
    ),
    "causal off taken without DSpark": (
        [],
        [["if noncausal and not builder.is_dspark:", "if False:"]],
        "noncausal_without_dspark_is_declined",
    ),
    "any slot mapping taken": (
        [],
        [[" or len(common.slot_mapping) != num_rows", ""]],
        "other_slot_mappings_are_declined",
    ),
}


@pytest.fixture(scope="module")
def worker():
    with Worker(Project.find().tree, whole=True) as started:
        yield started


def test_every_check_passes_on_our_files(worker):
    assert worker.call(CHECK) == {}


@pytest.mark.parametrize(("gate_edits", "kernel_edits", "check"), MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_killed(worker, gate_edits, kernel_edits, check):
    """By what the check asserts, and not by a mutant that does not run at all."""
    failed = worker.call(CHECK, gate_edits, kernel_edits)
    assert failed.get(check, "").startswith("AssertionError"), failed


def test_a_mutant_whose_text_is_not_in_the_file_is_refused(worker):
    with pytest.raises(WorkerError, match="stands 0 times"):
        worker.call(CHECK, [["no such text", ""]])


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "draft"])
@pytest.mark.parametrize("replay", [False, True], ids=["no replay", "replay"])
def test_the_builder_returns_the_same_object_with_the_gate_on(worker, noncausal, replay):
    """Types, values, shapes, and the buffers that CUDA graphs hold: field by field, one launch of ours."""
    assert worker.call(BUILD, 1, drafts=5, noncausal=noncausal, replay=replay, count=4) == []


@pytest.mark.parametrize("field", ["replay_start", "decode_swa_width", "num_decode_tokens"])
def test_a_field_left_out_of_the_object_is_found(worker, field):
    case = {"drafts": 5, "noncausal": False, "replay": False, "count": 1}
    (line,) = worker.call("tests.swa_builder:compare_spoilt", field, **case)
    assert field in line
