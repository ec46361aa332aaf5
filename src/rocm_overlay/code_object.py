# SPDX-License-Identifier: Apache-2.0
"""What a compiled AMD GPU kernel uses: registers, LDS, scratch, spills, instructions.

Registers and sizes are what the compiler wrote beside the code object in FlyDSL's module. Instructions are
counted in the machine code itself, by the length of each encoding (AMD Instinct MI300 and CDNA4 instruction
set manuals, chapter "Microcode Formats"), so that no disassembler of the right age has to be installed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

# Names in the module's metadata, by ours.
METADATA = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "lds_bytes": "group_segment_fixed_size",
    "scratch_bytes": "private_segment_fixed_size",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
}
_LITERAL, _SDWA, _DPP = 255, 249, 250
_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_FUNCTION, _SYMBOL_TABLE = 2, 2


class UnreadableCodeObject(ValueError):
    """A module or code object is not of the form that this reads."""


@dataclass(frozen=True)
class Resources:
    """What one kernel uses; registers a lane, bytes a lane of scratch, bytes a workgroup of LDS."""

    vgprs: int
    agprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    instructions: int

    def faults(self) -> list[str]:
        """What no kernel of ours may use. Scalar registers that are spilled to lanes of vector registers are
        no fault: they cost instructions and no memory traffic, and the table has them."""
        return [f"{self.scratch_bytes} bytes of scratch"] if self.scratch_bytes else []

    def as_dict(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def read_module(text: str, kernel: str) -> Resources:
    """The resources of ``kernel`` in a compiled MLIR module.

    Args:
        text: the module, whose ``gpu.binary`` holds one code object.
        kernel: the kernel's name.

    Raises:
        UnreadableCodeObject: the kernel or its code is not in it.
    """
    found = re.search(
        rf'#gpu\.kernel_metadata<"{re.escape(kernel)}",.*?metadata = \{{(?P<values>[^}}]*)\}}',
        text,
        re.DOTALL,
    )
    code = re.search(r'bin = "((?:[^"\\]|\\.)*)"', text)
    if found is None or code is None:
        raise UnreadableCodeObject(f"no kernel {kernel} with a code object in the compiled module")
    values = dict(re.findall(r"(\w+) = (\d+) : i64", found["values"]))
    missing = [name for name in METADATA.values() if name not in values]
    if missing:
        raise UnreadableCodeObject(f"the module does not say the {', '.join(missing)} of {kernel}")
    machine_code = function_code(unescape(code[1]), kernel)
    numbers = {ours: int(values[theirs]) for ours, theirs in METADATA.items()}
    return Resources(**numbers, instructions=sum(1 for _ in instruction_starts(machine_code)))


def unescape(text: str) -> bytes:
    """The bytes of an MLIR string attribute: two hexadecimal digits, a quote or a backslash after each
    backslash."""

    def byte(found: re.Match[bytes]) -> bytes:
        escaped = found[1]
        return bytes.fromhex(escaped.decode()) if len(escaped) == 2 else escaped

    return re.sub(rb'\\([0-9A-Fa-f]{2}|["\\])', byte, text.encode("latin-1"))


def function_code(elf: bytes, name: str) -> bytes:
    """The machine code of the function ``name`` of a 64-bit little-endian ELF file.

    Raises:
        UnreadableCodeObject: it is no such file, or has no such function.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise UnreadableCodeObject(f"no 64-bit little-endian ELF file: it starts with {elf[:6]!r}")
    try:
        sections = list(_sections(elf))
        for section in sections:
            if section.kind == _SYMBOL_TABLE:
                names = sections[section.link]
                for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
                    named, info, _, place, address, size = _SYMBOL.unpack_from(elf, at)
                    text = elf[names.offset + named : elf.index(b"\0", names.offset + named)]
                    if info & 15 == _FUNCTION and text.decode() == name:
                        home = sections[place]
                        start = home.offset + address - home.address
                        return elf[start : start + size]
    except (struct.error, IndexError, ValueError) as error:
        raise UnreadableCodeObject(f"the code object is cut short: {error}") from error
    raise UnreadableCodeObject(f"no function {name} in the code object")


@dataclass(frozen=True)
class _ElfSection:
    kind: int
    address: int
    offset: int
    size: int
    link: int


def _sections(elf: bytes) -> Iterator[_ElfSection]:
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, number = struct.unpack_from("<HH", elf, 0x3A)
    for i in range(number):
        _, kind, _, address, offset, length, link, *_ = _SECTION.unpack_from(elf, start + i * size)
        yield _ElfSection(kind, address, offset, length, link)


def instruction_starts(code: bytes) -> Iterator[int]:
    """The first 32-bit word of each instruction of a function of CDNA3 or CDNA4 machine code. A scaled matrix
    instruction and the scale operands encoded before it are one; what aligns loops (``s_nop``) is in it."""
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    at = 0
    while at < len(words):
        yield words[at]
        at += _length(words[at])


def _length(word: int) -> int:
    """32-bit words of the instruction that starts with ``word``."""
    if word >> 31 == 0:
        return _vector_length(word)
    if word >> 30 == 0b10:
        return _scalar_length(word)
    if word >> 16 == 0xD3AC:  # scale operands, then the matrix instruction
        return 4
    # The other 64-bit formats: scalar memory, three operands, LDS, flat, buffer. Interpolation is not CDNA's.
    return 2


def _vector_length(word: int) -> int:
    source, opcode = word & 0x1FF, word >> 25
    # One or two operands, or a comparison; multiply-add with a constant always carries it.
    with_constant = opcode in (23, 24, 36, 37)
    return 2 if with_constant or source in (_LITERAL, _SDWA, _DPP) else 1


def _scalar_length(word: int) -> int:
    kind = word >> 23
    if kind == 0b101111111:  # program control
        return 1
    if word >> 28 == 0b1011 and kind not in (0b101111101, 0b101111110):  # 16-bit constants
        return 2 if word >> 23 & 31 == 20 else 1
    sources = (word & 255,) if kind == 0b101111101 else (word & 255, word >> 8 & 255)
    return 2 if _LITERAL in sources else 1
