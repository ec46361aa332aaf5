# SPDX-License-Identifier: Apache-2.0
"""A recipe as a ``vllm serve`` command.

The user's own arguments win over the recipe's, whole: the recipe's flag is dropped and theirs is
passed on word for word, so the server never sees a flag twice. A dotted flag
(``--speculative-config.num_speculative_tokens 4``) changes one key of the recipe's map.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_overlay import flags
from rocm_overlay.errors import OverlayError
from rocm_overlay.masking import HIDDEN, is_secret, mask_text, mask_words
from rocm_overlay.recipe import Recipe, Value
from rocm_overlay.values import read_key_word, read_word, shown, text_of

MODEL_KEY = "model"
PORT_KEY = "port"
# vllm serve's own default.
DEFAULT_PORT = 8000
CONFIG_KEY = "config"


@dataclass(frozen=True)
class Argument:
    """One flag of the command: its one name without dashes, its words, and its value as read."""

    key: str
    words: tuple[str, ...]
    value: Value

    def shown(self) -> tuple[str, ...]:
        """The words as they may be printed."""
        if not is_secret(self.key):
            return tuple(mask_words(self.words))
        flag, equals, _ = self.words[0].partition("=")
        if len(self.words) == 1 and not equals:
            return self.words
        return (f"{flag}={HIDDEN}",) if equals else (flag, HIDDEN)


@dataclass(frozen=True)
class Override:
    """What the user changed: the flag, the recipe's value (None: not set) and theirs, as shown."""

    key: str
    recipe: str | None
    yours: str

    def __str__(self) -> str:
        before = "not set" if self.recipe is None else self.recipe
        return f"{self.key}: {before} -> {self.yours}"


@dataclass(frozen=True)
class ServeCommand:
    """A ``vllm serve`` command with its environment, and what the user changed in it.

    Attributes:
        given: the user's words, as they were given.
    """

    recipe: str
    model: str
    arguments: tuple[Argument, ...]
    env: Mapping[str, str]
    overrides: tuple[Override, ...] = ()
    given: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Value]:
        """The flags' values by name."""
        return {argument.key: argument.value for argument in self.arguments}

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        port = self.values.get(PORT_KEY, DEFAULT_PORT)
        assert isinstance(port, int)
        return port

    def argv(self) -> list[str]:
        """The words to execute."""
        return ["vllm", "serve", self.model, *(w for a in self.arguments for w in a.words)]

    def shown_argv(self) -> list[str]:
        """The words to print: as ``argv``, secrets hidden."""
        return ["vllm", "serve", mask_text(self.model), *(w for a in self.arguments for w in a.shown())]

    def line(self) -> str:
        """The command for a shell: variables first, then a flag a line. Secrets hidden."""
        head = [f"{name}={shlex.quote(shown(name, value))}" for name, value in self.env.items()]
        words = ["vllm serve " + shlex.quote(mask_text(self.model))]
        words += [shlex.join(argument.shown()) for argument in self.arguments]
        return " \\\n".join([*head, " \\\n  ".join(words)])


def argument(key: str, value: Value) -> Argument:
    """The words of a recipe's ``args`` entry.

    Raises:
        OverlayError: a key that is a flag cut short, or ``config``.
    """
    spelling = flags.key_of(key)
    _refuse_file(spelling)
    if isinstance(value, bool):
        words: tuple[str, ...] = (f"--{key}",) if value else (f"--no-{key}",)
        return Argument(spelling.key, words, value is spelling.on)
    if isinstance(value, list):
        return Argument(spelling.key, (f"--{key}", *map(text_of, value)), value)
    return Argument(spelling.key, (f"--{key}", text_of(value)), value)


def build_command(recipe: Recipe, overrides: Sequence[str] = ()) -> ServeCommand:
    """The recipe's command with the user's arguments over it.

    Args:
        overrides: words as for ``vllm serve``; a word before the first flag is the model.

    Raises:
        OverlayError: a word that is neither a flag nor a value of one, a flag cut short or without
            its value, a dotted flag on a value that is no map, ``--config``, or a port out of range.
    """
    model, given = _read_words(overrides)
    arguments = {one.key: one for one in (argument(key, value) for key, value in recipe.args.items())}
    notes: list[Override] = []
    if model is not None:
        notes.append(Override(MODEL_KEY, mask_text(recipe.model), mask_text(model)))
    for own in given:
        root, _, path = own.key.partition(".")
        before = arguments.get(root)
        if path:
            changed, old = _with_key(before, root, path.split("."), own.value)
            arguments[root] = changed
        else:
            # Placed anew, so that the user's flags stand at the end.
            arguments.pop(root, None)
            arguments[root] = own
            old = before.value if before else None
        notes.append(_override(own, old))
    command = ServeCommand(
        recipe=recipe.name,
        model=model if model is not None else recipe.model,
        arguments=tuple(arguments.values()),
        env=dict(recipe.env),
        overrides=tuple(notes),
        given=tuple(overrides),
    )
    _check_port(command)
    return command


def _override(own: Argument, old: Value | None) -> Override:
    return Override(own.key, None if old is None else shown(own.key, old), shown(own.key, own.value))


def _with_key(
    before: Argument | None, root: str, path: Sequence[str], value: Value
) -> tuple[Argument, Value | None]:
    """The argument ``root`` with ``value`` at ``path`` of its map, and the value that was there.

    A last key with a plus adds to a list, as in the base.
    """
    whole: Any = copy.deepcopy(before.value) if before else {}
    place = whole
    last = path[-1].removesuffix("+")
    for depth, key in enumerate(path):
        if not isinstance(place, dict):
            raise OverlayError(
                f"--{root}.{'.'.join(path)} changes a key of a value that is no map",
                seen=f"{'.'.join([root, *path[:depth]])} is {shown('.'.join([root, *path]), place)}",
                wanted="a map there",
                fix=f"pass --{root} whole",
            )
        if depth < len(path) - 1:
            place = place.setdefault(key, {})
    old = place.get(last)
    place[last] = [*(old if isinstance(old, list) else []), *_items(value)] if last != path[-1] else value
    return argument(root, whole), old


def _items(value: Value) -> list[str]:
    return text_of(value).split(",")


def _read_words(words: Sequence[str]) -> tuple[str | None, list[Argument]]:
    """Split the user's words into the model, if they name one, and flags with their values."""
    model: str | None = None
    given: list[Argument] = []
    position = 0
    while position < len(words):
        word = words[position]
        end = position + 1
        while end < len(words) and not _is_flag(words[end]):
            end += 1
        if _is_flag(word):
            given.append(_given(word, words[position + 1 : end]))
        elif end - position > 1:
            # Not shown: without a flag before it, nothing says whether a word is a secret.
            raise OverlayError(
                "more than one word before the first flag",
                seen=f"{end - position} words",
                wanted="at most the model's name, then flags",
                fix="put a flag's value behind its flag",
            )
        else:
            model = word
        position = end
    # vllm serve also takes the model as a flag.
    for own in [own for own in given if own.key == MODEL_KEY]:
        model = text_of(own.value)
        given.remove(own)
    return model, given


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _given(word: str, values: Sequence[str]) -> Argument:
    """A user's flag and the words behind it.

    Raises:
        OverlayError: a flag that is not the whole name of one, that reads a file we do not see, or
            that has another number of values than it takes.
    """
    if word == "--":
        raise OverlayError(
            "a second -- among the server's arguments", seen="--", wanted="one, before them", fix="drop it"
        )
    spelling = flags.read_flag(word)
    _refuse_file(spelling)
    words = (word, *values)
    if spelling.inline is not None:
        values = [spelling.inline, *values]
    _check_number(spelling, word, len(values))
    key = ".".join([spelling.key, *spelling.path])
    if not values:
        return Argument(key, words, spelling.on)
    if spelling.path:
        # The base makes a list of what stands behind a key with a plus.
        value: Any = values[0] if key.endswith("+") else read_key_word(values[0])
    else:
        value = read_word(values[0]) if len(values) == 1 else [read_word(word) for word in values]
    return Argument(key, words, value)


def _refuse_file(spelling: flags.Spelling) -> None:
    if spelling.key == CONFIG_KEY:
        raise OverlayError(
            "--config with a recipe: the file would set flags that preflight does not see",
            seen="--config",
            wanted="the file's settings as flags, which are then shown and judged",
            fix="write them behind --, or into a recipe of your own that extends this one",
        )


def _check_number(spelling: flags.Spelling, word: str, number: int) -> None:
    wanted = {
        flags.NONE: "the flag alone" if number else "",
        flags.ONE: "one value" if number != 1 else "",
        flags.MAYBE: "one value at most" if number > 1 else "",
        flags.MANY: "one value or more" if not number else "",
    }.get(spelling.values, "")
    # --help=GROUP narrows the help.
    if wanted and spelling.key != flags.HELP_KEY:
        name = word.partition("=")[0]
        raise OverlayError(
            f"{name} cannot be read",
            seen="no value" if not number else "a value" if number == 1 else f"{number} values",
            wanted=f"{name} takes {wanted}",
            fix=f"correct {name}, or leave it to the recipe",
        )


def _check_port(command: ServeCommand) -> None:
    port = command.values.get(PORT_KEY, DEFAULT_PORT)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise OverlayError(
            "--port is not a port number",
            seen=shown(PORT_KEY, port),
            wanted="1 to 65535",
            fix="pass another --port",
        )
