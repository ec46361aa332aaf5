# SPDX-License-Identifier: Apache-2.0
"""An interpreter of the ISA manual's instruction pseudocode, for lanes one at a time.

It knows nothing of the simulator: values are bit strings with a width and a kind (u, i, f, bf or b), and
every operation is computed in Python integers, fractions or doubles. Statements and expressions are parsed
from the text as the manual prints it. Anything it does not know raises ``Unsupported``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from pcode_values import (
    Unsupported,
    V,
    bf16,
    make,
    round_float,
    u,
)

TOKEN = re.compile(
    r"\s*(?:(//[^\n]*)|(\d+'0x[0-9a-fA-F]+|\d+'\d+[UIB]?|\d+'[UIFBubf]+|0x[0-9a-fA-F]+(?:U?LL|U)?|\d+\.\d+F?|\d+(?:U?LL|U)?)"
    r"|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\|=|&=|<>|[-+*/%&|^~!<>=?:;,.(){}\[\]]))"
)


@dataclass
class Env:
    """Names the text may use: S0.. D0.., VCC, SCC, EXEC, M0, laneId, memory, registers of other lanes."""

    names: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Break(Exception):
    pass


class Return(Exception):
    def __init__(self, value: V) -> None:
        self.value = value


@functools.cache
def tokenize(text: str) -> list[str]:
    """The text's tokens, comments left out. Callers do not change the list."""
    out: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match or match.end() == at:
            raise Unsupported(f"token at {text[at : at + 20]!r}")
        at = match.end()
        if match[1] is None:
            out.append(match[0].strip())
    return out


TYPE = re.compile(r"^(u|i|f|b|bf)(\d+)$")


class Interpreter:
    """Runs one statement list over an ``Env``. Variables hold V; register names are pre-set V of their
    width."""

    def __init__(self, text: str, env: Env) -> None:
        self.t, self.p, self.env = tokenize(text), 0, env
        self.lambdas: dict[str, tuple[list[str], int]] = {}
        self.live = True

    # ---- tokens
    def peek(self, k: int = 0) -> str:
        return self.t[self.p + k] if self.p + k < len(self.t) else ""

    def take(self, want: str | None = None) -> str:
        tok = self.peek()
        if want is not None and tok != want:
            raise Unsupported(f"expected {want!r}, found {tok!r}")
        self.p += 1
        return tok

    # ---- statements
    def run(self) -> None:
        self.block(())

    def block(self, ends: tuple[str, ...]) -> None:
        while self.p < len(self.t) and self.peek() not in ends:
            if self.peek() == ";":
                self.take()
                continue
            self.statement()

    def statement(self) -> None:
        tok = self.peek()
        if tok == "if":
            self.if_()
        elif tok == "for":
            self.for_()
        elif tok == "declare":
            self.declare()
        elif tok == "break":
            self.take()
            if self.live:
                raise Break
        elif tok == "return":
            self.take()
            value = self.expr()
            if self.live:
                raise Return(value)
        elif tok == "{":
            self.assign_concat()
        elif self.peek(1) == "=" and self.peek(2) == "lambda":
            self.lambda_()
        else:
            self.assign()

    def if_(self) -> None:
        self.take("if")
        outer, done = self.live, False
        while True:
            cond = self.expr()
            self.take("then")
            hit = outer and not done and bool(cond.bits)
            self.live = hit
            self.block(("elsif", "else", "endif"))
            done |= hit
            tok = self.take()
            if tok == "elsif":
                self.live = outer and not done
                continue
            if tok == "else":
                self.live = outer and not done
                self.block(("endif",))
                self.take("endif")
            break
        self.live = outer

    def for_(self) -> None:
        self.take("for")
        name = self.take()
        self.take("in")
        first, _, last = self.expr(), self.take(":"), self.expr()
        self.take("do")
        start, outer = self.p, self.live
        try:
            for i in range(int(first.num), int(last.num) + 1):
                self.p = start
                self.env.names[name] = V(i & 0xFFFFFFFF, 32, "i")
                self.block(("endfor",))
        except Break:
            pass
        self.p, self.live = start, False
        depth = 0
        while True:
            tok = self.take()
            depth += tok == "for"
            if tok == "endfor":
                if not depth:
                    break
                depth -= 1
        self.live = outer

    def declare(self) -> None:
        self.take("declare")
        name = self.take()
        self.take(":")
        match = re.match(r"(\d+)'([UIFB])", self.take())
        if not match:
            raise Unsupported("declaration")
        count = 0
        if self.peek() == "[":
            self.take()
            count = int(self.expr().num)
            self.take("]")
        zero = V(0, int(match[1]), "f" if match[2] == "F" else match[2].lower().replace("b", "u"))
        if name not in self.env.names or count:
            self.env.names[name] = [zero] * count if count else zero

    def lambda_(self) -> None:
        name = self.take()
        self.take("=")
        self.take("lambda")
        self.take("(")
        params = []
        while self.peek() != ")":
            if self.peek() == ",":
                self.take()
            params.append(self.take())
        self.take(")")
        self.take("(")
        self.lambdas[name] = (params, self.p)
        depth = 1
        while depth:
            tok = self.take()
            depth += tok == "("
            depth -= tok == ")"

    def call_lambda(self, name: str, args: list[V]) -> V:
        params, start = self.lambdas[name]
        saved_p, saved = self.p, dict(self.env.names)
        self.env.names.update(zip(params, args, strict=True))
        self.p = start
        try:
            # A body is an expression, or statements that return.
            if self.peek() in ("declare", "if", "for"):
                self.block((")",))
                raise Unsupported("lambda without return")
            return self.expr()
        except Return as r:
            return r.value
        finally:
            self.p = saved_p
            self.env.names.clear()
            self.env.names.update(saved)

    def assign_concat(self) -> None:
        self.take("{")
        targets = [self.lvalue()]
        while self.peek() == ",":
            self.take()
            targets.append(self.lvalue())
        self.take("}")
        self.take("=")
        value = self.expr()
        if self.live:
            low = 0
            for target in reversed(targets):
                width = target[1]
                target[0](V(value.bits >> low & ((1 << width) - 1), width, "u"))
                low += width

    def assign(self) -> None:
        targets = [self.lvalue()]
        op = self.take()
        if op not in ("=", "+=", "-=", "|=", "&="):
            raise Unsupported(f"statement with {op!r}")
        while op == "=":
            mark = self.p
            try:
                target = self.lvalue()
                if self.peek() == "=":
                    self.take()
                    targets.append(target)
                    continue
            except Unsupported:
                pass
            self.p = mark
            break
        value = self.expr()
        if not self.live:
            return
        if op != "=":
            value = self.binary(op[0], targets[0][2](), value)
        for store, _, _ in targets:
            store(value)

    def lvalue(self) -> tuple[Callable[[V], None], int, Callable[[], V]]:
        """(store, width, load) of name[.type][[hi : lo]][.type]."""
        name = self.take()
        if not re.match(r"[A-Za-z_]\w*$", name):
            raise Unsupported(f"lvalue {name}")
        names = self.env.names
        element: int | None = None
        low, width, kind = 0, None, None
        current = names.get(name)
        if name == "VGPR" or name == "MEM":
            raise Unsupported(name)
        while self.peek() in (".", "["):
            if self.take() == ".":
                match = TYPE.match(self.take())
                if not match:
                    raise Unsupported("field")
                kind = match[1].replace("b", "u") if match[1] != "bf" else "bf"
                width = int(match[2]) if width is None else min(width, int(match[2]))
            else:
                first = self.expr()
                if self.peek() == ":":
                    self.take()
                    second = self.expr()
                    self.take("]")
                    low += int(second.num)
                    width = int(first.num) - int(second.num) + 1
                elif isinstance(current, list):
                    self.take("]")
                    element = int(first.num)
                else:
                    self.take("]")
                    low += int(first.num)
                    width, kind = 1, "u"
        whole = (current[element] if element is not None else None) if isinstance(current, list) else current
        full = whole.width if isinstance(whole, V) else None

        def load() -> V:
            if whole is None:
                raise Unsupported(f"{name} before its first value")
            w = width or full or 32
            return V(whole.bits >> low & ((1 << w) - 1), w, kind or whole.kind)

        def store(value: V) -> None:
            if value.kind == "cat":
                value = V(value.bits, value.width, "u")
            old = names.get(name)
            if isinstance(old, list):
                old = old[element or 0]
            if old is None:
                w = max(low + (width or value.width), 64 if width and (low or width < 32) else 0)
                old = V(0, w, kind or value.kind)
            w = width or old.width
            k = kind or (old.kind if width is None and low == 0 and name in ("D0", "D1", "D") else value.kind)
            if k in ("f", "bf") and value.kind in ("f", "bf") and (value.width, value.kind) != (w, k):
                value = make(value.num, k, w)
            elif k == "f" and value.kind in ("u", "i") and width is not None and value.width != w:
                value = make(float(value.num), "f", w)
            elif value.kind == "i" and k != "f":
                value = V(int(value.num) & ((1 << w) - 1), w, k)
            mask = (1 << w) - 1
            bits = (old.bits & ~(mask << low)) | (value.bits & mask) << low
            new = V(bits, old.width, k if w == old.width else old.kind)
            if isinstance(names.get(name), list):
                names[name] = [*names[name]]
                names[name][element or 0] = new
            else:
                names[name] = new

        return store, width or full or 32, load

    # ---- expressions, by precedence
    LEVELS = (
        ("||",),
        ("&&",),
        ("|",),
        ("^",),
        ("&",),
        ("==", "!=", "<>"),
        ("<", ">", "<=", ">="),
        ("<<", ">>"),
        ("+", "-"),
        ("*", "/", "%"),
    )

    def expr(self) -> V:
        cond = self.level(0)
        if self.peek() != "?":
            return cond
        self.take()
        yes = self.expr()
        self.take(":")
        no = self.expr()
        return yes if cond.bits else no

    def level(self, n: int) -> V:
        if n == len(self.LEVELS):
            return self.power()
        left = self.level(n + 1)
        while self.peek() in self.LEVELS[n]:
            op = self.take()
            left = self.binary(op, left, self.level(n + 1))
        return left

    def power(self) -> V:
        base = self.unary()
        if self.peek() == "**":
            self.take()
            exp = self.power()
            if base.kind == "f":
                return V(self.pow2(base, exp), 0, "pow")
            if not 0 <= int(exp.num) < 64:
                raise Unsupported("integer power")
            return V(int(base.num) ** int(exp.num), 64, "u")
        return base

    @staticmethod
    def pow2(base: V, exp: V) -> Any:
        # Past these the product is zero or infinite in every format.
        return Fraction(base.num) ** max(-3000, min(3000, int(exp.num)))

    def unary(self) -> V:
        tok = self.peek()
        if tok in ("-", "+", "~", "!"):
            self.take()
            x = self.unary()
            if tok == "+":
                return x
            if tok == "!":
                return u(x.bits == 0, 1)
            if tok == "~":
                return V(~x.bits & ((1 << x.width) - 1), x.width, x.kind)
            if x.kind in ("f", "bf"):
                return V(x.bits ^ 1 << (x.width - 1), x.width, x.kind)
            return V(-x.bits & ((1 << x.width) - 1), x.width, "i")
        return self.postfix(self.primary())

    def postfix(self, x: Any) -> V:
        while self.peek() in (".", "["):
            if self.take() == ".":
                name = self.take()
                match = TYPE.match(name)
                if match:
                    width = int(match[2])
                    kind = "bf" if match[1] == "bf" else match[1].replace("b", "u")
                    if (kind == "i" and width not in (1, 4, 8, 16, 24, 32, 64)) or (
                        x.width < width and kind == "f"
                    ):
                        raise Unsupported(name)
                    x = V(x.bits & ((1 << width) - 1), width, kind)
                elif name in ("fp8", "bf8", "fp4", "u4"):
                    x = V(x.bits, x.width, name)
                else:
                    raise Unsupported(f"field {name}")
            else:
                first = self.expr()
                if self.peek() == ":":
                    self.take()
                    low = int(self.expr().num)
                    self.take("]")
                    width = int(first.num) - low + 1
                    if width <= 0:  # [0 : 31] is the bits in reverse
                        top, low, width = low, int(first.num), 2 - width
                        x = V(sum((x.bits >> (top - i) & 1) << i for i in range(width)), width, "u")
                    else:
                        x = V(x.bits >> low & ((1 << width) - 1), width, "u")
                else:
                    self.take("]")
                    i = int(first.num)
                    x = x[i] if isinstance(x, list) else V(x.bits >> i & 1, 1, "u")
        return x

    def primary(self) -> Any:
        tok = self.take()
        if tok == "(":
            x = self.expr()
            self.take(")")
            return x
        if tok == "{":
            parts = [self.expr()]
            while self.peek() == ",":
                self.take()
                parts.append(self.expr())
            self.take("}")
            bits = width = 0
            for part in parts:
                bits = bits << part.width | part.bits
                width += part.width
            return V(bits, width, "cat")
        if match := re.match(r"^(\d+)'([UIFB])$", tok):
            self.take("(")
            x = self.expr()
            self.take(")")
            return self.cast(x, match[2], int(match[1]))
        if match := re.match(r"^(\d+)'(0x[0-9a-fA-F]+|\d+)[UIB]?$", tok):
            return u(int(match[2], 0), int(match[1]))
        if re.match(r"^\d+\.\d+", tok):
            return make(float(tok.rstrip("F")), "f", 32 if tok.endswith("F") else 64)
        if re.match(r"^(0x|\d)", tok):
            match = re.match(r"^(0x[0-9a-fA-F]+|\d+)(U?LL|U)?$", tok)
            assert match
            return V(
                int(match[1], 0),
                64 if match[2] in ("LL", "ULL") else 32,
                "u" if match[2] in ("U", "ULL") else "i",
            )
        return self.name(tok)

    @staticmethod
    def cast(x: V, kind: str, width: int) -> V:
        if kind == "B":
            return V(x.bits & ((1 << width) - 1), width, "u")
        if kind == "F" and x.kind == "cat":  # bits put together are reinterpreted
            return V(x.bits, width, "f")
        if kind == "F":
            if x.kind in ("f", "bf", "pow"):
                return V(round_float(x.bits if x.kind == "pow" else x.num, width), width, "f")
            if width == 32 and x.bits in (0xFFC00000,):
                return V(x.bits, 32, "f")
            return V(round_float(Fraction(int(x.num)), width), width, "f")
        if x.kind in ("f", "bf"):
            raise Unsupported("float to integer cast")
        return V(int(x.num) & ((1 << width) - 1), width, kind.lower())

    def name(self, tok: str) -> Any:
        names = self.env.names
        if self.peek() == "(" and (tok in self.env.functions or tok in self.lambdas):
            self.take()
            args = []
            while self.peek() != ")":
                if self.peek() == ",":
                    self.take()
                args.append(self.expr())
            self.take(")")
            if tok in self.lambdas:
                return self.call_lambda(tok, args)
            return self.env.functions[tok](*args)
        if tok in names:
            value = names[tok]
            if isinstance(value, list) and self.peek() != "[":
                raise Unsupported(f"array {tok}")
            return value
        if tok == "INF":
            return (
                V(0x7FF0 << 48, 64, "f")
                if self.peek() != "."
                else self.special(0x7F800000, 0x7FF0 << 48, 0x7C00)
            )
        if tok == "NAN":
            return self.special(0x7FC00000, 0x7FF8 << 48, 0x7E00)
        raise Unsupported(f"name {tok}")

    def special(self, f32: int, f64: int, f16: int) -> V:
        self.take(".")
        kind = self.take()
        return {"f32": V(f32, 32, "f"), "f64": V(f64, 64, "f"), "f16": V(f16, 16, "f")}[kind]

    def binary(self, op: str, a: V, b: V) -> V:
        if op in ("&&", "||"):
            return u(bool(a.bits) and bool(b.bits) if op == "&&" else bool(a.bits) or bool(b.bits), 1)
        if a.kind == "pow" or b.kind == "pow":
            return self.scaled(op, a, b)
        a, b = (V(x.bits, x.width, "u") if x.kind == "cat" else x for x in (a, b))
        floats = a.kind in ("f", "bf") or b.kind in ("f", "bf")
        if op in ("==", "!=", "<>", "<", ">", "<=", ">="):
            x, y = a.num, b.num
            result = {
                "==": x == y,
                "!=": x != y,
                "<>": x < y or x > y,
                "<": x < y,
                ">": x > y,
                "<=": x <= y,
                ">=": x >= y,
            }[op]
            return u(result, 1)
        if floats:
            kind = "bf" if "bf" in (a.kind, b.kind) and "f" not in (a.kind, b.kind) else "f"
            width = max(x.width for x in (a, b) if x.kind in ("f", "bf"))
            return self.float_op(op, float(a.num), float(b.num), kind, width)
        width = max(a.width, b.width)
        kind = "u" if "u" in (a.kind, b.kind) and not (op in ("<<", ">>") and a.kind == "i") else "i"
        x, y = int(a.num), int(b.num)
        if op in ("<<", ">>"):
            width, kind = max(a.width, 32), a.kind
            return V((x << y if op == "<<" else x >> y) & ((1 << width) - 1), width, kind)
        value = {"+": x + y, "-": x - y, "*": x * y, "&": x & y, "|": x | y, "^": x ^ y}.get(op)
        if value is None:
            if y == 0:
                raise Unsupported("division by zero")
            value = x // y if op == "/" else x % y
        return V(value & ((1 << width) - 1), width, kind)

    @staticmethod
    def scaled(op: str, a: V, b: V) -> V:
        """f32 * 2 ** n, rounded once."""
        x, p = (a, b) if b.kind == "pow" else (b, a)
        if op != "*" or x.kind != "f":
            raise Unsupported("power of two outside a product")
        if not math.isfinite(x.num) or x.num == 0:
            return x
        out = round_float(Fraction(x.num) * p.bits, x.width)
        if out == 0 and math.copysign(1, x.num) < 0:
            out = 1 << (x.width - 1)
        return V(out, x.width, "f")

    @staticmethod
    def float_op(op: str, x: float, y: float, kind: str, width: int) -> V:
        if op == "/":
            if y == 0:
                value = (
                    math.nan if x == 0 or math.isnan(x) else math.copysign(math.inf, x) * math.copysign(1, y)
                )
            else:
                value = x / y
        elif op in "+-*":
            if math.isfinite(x) and math.isfinite(y):
                exact = {
                    "+": Fraction(x) + Fraction(y),
                    "-": Fraction(x) - Fraction(y),
                    "*": Fraction(x) * Fraction(y),
                }[op]
                if exact or width == 64:
                    value = exact if exact else {"+": x + y, "-": x - y, "*": x * y}[op]
                else:
                    value = {"+": x + y, "-": x - y, "*": x * y}[op]
            else:
                value = {"+": x + y, "-": x - y, "*": x * y}[op]
        else:
            raise Unsupported(f"{op} of floats")
        if kind == "bf":
            return V(bf16(float(value)), 16, "bf")
        if isinstance(value, Fraction):
            negative = value < 0
            bits = round_float(value, width)
            return V(bits | (1 << (width - 1) if negative and not bits else 0), width, "f")
        return V(round_float(value, width), width, "f")
