# SPDX-License-Identifier: Apache-2.0
"""The same calls on real AMD GPUs: ``HipDevice`` takes what ``Device`` takes and runs the same assembly text.

A test body that takes ``dev`` (tensor, zeros, empty, prepare, run, launch) runs on either:

    dev = open_device("gfx950", ranks=2)      # GPUs when torch has them, else the simulator

The assembly text is assembled and linked by Triton's copy of LLVM, loaded with hipModuleLoadData, and
launched with the argument bytes that the simulator would use. Ranks are GPUs of this process. Checks,
counts, schedules and the memory model are the simulator's alone: on a GPU a launch reports nothing, and
never a time."""

from __future__ import annotations

import ctypes as C
import functools
import math
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .device import Device
from .program import ARCHES, Kernel

UNCACHED = 3  # hipDeviceMallocUncached
BUFFER_POINTER, BUFFER_SIZE, CONFIG_END = 1, 2, 3  # HIP_LAUNCH_PARAM_*
SIMULATOR_ONLY = (
    "seed",
    "schedule",
    "memory",
    "checks",
    "quantum",
    "compute_units",
    "stall_bound",
    "unasked",
    "count_traffic",
    "threads",
)


class _Bytes:
    """Memory that torch takes by the array interface that it reads for ROCm's memory, too."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GpuLike(Protocol):
    """What a test body may use of a device, simulated or real."""

    arch: str
    ranks: int

    def tensor(self, data: torch.Tensor, name: str = ..., rank: int = ..., **kind: bool) -> torch.Tensor: ...

    def zeros(
        self, *shape: int, dtype: torch.dtype = ..., name: str = ..., rank: int = ..., peer: bool = ...
    ) -> torch.Tensor: ...

    def empty(
        self, *shape: int, dtype: torch.dtype = ..., name: str = ..., rank: int = ..., peer: bool = ...
    ) -> torch.Tensor: ...

    def register(
        self,
        tensor: torch.Tensor,
        name: str = ...,
        rank: int = ...,
        *,
        peer: bool = ...,
        read_only: bool = ...,
        track: bool = ...,
    ) -> torch.Tensor: ...

    def prepare(
        self,
        kernel: Kernel,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        *,
        rank: int = ...,
        lds_bytes: int | None = ...,
        persistent: bool = ...,
    ) -> Any: ...

    def run(self, launches: Sequence[Any]) -> Sequence[Any]: ...

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        **options: Any,
    ) -> Any: ...


def argument_bytes(kernel: Kernel, args: Sequence[Any]) -> bytes:
    """The explicit arguments as the kernel argument segment holds them; ValueError on a wrong number."""
    layout = kernel.arguments
    if len(args) != len(layout):
        raise ValueError(f"{kernel.name} takes {len(layout)} arguments, {len(args)} given")
    out = bytearray(max((offset + size for offset, size in layout), default=0))
    for (offset, size), value in zip(layout, args, strict=True):
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        if isinstance(value, float):
            data = struct.pack("<f" if size == 4 else "<d", value)
        elif isinstance(value, bytes):
            data = value
        else:
            data = (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        if len(data) != size:
            raise ValueError(f"{kernel.name}: an argument of {len(data)} bytes where {size} are taken")
        out[offset : offset + size] = data
    return bytes(out)


def code_object(kernel: Kernel) -> bytes:
    """The kernel's assembly text, assembled and linked for its architecture."""
    from triton._C.libtriton import amd, llvm

    if not kernel.assembly:
        raise ValueError(f"{kernel.name} does not hold its assembly text: load it with cdnasim.load")
    llvm.init_targets()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        source.write_bytes(amd.assemble_amdgcn(kernel.assembly, kernel.arch, ""))
        amd.link_hsaco(str(source), str(target))
        return target.read_bytes()


@functools.cache
def hip_library() -> Any:
    """libamdhip64, which a ROCm build of torch has loaded."""
    for name in ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"):
        try:
            return C.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("libamdhip64.so is not on the library path: HipDevice needs a ROCm installation")


class HipDevice:
    """GPUs of this process behind ``Device``'s calls. ``ranks`` GPUs from 0. Options of the simulator alone
    (``SIMULATOR_ONLY``) are accepted and do nothing here. Raises RuntimeError with every reason at once when
    the machine does not fit."""

    def __init__(
        self, arch: str, ranks: int = 1, *, library: Any = None, gpu: Any = None, **options: Any
    ) -> None:
        if unknown := set(options) - set(SIMULATOR_ONLY):
            raise ValueError(f"options {sorted(unknown)} are not known: {SIMULATOR_ONLY}")
        self._gpu = gpu or torch.cuda
        if reasons := unfit(arch, ranks, self._gpu):
            raise RuntimeError("no HIP device for this: " + "; ".join(reasons))
        self.arch, self.ranks = arch, ranks
        self._hip = library or hip_library()
        self._functions: dict[tuple[int, int], Any] = {}
        for rank in range(ranks):
            for other in range(ranks):
                if rank != other:
                    self._on(rank)
                    self._hip.hipDeviceEnablePeerAccess(other, 0)  # an error here means: enabled before

    def _on(self, rank: int) -> None:
        self._call("hipSetDevice", rank)

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._hip, name)(*args):
            raise RuntimeError(f"{name} failed with HIP error {code}")

    def _place(self, rank: int) -> torch.device:
        return torch.device(self._gpu.__name__.rsplit(".", 1)[-1], rank)

    def tensor(self, data: torch.Tensor, name: str = "tensor", rank: int = 0, **kind: bool) -> torch.Tensor:
        """A copy of ``data`` on GPU ``rank``; ``peer``: as ``empty``'s."""
        if kind.get("peer"):
            return self._uncached(data.shape, data.dtype, rank).copy_(data.detach())
        return data.detach().clone(memory_format=torch.contiguous_format).to(self._place(rank))

    def register(
        self,
        tensor: torch.Tensor,
        name: str = "tensor",
        rank: int = 0,
        *,
        peer: bool = False,
        read_only: bool = False,
        track: bool = False,
    ) -> torch.Tensor:
        """``tensor`` in memory of GPU ``rank``: a GPU cannot take the CPU's own, so this is a copy;
        ``peer``: as ``empty``'s."""
        if peer:
            return self._uncached(tensor.shape, tensor.dtype, rank).copy_(tensor)
        return tensor.to(self._place(rank))

    def zeros(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        name: str = "zeros",
        rank: int = 0,
        peer: bool = False,
    ) -> torch.Tensor:
        """Zeroed memory of GPU ``rank``; the other ranks reach it (peer access is on). ``peer``: as
        ``empty``'s."""
        return self.empty(*shape, dtype=dtype, rank=rank, peer=peer).zero_()

    def _uncached(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Memory of GPU ``rank`` as peers need it; none is allocated for no elements."""
        count = math.prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(*shape, dtype=dtype, device=self._place(rank))
        self._on(rank)
        address = C.c_void_p()
        self._call("hipExtMallocWithFlags", C.byref(address), C.c_size_t(count), UNCACHED)
        return self._at(address.value or 0, count, rank).view(dtype).view(*shape)

    def _at(self, address: int, count: int, rank: int) -> torch.Tensor:
        """``count`` bytes at an address of GPU ``rank``."""
        return torch.as_tensor(_Bytes(address, count), device=self._place(rank))

    def empty(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        name: str = "empty",
        rank: int = 0,
        peer: bool = False,
    ) -> torch.Tensor:
        """Memory of GPU ``rank`` with whatever is in it. ``peer``: uncached, so that what one rank stores at
        system scope is what another loads; kept for the process."""
        if peer:
            return self._uncached(shape, dtype, rank)
        return torch.empty(*shape, dtype=dtype, device=self._place(rank))

    def prepare(
        self,
        kernel: Kernel,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        *,
        rank: int = 0,
        lds_bytes: int | None = None,
        persistent: bool = False,
    ) -> tuple[Any, ...]:
        """A launch ready for ``run``. Static LDS is the code object's; ``lds_bytes`` beyond it is dynamic."""
        if kernel.arch != self.arch:
            raise ValueError(f"{kernel.name} is for {kernel.arch}, the device is {self.arch}")
        sizes = []
        for value in (grid, block):
            three = [value] if isinstance(value, int) else list(value)
            sizes.append(three + [1] * (3 - len(three)))
        dynamic = max(0, (lds_bytes or 0) - kernel.lds_bytes)
        return self._function(kernel, rank), sizes[0], sizes[1], argument_bytes(kernel, args), dynamic, rank

    def run(self, launches: Sequence[tuple[Any, ...]]) -> list[None]:
        """Launch all, then wait for every GPU that took part. What was asked of any GPU before, such as
        zeroing memory that another reaches, ends first: a GPU waits for its own work only."""
        for rank in range(self.ranks):
            self._on(rank)
            self._call("hipDeviceSynchronize")
        keep = []
        for function, grid, block, data, dynamic, rank in launches:
            buffer, size = C.create_string_buffer(data, len(data)), C.c_size_t(len(data))
            config = (C.c_void_p * 5)(
                BUFFER_POINTER, C.addressof(buffer), BUFFER_SIZE, C.addressof(size), CONFIG_END
            )
            keep.append((buffer, size, config))
            self._on(rank)
            self._call("hipModuleLaunchKernel", function, *grid, *block, dynamic, None, None, config)
        for rank in sorted({launch[-1] for launch in launches}):
            self._on(rank)
            self._call("hipDeviceSynchronize")
        return [None] * len(launches)

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        **options: Any,
    ) -> None:
        """Prepare and run one launch."""
        self.run([self.prepare(kernel, grid, block, args, **options)])

    def _function(self, kernel: Kernel, rank: int) -> Any:
        key = (id(kernel), rank)
        if key not in self._functions:
            module, function = C.c_void_p(), C.c_void_p()
            self._on(rank)
            self._call("hipModuleLoadData", C.byref(module), code_object(kernel))
            self._call("hipModuleGetFunction", C.byref(function), module, kernel.name.encode())
            self._functions[key] = (function, module, kernel)  # the kernel kept: its id is the key
        return self._functions[key][0]


def unfit(arch: str, ranks: int, gpu: Any = None) -> list[str]:
    """Why this machine's GPUs cannot stand in for ``Device(arch, ranks)``: empty when they can."""
    gpu = gpu or torch.cuda
    if arch not in ARCHES:
        return [f"architecture {arch!r} is none of {sorted(ARCHES)}"]
    if not gpu.is_available():
        return ["torch sees no GPU"]
    reasons = []
    if gpu.device_count() < ranks:
        reasons.append(f"{ranks} ranks are wanted, {gpu.device_count()} GPUs are there")
    for i in range(min(ranks, gpu.device_count())):
        found = str(getattr(gpu.get_device_properties(i), "gcnArchName", "not AMD")).split(":")[0]
        if found != arch:
            reasons.append(f"GPU {i} is {found}, {arch} is wanted")
    return reasons


def open_device(arch: str, ranks: int = 1, **options: Any) -> GpuLike:
    """Real GPUs when this machine has ``ranks`` of ``arch``, else the simulator with ``options``."""
    return Device(arch, ranks, **options) if unfit(arch, ranks) else HipDevice(arch, ranks, **options)
