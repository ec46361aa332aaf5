# SPDX-License-Identifier: Apache-2.0
"""The mono kernels that can be built, without FlyDSL: for the runner, and for ahead-of-time builds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from vllm.models.common.amd.persistent.build import Build, KernelBuildError

from .geometry import MAX_ROWS, SUPPORTED_EXPERTS, SUPPORTED_TP, BackGeometry, FfnGeometry, FrontGeometry

_PERSISTENT = "vllm.models.common.amd.persistent"


@dataclass(frozen=True)
class Kind:
    """One of the launches.

    Args:
        module: what defines its kernel.
        struct: the module's argument struct.
        geometry: what it is built for.
        routed: whether the routing is part of that.
    """

    module: str
    struct: str
    geometry: type[FfnGeometry]
    routed: bool = True


KINDS = {
    "ffn": Kind(f"{__package__}.kernels.ffn", "FfnArguments", FfnGeometry),
    "attention_front": Kind(
        f"{__package__}.kernels.attention_front", "FrontArguments", FrontGeometry, routed=False
    ),
    "attention_back_ffn": Kind(f"{__package__}.kernels.attention_back_ffn", "BackArguments", BackGeometry),
}
FFN_MODULE = KINDS["ffn"].module
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


def kernel_build(kind: str, geometry: FfnGeometry, arch: str) -> Build:
    """One build of one of ``KINDS``.

    Raises:
        KernelBuildError: there are no kernels for ``arch``.
    """
    if arch not in ISAS:
        isa_of(arch)
    what = KINDS[kind]

    def make(name: str) -> tuple[Any, tuple[Any, ...]]:
        kernel = importlib.import_module(what.module)
        struct = getattr(kernel, what.struct)
        return kernel.build(geometry, isa_of(arch), name), (
            struct(**dict.fromkeys(struct.__annotations__, 0)),
        )

    parameters = [("tp", geometry.tp), ("rows", geometry.rows)]
    if what.routed:
        parameters += [("experts", geometry.experts), ("picks", geometry.picks)]
    return Build(kind, (what.module, ISAS[arch][0]), arch, tuple(parameters), make)


def ffn_build(geometry: FfnGeometry, arch: str) -> Build:
    """The FFN launch of one step width, TP size and routing; raises as ``kernel_build``."""
    return kernel_build("ffn", geometry, arch)


def every_geometry() -> list[FfnGeometry]:
    """All that the FFN launch does."""
    return [
        FfnGeometry(rows, tp, experts, picks)
        for experts, picks in SUPPORTED_EXPERTS
        for tp in SUPPORTED_TP
        for rows in range(1, MAX_ROWS + 1)
    ]
