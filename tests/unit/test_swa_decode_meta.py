# SPDX-License-Identifier: Apache-2.0
"""The one-launch SWA metadata under Triton's interpreter: vLLM's operations, the definition, and faults."""

import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_overlay.project import Project
from tests import swa_cases
from tests.harness.interpreter import HARNESS, Worker, WorkerError
from tests.swa_ragged import Batch, Request, expected

PROJECT = Project.find()
BASE_TEST = PROJECT.base / "tests/kernels/models/amd/test_dsv41_gfx942_decode_meta.py"
FAST_BATCHES = 10
# Beyond the default limit: a case holds hundreds of interpreted batches, and cores may be shared.
FULL_SECONDS = 3600
# Fewer rows show a fault as well, and an interpreted program a row is what takes the time.
FAULT_ROWS = 14

cases = pytest.mark.parametrize(
    ("drafts", "noncausal"),
    [(drafts, noncausal) for noncausal in (False, True) for drafts in swa_cases.DRAFTS],
    ids=lambda value: {False: "causal", True: "draft"}[value] if isinstance(value, bool) else f"k{value}",
)


@pytest.fixture(scope="module")
def worker():
    with Worker(PROJECT.tree) as started:
        yield started


@cases
def test_equal_to_vllm_on_random_batches(worker, drafts, noncausal):
    failed = worker.call(
        "tests.swa_cases:compare", 2024, drafts=drafts, noncausal=noncausal, count=FAST_BATCHES
    )
    assert failed == []


@pytest.mark.full
@pytest.mark.timeout(FULL_SECONDS)
@cases
def test_equal_to_vllm_on_300_random_batches(worker, drafts, noncausal):
    failed = worker.call("tests.swa_cases:compare", 7, drafts=drafts, noncausal=noncausal)
    assert failed == []


@pytest.mark.parametrize(("old", "new", "noncausal"), swa_cases.FAULTS.values(), ids=swa_cases.FAULTS)
def test_planted_fault_is_found(worker, old, new, noncausal):
    case = {"drafts": 5, "noncausal": noncausal, "count": 40, "max_rows": FAULT_ROWS, "stop_at_first": True}
    assert worker.call("tests.swa_cases:compare_mutant", old, new, 5, **case) != []


def test_a_fault_whose_text_is_not_in_the_kernel_is_refused(worker):
    with pytest.raises(WorkerError, match="stands 0 times"):
        worker.call("tests.swa_cases:compare_mutant", "no such line", "", 5, drafts=5, noncausal=False)


@pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "draft"])
def test_equal_on_the_first_batches_of_the_base_test(worker, noncausal):
    failed = worker.call("tests.swa_base_cases:compare", str(BASE_TEST), noncausal=noncausal, count=8)
    assert failed == []


@pytest.mark.full
@pytest.mark.timeout(FULL_SECONDS)
def test_the_base_test_file_passes_unchanged():
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "fake_rocm_plugin", "-p", "no:cacheprovider",
        "-c", str(HARNESS / "empty.ini"), "--noconftest", "--rootdir", str(PROJECT.base / "tests"),
        str(BASE_TEST), "-k", "swa",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "FAKE_ROCM_BARE": str(PROJECT.tree),
        "PYTHONPATH": str(HARNESS),
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert re.search(r"^2 passed, 1 deselected", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert done.returncode == 0 and "skipped" not in done.stdout
    assert f"vLLM tested: {PROJECT.tree}\n" in done.stdout


@pytest.mark.parametrize("rows", [0, 49])
def test_a_launch_of_rows_that_the_kernel_does_not_take_is_refused(worker, rows):
    batch = make_batch(requests=[Request(1, 9, 0, [3, 4, 5])] * rows)
    with pytest.raises(WorkerError, match=f"takes 1 to 48 rows, got {rows}"):
        worker.call("tests.swa_ragged:launch", batch.plain())


def make_batch(**changes):
    """A causal batch of one request of three rows, one block short of its window."""
    fields = {
        "window": 8,
        "width": 8,
        "block_size": 4,
        "noncausal": False,
        "requests": [Request(3, 7, 0, [5, 9])],
        "padded": [],
        "tail": 0,
    }
    return Batch(**{**fields, **changes})


@st.composite
def batches(draw):
    """Decode batches as a scheduler could form them, and tables with null and negative entries anywhere."""
    window, block_size = draw(st.sampled_from([4, 16, 24])), draw(st.sampled_from([4, 16, 32]))
    noncausal = draw(st.booleans())
    requests = []
    for rows in draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)):
        length = rows + draw(st.integers(0, 3 * window))
        blocks = st.lists(st.integers(-2, 9), min_size=length // block_size + 1)
        requests.append(
            Request(
                rows,
                length,
                draw(st.sampled_from([0, 0, length, length + 2]) | st.integers(0, length)),
                draw(blocks.map(lambda found, most=length // block_size + 1: found[:most])),
            )
        )
    own = sum(request.rows for request in requests)
    return Batch(
        window=window,
        width=window + 8 if noncausal else window,
        block_size=block_size,
        noncausal=noncausal,
        requests=requests,
        padded=draw(st.lists(st.integers(0, own - 1), max_size=3)),
        tail=draw(st.integers(0, 3)),
    )


def check(found, batch):
    """The ragged form's own rules, which hold for any batch, and then the definition's values."""
    indptr, ragged, dense = found["indptr"], found["ragged"], found["indices"]
    assert indptr[0] == 0 and indptr[-1] == len(ragged)
    assert all(start <= end for start, end in pairwise(indptr)), "indptr must not fall"
    assert ragged == [slot for row in dense for slot in row if slot >= 0], "ragged is the kept dense slots"
    for row, (start, end) in enumerate(pairwise(indptr)):
        keys = max(found["lens"][row], 0)
        assert end - start <= keys <= batch.width
        assert all(slot == -1 for slot in dense[row][keys:]), "-1 after the last key"
        assert found["is_valid"][row] or (end == start and found["lens"][row] == 0)
    assert not any(found["lens"][batch.num_rows :]), "lengths are zero after the last row"
    assert found == expected(batch)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_the_ragged_form_is_what_the_definition_says(worker, batch):
    check(worker.call("tests.swa_ragged:launch", batch.plain()), batch)


def test_the_definition_on_a_batch_worked_by_hand(worker):
    """Rows at positions 4, 5 and 6 of blocks 5 and 9: slots 20..23 and 36..38; the second row is padded."""
    batch = make_batch(window=4, width=4, padded=[1])
    by_hand = {
        "is_valid": [True, False, True],
        "indices": [[21, 22, 23, 36], [-1, -1, -1, -1], [23, 36, 37, 38]],
        "lens": [4, 0, 4, 0, 0, 0, 0, 0],
        "indptr": [0, 4, 4, 8],
        "ragged": [21, 22, 23, 36, 23, 36, 37, 38],
    }
    assert expected(batch) == by_hand
    assert worker.call("tests.swa_ragged:launch", batch.plain()) == by_hand


@pytest.mark.parametrize(
    ("field", "spoil"),
    {
        "indptr falls": ("indptr", lambda found: [0, 5, 4, 8]),
        "a ragged slot is lost": ("ragged", lambda found: found[1:]),
        "a dense slot is another": ("indices", lambda found: [[21, 22, 23, 37], *found[1:]]),
        "a length is left after the rows": ("lens", lambda found: [*found[:-1], 1]),
        "a padded row is valid": ("is_valid", lambda found: [True, True, True]),
    }.values(),
    ids=["indptr", "ragged", "indices", "lens", "is_valid"],
)
def test_the_property_check_finds_a_spoilt_result(field, spoil):
    batch = make_batch(window=4, width=4, padded=[1])
    found = expected(batch)
    check(found, batch)
    with pytest.raises(AssertionError):
        check({**found, field: spoil(found[field])}, batch)
