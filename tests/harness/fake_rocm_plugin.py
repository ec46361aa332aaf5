# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs somebody else's tests, unedited, on a machine that is not theirs.

``PYTHONPATH=<tree>:tests/harness python -m pytest -p fake_rocm_plugin FILE``, with in the environment:

* ``FAKE_ROCM_ARCH``: the architecture of the stand-in for the ROCm platform (default gfx950);
* ``FAKE_ROCM_BARE``: a tree whose vLLM is loaded module by module, where its dependencies are missing.

Where torch sees no GPU, tensors that a test puts on "cuda" live on the CPU; Triton kernels then need
``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import importlib
import os
import sys

import bare_vllm
import fake_rocm
import on_cpu
import pytest
import torch

ARCH = os.environ.get("FAKE_ROCM_ARCH", "gfx950")
BARE = os.environ.get("FAKE_ROCM_BARE")

if BARE:
    bare_vllm.install(BARE, ARCH)
else:
    fake_rocm.install(ARCH)
    # Before pytest puts the test file's own root, which may hold another vLLM, in front of the path.
    importlib.import_module("vllm")


@pytest.fixture(autouse=True)
def _cuda_tensors_on_cpu():
    if torch.cuda.is_available():
        yield
    else:
        with on_cpu.CudaOnCpu():
            yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which vLLM was tested: none of its tests can tell."""
    terminalreporter.write_line(f"vLLM tested: {BARE or next(iter(sys.modules['vllm'].__path__))}")
