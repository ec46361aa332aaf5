# SPDX-License-Identifier: Apache-2.0
"""The mono kernels that can be built, without FlyDSL: for a server's launches, and for ahead-of-time
builds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm.models.common.amd.persistent.build import Build, KernelBuildError

from .geometry import (
    MAX_ROWS,
    MAX_ROWS_GFX942,
    SUPPORTED_EXPERTS,
    SUPPORTED_TP,
    BackGeometry,
    FfnGeometry,
    FrontGeometry,
)

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


@dataclass(frozen=True)
class Architecture:
    """What there is for an architecture.

    Args:
        isa: its instructions, as module and class.
        expert_layout: how the serving engine keeps the routed experts there, one of ``EXPERT_LAYOUTS``.
        max_rows: rows of the largest step, by tensor parallel size: up to there the launches compile without
            scratch. A size without an entry has no kernels.
    """

    isa: tuple[str, str]
    expert_layout: str
    max_rows: Mapping[int, int]


# All that there are kernels for, and the one place that says how many rows of them. Each has every one of
# ``KINDS``. On gfx942 at TP 2 the attention back spills registers from 33 rows on.
ARCHITECTURES = {
    "gfx950": Architecture(
        (f"{_PERSISTENT}.isa.gfx950", "Gfx950"),
        "aiter_shuffle",
        MappingProxyType(dict.fromkeys(SUPPORTED_TP, MAX_ROWS)),
    ),
    "gfx942": Architecture(
        (f"{_PERSISTENT}.isa.gfx942", "Gfx942"),
        "row_major",
        MappingProxyType({2: 32, 4: MAX_ROWS_GFX942}),
    ),
}


def _architecture(arch: str) -> Architecture:
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise KernelBuildError(f"no mono kernels for {arch}, there are some for {known}")
    return ARCHITECTURES[arch]


def isa_of(arch: str) -> Any:
    """The instructions of an architecture.

    Raises:
        KernelBuildError: there are no kernels for it.
    """
    module, name = _architecture(arch).isa
    return getattr(importlib.import_module(module), name)()


def kernel_build(kind: str, geometry: FfnGeometry, arch: str) -> Build:
    """One build of one of ``KINDS``.

    Raises:
        KernelBuildError: there is no such kernel for ``arch``.
    """
    there = _architecture(arch)
    if geometry.rows > there.max_rows.get(geometry.tp, 0):
        known = " and ".join(f"up to {rows} rows at TP {tp}" for tp, rows in sorted(there.max_rows.items()))
        raise KernelBuildError(
            f"no mono kernel {kind} of {geometry.rows} rows at TP {geometry.tp} for {arch}, there are some "
            f"of {known}"
        )
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
    if geometry.timeline:
        parameters += [("timeline", 1)]
    return Build(kind, (what.module, there.isa[0]), arch, tuple(parameters), make)


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
