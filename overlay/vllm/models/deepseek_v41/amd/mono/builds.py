# SPDX-License-Identifier: Apache-2.0
"""The mono kernels that can be built, without FlyDSL: for the runner, and for ahead-of-time builds."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.models.common.amd.persistent.build import Build, KernelBuildError

from .geometry import MAX_ROWS, SUPPORTED_EXPERTS, SUPPORTED_TP, FfnGeometry

_PERSISTENT = "vllm.models.common.amd.persistent"
FFN_MODULE = f"{__package__}.kernels.ffn"
# Where each architecture's instructions are, as module and class.
ISAS = {"gfx950": (f"{_PERSISTENT}.isa.gfx950", "Gfx950")}


def isa_of(arch: str) -> Any:
    """The instructions of an architecture.

    Raises:
        KernelBuildError: there are no kernels for it.
    """
    if arch not in ISAS:
        raise KernelBuildError(f"no mono kernels for {arch}, there are some for {', '.join(sorted(ISAS))}")
    module, name = ISAS[arch]
    return getattr(importlib.import_module(module), name)()


def ffn_build(geometry: FfnGeometry, arch: str) -> Build:
    """The FFN launch of one step width, TP size and routing.

    Raises:
        KernelBuildError: there are no kernels for ``arch``.
    """
    if arch not in ISAS:
        isa_of(arch)

    def make(name: str) -> tuple[Any, tuple[Any, ...]]:
        kernel = importlib.import_module(FFN_MODULE)
        arguments = kernel.FfnArguments(**dict.fromkeys(kernel.FfnArguments.__annotations__, 0))
        return kernel.build(geometry, isa_of(arch), name), (arguments,)

    parameters = (
        ("tp", geometry.tp),
        ("rows", geometry.rows),
        ("experts", geometry.experts),
        ("picks", geometry.picks),
    )
    return Build("ffn", (FFN_MODULE, ISAS[arch][0]), arch, parameters, make)


def every_geometry() -> list[FfnGeometry]:
    """All that the FFN launch does."""
    return [
        FfnGeometry(rows, tp, experts, picks)
        for experts, picks in SUPPORTED_EXPERTS
        for tp in SUPPORTED_TP
        for rows in range(1, MAX_ROWS + 1)
    ]
