# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the ROCm platform: vLLM's own answers for each architecture, and what it leaves behind."""

import pytest

from rocm_overlay.project import Project
from tests.harness.interpreter import Worker, WorkerError

GIB = 1 << 30
ANSWERS = "tests.fake_rocm_checks:answers"

# Architecture: CDNA version, the questions that vLLM answers with yes, GPU memory.
ROCM = {
    "gfx90a": (2, ["on_gfx9", "on_gfx90a"], 64 * GIB),
    "gfx942": (3, ["on_gfx9", "on_mi3xx", "on_gfx942"], 192 * GIB),
    "gfx950": (4, ["on_gfx9", "on_mi3xx", "on_gfx950"], 288 * GIB),
    "gfx1201": (0, ["on_rdna4"], 32 * GIB),
    "gfx1250": (5, ["on_gfx1250"], 288 * GIB),
}


@pytest.fixture(scope="module")
def worker():
    with Worker(Project.find().tree, arch="gfx942", whole=True) as started:
        yield started


@pytest.mark.parametrize("arch", ROCM)
def test_vllm_sees_the_architecture_that_the_test_chose(worker, arch):
    cdna, questions, memory = ROCM[arch]
    assert worker.call(ANSWERS, arch) == {
        "is_rocm": True,
        "is_cuda": False,
        "cdna": cdna,
        "true": questions,
        "memory": memory,
    }


@pytest.mark.parametrize(("platform", "is_cuda"), [("cuda", True), ("none", False)])
def test_other_platforms_are_no_rocm(worker, platform, is_cuda):
    assert worker.call(ANSWERS, platform) == {"is_rocm": False, "is_cuda": is_cuda}


@pytest.mark.parametrize("platform", ["gfx906", "", "rocm"])
def test_an_unknown_platform_is_refused_by_name(worker, platform):
    with pytest.raises(WorkerError, match=f"unknown platform '{platform}', wanted one of .*gfx942"):
        worker.call(ANSWERS, platform)


def test_an_unknown_architecture_is_refused_by_name(worker):
    with pytest.raises(WorkerError, match=r"unknown architecture 'gfx906', wanted one of .*gfx942"):
        worker.call("fake_rocm:amdsmi_module", "gfx906")


def test_a_worker_that_cannot_start_says_so_at_the_call():
    with (
        Worker(Project.find().tree, arch="gfx906", whole=True) as started,
        pytest.raises(WorkerError, match=r"the worker ended .*status 1"),
    ):
        started.call(ANSWERS, "gfx942")


@pytest.mark.parametrize("fail", [False, True], ids=["ended", "raised"])
@pytest.mark.parametrize("platform", ["gfx950", "cuda", "none"])
def test_the_earlier_platform_is_back_after_the_block(worker, platform, fail):
    assert worker.call("tests.fake_rocm_checks:state_returns", platform, fail=fail) == {
        "changed": True,
        "back": True,
    }


def test_installing_after_vllm_resolved_its_platform_is_refused(worker):
    with pytest.raises(WorkerError, match="resolved already"):
        worker.call("tests.fake_rocm_checks:install_again", "gfx950")


def test_a_reloaded_module_binds_the_blocks_constants_and_is_itself_again_after(worker):
    assert worker.call("tests.fake_rocm_checks:reloaded_constant", "gfx950") == [False, True]


def test_a_worker_tells_of_a_call_that_raised_and_lives_on(worker):
    with pytest.raises(WorkerError, match=r"No module named 'tests\.no_such'"):
        worker.call("tests.no_such:name")
    assert worker.call(ANSWERS, "none")["is_rocm"] is False
