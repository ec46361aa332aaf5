# SPDX-License-Identifier: Apache-2.0
"""Compiled Triton kernels on the simulator give what Triton's own interpreter gives for the same inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted import CASES

from cdnasim import Device
from cdnasim.triton_front import TritonKernel


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What the interpreter gives, from a process of its own: it is chosen when Triton is imported."""
    path = tmp_path_factory.mktemp("interpreted") / "out.pt"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "interpreted.py"), str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return torch.load(path)  # type: ignore[no-any-return]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", CASES)
def test_simulator_and_interpreter_agree(
    name: str, arch: str, interpreted: dict[str, list[torch.Tensor]]
) -> None:
    case = CASES[name]
    names = [p for p in case.kernel.arg_names if p not in case.constants]
    kernel = TritonKernel(case.kernel, dict(zip(names, case.types, strict=True)), case.constants, arch)
    device = Device(arch)
    args = [device.tensor(a) if isinstance(a, torch.Tensor) else a for a in case.made()]
    kernel.run(device, case.grid, args)
    got = [a for a in args if isinstance(a, torch.Tensor)]
    for mine, theirs in zip(got, interpreted[name], strict=True):
        if mine.is_floating_point() and name in ("softmax", "dot"):  # another order of sums
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-5)
        else:
            assert torch.equal(mine, theirs)
    before = [a for a in case.made() if isinstance(a, torch.Tensor)]
    assert any(not torch.equal(a, b) for a, b in zip(got, before, strict=True)), "nothing was written"
