# SPDX-License-Identifier: Apache-2.0
"""One wave by hand: set registers, run one instruction, read registers. For opcode tests and for a look at
one
instruction."""

from __future__ import annotations

import ctypes as C

import numpy as np

from .errors import AssemblyError, SimulationError
from .native import CHECKS, Inst, core
from .operands import InstructionReader, Reject
from .program import ARCHES

NUM_VGPRS = 512
AGPR0 = 256


class Bench:
    """A wave with 256 VGPRs, 256 AGPRs, every scalar register and some LDS.

    ``vgprs`` is [512, 64] uint32 (AGPRs from row 256), ``sgprs`` [128] uint32 indexed as the hardware encodes
    them (vcc 106, m0 124, exec 126), ``lds`` bytes; all are views of the wave's own state.
    """

    def __init__(self, arch: str, instructions: list[str], lds_bytes: int = 4096) -> None:
        reader = InstructionReader(AGPR0)
        decoded = []
        for i, text in enumerate(instructions):
            mnemonic, _, rest = text.strip().partition(" ")
            try:
                decoded.append(reader.read(mnemonic, rest.strip(), i, i + 1))
            except Reject as why:
                raise AssemblyError("<bench>", i + 1, text, str(why)) from None
        self._core = core()
        code = (Inst * len(decoded))(*decoded)
        self._kernel = self._core.cdna_kernel(code, len(decoded), ARCHES[arch], NUM_VGPRS, 128, lds_bytes, 0)
        self._bench = self._core.cdna_bench(self._kernel, lds_bytes)

        def view(address: int, kind: type, count: int) -> np.ndarray:
            return np.ctypeslib.as_array(C.cast(address, C.POINTER(kind)), (count,))

        self.vgprs = view(self._core.cdna_bench_vgprs(self._bench), C.c_uint32, NUM_VGPRS * 64).reshape(
            NUM_VGPRS, 64
        )
        self.sgprs = view(self._core.cdna_bench_sgprs(self._bench), C.c_uint32, 128)
        self.lds = (
            view(self._core.cdna_bench_lds(self._bench), C.c_uint8, lds_bytes)
            if lds_bytes
            else np.zeros(0, np.uint8)
        )
        self.scc = 0
        self.exec = (1 << 64) - 1
        levels = (C.c_int32 * len(CHECKS))()
        self._core.cdna_configure(
            self._core.cdna_bench_machine(self._bench), 0, 0, 1, 1, 0, 0, 0, 0, 1, levels
        )

    def __del__(self) -> None:
        if bench := getattr(self, "_bench", None):
            self._core.cdna_bench_free(bench)
            self._core.cdna_kernel_free(self._kernel)

    def _pair(self, reg: int) -> int:
        return int(self.sgprs[reg]) | int(self.sgprs[reg + 1]) << 32

    def _set_pair(self, reg: int, value: int) -> None:
        self.sgprs[reg], self.sgprs[reg + 1] = value & 0xFFFFFFFF, value >> 32

    @property
    def exec(self) -> int:
        """The execution mask."""
        return self._pair(126)

    @exec.setter
    def exec(self, value: int) -> None:
        self._set_pair(126, value)

    @property
    def vcc(self) -> int:
        """The vector condition code."""
        return self._pair(106)

    @vcc.setter
    def vcc(self, value: int) -> None:
        self._set_pair(106, value)

    def step(self, index: int = 0) -> None:
        """Run instruction ``index``."""
        scc = C.c_uint32(self.scc)
        if error := self._core.cdna_bench_step(self._bench, index, C.byref(scc)):
            raise SimulationError(error.decode())
        self.scc = scc.value
