# SPDX-License-Identifier: Apache-2.0
"""Flag values as the base reads them: from words, and from what JSON and YAML make of words.

vLLM hands JSON arguments to pydantic, which takes ``"True"``, ``"off"`` or ``1`` for a boolean and
``"5"`` for a number. What is judged here must mean the same as what the server gets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from rocm_overlay.errors import OverlayError
from rocm_overlay.masking import mask_value
from rocm_overlay.recipe import Value

_TRUE = frozenset({"1", "t", "true", "y", "yes", "on"})
_FALSE = frozenset({"0", "f", "false", "n", "no", "off"})

_READABLE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
# As vLLM reads them: small letters count in thousands, capital ones in 1024s.
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compact_json(value: object) -> str:
    """``value`` as JSON without spaces, keys in their given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def text_of(value: object) -> str:
    """A value as it is passed: JSON for maps, lists and booleans, digits for numbers."""
    if isinstance(value, dict | list | bool) or value is None:
        return compact_json(value)
    return str(value)


def shown(name: str, value: object) -> str:
    """The value of the flag, key or variable ``name`` as it may be printed."""
    return text_of(mask_value(name, value))


def read_word(word: str) -> Value:
    """A flag's word as JSON reads it, the word itself where it is no JSON.

    NaN and the infinities, which JSON does not have, stay words.
    """
    value: Value | None = _json(word)
    return word if value is None else value


def read_key_word(word: str) -> Value | None:
    """The word of a dotted flag, as the base reads it: JSON with null, else a short number, else text."""
    if word.strip() == "null":
        return None
    value: Value | None = _json(word)
    if value is None:
        count = _count(word)
        return word if count is None else count
    return value


def _json(word: str) -> Any:
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _count(word: str) -> int | None:
    """A whole number, or one such as 16k or 1M; None for anything else."""
    readable = _READABLE.fullmatch(word.strip())
    if readable is None:
        try:
            return int(word)
        except ValueError:
            return None
    number, unit = readable.groups()
    scaled = float(number) * (_BINARY.get(unit) or _DECIMAL[unit])
    return int(scaled) if scaled == int(scaled) else None


def unreadable(flag: str, value: object, wanted: str) -> OverlayError:
    """The error for a value that cannot be judged."""
    return OverlayError(
        f"--{flag} cannot be read",
        seen="not set" if value is None else shown(flag, value),
        wanted=wanted,
        fix=f"correct --{flag}, or leave it to the recipe",
    )


def as_map(values: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """The JSON argument ``flag``, empty where it is not set.

    Raises:
        OverlayError: it is no map.
    """
    value = values.get(flag, {})
    if not isinstance(value, dict):
        raise unreadable(flag, value, "a JSON map")
    return value


def as_flag(values: Mapping[str, Any], flag: str, default: bool = False, root: str = "") -> bool:
    """A boolean as pydantic takes it; ``root`` names the argument that the key is in, for errors.

    Raises:
        OverlayError: neither true nor false.
    """
    value = values.get(flag)
    if value is None:
        return default
    text = str(value).strip().lower() if not isinstance(value, float) else f"{value:g}"
    if isinstance(value, bool | int | float | str) and text in _TRUE | _FALSE:
        return text in _TRUE
    raise unreadable(f"{root}.{flag}" if root else flag, value, "true or false")


def as_count(values: Mapping[str, Any], flag: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        OverlayError: no such number; or not set, with no default.
    """
    value = values.get(flag)
    if value is None:
        if default is None:
            raise unreadable(flag, None, "a number: preflight takes no default that may change")
        return default
    count = None if isinstance(value, bool | dict | list) else _count(text_of(value))
    if count is None or count < least:
        raise unreadable(flag, value, f"a whole number, {least} or more, or one such as 16k or 1M")
    return count


def as_share(values: Mapping[str, Any], flag: str) -> float:
    """A share above 0 and at most 1.

    Raises:
        OverlayError: no such number, or not set.
    """
    value = values.get(flag)
    try:
        share = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise unreadable(flag, value, "a number above 0, at most 1")
    return share
