# SPDX-License-Identifier: Apache-2.0
"""Reading one instruction's text: operands and modifiers, each checked against its opcode's row."""

from __future__ import annotations

import re
import struct

from .native import MAX_OPERANDS, Inst, Operand
from .opcodes import Form, Op, find

NONE, VGPR, SGPR, CONST, SCC, VCCZ, EXECZ, OFF = range(8)
NEG, ABS, SEXT = 1, 2, 4
SPECIAL = {
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (106, 2),
    "vcc_lo": (106, 1),
    "vcc_hi": (107, 1),
    "m0": (124, 1),
    "exec": (126, 2),
    "exec_lo": (126, 1),
    "exec_hi": (127, 1),
}
SDWA_SEL = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
SDWA_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
DPP_ROWS = {"row_shl": 0x100, "row_shr": 0x110, "row_ror": 0x120, "row_newbcast": 0x150}
DPP_PLAIN = {"wave_shl": 0x130, "wave_rol": 0x134, "wave_shr": 0x138, "wave_ror": 0x13C}
VOP3P_ALL_HI = re.compile(r"^v_(pk_|mfma_scale|dot2_|fma_mix|mad_mix)")
# 1 / (2 pi) is an inline constant of its own bit patterns.
INV_2PI = {"f": 0x3E22F983, "h": 0x3118, "d": 0x3FC45F306DC9C882}
REGISTER = re.compile(r"^([svat])(?:(\d+)|\[(\d+):(\d+)\])$")
HWREG = {"HW_REG_MODE": 1, "HW_REG_HW_ID": 4, "HW_REG_XCC_ID": 20}


class Reject(Exception):
    """A reason why the text is not understood; the parser adds file and line."""


def split_operands(text: str) -> list[str]:
    """Comma-separated pieces, commas inside brackets kept."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        elif ch == "," and not depth:
            out.append(text[start:i].strip())
            start = i + 1
    out.append(text[start:].strip())
    return [x for x in out if x]


def split_words(text: str) -> list[str]:
    """Space-separated words, spaces inside brackets kept."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text + " "):
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        elif ch.isspace() and not depth:
            if i > start:
                out.append(text[start:i])
            start = i + 1
    return out


def integer(text: str) -> int:
    """A decimal or hexadecimal integer literal."""
    try:
        return int(text, 0)
    except ValueError:
        raise Reject(f"not an integer: {text}") from None


def float_bits(value: float, form: Form) -> int:
    """A printed float constant as the operand's type holds it."""
    if form.type == "d":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    if form.type == "h":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    if form.type == "p":
        raise Reject("a float constant of a packed 16-bit operand is not modelled")
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def constant(text: str, form: Form) -> int:
    """The bits of a constant operand. Integers sign-extend to 64 bits when inline; other 64-bit literals
    whose
    extension the text does not settle are refused."""
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        if text in ("0.15915494", "0.15915494309189532"):
            return INV_2PI["d" if form.type == "d" else "h" if form.type == "h" else "f"]
        return float_bits(float(text), form)
    value = integer(text)
    if form.width <= 1:
        if not -(1 << 31) <= value < 1 << 32:
            raise Reject(f"constant {text} does not fit in 32 bits")
        return value & 0xFFFFFFFF
    if -16 <= value <= 64:
        return value & 0xFFFFFFFFFFFFFFFF
    if form.type == "d":
        return (value & 0xFFFFFFFF) << 32
    if value < 0 or value >> 31:
        raise Reject(f"the extension of literal {text} to 64 bits is not settled by the text")
    return value


class OperandReader:
    """Turns operand text into an ``Operand``; ``accum_offset`` is where AGPRs start in the register file."""

    def __init__(self, accum_offset: int) -> None:
        self.accum_offset = accum_offset

    def register(self, text: str) -> tuple[int, int, int] | None:
        """(kind, register index, dwords) of a register name, or None."""
        if text in SPECIAL:
            return SGPR, *SPECIAL[text]
        match = REGISTER.match(text)
        if not match:
            return None
        first = int(match[2] if match[2] is not None else match[3])
        last = first if match[2] is not None else int(match[4])
        if last < first:
            raise Reject(f"register range {text}")
        if match[1] == "s":
            if last > 101:
                raise Reject(f"scalar register {text} does not exist")
            return SGPR, first, last - first + 1
        if match[1] == "v":
            if last > 255:
                raise Reject(f"vector register {text} does not exist")
            return VGPR, first, last - first + 1
        if match[1] == "a":
            return VGPR, self.accum_offset + first, last - first + 1
        return None

    def read(self, text: str, form: Form, mods: frozenset[str]) -> Operand:
        out = Operand()
        if match := re.fullmatch(r"(sext|neg|abs)\((.*)\)", text):
            text = match[2]
            out.flags |= {"sext": SEXT, "neg": NEG, "abs": ABS}[match[1]]
        if text.startswith("-") and not re.match(r"-[\d.]", text):
            out.flags |= NEG
            text = text[1:]
        if text.startswith("|") and text.endswith("|"):
            out.flags |= ABS
            text = text[1:-1]
        if (out.flags & NEG and "neg" not in mods) or (out.flags & ABS and "abs" not in mods):
            raise Reject("a neg or abs that this opcode does not take")
        if out.flags & SEXT and "sdwa" not in mods:
            raise Reject("a sext that this opcode does not take")
        if text == "off":
            if form.cls not in ("o", "o1"):
                raise Reject("'off' where a register is needed")
            out.kind = OFF
            return out
        if found := self.register(text):
            out.kind, out.reg, out.width = found
            self._check_class(text, out, form)
            return out
        if form.role in ("d", "x") or form.cls == "v":
            raise Reject(f"{text} is not a register that can stand here")
        if text in ("src_scc", "scc", "src_vccz", "src_execz"):
            out.kind = {"src_scc": SCC, "scc": SCC, "src_vccz": VCCZ, "src_execz": EXECZ}[text]
            out.width = 1
            return out
        out.kind, out.width = CONST, form.width
        out.value = constant(text, form)
        return out

    def _check_class(self, text: str, out: Operand, form: Form) -> None:
        if form.cls in ("o", "o1"):
            if out.kind == SGPR and form.cls == "o" and out.width != 2:
                raise Reject(f"{text} is not a 64-bit base")
            return
        if form.cls == "s" and out.kind != SGPR:
            raise Reject(f"{text} is not scalar")
        if form.cls == "v" and out.kind != VGPR:
            raise Reject(f"{text} is not a vector register")
        if (
            form.width
            and out.width != form.width
            and not (form.type == "u" and form.cls == "s" and form.width == out.width)
        ):
            raise Reject(f"{text} is {out.width} registers, {form.width} are needed")


def bits_list(text: str) -> int:
    """[1,0,1] -> 0b101 (first entry is bit 0)."""
    if not re.fullmatch(r"\[[01](,[01])*\]", text):
        raise Reject(f"bit list {text}")
    return sum(int(x) << i for i, x in enumerate(text[1:-1].split(",")))


def modifier(word: str, op: Op, suffix: str, inst: Inst) -> None:
    """Apply one modifier word, or reject it."""
    name, _, value = word.partition(":")
    legal = op.mods
    if name in ("sc0", "sc1", "nt"):
        if name not in legal:
            raise Reject(f"cache policy {name} on this opcode")
        inst.cpol |= {"sc0": 1, "nt": 2, "sc1": 16}[name]
    elif name in ("offen", "idxen", "lds", "clamp") and not value:
        if name not in legal:
            raise Reject(f"modifier {name} on this opcode")
        setattr(inst, name, 1)
    elif name in ("offset", "offset0", "offset1") and value.startswith("swizzle("):
        inst.offset0 = swizzle(value[8:-1])
    elif name in ("offset", "offset0", "offset1"):
        if name not in legal and not (name == "offset" and "swizzle" in legal):
            raise Reject(f"modifier {name} on this opcode")
        setattr(inst, "offset0" if name == "offset" else name, integer(value))
    elif name in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi"):
        if name not in legal:
            raise Reject(f"modifier {name} on this opcode")
        count = value.count(",") + 1
        bits = bits_list(value)
        if name == "op_sel" and not VOP3P_ALL_HI.match(op.name):
            # The last entry is the destination's half, always bit 3; of a byte, the last two entries.
            to_byte = op.name.startswith("v_cvt_scalef32_pk_fp4_")
            if to_byte and count != 4:
                raise Reject(f"op_sel with {count} entries, of four")
            if count > max(4 * to_byte, len(op.forms[0])) or (count < 2 and len(op.forms[0]) > 2):
                raise Reject(f"op_sel with {count} entries")
            if count == len(op.forms[0]) and bits >> (count - 1):
                bits = (bits & ((1 << (count - 1)) - 1)) | 8
        setattr(inst, name, bits)
    elif name in ("cbsz", "abid", "blgp", "bitop3"):
        if name not in legal:
            raise Reject(f"modifier {name} on this opcode")
        setattr(inst, "imm" if name == "bitop3" else name, integer(value))
    elif name in ("mul", "div"):
        if "omod" not in legal or (name, value) not in (("mul", "2"), ("mul", "4"), ("div", "2")):
            raise Reject(f"output modifier {word}")
        inst.omod = {"mul:2": 1, "mul:4": 2, "div:2": 3}[word]
    elif suffix == "_sdwa":
        sdwa(name, value, inst)
    elif suffix.endswith("_dpp"):
        dpp(name, value, inst)
    else:
        raise Reject(f"modifier {word} is not known")


def sdwa(name: str, value: str, inst: Inst) -> None:
    """dst_sel, dst_unused, src0_sel, src1_sel."""
    if name in ("dst_sel", "src0_sel", "src1_sel") and value in SDWA_SEL:
        setattr(inst, name, SDWA_SEL[value])
    elif name == "dst_unused" and value in SDWA_UNUSED:
        inst.dst_unused = SDWA_UNUSED[value]
    else:
        raise Reject(f"SDWA modifier {name}:{value} is not known")


def dpp(name: str, value: str, inst: Inst) -> None:
    """A DPP control, or the masks."""
    if name == "quad_perm":
        lanes = [integer(x) for x in value[1:-1].split(",")]
        if len(lanes) != 4 or not all(0 <= x < 4 for x in lanes):
            raise Reject(f"quad_perm {value}")
        inst.dpp_ctrl = sum(x << (2 * i) for i, x in enumerate(lanes))
    elif name in DPP_ROWS:
        inst.dpp_ctrl = DPP_ROWS[name] + integer(value)
    elif name in DPP_PLAIN and value == "1":
        inst.dpp_ctrl = DPP_PLAIN[name]
    elif name in ("row_mirror", "row_half_mirror") and not value:
        inst.dpp_ctrl = 0x140 if name == "row_mirror" else 0x141
    elif name == "row_bcast" and value in ("15", "31"):
        inst.dpp_ctrl = 0x142 if value == "15" else 0x143
    elif name in ("row_mask", "bank_mask"):
        setattr(inst, name, integer(value))
    elif name == "bound_ctrl":
        # The assembler prints 1, and older ones 0, for the one bit: invalid lanes read zero.
        inst.bound_ctrl = 1
    else:
        raise Reject(f"DPP modifier {name}:{value} is not known")


def swizzle(text: str) -> int:
    """The named forms of ds_swizzle_b32's pattern."""
    kind, *rest = [x.strip() for x in text.split(",")]
    if kind == "SWAP":
        return 0x1F | integer(rest[0]) << 10
    if kind == "REVERSE":
        return 0x1F | (integer(rest[0]) - 1) << 10
    if kind == "BROADCAST":
        group, lane = integer(rest[0]), integer(rest[1])
        return (0x1F & ~(group - 1)) | lane << 5
    if kind == "QUAD_PERM":
        return 0x8000 | sum(integer(x) << (2 * i) for i, x in enumerate(rest))
    if kind == "BITMASK_PERM" and re.fullmatch(r'"[01pi]{5}"', rest[0]):
        keep = set_ = flip = 0
        for i, ch in enumerate(reversed(rest[0][1:-1])):
            keep |= (ch in "pi") << i
            set_ |= (ch == "1") << i
            flip |= (ch == "i") << i
        return keep | set_ << 5 | flip << 10
    raise Reject(f"swizzle({text})")


def waitcnt(words: list[str]) -> int:
    """vmcnt in bits 0..15, lgkmcnt in 16..23, expcnt in 24..31; all ones where not waited on."""
    fields = {"vmcnt": (0, 0xFFFF), "lgkmcnt": (16, 0xFF), "expcnt": (24, 0x7F)}
    out = 0x7FFFFFFF
    for word in words:
        match = re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", word)
        if not match:
            raise Reject(f"wait {word}")
        shift, mask = fields[match[1]]
        out = out & ~(mask << shift) | min(int(match[2]), mask) << shift
    return out


def hwreg(text: str) -> int:
    """hwreg(name[, offset, size]) as the instruction encodes it."""
    match = re.fullmatch(r"hwreg\(([\w]+)(?:,\s*(\d+),\s*(\d+))?\)", text)
    if not match or match[1] not in HWREG:
        raise Reject(f"hardware register {text}")
    return HWREG[match[1]] | int(match[2] or 0) << 6 | (int(match[3] or 32) - 1) << 11


class InstructionReader:
    """Decodes instruction lines. Branch targets are left as label names in ``labels_used``."""

    def __init__(self, accum_offset: int) -> None:
        self.operands = OperandReader(accum_offset)
        self.labels_used: list[tuple[int, str]] = []

    def read(self, mnemonic: str, rest: str, index: int, line: int) -> Inst:
        found = find(mnemonic)
        if found is None:
            raise Reject(f"opcode {mnemonic} is not known")
        op, suffix = found
        inst = Inst()
        inst.opcode, inst.line, inst.dpp_ctrl = op.index, line, -1
        inst.row_mask = inst.bank_mask = 0xF
        inst.dst_sel = inst.src0_sel = inst.src1_sel = 6
        inst.sdwa = suffix == "_sdwa"
        inst.op_sel_hi = 7 if VOP3P_ALL_HI.match(op.name) and not op.name.startswith("v_fma_mix") else 0
        if suffix in ("_sdwa", "_dpp") and suffix[1:] not in op.mods:
            raise Reject(f"{suffix[1:].upper()} form of {op.name}")
        pieces = split_operands(rest)
        if op.name == "s_waitcnt":
            inst.imm = waitcnt(split_words(rest.replace("&", " ")))
            return inst
        modifiers: list[str] = []
        if any(op.forms) and pieces:
            head, *modifiers = split_words(pieces[-1])
            pieces[-1] = head
        elif pieces:
            modifiers, pieces = split_words(rest), []
        for word in modifiers:
            modifier(word, op, suffix, inst)
        forms = next((f for f in op.forms if len(f) == len(pieces)), None)
        if forms is None:
            raise Reject(f"{op.name} with {len(pieces)} operands")
        if len(pieces) > MAX_OPERANDS:
            raise Reject("too many operands")
        inst.num_ops = len(pieces)
        for i, (text, form) in enumerate(zip(pieces, forms, strict=True)):
            self._one(inst, i, text, form, op, index)
        if suffix in ("_dpp", "_e64_dpp") and inst.dpp_ctrl < 0:
            raise Reject("a DPP form without a DPP control")
        return inst

    def _one(self, inst: Inst, i: int, text: str, form: Form, op: Op, index: int) -> None:
        if form.cls == "l":
            self.labels_used.append((index, text))
        elif form.cls == "i":
            inst.imm = integer(text)
        elif form.cls == "r":
            inst.imm = hwreg(text)
        elif form.cls in ("k", "ku"):
            value = integer(text)
            if not -0x8000 <= value <= 0xFFFF:
                raise Reject(f"16-bit immediate {text}")
            value &= 0xFFFF
            if form.cls == "k" and value & 0x8000:
                value -= 0x10000
            inst.ops[i].kind, inst.ops[i].value = CONST, value & 0xFFFFFFFF
        else:
            inst.ops[i] = self.operands.read(text, form, op.mods)
