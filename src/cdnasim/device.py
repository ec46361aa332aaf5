# SPDX-License-Identifier: Apache-2.0
"""The simulated device: memory made of torch CPU tensors, launches, checks and counters.

    dev = Device("gfx950", ranks=4)
    x = dev.tensor(torch.randn(1024), rank=1)
    report = dev.launch(kernel, grid=(4,), block=(256,), args=[x, 1024], rank=1)

Launches of several ranks that must run together are prepared and run as one: ``dev.run([dev.prepare(...), ...])``.
"""  # noqa: E501

from __future__ import annotations

import ctypes as C
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import SimulationError
from .native import CHECKS, CLASSES, LEVELS, core
from .program import ARCHES, Kernel

SCHEDULES = ("random", "round-robin", "slowest-first", "rank-stalled")
SCOPES = ("plain", "sc0", "sc1", "sc0 sc1")
POLICIES = (*SCOPES, "nt", "sc0 nt", "sc1 nt", "sc0 sc1 nt")
WAVE_FIELDS = (
    "workgroup",
    "wave",
    "compute_unit",
    "issued",
    "barriers",
    "polls",
    "handoff_depth",
    "first_clock",
    "last_clock",
)
# Instructions of a wave's turn. Hand-offs go wrong between instructions that are near each other, so hostile
# memory has short turns; otherwise a longer one keeps the host's caches warm.
QUANTUM = {"exact": (300, 800), "hostile": (60, 150)}
# Compute units and LDS of a compute unit, as the products have them (MI300X, MI355X).
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
DEFAULT_CHECKS = dict.fromkeys(CHECKS, "error") | {
    "offset-wrap": "warn",
    "register-before-wait": "off",  # "error" with hostile memory
    "not-finite": "off",
}


@dataclass
class LaunchReport:
    """What one launch did.

    Bytes are as the instructions ask (every lane counted): ``load_bytes`` and ``store_bytes`` by scope,
    ``load_policy`` and ``store_policy`` by scope and nt. ``distinct_bytes`` (what memory must deliver or
    take at least, in 64-byte lines) is of the whole run, all ranks; ``rank_bytes`` of this rank's memory.
    ``polls`` counts executed s_sleep. ``handoff_depth``: the longest chain of hand-offs between
    workgroups from launch to end (0 unless ``Device.count_handoffs``). ``per_wave``: a tensor [waves] a
    name of ``WAVE_FIELDS`` or of ``CLASSES``, in the order in which the waves' workgroups ended."""

    kernel: str
    instructions: dict[str, int]
    longest_wave: int
    waves: int
    load_bytes: dict[str, int]
    store_bytes: dict[str, int]
    nontemporal_bytes: int
    lds_read_bytes: int
    lds_write_bytes: int
    lds_accesses: int
    lds_conflict_cycles: int
    distinct_bytes: int
    rank_bytes: int
    polls: int
    handoff_depth: int
    mfma: dict[str, int] = field(default_factory=dict)
    load_policy: dict[str, int] = field(default_factory=dict)
    store_policy: dict[str, int] = field(default_factory=dict)
    per_wave: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        """Wave-instructions of the launch."""
        return sum(self.instructions.values())

    @property
    def mean_wave(self) -> float:
        """Wave-instructions of the mean wave."""
        return self.total / self.waves

    @property
    def barriers(self) -> int:
        """Executed s_barrier, a wave each."""
        return self.instructions["barrier"]


class Prepared:
    """A launch that has its arguments and waits for ``Device.run``."""

    def __init__(self, device: Device, kernel: Kernel, handle: int, keep: list[Any], rank: int) -> None:
        self.device, self.kernel, self.handle, self.keep, self.rank = device, kernel, handle, keep, rank


def _three(value: Sequence[int] | int) -> list[int]:
    out = [value] if isinstance(value, int) else list(value)
    return out + [1] * (3 - len(out))


class Device:
    """A simulated GPU, or several that reach each other's shared memory.

    arch: "gfx942" or "gfx950". ranks: devices. seed: of the scheduler and of the memory model's choices.
    schedule: one of ``SCHEDULES``. memory: "exact" (every access happens at once) or "hostile" (see
    docs/simulator.md). checks: name -> "off", "warn" or "error", over ``DEFAULT_CHECKS``. quantum: least and
    most instructions of a wave's turn (default ``QUANTUM``). stall_bound: wave instructions without any
    change of memory after which a run counts as deadlocked. threads: host threads for ranks that run side
    by side in exact memory (default: the host's processors); the results do not depend on it. unasked:
    hostile caches fetch lines that nobody loaded; without it only a kernel's own loads make a line stale.
    """

    def __init__(
        self,
        arch: str,
        ranks: int = 1,
        *,
        seed: int = 0,
        schedule: str = "random",
        memory: str = "exact",
        checks: Mapping[str, str] | None = None,
        quantum: tuple[int, int] | None = None,
        compute_units: int | None = None,
        stall_bound: int = 20_000_000,
        count_traffic: bool = True,
        threads: int | None = None,
        unasked: bool = True,
    ) -> None:
        if arch not in ARCHES:
            raise ValueError(f"architecture {arch!r}: one of {sorted(ARCHES)}")
        if schedule not in SCHEDULES or memory not in ("exact", "hostile"):
            raise ValueError(f"schedule {schedule!r} or memory {memory!r} is not known")
        self.arch, self.ranks = arch, ranks
        waits = {"register-before-wait": "error"} if memory == "hostile" else {}
        self.checks = DEFAULT_CHECKS | waits | dict(checks or {})
        if unknown := set(self.checks) - set(CHECKS):
            raise ValueError(f"checks {sorted(unknown)} are not known: {CHECKS}")
        self._core = core()
        units = compute_units or COMPUTE_UNITS[arch]
        self.compute_units = units
        self._machine = self._core.cdna_machine(
            ARCHES[arch], ranks, 8 if units % 8 == 0 else 1, units, LDS_BYTES[arch]
        )
        self.threads = threads or os.cpu_count() or 1
        self._settings = (schedule, memory, quantum or QUANTUM[memory], stall_bound, count_traffic, unasked)
        self.reseed(seed)
        self._kept: dict[int, torch.Tensor] = {}

    def reseed(self, seed: int) -> None:
        """Start the schedule of another seed (caches of the hostile model are emptied)."""
        schedule, memory, quantum, stall_bound, traffic, unasked = self._settings
        levels = (C.c_int32 * len(CHECKS))(*(LEVELS[self.checks[name]] for name in CHECKS))
        self._core.cdna_configure(
            self._machine,
            seed,
            SCHEDULES.index(schedule),
            quantum[0],
            quantum[1],
            int(memory == "hostile"),
            int(unasked),
            stall_bound,
            int(traffic),
            self.threads,
            levels,
        )

    def __del__(self) -> None:
        if machine := getattr(self, "_machine", None):
            self._core.cdna_machine_free(machine)

    # ---- memory
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
        """Make a CPU tensor's storage memory of ``rank``. ``peer``: other ranks may touch it (uncached).
        ``track``: nothing in it counts as written yet."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if base in self._kept:
            return tensor
        error = self._core.cdna_allocate(
            self._machine, base, size, rank, int(peer), int(read_only), int(track), name.encode()
        )
        if error:
            raise SimulationError(error.decode())
        self._kept[base] = tensor
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Take a tensor's storage out of device memory."""
        base = tensor.untyped_storage().data_ptr()
        self._kept.pop(base, None)
        self._core.cdna_release(self._machine, base)

    def tensor(self, data: torch.Tensor, name: str = "tensor", rank: int = 0, **kind: bool) -> torch.Tensor:
        """A copy of ``data`` in device memory."""
        return self.register(data.detach().clone(memory_format=torch.contiguous_format), name, rank, **kind)

    def empty(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        name: str = "empty",
        rank: int = 0,
        peer: bool = False,
    ) -> torch.Tensor:
        """Memory that counts as never written until a kernel (or ``mark_written``) writes it."""
        out = torch.empty(*shape, dtype=dtype)
        return self.register(out, name, rank, peer=peer, track=True)

    def zeros(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        name: str = "zeros",
        rank: int = 0,
        peer: bool = False,
    ) -> torch.Tensor:
        """Zeroed memory."""
        return self.register(torch.zeros(*shape, dtype=dtype), name, rank, peer=peer)

    # ---- launches
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
    ) -> Prepared:
        """A launch ready for ``run``. ``args``: tensors (registered already, or now with this rank), ints,
        floats,
        or bytes, one an explicit argument. ``persistent``: refuse a grid that is not all resident."""
        if kernel.arch != self.arch:
            raise ValueError(f"{kernel.name} is for {kernel.arch}, the device is {self.arch}")
        layout = kernel.arguments
        if len(args) != len(layout):
            raise ValueError(f"{kernel.name} takes {len(layout)} arguments, {len(args)} given")
        segment = torch.zeros(max(kernel.kernarg_bytes, 8) + 256, dtype=torch.uint8)
        keep: list[Any] = [segment]
        for (offset, size), value in zip(layout, args, strict=True):
            data = self._argument(value, size, rank)
            segment[offset : offset + size] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        grid3, block3 = _three(grid), _three(block)
        limit = kernel.metadata.get(".max_flat_workgroup_size")
        threads = block3[0] * block3[1] * block3[2]
        if limit and threads > limit:
            raise ValueError(f"{kernel.name}: {threads} threads a workgroup, at most {limit}")
        packet = self._packet(grid3, block3, segment.data_ptr())
        keep.append(packet)
        for tensor, name in ((segment, "kernel arguments"), (packet, "dispatch packet")):
            self.register(tensor, name, rank, read_only=True)
        lds = kernel.lds_bytes if lds_bytes is None else lds_bytes
        if lds > LDS_BYTES[self.arch]:
            raise SimulationError(f"lds-size: {lds} bytes of LDS, {self.arch} has {LDS_BYTES[self.arch]}")
        abi = kernel.abi()
        handle = self._core.cdna_launch(
            kernel.build(),
            (C.c_int32 * 3)(*grid3),
            (C.c_int32 * 3)(*block3),
            rank,
            lds,
            int(persistent),
            segment.data_ptr(),
            packet.data_ptr(),
            (C.c_int32 * len(abi))(*abi),
        )
        return Prepared(self, kernel, handle, keep, rank)

    def _argument(self, value: Any, size: int, rank: int) -> bytes:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().data_ptr() not in self._kept:
                self.register(value, "argument", rank)
            value = value.data_ptr()
        if isinstance(value, bytes):
            if len(value) != size:
                raise ValueError(f"an argument of {len(value)} bytes where {size} are taken")
            return value
        if isinstance(value, float):
            return struct.pack("<f" if size == 4 else "<d", value)
        return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")

    @staticmethod
    def _packet(grid: list[int], block: list[int], kernarg: int) -> torch.Tensor:
        """The dispatch packet that kernels may read their sizes from (HSA AQL layout)."""
        raw = struct.pack(
            "<HHHHHHIIIIIQQQQ",
            0,
            3,
            *block,
            0,
            *(g * b for g, b in zip(grid, block, strict=True)),
            0,
            0,
            0,
            kernarg,
            0,
            0,
        )
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone()

    def run(self, launches: Sequence[Prepared]) -> list[LaunchReport]:
        """Run prepared launches to the end: those of one rank one after another, the ranks side by side."""
        core_ = self._core
        core_.cdna_touched_bytes(self._machine, -1, None, 1)
        handles = (C.c_void_p * len(launches))(*(x.handle for x in launches))
        try:
            error = core_.cdna_run(self._machine, handles, len(launches))
            if error:
                raise self._error(error.decode(), launches)
            return [self._report(x) for x in launches]
        finally:
            for launch in launches:
                core_.cdna_launch_free(launch.handle)
                for tensor in launch.keep:
                    self.release(tensor)

    def touched(self, rank: int = -1, name: str | None = None) -> int:
        """Bytes of distinct 64-byte lines that the last run touched: of one rank's memory, of one name."""
        label = None if name is None else name.encode()
        return int(self._core.cdna_touched_bytes(self._machine, rank, label, 0))

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        **options: Any,
    ) -> LaunchReport:
        """Prepare and run one launch."""
        return self.run([self.prepare(kernel, grid, block, args, **options)])[0]

    @property
    def warnings(self) -> list[str]:
        """One entry for each kind of warning and source line since ``clear_warnings``."""
        return [
            self._core.cdna_warning(self._machine, i).decode()
            for i in range(self._core.cdna_num_warnings(self._machine))
        ]

    def clear_warnings(self) -> None:
        """Forget the warnings."""
        self._core.cdna_clear_warnings(self._machine)

    @property
    def clock(self) -> int:
        """Wave-instructions run on this device so far."""
        return int(self._core.cdna_clock(self._machine))

    def count_handoffs(self, on: bool = True) -> None:
        """Follow stores and loads past the caches (sc1) between workgroups; exact memory only.

        Atomics are left out: a queue's counter orders its users without one waiting for another."""
        if on and self._settings[1] != "exact":
            raise ValueError("hand-offs are counted in exact memory only")
        self._core.cdna_count_handoffs(self._machine, int(on))

    def record_timeline(self, on: bool = True) -> None:
        """Keep every turn of every wave from now on (``spans``; the picture: ``cdnasim.timeline``)."""
        self._core.cdna_timeline(self._machine, int(on))

    def spans(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """The turns of the last run, in order: begin and end (the rank's clock), workgroup, wave,
        assembly line
        of the last instruction, kind (0 goes on, 1 waits at a barrier, 2 sleeps, 3 ended, 4 waits for
        peers)."""
        count = self._core.cdna_spans(self._machine, rank, None)
        raw = torch.zeros(count, 4, dtype=torch.int64)
        self._core.cdna_spans(self._machine, rank, raw.data_ptr())
        small = raw[:, 2:].contiguous().view(torch.int32).long().view(count, 4)
        names = ("workgroup", "wave", "line", "kind")
        return {"begin": raw[:, 0], "end": raw[:, 1]} | {n: small[:, i] for i, n in enumerate(names)}

    def watch(
        self, rank: int = 0, workgroup: int = 0, wave: int = 0, *, dump_line: int = 0, limit: int = 1_000_000
    ) -> None:
        """Record what one wave does from now on: ``trace`` and, before ``dump_line`` first runs, ``registers``."""  # noqa: E501
        self._core.cdna_watch(self._machine, rank, workgroup, wave, dump_line, limit)

    def trace(self, kernel: Kernel) -> list[str]:
        """The watched wave's instructions in order, each "line: text"."""
        texts = {inst.line: text for inst, text in zip(kernel.insts, kernel.texts, strict=True)}
        return [f"{line}: {texts.get(line, '')}" for line in self._watched(0, C.c_int32)]

    def registers(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(vector registers [n, 64], scalar registers [128]) of the watched wave at its dump line, as int32."""  # noqa: E501
        vgprs, sgprs = self._watched(1, C.c_int32), self._watched(2, C.c_int32)
        if not sgprs:
            return None
        return torch.tensor(vgprs, dtype=torch.int32).view(-1, 64), torch.tensor(sgprs, dtype=torch.int32)

    def _watched(self, what: int, kind: Any) -> list[int]:
        size = self._core.cdna_watch_size(self._machine, what)
        if not size:
            return []
        data = self._core.cdna_watch_data(self._machine, what)
        return list((kind * size).from_address(data))

    def _error(self, message: str, launches: Sequence[Prepared]) -> SimulationError:
        if not message.startswith("@"):
            return SimulationError(message, kernel=launches[0].kernel.name)
        _, line_text, where, what = message.split("@", 3)
        kernel = launches[0].kernel
        for launch in launches:
            if launch.kernel.at_line(int(line_text))[0]:
                kernel = launch.kernel
        text, source = kernel.at_line(int(line_text))
        return SimulationError(what, kernel.name, where, int(line_text), text, source)

    def _report(self, launch: Prepared) -> LaunchReport:
        words = self._core.cdna_counters_words()
        raw = (C.c_uint64 * words)()
        self._core.cdna_launch_counters(launch.handle, raw)
        values = list(raw)
        n = len(CLASSES)
        loads, stores, rest = values[n : n + 8], values[n + 8 : n + 16], values[n + 16 :]
        lds_read, lds_write, conflicts, accesses, longest, waves, depth = rest
        return LaunchReport(
            kernel=launch.kernel.name,
            instructions=dict(zip(CLASSES, values[:n], strict=True)),
            longest_wave=longest,
            waves=waves,
            load_bytes={scope: loads[i] + loads[i + 4] for i, scope in enumerate(SCOPES)},
            store_bytes={scope: stores[i] + stores[i + 4] for i, scope in enumerate(SCOPES)},
            nontemporal_bytes=sum(loads[4:]) + sum(stores[4:]),
            lds_read_bytes=lds_read,
            lds_write_bytes=lds_write,
            lds_accesses=accesses,
            lds_conflict_cycles=conflicts,
            distinct_bytes=self.touched(),
            handoff_depth=depth,
            rank_bytes=self.touched(launch.rank),
            polls=values[CLASSES.index("sleep")],
            mfma=self._mfma(launch),
            load_policy=dict(zip(POLICIES, loads, strict=True)),
            store_policy=dict(zip(POLICIES, stores, strict=True)),
            per_wave=self._per_wave(launch),
        )

    def _mfma(self, launch: Prepared) -> dict[str, int]:
        out: dict[str, int] = {}
        executed = (C.c_uint64 * len(launch.kernel.insts))()
        self._core.cdna_launch_executed(launch.handle, executed)
        for text, count in zip(launch.kernel.texts, executed, strict=True):
            if count and text.startswith("v_mfma"):
                name = text.split()[0]
                out[name] = out.get(name, 0) + count
        return out

    def _per_wave(self, launch: Prepared) -> dict[str, torch.Tensor]:
        names = (*WAVE_FIELDS, *CLASSES)
        count = self._core.cdna_launch_waves(launch.handle, None)
        table = torch.zeros(count, len(names), dtype=torch.int64)
        self._core.cdna_launch_waves(launch.handle, table.data_ptr())
        return {name: table[:, i].clone() for i, name in enumerate(names)}
