# SPDX-License-Identifier: Apache-2.0
"""Every scalar and vector ALU opcode against the ISA manual's pseudocode, over edge values and random bits.

The pseudocode ships as text in the tinygrad wheel; ``pcode`` evaluates it. ``check(name)`` runs one opcode
and
returns how many lane results were compared, or raises ``Mismatch``; ``UNCHECKED`` opcodes have no usable
pseudocode and are listed with the reason.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from conformance_lists import UNCHECKED
from pcode import Env, Interpreter
from pcode_values import Unsupported, V, bf16, make, mini, round_float, u

from cdnasim.lab import Bench
from cdnasim.opcodes import Op, table

MASK64 = (1 << 64) - 1
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Mismatch(AssertionError):
    """The simulator and the pseudocode differ."""


def pseudocode_path() -> Path | None:
    """Where str_pcode.py is: an installed tinygrad, or $CDNASIM_TINYGRAD (an unpacked wheel)."""
    root = os.environ.get("CDNASIM_TINYGRAD")
    roots = [Path(root)] if root else []
    if spec := importlib.util.find_spec("tinygrad"):
        roots += [Path(p).parent for p in spec.submodule_search_locations or []]
    for folder in roots:
        path = folder / "tinygrad/runtime/autogen/amd/cdna/str_pcode.py"
        if path.exists():
            return path
    return None


@cache
def library_of(arch: str) -> dict[str, Callable[..., Any]]:
    return library(arch)


@cache
def pseudocode() -> dict[str, str]:
    """Opcode name -> text. The enum members are replaced by their names, so tinygrad itself is not
    imported."""
    path = pseudocode_path()
    if path is None:
        raise RuntimeError("no tinygrad wheel: pip install tinygrad, or set CDNASIM_TINYGRAD")

    class Names:
        def __getattr__(self, name: str) -> str:
            return name

    source = re.sub(r"^from tinygrad.*$", "", path.read_text(), flags=re.M)
    names = set(re.findall(r"\b(\w+Op)\.", source))
    module: dict[str, Any] = {n: Names() for n in names}
    # Keys of one name in several encodings collapse; the texts agree but for the destination's name.
    exec(compile(source, str(path), "exec"), module)
    out: dict[str, str] = {}
    for key, text in module["PCODE"].items():
        name = key.lower()
        name = name[:-4] if name.endswith(("_e32", "_e64")) else name
        out.setdefault(name, text)
    return out


# ---- functions that the pseudocode calls
def _f(width: int) -> Callable[[Callable[[float], float]], Callable[[V], V]]:
    def wrap(fn: Callable[[float], float]) -> Callable[[V], V]:
        return lambda x: make(fn(float(x.num)), "f", x.width if width == 0 else width)

    return wrap


def _integral(fn: Callable[[float], float]) -> Callable[[V], V]:
    def go(x: V) -> V:
        v = float(x.num)
        if not math.isfinite(v):
            return x
        out = make(float(fn(v)), "f", x.width)
        return (
            V(out.bits | (1 << (x.width - 1) if math.copysign(1, v) < 0 else 0), x.width, "f")
            if not out.num
            else out
        )

    return go


def fma(a: V, b: V, c: V) -> V:
    x, y, z = float(a.num), float(b.num), float(c.num)
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return make(x * y + z, "f", a.width)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return make(x * y + z, "f", a.width) if x * y == 0 or x * y == -z else make(0.0, "f", a.width)
    bits = round_float(exact, a.width)
    return V(bits | (1 << (a.width - 1) if exact < 0 and not bits else 0), a.width, "f")


def fields(x: V) -> tuple[int, int, int, int]:
    man = {16: 10, 32: 23, 64: 52}[x.width]
    exp = x.width - 1 - man
    return (
        x.bits >> (x.width - 1),
        x.bits >> man & ((1 << exp) - 1),
        x.bits & ((1 << man) - 1),
        (1 << exp) - 1,
    )


def is_nan(x: V) -> bool:
    _, e, m, top = fields(x)
    return e == top and m != 0


def is_signalling(x: V, quiet: bool = False) -> V:
    _, e, m, top = fields(x)
    return u(e == top and m != 0, 1) if quiet else u(0, 1)


def convert(kind: str, width: int) -> Callable[[V], V]:
    low, high = (0, (1 << width) - 1) if kind == "u" else (-(1 << (width - 1)), (1 << (width - 1)) - 1)

    def go(x: V) -> V:
        v = float(x.num)
        if math.isnan(v):
            return V(0, width, kind)
        if math.isinf(v):
            return V((high if v > 0 else low) & ((1 << width) - 1), width, kind)
        return V(min(max(math.trunc(v), low), high) & ((1 << width) - 1), width, kind)

    return go


def sext_from(x: V, bits: V) -> V:
    n = int(bits.num)
    v = x.bits & ((1 << n) - 1)
    if n and v >> (n - 1) & 1:
        v -= 1 << n
    return V(v & ((1 << x.width) - 1), x.width, "i")


def library(arch: str) -> dict[str, Callable[..., Any]]:
    """Functions by name. Signalling NaNs are looked up in the original bits by the caller (see
    ``run_lane``)."""
    fns: dict[str, Callable[..., Any]] = {
        "fma": fma,
        "floor": _integral(math.floor),
        "ceil": _integral(math.ceil),
        "trunc": _integral(math.trunc),
        "sqrt": lambda x: make(
            math.sqrt(x.num) if x.num >= 0 else (x.num if x.num == 0 else math.nan), "f", x.width
        ),
        "pow": lambda a, b: make(_pow(b.num), "f", b.width),
        "log2": lambda x: make(_log2(x.num), "f", x.width),
        "abs": lambda x: V(x.bits & ~(1 << (x.width - 1)), x.width, x.kind),
        "isNAN": lambda x: u(is_nan(x), 1),
        "isQuietNAN": lambda x: u(is_nan(x), 1),
        "isSignalNAN": lambda x: u(0, 1),
        "cvtToQuietNAN": lambda x: x,
        "exponent": lambda x: V(fields(x)[1], 32, "i"),
        "sign": lambda x: u(x.bits >> (x.width - 1), 1),
        "mantissa": lambda x: make(math.frexp(x.num)[0], "f", x.width),
        "ldexp": lambda x, n: make(math.ldexp(x.num, int(n.num)), "f", x.width),
        "isEven": lambda x: u(math.isfinite(x.num) and int(x.num) % 2 == 0, 1),
        "fract": lambda x: make(
            x.num - math.floor(x.num) if math.isfinite(x.num) else math.nan, "f", x.width
        ),
        "signext": lambda x: V(int(V(x.bits, x.width, "i").num) & MASK64, 64, "i"),
        "signext_from_bit": sext_from,
        "i32_to_f32": lambda x: V(round_float(Fraction(V(x.bits, 32, "i").num), 32), 32, "f"),
        "u32_to_f32": lambda x: V(round_float(Fraction(x.bits), 32), 32, "f"),
        "i32_to_f64": lambda x: make(float(V(x.bits, 32, "i").num), "f", 64),
        "u32_to_f64": lambda x: make(float(x.bits), "f", 64),
        "f32_to_i32": convert("i", 32),
        "f32_to_u32": convert("u", 32),
        "f64_to_i32": convert("i", 32),
        "f64_to_u32": convert("u", 32),
        "f32_to_f64": lambda x: make(x.num, "f", 64),
        "f64_to_f32": lambda x: make(x.num, "f", 32),
        "f32_to_f16": lambda x: make(x.num, "f", 16),
        "f16_to_f32": lambda x: make(x.num, "f", 32),
        "u16_to_f16": lambda x: make(float(x.bits & 0xFFFF), "f", 16),
        "i16_to_f16": lambda x: make(float(V(x.bits & 0xFFFF, 16, "i").num), "f", 16),
        "u8_to_u32": lambda x: u(x.bits),
        "u4_to_u32": lambda x: u(x.bits),
        "i8_to_i32": lambda x: V(int(V(x.bits & 0xFF, 8, "i").num) & 0xFFFFFFFF, 32, "i"),
        "f32_to_bf16": lambda x: V(bf16(x.num), 16, "bf"),
        "bf16_to_f32": lambda x: V(x.bits << 16, 32, "f"),
        "sin": None,
        "cos": None,
    }
    for name in [k for k, v in fns.items() if v is None]:
        del fns[name]
    if arch == "gfx950":
        fns["fp8_to_f32"] = lambda x: make(mini(x.bits & 0xFF, 4, 3, 7, True), "f", 32)
        fns["bf8_to_f32"] = lambda x: make(mini(x.bits & 0xFF, 5, 2, 15, False), "f", 32)
    if arch == "gfx950":
        sources = {"fp8": (8, 4, 3, 7, True), "bf8": (8, 5, 2, 15, False), "fp4": (4, 2, 1, 1, None)}
        for name, (bits, e, m, bias, top) in sources.items():
            for out in ("f32", "bf16", "f16"):

                def up(
                    x: V,
                    scale: V,
                    bits: int = bits,
                    e: int = e,
                    m: int = m,
                    bias: int = bias,
                    top: Any = top,
                    out: str = out,
                ) -> V:
                    code = x.bits & ((1 << bits) - 1)
                    value = FP4[code] if top is None else mini(code, e, m, bias, top)
                    factor = math.nan if scale.bits & 255 == 255 else 2.0 ** ((scale.bits & 255) - 127)
                    wide = make(value * factor, "f", 32)
                    return (
                        V(bf16(wide.num), 16, "bf")
                        if out == "bf16"
                        else make(wide.num, "f", 32 if out == "f32" else 16)
                    )

                fns[f"{name}_to_{out}_scale"] = up
    for width in (16, 32, 64):
        for kind in ("i", "u"):
            fns[f"v_max_{kind}{width}"] = lambda a, b: a if a.num >= b.num else b
            fns[f"v_min_{kind}{width}"] = lambda a, b: a if a.num < b.num else b
        fns[f"v_max_f{width}"] = lambda a, b: _pick(a, b, True)
        fns[f"v_min_f{width}"] = lambda a, b: _pick(a, b, False)
        fns[f"v_maximum_f{width}"] = lambda a, b: a if is_nan(a) else b if is_nan(b) else _pick(a, b, True)
        fns[f"v_minimum_f{width}"] = lambda a, b: a if is_nan(a) else b if is_nan(b) else _pick(a, b, False)
        for kind in ("i", "u", "f"):
            for what in ("max", "min"):
                two = fns[f"v_{what}_{kind}{width}"]
                fns[f"v_{what}3_{kind}{width}"] = lambda a, b, c, two=two: two(two(a, b), c)
    return fns


def _pick(a: V, b: V, larger: bool) -> V:
    if is_nan(a):
        return b
    if is_nan(b):
        return a
    if a.num == 0 and b.num == 0:
        negative_first = a.bits >> (a.width - 1)
        return (b if negative_first else a) if larger else (a if negative_first else b)
    return a if (a.num > b.num) == larger else b


def _pow(x: float) -> float:
    try:
        return 2.0**x
    except OverflowError:
        return math.inf


def _log2(x: float) -> float:
    if math.isnan(x) or x < 0:
        return math.nan
    return -math.inf if x == 0 else math.log2(x) if math.isfinite(x) else x


# ---- values to try
EDGES32 = [
    0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFF,
    0x800000, 0xFFFFFF,
    0x3F800000, 0xBF800000, 0x40000000, 0x3F000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF,
    0xFF7FFFFF,
    0x00000001, 0x80000001, 0x007FFFFF, 0x80800000, 0x4F000000, 0xCF000000, 0x4F800000, 0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF, 0x3C003C00, 0xBC007BFF, 0x7C00FC00, 0x04000001, 0x3FFF0000, 0x4B000000, 0x4B000001,
    0x3EFFFFFF,
]  # fmt: skip


def words(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """Edge values, random bits, and (for floats) moderate numbers."""
    out = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    pick = rng.random(count)
    edges = np.array(EDGES32, dtype=np.uint32)
    out = np.where(pick < 0.4, edges[rng.integers(0, len(edges), count)], out)
    if kind in ("f", "h", "p", "d"):
        moderate = (rng.standard_normal(count) * 8).astype(np.float32).view(np.uint32)
        if kind in ("h", "p"):
            halves = (rng.standard_normal(2 * count) * 8).astype(np.float16).view(np.uint16).astype(np.uint32)
            moderate = halves[:count] | halves[count:] << 16
        out = np.where(pick > 0.7, moderate, out)
    # Signalling NaNs: whether an operation quiets them depends on the mode; not part of this check.
    if kind == "f":
        bad = ((out & 0x7FC00000) == 0x7F800000) & ((out & 0x3FFFFF) != 0)
        out = np.where(bad, out | 0x400000, out)
    return out.astype(np.uint32)


# Opcodes whose result the manual gives only within an error: units in the last place allowed.
ULPS = (
    dict.fromkeys(("v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sqrt_f32", "v_exp_f32", "v_log_f32"), 1)
    | dict.fromkeys(("v_rcp_f16", "v_rsq_f16", "v_sqrt_f16", "v_exp_f16", "v_log_f16"), 1)
    | {"v_dot2_f32_f16": 4, "v_dot2_f32_bf16": 4, "v_dot2c_f32_bf16": 4}
)
FLUSHING = {"v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sqrt_f32", "v_exp_f32", "v_log_f32"}
NOT_ALU = re.compile(
    r"^(s_branch|s_cbranch|s_nop|s_set|s_get|s_mem|s_icache|s_sleep|s_barrier|s_end|s_wait|s_load|s_buffer|s_dcache)"
)


def alu_opcodes() -> list[str]:
    """Scalar and vector ALU opcodes of the table."""
    return sorted(n for n, op in table().items() if op.cls in ("salu", "valu") and not NOT_ALU.match(n))


def text_of(op: Op, forms: tuple[Any, ...]) -> tuple[str, list[tuple[str, int]]]:
    """An instruction with distinct registers, and where each operand is ("v" / "s" / "k", register)."""
    places: list[tuple[str, int]] = []
    parts = []
    next_v, next_s = 8, 8
    for form in forms:
        n = max(form.width, 1)

        def span(c, r, n=n):
            return f"{c}{r}" if n == 1 else f"{c}[{r}:{r + n - 1}]"

        if form.cls in ("k", "ku"):
            places.append(("k", 0))
            parts.append("{k}")
        elif form.cls == "s":
            next_s += -next_s % max(n, 2)
            places.append(("s", next_s))
            parts.append(span("s", next_s))
            next_s += n
        else:
            places.append(("v", next_v))
            parts.append(span("v", next_v))
            next_v += n + n % 2
    return ", ".join(parts), places


def run_lane(text: str, names: dict[str, Any], arch: str) -> dict[str, Any]:
    env = Env(names, library_of(arch))
    Interpreter(text, env).run()
    return env.names


def check(name: str, arch: str = "gfx950", rounds: int = 2, seed: int = 0) -> int:
    """Compare one opcode. Returns the number of compared results; raises ``Unsupported`` or ``Mismatch``."""
    op = table()[name]
    text = pseudocode().get(name)
    if text is None:
        raise Unsupported("no pseudocode")
    rng = np.random.default_rng(seed + sum(map(ord, name)))
    compared = 0
    scalar = op.cls == "salu"
    for round_ in range(rounds * (20 if scalar else 1)):
        forms = op.forms[0]
        operands, places = text_of(op, forms)
        immediate = int(rng.integers(-0x8000, 0x8000))
        table3 = int(rng.integers(0, 256))
        line = f"{name} {operands.format(k=immediate & 0xFFFF)}"
        if "bitop3" in op.mods:
            line += f" bitop3:{table3:#x}"
        bench = Bench(arch, [line], 0)
        kinds = {
            ("v", r + i): f.type
            for f, (c, r) in zip(forms, places, strict=True)
            if c == "v"
            for i in range(max(f.width, 1))
        }
        for (_, reg), kind in kinds.items():
            bench.vgprs[reg] = words(rng, 64, kind)
        for f, (_c, r) in zip(forms, places, strict=True):
            if f.type == "d":
                bench.vgprs[r + 1] = (rng.standard_normal(64) * 8).view(np.uint64) >> 32
        bench.sgprs[:100] = words(rng, 100, "u")
        bench.exec = MASK64 if round_ % 2 == 0 else int(rng.integers(1, MASK64, dtype=np.uint64))
        bench.vcc = int(rng.integers(0, MASK64, dtype=np.uint64))
        bench.scc = int(rng.integers(0, 2))
        before_v, before_s = bench.vgprs.copy(), bench.sgprs.copy()
        before = (bench.exec, bench.vcc, bench.scc)
        bench.step()
        lanes = [0] if scalar else [i for i in range(64) if before[0] >> i & 1][:: 1 if round_ == 0 else 3]
        compared += compare(
            op, text, forms, places, bench, before_v, before_s, before, lanes, immediate, table3, arch
        )
    return compared


def gather(where: tuple[str, int], width: int, lane: int, v: np.ndarray, s: np.ndarray) -> int:
    value = 0
    for i in range(max(width, 1)):
        value |= int(v[where[1] + i][lane] if where[0] == "v" else s[where[1] + i]) << (32 * i)
    return value


def compare(
    op: Op,
    text: str,
    forms: Any,
    places: Any,
    bench: Bench,
    v: np.ndarray,
    s: np.ndarray,
    before: Any,
    lanes: list[int],
    immediate: int,
    table3: int,
    arch: str,
) -> int:
    exec_, vcc, scc = before
    dests = [i for i, f in enumerate(forms) if f.role == "d"]
    scalar = op.cls == "salu"
    mask_dest = not scalar and forms and forms[0].role == "d" and forms[0].cls == "s"
    count = 0
    for lane in lanes:
        names: dict[str, Any] = {
            "laneId": V(lane, 32, "i"),
            "SCC": u(scc, 1),
            "EXEC": u(exec_, 64),
            "VCC": u(vcc, 64),
            "M0": u(0),
        }
        sources = [i for i, f in enumerate(forms) if f.role == "s"]
        carry_in = (
            not scalar and len(sources) == 3 and forms[sources[2]].cls == "s" and forms[sources[2]].width == 2
        )
        if scalar and forms[0].role == "x":
            names["D0"] = u(gather(places[0], forms[0].width, lane, v, s), 32 * forms[0].width)
        if not scalar and forms[0].role == "x":
            names["D0"] = u(gather(places[0], forms[0].width, lane, v, s), 32 * max(forms[0].width, 1))
        for n, i in enumerate(sources):
            f = forms[i]
            if f.cls in ("k", "ku"):
                names[f"S{n}"] = names["SIMM16"] = u(immediate & 0xFFFF, 16)
            else:
                names[f"S{n}"] = u(gather(places[i], f.width, lane, v, s), 32 * max(f.width, 1))
        if carry_in:
            names["VCC"] = names["S2"]
        for i in dests[:2]:
            if not mask_dest or i:
                old = gather(places[i], forms[i].width, lane, v, s) if scalar else 0
                names.setdefault(f"D{dests.index(i)}", u(old, 32 * max(forms[i].width, 1)))
        if forms and forms[0].cls != "s":
            names["OLD"] = u(gather(places[0], 1, lane, v, s))
        if mask_dest:
            names["D0"] = u(0, 64)
        names["OPSEL"] = u(0, 4)
        names["OPSEL_HI"] = u(7, 3)
        if "bitop3" in op.mods:
            names["INST_TABLE"] = u(table3, 8)
            text = re.sub(r"TTBL = \{[^}]*\}", "TTBL = INST_TABLE", text)
        text_ = (
            text.replace("WAVE_MODE.IEEE", "1'1U")
            .replace("VGPR[laneId][VDST.u32]", "D0")
            .replace("VGPR[laneId][SRC0.u32]", "S0")
        )
        text_ = re.sub(r"(prev_mode = ROUND_MODE|ROUND_MODE = \w+);?", "", text_)
        text_ = text_.replace("SDWA_SRC0_SEL[1 : 0] == WORD1.b2", "1'0U").replace(
            "SDWA_SRC0_SEL[1 : 0]", "2'0U"
        )
        after = run_lane(text_, names, arch)
        for n, i in enumerate([*dests, *([0] if forms and forms[0].role == "x" else [])]):
            f = forms[i]
            if mask_dest and i == 0:
                want = after["D0"].bits >> lane & 1
                got = gather(places[0], 2, lane, bench.vgprs, bench.sgprs) >> lane & 1
                if want != got:
                    raise Mismatch(
                        f"{op.name} lane {lane}: bit {got}, the manual gives {want}; sources {show(names)}"
                    )
            elif not scalar and f.cls == "s":
                want = (
                    (after.get("D1", after["VCC"]).bits & 1)
                    if "D1" in text
                    else after["VCC"].bits >> lane & 1
                )
                got = gather(places[i], 2, lane, bench.vgprs, bench.sgprs) >> lane & 1
                if want != got:
                    raise Mismatch(
                        f"{op.name} lane {lane}: carry {got}, the manual gives {want}; sources {show(names)}"
                    )
            else:
                key = (
                    "D"
                    if "D" in after
                    and "D0" not in re.findall(r"\bD0\b", text)
                    and "D" in re.findall(r"\bD\b", text)
                    else f"D{n}"
                )
                got = gather(places[i], f.width, lane, bench.vgprs, bench.sgprs)
                same(op.name, lane, got, after[key].bits, f, names)
            count += 1
        if scalar:
            if bench.scc != after["SCC"].bits & 1:
                raise Mismatch(
                    f"{op.name}: SCC {bench.scc}, the manual gives {after['SCC'].bits & 1}; {show(names)}"
                )
            if "EXEC" in text and bench.exec != after["EXEC"].bits:
                raise Mismatch(
                    f"{op.name}: EXEC {bench.exec:#x}, the manual gives {after['EXEC'].bits:#x}; {show(names)}"  # noqa: E501
                )
            count += 1
    return count


def show(names: dict[str, Any]) -> str:
    return ", ".join(
        f"{k}={v.bits:#x}" for k, v in names.items() if re.match(r"[SD]\d$", k) and isinstance(v, V)
    )


def same(name: str, lane: int, got: int, want: int, form: Any, names: dict[str, Any]) -> None:
    width = 32 * max(form.width, 1)
    want &= (1 << width) - 1
    if got == want:
        return
    pieces = {"f": (32, 32), "h": (32, 16), "p": (16, 16), "d": (64, 64)}.get(form.type)
    if pieces:
        step, size = pieces
        ok = True
        for low in range(0, width, step):
            a, b = (V(x >> low & ((1 << size) - 1), size, "f") for x in (got, want))
            if a.bits == b.bits or (is_nan(a) and is_nan(b)):
                continue
            if name in FLUSHING and ((abs(b.num) < 2.0**-126 and a.num == 0) or flushed(name, names, a)):
                continue
            if name.startswith("v_rndne") and a.num == 0 == b.num:
                continue  # the text loses the sign of a zero that IEEE keeps
            if name == "v_rndne_f32" and a.bits == names["S0"].bits and abs(a.num) >= 2.0**23:
                continue  # an integer already; the text's x + 0.5 rounds
            ok &= name in ULPS and abs(a.bits - b.bits) <= ULPS[name]
        if form.type == "h" and got >> 16 not in (0, names["OLD"].bits >> 16):
            ok = False
        if ok:
            return
    raise Mismatch(f"{name} lane {lane}: {got:#x}, the manual gives {want:#x}; {show(names)}")


def flushed(name: str, names: dict[str, Any], got: V) -> bool:
    """A denormal source taken for zero."""
    x = V(names["S0"].bits & 0xFFFFFFFF, 32, "f")
    if not 0 < abs(x.num) < 2.0**-126:
        return False
    sign = math.copysign(1, x.num)
    want = {
        "v_rcp_f32": sign * math.inf,
        "v_rcp_iflag_f32": sign * math.inf,
        "v_rsq_f32": sign * math.inf,
        "v_sqrt_f32": sign * 0.0,
        "v_exp_f32": 1.0,
        "v_log_f32": -math.inf,
    }[name]
    return got.num == want or (math.isnan(want) and math.isnan(got.num))


def main() -> int:
    """Print every ALU opcode's result and the list of those without a check."""
    good = bad = 0
    unchecked: list[tuple[str, str]] = []
    for name in alu_opcodes():
        if name in UNCHECKED:
            unchecked.append((name, UNCHECKED[name]))
            continue
        try:
            started = time.monotonic()
            check(name)
            good += 1
            if time.monotonic() - started > 2:
                print(f"slow: {name} {time.monotonic() - started:.1f} s")
        except Unsupported as why:
            unchecked.append((name, f"pseudocode not evaluated: {why}"))
        except Mismatch as why:
            bad += 1
            print("MISMATCH", why)
    print(f"{good} opcodes agree with the manual, {bad} do not, {len(unchecked)} are not checked this way:")
    for name, why in unchecked:
        print(f"  {name}: {why}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
