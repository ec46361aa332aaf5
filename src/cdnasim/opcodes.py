# SPDX-License-Identifier: Apache-2.0
"""The opcode table, read from the core, with each row's operand forms parsed.

An operand form is role + class + dwords + type, as core/state.h states it. What the front end needs of a row:
how many operands, which are registers of which width, what type a constant has, and which modifiers are
legal.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .native import CLASSES, core

SUFFIXES = ("_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp")
FORM = re.compile(r"^([dsx])([vsa])(\d+)([uifhdbp])$")


@dataclass(frozen=True)
class Form:
    """One operand: ``role`` d / s / x, ``cls`` v / s / a or one of k, ku, l, i, w, r, o; ``width`` in dwords
    (0: the handler checks), ``type`` u, i, f, h (16 bit), p (packed 16 bit), d."""

    role: str
    cls: str
    width: int
    type: str


@dataclass(frozen=True)
class Op:
    """One row: its index in the core, name, alternative operand lists, legal modifiers, instruction class."""

    index: int
    name: str
    forms: tuple[tuple[Form, ...], ...]
    mods: frozenset[str]
    cls: str


def _form(text: str) -> Form:
    match = FORM.match(text)
    if match:
        return Form(match[1], match[2], int(match[3]), match[4])
    if text in ("k", "ku", "l", "i", "w", "r", "o", "o1"):
        return Form("s", text, 1 if text == "o1" else 2, "u")
    raise ValueError(f"operand form {text!r}")


@functools.cache
def table() -> dict[str, Op]:
    """Every opcode by mnemonic without its encoding suffix."""
    lib = core()
    rows: dict[str, Op] = {}
    for i in range(lib.cdna_num_ops()):
        name = lib.cdna_op_name(i).decode()
        lists = lib.cdna_op_operands(i).decode().split("|")
        forms = tuple(tuple(_form(x) for x in one.split(",") if x) for one in lists)
        mods = frozenset(lib.cdna_op_mods(i).decode().split())
        if name in rows:
            raise ValueError(f"opcode {name} has two rows")
        rows[name] = Op(i, name, forms, mods, CLASSES[lib.cdna_op_class(i)])
    return rows


def find(mnemonic: str) -> tuple[Op, str] | None:
    """The row of a printed mnemonic, and its encoding suffix ("" when it has none)."""
    rows = table()
    if mnemonic in rows:
        return rows[mnemonic], ""
    for suffix in SUFFIXES:
        if mnemonic.endswith(suffix) and mnemonic[: -len(suffix)] in rows:
            return rows[mnemonic[: -len(suffix)]], suffix
    return None
