# SPDX-License-Identifier: Apache-2.0
"""Values of the ISA manual's pseudocode: bit strings with a width and a kind, and their conversions."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction


class Unsupported(Exception):
    """A construct of the pseudocode that the interpreter does not evaluate."""


FLOAT_FORMATS = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}


@dataclass(frozen=True)
class V:
    """A typed value. ``kind`` "u" unsigned, "i" signed, "f" float, "bf" bfloat16."""

    bits: int
    width: int
    kind: str

    @property
    def num(self) -> int | float:
        if self.kind == "f":
            return to_float(self.bits, self.width)
        if self.kind == "bf":
            return to_float(self.bits << 16, 32)
        if self.kind == "i" and self.bits >> (self.width - 1) & 1:
            return self.bits - (1 << self.width)
        return self.bits


def to_float(bits: int, width: int) -> float:
    fmt, raw = FLOAT_FORMATS[width]
    return float(struct.unpack(fmt, struct.pack(raw, bits))[0])


def round_float(x: float | Fraction, width: int) -> int:
    """The bits of x rounded to nearest even."""
    if isinstance(x, Fraction):
        x = round_fraction(x, width)
    fmt, raw = FLOAT_FORMATS[width]
    if math.isnan(x):
        return {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}[width]
    try:
        return int(struct.unpack(raw, struct.pack(fmt, x))[0])
    except OverflowError:
        top = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF0 << 48}[width]
        return top | (1 << (width - 1) if math.copysign(1, x) < 0 else 0)


def round_fraction(x: Fraction, width: int) -> float:
    """A fraction rounded once to the format (as a double)."""
    if x == 0:
        return 0.0
    man, low = {16: (11, -24), 32: (24, -149), 64: (53, -1074)}[width]
    sign, a = (-1, -x) if x < 0 else (1, x)
    exp = a.numerator.bit_length() - a.denominator.bit_length()
    if Fraction(2) ** exp > a:
        exp -= 1
    step = max(exp - man + 1, low)
    q = a / Fraction(2) ** step
    n = q.numerator // q.denominator
    rest = q - n
    n += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n & 1)
    limit = {16: 65504.0, 32: 3.4028234663852886e38, 64: 1.7976931348623157e308}[width]
    value = Fraction(n) * Fraction(2) ** step
    if value > Fraction(limit):
        return sign * math.inf
    return sign * float(value)


def make(x: int | float, kind: str, width: int) -> V:
    if kind in ("f",):
        return V(round_float(float(x), width), width, "f")
    if kind == "bf":
        return V(bf16(float(x)), 16, "bf")
    if isinstance(x, float):
        raise Unsupported("implicit float to integer")
    return V(int(x) & ((1 << width) - 1), width, kind)


def bf16(x: float) -> int:
    b = round_float(x, 32)
    if b & 0x7FFFFFFF > 0x7F800000:
        return b >> 16 | 0x40
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16 & 0xFFFF


def u(x: int, width: int = 32) -> V:
    return V(x & ((1 << width) - 1), width, "u")


def mini(code: int, exp: int, man: int, bias: int, top_is_nan: bool) -> float:
    """A small float's value (OCP e4m3: only all-ones is NaN; e5m2: IEEE)."""
    sign = -1.0 if code >> (exp + man) & 1 else 1.0
    e, m = code >> man & ((1 << exp) - 1), code & ((1 << man) - 1)
    if e == (1 << exp) - 1:
        if not top_is_nan:
            return math.nan if m else sign * math.inf
        if m == (1 << man) - 1:
            return math.nan
    return sign * (math.ldexp((1 << man) + m, e - bias - man) if e else math.ldexp(m, 1 - bias - man))
