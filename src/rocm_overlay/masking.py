# SPDX-License-Identifier: Apache-2.0
"""What must not be printed: values whose name says secret, and words that are a token by their form.

Names are judged by pattern, wherever they stand: a flag in any spelling, a key inside a JSON
argument, an environment variable. Too much hidden costs a look elsewhere, too little a credential.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rocm_overlay.flags import completions

HIDDEN = "***"

# Counted tokens, tokenizers, thresholds and the path of a key file are no secrets.
_SECRET_NAME = re.compile(
    r"token(?!s|i[sz]|[-_](?:threshold|ids?\b))|key(?!file|word|board)|secret|passw|passphrase|credential(?!s$)",
    re.IGNORECASE,
)
# Tokens of the Hugging Face Hub and keys of the common API form.
_SECRET_FORM = re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9]{6,}(?![/\w-])")


def is_secret(name: str) -> bool:
    """Whether a value of this name is a secret, by the name's looks."""
    return _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """``text`` without the words that are a token by their form."""
    return _SECRET_FORM.sub(HIDDEN, text)


def mask_value(name: str, value: object) -> object:
    """``value`` of the flag, key or variable ``name`` as it may be printed, maps key by key.

    A flag that is only on or off hides nothing.
    """
    if is_secret(name) and not isinstance(value, bool) and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: mask_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value("", inner) for inner in value]
    return _mask_word(value) if isinstance(value, str) else value


def _mask_word(word: str) -> str:
    if word.lstrip().startswith(("{", "[")):
        try:
            inner = json.loads(word)
        except ValueError:
            # Something like JSON, which cannot be taken apart, with the name of a secret in it.
            return HIDDEN if is_secret(word) else mask_text(word)
        masked = mask_value("", inner)
        return word if masked == inner else json.dumps(masked, separators=(",", ":"), ensure_ascii=False)
    return mask_text(word)


def mask_words(words: Sequence[str]) -> list[str]:
    """A command line's words as they may be printed: each flag's values judged by its name."""
    shown: list[str] = []
    hide = False
    for word in words:
        flag, equals, inline = word.partition("=")
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            # Cut short, a flag may yet be meant for one with a secret.
            hide = any(is_secret(name) for name in (flag, *completions(flag)))
            masked = HIDDEN if hide else mask_value(flag, inline)
            shown.append(f"{flag}={masked}" if equals else mask_text(word))
        else:
            shown.append(HIDDEN if hide else _mask_word(word))
    return shown
