# SPDX-License-Identifier: Apache-2.0
"""Reading a whole assembly file: descriptors, labels, source locations, instructions.

``load(text, arch)`` gives a ``Program`` with a ``Kernel`` a ``.amdhsa_kernel`` descriptor.
"""

from __future__ import annotations

import ctypes as C
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from .errors import AssemblyError
from .native import Inst, core
from .opcodes import table
from .operands import InstructionReader, Reject

ARCHES = {"gfx942": 942, "gfx950": 950}
LABEL = re.compile(r"^([.\w$]+):\s*(?:;.*)?$")
# Directives that say nothing about what the code does.
IGNORED = re.compile(
    r"^\.(globl|p2align|p2alignl|type|size|section|text|file|cfi_\w+|set|fill|weak|protected|hidden|ident|"
    r"amdgpu_\w+|amdhsa_code_object_version|addrsig\w*|local|data|long|quad|short|byte|asciz|ascii|uleb128|sleb128|"
    r"zero|space|comm|end_amdgpu\w*|popsection|pushsection)\b"
)
# Descriptor fields and the only value the simulator takes for them.
FIXED = {
    "amdhsa_float_round_mode_32": 0,
    "amdhsa_float_round_mode_16_64": 0,
    "amdhsa_float_denorm_mode_32": 3,
    "amdhsa_float_denorm_mode_16_64": 3,
    "amdhsa_fp16_overflow": 0,
    "amdhsa_tg_split": 0,
    "amdhsa_uses_dynamic_stack": 0,
    "amdhsa_dx10_clamp": 1,
    "amdhsa_ieee_mode": 1,
    "amdhsa_exception_fp_ieee_invalid_op": 0,
    "amdhsa_exception_fp_denorm_src": 0,
    "amdhsa_exception_fp_ieee_div_zero": 0,
    "amdhsa_exception_fp_ieee_overflow": 0,
    "amdhsa_exception_fp_ieee_underflow": 0,
    "amdhsa_exception_fp_ieee_inexact": 0,
    "amdhsa_exception_int_div_zero": 0,
}
READ = {
    "amdhsa_group_segment_fixed_size",
    "amdhsa_private_segment_fixed_size",
    "amdhsa_kernarg_size",
    "amdhsa_user_sgpr_count",
    "amdhsa_user_sgpr_dispatch_ptr",
    "amdhsa_user_sgpr_queue_ptr",
    "amdhsa_user_sgpr_kernarg_segment_ptr",
    "amdhsa_user_sgpr_dispatch_id",
    "amdhsa_user_sgpr_kernarg_preload_length",
    "amdhsa_user_sgpr_kernarg_preload_offset",
    "amdhsa_user_sgpr_private_segment_size",
    "amdhsa_enable_private_segment",
    "amdhsa_system_sgpr_workgroup_id_x",
    "amdhsa_system_sgpr_workgroup_id_y",
    "amdhsa_system_sgpr_workgroup_id_z",
    "amdhsa_system_sgpr_workgroup_info",
    "amdhsa_system_vgpr_workitem_id",
    "amdhsa_next_free_vgpr",
    "amdhsa_next_free_sgpr",
    "amdhsa_accum_offset",
    "amdhsa_reserve_vcc",
    "amdhsa_reserve_xnack_mask",
}


@dataclass
class Kernel:
    """One kernel: its descriptor, code, and the text and source location of every instruction."""

    name: str
    arch: str
    file: str
    descriptor: dict[str, int]
    insts: list[Inst] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    handle: int = 0
    assembly: str = field(default="", repr=False)  # the whole text that it came from

    @property
    def arguments(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every explicit argument in the kernel argument segment."""
        return [
            (arg[".offset"], arg[".size"])
            for arg in self.metadata.get(".args", [])
            if not arg[".value_kind"].startswith("hidden_")
        ]

    @property
    def kernarg_bytes(self) -> int:
        """Size of the kernel argument segment."""
        return int(self.descriptor.get("amdhsa_kernarg_size", 0))

    @property
    def lds_bytes(self) -> int:
        """Static LDS of a workgroup, in bytes."""
        return self.descriptor["amdhsa_group_segment_fixed_size"]

    @property
    def num_vgprs(self) -> int:
        """VGPRs and AGPRs of a lane together."""
        return self.descriptor["amdhsa_next_free_vgpr"]

    def abi(self) -> list[int]:
        """Where the initial scalar registers are, in the order that the core's launch takes."""
        d = self.descriptor
        next_sgpr = 0

        def take(name: str, count: int) -> int:
            nonlocal next_sgpr
            if not d.get("amdhsa_user_sgpr_" + name, 0):
                return -1
            first = next_sgpr
            next_sgpr += count
            return first

        dispatch, queue = take("dispatch_ptr", 2), take("queue_ptr", 2)
        kernarg, dispatch_id = take("kernarg_segment_ptr", 2), take("dispatch_id", 2)
        private = take("private_segment_size", 1)
        preload = d.get("amdhsa_user_sgpr_kernarg_preload_length", 0)
        first = next_sgpr if preload else -1
        next_sgpr += preload
        declared = d.get("amdhsa_user_sgpr_count", next_sgpr)
        if declared != next_sgpr:
            raise AssemblyError(
                self.file, 0, self.name, f"{declared} user SGPRs declared, {next_sgpr} laid out"
            )
        return [
            declared,
            kernarg,
            dispatch,
            queue,
            dispatch_id,
            private,
            first,
            preload,
            d.get("amdhsa_user_sgpr_kernarg_preload_offset", 0),
            d.get("amdhsa_system_sgpr_workgroup_id_x", 1),
            d.get("amdhsa_system_sgpr_workgroup_id_y", 0),
            d.get("amdhsa_system_sgpr_workgroup_id_z", 0),
            d.get("amdhsa_system_sgpr_workgroup_info", 0),
            d.get("amdhsa_system_vgpr_workitem_id", 0),
        ]

    def at_line(self, line: int) -> tuple[str, str]:
        """(text, source location) of the instruction on that line of the file."""
        for inst, text, source in zip(self.insts, self.texts, self.sources, strict=True):
            if inst.line == line:
                return text, source
        return "", ""

    def build(self) -> int:
        """The kernel in the core; made once."""
        if not self.handle:
            code = (Inst * len(self.insts))(*self.insts)
            self.handle = core().cdna_kernel(
                code,
                len(self.insts),
                ARCHES[self.arch],
                max(self.num_vgprs, 1),
                self.descriptor["amdhsa_next_free_sgpr"],
                self.lds_bytes,
                self.descriptor["amdhsa_private_segment_fixed_size"],
            )
        return self.handle

    def executed(self) -> list[int]:
        """How often each instruction ran, over every launch."""
        out = (C.c_uint64 * len(self.insts))()
        core().cdna_kernel_executed(self.build(), out)
        return list(out)


@dataclass
class Program:
    """The kernels of one assembly file, by name."""

    arch: str
    kernels: dict[str, Kernel]

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name; the only one when no name is given."""
        if name is None:
            if len(self.kernels) != 1:
                raise KeyError(f"{len(self.kernels)} kernels: {sorted(self.kernels)}")
            return next(iter(self.kernels.values()))
        return self.kernels[name]


@dataclass
class _Line:
    number: int
    label: str
    mnemonic: str
    rest: str
    text: str
    source: str


def _strip(line: str) -> str:
    """Without its comment (a ';' outside quotes)."""
    if ";" not in line:
        return line
    quoted = False
    for i, ch in enumerate(line):
        if ch == '"':
            quoted = not quoted
        elif ch == ";" and not quoted:
            return line[:i]
    return line


class _Reader:
    """One pass over the text: functions, descriptors, metadata."""

    def __init__(self, text: str, arch: str, file: str) -> None:
        self.arch, self.file = arch, file
        self.functions: dict[str, list[_Line]] = {}
        self.descriptors: dict[str, dict[str, int]] = {}
        self.metadata: dict[str, dict[str, Any]] = {}
        self.files: dict[str, str] = {}
        self.types: set[str] = set()
        self._scan(text)

    def _scan(self, text: str) -> None:
        current: list[_Line] | None = None
        descriptor: dict[str, int] | None = None
        source, in_metadata, in_code = "", False, True
        meta_lines: list[str] = []
        for number, raw in enumerate(text.splitlines(), 1):
            line = _strip(raw).strip()
            if in_metadata:
                in_metadata = ".end_amdgpu_metadata" not in raw
                meta_lines.append(raw)
                continue
            if not line:
                continue
            if line.startswith(".amdgpu_metadata"):
                in_metadata = True
            elif line.startswith(".amdgcn_target"):
                if self.arch not in line:
                    raise AssemblyError(self.file, number, raw, f"the text is not for {self.arch}")
            elif line.startswith(".type"):
                if match := re.match(r"\.type\s+([\w$.]+),@function", line):
                    self.types.add(match[1])
            elif line.startswith(".section"):
                in_code = ".text" in line
            elif line == ".text":
                in_code = True
            elif line.startswith(".file"):
                if match := re.match(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"', line):
                    self.files[match[1]] = match[3]
            elif line.startswith(".loc"):
                if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
                    source = f"{self.files.get(match[1], '?')}:{match[2]}"
            elif line.startswith(".amdhsa_kernel"):
                descriptor = self.descriptors.setdefault(line.split()[1], {})
            elif line.startswith(".end_amdhsa_kernel"):
                descriptor = None
            elif descriptor is not None:
                self._field(descriptor, line, number, raw)
            elif match := LABEL.match(line):
                if in_code and match[1] in self.types:
                    current = self.functions.setdefault(match[1], [])
                elif in_code and current is not None:
                    current.append(_Line(number, match[1], "", "", raw, ""))
            elif line.startswith("."):
                if not IGNORED.match(line):
                    raise AssemblyError(self.file, number, raw, "directive is not known")
            elif in_code:
                if current is None:
                    raise AssemblyError(self.file, number, raw, "an instruction outside a function")
                mnemonic, _, rest = line.partition(" ")
                if "\t" in mnemonic:
                    mnemonic, _, rest = line.partition("\t")
                current.append(_Line(number, "", mnemonic, rest.strip(), raw, source))
            else:
                raise AssemblyError(self.file, number, raw, "not understood")
        self._read_metadata(meta_lines)

    def _field(self, descriptor: dict[str, int], line: str, number: int, raw: str) -> None:
        name, _, value = line.partition(" ")
        name = name.lstrip(".")
        number_text = value.strip()
        if name not in FIXED and name not in READ:
            raise AssemblyError(self.file, number, raw, "descriptor field is not known")
        try:
            descriptor[name] = int(number_text, 0)
        except ValueError:
            raise AssemblyError(self.file, number, raw, "descriptor value is not a number") from None
        if name in FIXED and descriptor[name] != FIXED[name]:
            raise AssemblyError(self.file, number, raw, f"only {FIXED[name]} is modelled")

    def _read_metadata(self, lines: list[str]) -> None:
        """Argument layout and sizes that only the metadata holds (Triton's LDS is dynamic)."""
        text = "\n".join(line for line in lines if ".end_amdgpu_metadata" not in line)
        try:
            document = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError as why:
            raise AssemblyError(self.file, 0, str(why), "metadata is not YAML") from None
        for entry in (document or {}).get("amdhsa.kernels", []):
            self.metadata[entry[".name"]] = entry

    def kernel(self, name: str) -> Kernel:
        lines = self.functions.get(name)
        if lines is None:
            raise AssemblyError(self.file, 0, name, "no code for this descriptor")
        descriptor = self.descriptors[name]
        for needed in ("amdhsa_next_free_vgpr", "amdhsa_next_free_sgpr", "amdhsa_accum_offset"):
            if needed not in descriptor:
                raise AssemblyError(self.file, 0, name, f"descriptor without .{needed}")
        descriptor.setdefault("amdhsa_group_segment_fixed_size", 0)
        descriptor.setdefault("amdhsa_private_segment_fixed_size", 0)
        out = Kernel(name, self.arch, self.file, descriptor, metadata=self.metadata.get(name, {}))
        reader = InstructionReader(descriptor["amdhsa_accum_offset"])
        labels: dict[str, int] = {}
        used_lines: list[_Line] = []
        for line in lines:
            if line.label:
                labels[line.label] = len(out.insts)
                continue
            try:
                out.insts.append(reader.read(line.mnemonic, line.rest, len(out.insts), line.number))
            except Reject as why:
                raise AssemblyError(self.file, line.number, line.text, str(why)) from None
            out.texts.append(line.text.strip())
            out.sources.append(line.source)
            used_lines.append(line)
        for index, label in reader.labels_used:
            if label not in labels:
                raise AssemblyError(
                    self.file, used_lines[index].number, used_lines[index].text, "label is not known"
                )
            out.insts[index].target = labels[label]
        self._check_registers(out)
        return out

    def _check_registers(self, kernel: Kernel) -> None:
        rows = {op.index: op for op in table().values()}
        for inst, text in zip(kernel.insts, kernel.texts, strict=True):
            for i in range(inst.num_ops):
                operand = inst.ops[i]
                if operand.kind == 1 and operand.reg + max(operand.width, 1) > kernel.num_vgprs:
                    name = rows[inst.opcode].name
                    why = f"{name} uses a register past the {kernel.num_vgprs} that the descriptor declares"
                    raise AssemblyError(self.file, inst.line, text, why)


def load(text: str, arch: str, file: str = "<assembly>") -> Program:
    """Parse a final assembly text. ``arch`` is "gfx942" or "gfx950".

    Raises ``AssemblyError`` with file, line and text for anything it does not know.
    """
    if arch not in ARCHES:
        raise ValueError(f"architecture {arch!r}: one of {sorted(ARCHES)}")
    reader = _Reader(text, arch, file)
    if not reader.descriptors:
        raise AssemblyError(file, 0, "", "no .amdhsa_kernel descriptor")
    kernels = {name: reader.kernel(name) for name in reader.descriptors}
    for kernel in kernels.values():
        kernel.assembly = text
    return Program(arch, kernels)
