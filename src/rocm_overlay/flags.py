# SPDX-License-Identifier: Apache-2.0
"""The flags of the base's ``vllm serve`` in every spelling that its parser takes.

vLLM's parser knows one-dash names, several long names of one flag, ``--no-`` and ``--disable-``
forms, underscores for dashes, dotted keys of JSON arguments, and it completes a flag that is cut
short. A spelling that is not understood here would reach the server past the recipe's own value and
past preflight, so each is either turned into the flag's one name, or refused. The table of
spellings is the pinned base's own; ``rocm-overlay recipes flags --write`` makes it anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rocm_overlay.errors import OverlayError

TABLE_NAME = "serve_flags.json"
# The parser turns -O3, -O=3 and -O 3 into this flag before it reads anything.
LEVEL_WORD = "-O"
LEVEL_KEY = "optimization-level"
HELP_KEY = "help"

NONE, ONE, MAYBE, MANY, UNKNOWN = "0", "1", "?", "+", ""


@dataclass(frozen=True)
class Spelling:
    """What one written flag means.

    Attributes:
        key: the flag's one name, without dashes.
        on: False where this spelling unsets the flag.
        values: how many words it takes: ``NONE``, ``ONE``, ``MAYBE`` (one or none), ``MANY`` (one or
            more), ``UNKNOWN`` for a flag that is not in the table.
        path: keys behind the dots, outermost first.
        inline: the value behind ``=``, None without one.
    """

    key: str
    on: bool = True
    values: str = UNKNOWN
    path: tuple[str, ...] = ()
    inline: str | None = None


@functools.cache
def flag_table() -> Mapping[str, Mapping[str, Any]]:
    """The pinned base's flags: by name, the words that set and unset each, and its values."""
    text = resources.files("rocm_overlay").joinpath(TABLE_NAME).read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


@functools.cache
def _spellings() -> Mapping[str, Spelling]:
    found: dict[str, Spelling] = {}
    for key, own in flag_table().items():
        found.update({word: Spelling(key, True, own["values"]) for word in own["on"]})
        found.update({word: Spelling(key, False, own["values"]) for word in own["off"]})
    return found


def table_text(flags: Mapping[str, Mapping[str, Any]]) -> str:
    """``flags`` as the table's file, a line each."""
    lines = [f"{json.dumps(key)}: {json.dumps(own)}" for key, own in sorted(flags.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_flag(word: str) -> Spelling:
    """What ``word``, a flag as a user writes it, means to the base's parser.

    Raises:
        OverlayError: a flag that is cut short. vLLM would complete it.
    """
    name, equals, text = word.partition("=")
    inline = text if equals else None
    if name.startswith(LEVEL_WORD):
        return Spelling(LEVEL_KEY, True, ONE, (), inline if equals else name[2:] or None)
    root, dot, path = name.partition(".")
    if root.startswith("--"):
        root = "--" + root[2:].replace("_", "-")
    known = _spellings().get(root)
    if known is None:
        _refuse_short(root)
        key = root.lstrip("-")
        known = Spelling(key.removeprefix("no-"), on=not key.startswith("no-"))
        if dot or equals:
            known = Spelling(key)
    keys = tuple(path.split(".")) if dot else ()
    return Spelling(known.key, known.on, ONE if keys else known.values, keys, inline)


def key_of(name: str) -> Spelling:
    """What a recipe's ``args`` key means: the long flag of that name."""
    return read_flag(f"--{name}")


def completions(flag: str) -> list[str]:
    """The flags that the parser may take ``flag`` for when it is cut short: all that begin with it.

    One dash and a flag of one letter with more behind it are that flag and its value.
    """
    root = flag.partition("=")[0].partition(".")[0].replace("_", "-")
    near = sorted({word for word in _spellings() if word.startswith(root)})
    return [*near, root[:2]] if not root.startswith("--") and root[:2] in _spellings() else near


def _refuse_short(root: str) -> None:
    near = completions(root)
    if not near:
        return
    shown = ", ".join(near[:4]) + (", ..." if len(near) > 4 else "")
    raise OverlayError(
        f"{root} is not the whole name of a flag",
        seen=root,
        wanted=f"one of {shown}" if len(near) > 1 else shown,
        fix="write the flag out: cut short, it passes the recipe's own value and the preflight by",
    )
