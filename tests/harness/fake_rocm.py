# SPDX-License-Identifier: Apache-2.0
"""A CPU stand-in for the ROCm platform, with the architecture chosen by the test.

vLLM asks one package, ``amdsmi``, whether the machine has an AMD GPU and which one. The stand-in is
therefore a module of that name: vLLM's own detection, ``RocmPlatform`` and the architecture constants of
``vllm.platforms.rocm`` then run as they are on hardware, and nothing in vLLM is replaced.

Two ways to use it:

* ``fake_platform(arch)``, in a process that can import vLLM: the platform holds inside the ``with`` block.
* ``install(arch)``, before vLLM is imported: the platform holds for the whole process. The pytest plugin
  ``fake_rocm_plugin`` and the worker process of ``interpreter`` do that.

The stand-in knows no kernel, runs no device code and says nothing about speed.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30
CUDA = "cuda"
NONE = "none"


@dataclass(frozen=True)
class Device:
    """What vLLM can ask of a GPU: the PCI id of its name table, compute units and memory in bytes."""

    device_id: str
    compute_units: int
    memory_bytes: int


DEVICES = {
    "gfx90a": Device("0x740c", 104, 64 * GIB),
    "gfx942": Device("0x74a1", 304, 192 * GIB),
    "gfx950": Device("0x75a3", 256, 288 * GIB),
    "gfx1201": Device("0x7551", 64, 32 * GIB),
    # Its published figures are not needed: no test asks more than the architecture of it.
    "gfx1250": Device("0x0000", 256, 288 * GIB),
}
PLATFORMS = (*DEVICES, CUDA, NONE)


class AmdSmiException(Exception):
    """The base of amdsmi's own errors."""


class AmdSmiMemoryType(enum.IntEnum):
    VRAM = 0


def amdsmi_module(arch: str, gpus: int = 1) -> ModuleType:
    """An ``amdsmi`` that reports ``gpus`` devices of ``arch``.

    Raises:
        ValueError: ``arch`` is not one of ``DEVICES``.
    """
    if arch not in DEVICES:
        raise ValueError(f"unknown architecture {arch!r}, wanted one of {sorted(DEVICES)}")
    device = DEVICES[arch]
    module = ModuleType("amdsmi", "The stand-in of fake_rocm.py.")
    asic = {"target_graphics_version": arch, "device_id": device.device_id, "market_name": arch}
    functions: dict[str, Any] = {
        "AmdSmiException": AmdSmiException,
        "AmdSmiMemoryType": AmdSmiMemoryType,
        "amdsmi_init": lambda *flags: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: list(range(gpus)),
        "amdsmi_get_gpu_asic_info": lambda handle: dict(asic),
        "amdsmi_get_gpu_device_uuid": lambda handle: f"GPU-{arch}-{handle}",
        "amdsmi_get_gpu_memory_total": lambda handle, kind: device.memory_bytes,
        "amdsmi_topo_get_link_type": lambda one, other: {"hops": 1, "type": 2},
        "amdsmi_topo_get_numa_node_number": lambda handle: 0,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


def device_properties(arch: str) -> SimpleNamespace:
    """The fields of ``torch.cuda.get_device_properties`` that vLLM reads on ROCm."""
    device = DEVICES[arch]
    return SimpleNamespace(
        name=arch,
        gcnArchName=f"{arch}:sramecc+:xnack-",
        multi_processor_count=device.compute_units,
        total_memory=device.memory_bytes,
    )


def allow_triton_without_a_gpu() -> None:
    """Have vLLM keep Triton where no GPU driver answers.

    vLLM drops Triton then, except where the visible devices are set and empty, as in a process whose GPUs
    are handed to it later. Interpreted kernels need no more than that.
    """
    os.environ["HIP_VISIBLE_DEVICES"] = ""


def install(arch: str) -> None:
    """Make this process an AMD one for good. Call it before anything imports vLLM.

    Raises:
        RuntimeError: vLLM's platform was resolved already.
        ValueError: ``arch`` is not one of ``DEVICES``.
    """
    platforms: Any = sys.modules.get("vllm.platforms")
    if platforms is not None and platforms._current_platform is not None:
        raise RuntimeError("vLLM's platform is resolved already: install the stand-in before importing vLLM")
    sys.modules["amdsmi"] = amdsmi_module(arch)
    import torch

    if not torch.cuda.is_available():
        allow_triton_without_a_gpu()
        torch.cuda.get_device_properties = lambda *device: device_properties(arch)
    else:
        _prefer_rocm()


def _prefer_rocm() -> None:
    """On a machine with an NVIDIA GPU vLLM would find two platforms and refuse: name the ROCm one."""
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = importlib.import_module("vllm.platforms.rocm").RocmPlatform()


@contextlib.contextmanager
def fake_platform(platform: str, reload: Sequence[str] = ()) -> Iterator[Any]:
    """Hold vLLM's current platform at ``platform`` inside the block, and give that platform object.

    Args:
        platform: one of ``PLATFORMS``. ``cuda`` is a platform that says it is CUDA and nothing more, since
            vLLM's own class needs its compiled extensions; ``none`` is vLLM's unspecified platform.
        reload: modules that bind ``current_platform`` or an architecture constant when imported; they are
            imported afresh inside the block, and the earlier ones are back after it.

    Raises:
        ValueError: an unknown platform.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"unknown platform {platform!r}, wanted one of {sorted(PLATFORMS)}")
    platforms: Any = importlib.import_module("vllm.platforms")
    earlier = platforms._current_platform
    with _modules_set_aside(["amdsmi", "vllm.platforms.rocm", *reload]):
        if platform in DEVICES:
            sys.modules["amdsmi"] = amdsmi_module(platform)
            current = importlib.import_module("vllm.platforms.rocm").RocmPlatform()
        else:
            interface = importlib.import_module("vllm.platforms.interface")
            current = interface.UnspecifiedPlatform()
            if platform == CUDA:
                current._enum = interface.PlatformEnum.CUDA
        platforms._current_platform = current
        try:
            yield current
        finally:
            platforms._current_platform = earlier


@contextlib.contextmanager
def _modules_set_aside(names: Sequence[str]) -> Iterator[None]:
    """Forget modules inside the block, in ``sys.modules`` and as attributes of their packages."""
    missing = object()
    kept = {name: sys.modules.pop(name, missing) for name in names}
    try:
        yield
    finally:
        for name, module in kept.items():
            package, _, leaf = name.rpartition(".")
            sys.modules.pop(name, None)
            if module is not missing:
                sys.modules[name] = module
            if package in sys.modules and module is not missing:
                setattr(sys.modules[package], leaf, module)
