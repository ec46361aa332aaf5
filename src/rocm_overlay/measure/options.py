# SPDX-License-Identifier: Apache-2.0
"""Types of the measuring verbs' options, for argparse: a value outside is refused with the option's name."""

from __future__ import annotations

import argparse
import math
import re
import shlex

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
NAME_WANTED = "letters, digits and _ . + -, with none of . + - first"
# [HOST[:PORT]/]PATH[:TAG][@sha256:DIGEST], as container engines take it.
IMAGE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[A-Za-z0-9_][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
# The longest time that may be asked for: a week.
MOST_SECONDS = 7 * 24 * 3600.0


def count(word: str) -> int:
    """A whole number above zero."""
    try:
        value = int(word)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number above zero")
    return value


def seconds(word: str) -> float:
    """A time above zero, of a week at most."""
    value = _number(word)
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no number of seconds above 0, {MOST_SECONDS:g} at most"
        )
    return value


def share(word: str) -> float:
    """A number from 0 to 1."""
    value = _number(word)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not between 0 and 1")
    return value


def percentage(word: str) -> float:
    """A number of percent from 0 to 100."""
    value = _number(word)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{word!r} is not between 0 and 100")
    return value


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def name(word: str) -> str:
    """The name of an arm or a half: a part of files' names, and of SET:ARM."""
    if not NAME.fullmatch(word):
        raise argparse.ArgumentTypeError(f"{word!r} is not {NAME_WANTED}")
    return word


def image(word: str) -> str:
    """A container image's reference."""
    if not IMAGE.fullmatch(word):
        raise argparse.ArgumentTypeError(
            f"{word!r} is no image, as REPOSITORY:TAG or REPOSITORY@sha256:DIGEST"
        )
    return word


def name_or_none(word: str) -> str:
    """A name, or nothing."""
    return name(word) if word else word


def shell_words(text: str) -> list[str]:
    """Words as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {error}") from None


def program(text: str) -> list[str]:
    """Words of which the first is a program."""
    words = shell_words(text)
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names no program")
    return words
