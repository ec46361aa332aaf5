# SPDX-License-Identifier: Apache-2.0
"""A recipe as a command: the ``vllm serve`` line, a ``docker run`` line, a compose file.

The user's own arguments win over the recipe's, whole: the recipe's flag is dropped and theirs is
passed on word for word, so the server never sees a flag twice. A dotted flag
(``--speculative-config.num_speculative_tokens 4``) changes one key of the recipe's map.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rocm_overlay.errors import OverlayError
from rocm_overlay.recipe import Recipe, Value

DEFAULT_IMAGE = "vllm-openai-rocm"
# vllm serve's own default.
DEFAULT_PORT = 8000
MODEL_KEY = "model"

# One-dash names of flags that recipes set, as the base's parser knows them.
SHORT_FLAGS = {
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}

# Flags whose value is never printed, and the variable that does the same.
SECRET_FLAGS = {"hf-token": "HF_TOKEN", "api-key": "VLLM_API_KEY"}
HIDDEN = "***"

# What a ROCm container needs to reach the GPUs: the compute and the display device, shared memory
# and peer handles of the host (the ranks exchange both), the kernel's default filter off (it
# forbids the calls that map peer memory), and the group that owns the devices.
DEVICES = ("/dev/kfd", "/dev/dri")
GROUP = "video"
SECURITY = "seccomp=unconfined"
# Weights and compiled kernels, kept on the host across containers: folder under the user's home,
# folder in the container.
CACHES = ((".cache/huggingface", "/root/.cache/huggingface"), (".cache/vllm", "/root/.cache/vllm"))
TOKEN_VARIABLE = "HF_TOKEN"


@dataclass(frozen=True)
class Argument:
    """One flag of the command: its name without dashes, its words, and its value as read."""

    key: str
    words: tuple[str, ...]
    value: Value

    def shown(self) -> tuple[str, ...]:
        """The words as they may be printed."""
        if self.key not in SECRET_FLAGS:
            return self.words
        flag, equals, _ = self.words[0].partition("=")
        return (f"{flag}={HIDDEN}",) if equals else (flag, HIDDEN)


@dataclass(frozen=True)
class Override:
    """What the user changed: the flag, the recipe's value (None: not set) and theirs, as text."""

    key: str
    recipe: str | None
    yours: str

    def __str__(self) -> str:
        before = "not set" if self.recipe is None else self.recipe
        return f"{self.key}: {before} -> {self.yours}"


@dataclass(frozen=True)
class ServeCommand:
    """A ``vllm serve`` command with its environment, and what the user changed in it."""

    recipe: str
    model: str
    arguments: tuple[Argument, ...]
    env: Mapping[str, str]
    overrides: tuple[Override, ...] = ()

    @property
    def values(self) -> dict[str, Value]:
        """The flags' values by name."""
        return {argument.key: argument.value for argument in self.arguments}

    def argv(self) -> list[str]:
        """The words to execute."""
        return ["vllm", "serve", self.model, *(w for a in self.arguments for w in a.words)]

    def shown_argv(self) -> list[str]:
        """The words to print: as ``argv``, secrets hidden."""
        return ["vllm", "serve", self.model, *(w for a in self.arguments for w in a.shown())]

    def line(self) -> str:
        """The command for a shell: variables first, then a flag a line."""
        head = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words = ["vllm serve " + shlex.quote(self.model)]
        words += [shlex.join(argument.shown()) for argument in self.arguments]
        return " \\\n".join([*head, " \\\n  ".join(words)])


def compact_json(value: object) -> str:
    """``value`` as JSON without spaces, keys in their given order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def text_of(value: Value) -> str:
    """A value as it is shown and passed: JSON for maps and lists, digits for numbers."""
    if isinstance(value, dict | list | bool):
        return compact_json(value)
    return str(value)


def argument(key: str, value: Value) -> Argument:
    """The words of a recipe's ``args`` entry."""
    if value is True:
        return Argument(key, (f"--{key}",), True)
    if value is False:
        return Argument(key, (f"--no-{key}",), False)
    if isinstance(value, list):
        return Argument(key, (f"--{key}", *map(text_of, value)), value)
    return Argument(key, (f"--{key}", text_of(value)), value)


def build_command(recipe: Recipe, overrides: Sequence[str] = ()) -> ServeCommand:
    """The recipe's command with the user's arguments over it.

    Args:
        overrides: words as for ``vllm serve``; words before the first flag are the model.

    Raises:
        OverlayError: a word that is neither a flag nor a value of one, or a dotted flag on a value
            that is no map.
    """
    model, given = _read_words(overrides)
    arguments = {key: argument(key, value) for key, value in recipe.args.items()}
    notes: list[Override] = []
    if model is not None:
        notes.append(Override(MODEL_KEY, recipe.model, model))
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
    return ServeCommand(
        recipe=recipe.name,
        model=model if model is not None else recipe.model,
        arguments=tuple(arguments.values()),
        env=dict(recipe.env),
        overrides=tuple(notes),
    )


def _override(own: Argument, old: Value | None) -> Override:
    hidden = own.key in SECRET_FLAGS
    yours = HIDDEN if hidden else text_of(own.value)
    return Override(own.key, None if old is None else HIDDEN if hidden else text_of(old), yours)


def _with_key(
    before: Argument | None, root: str, path: Sequence[str], value: Value
) -> tuple[Argument, Value | None]:
    """The argument ``root`` with ``value`` at ``path`` of its map, and the value that was there."""
    whole: Any = copy.deepcopy(before.value) if before else {}
    place = whole
    for depth, key in enumerate(path):
        if not isinstance(place, dict):
            raise OverlayError(
                f"--{root}.{'.'.join(path)} changes a key of a value that is no map",
                seen=f"{'.'.join([root, *path[:depth]])} is {text_of(place)}",
                wanted="a map there",
                fix=f"pass --{root} whole",
            )
        if depth < len(path) - 1:
            place = place.setdefault(key, {})
    old = place.get(path[-1])
    place[path[-1]] = value
    return argument(root, whole), old


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
            raise OverlayError(
                "more than one word before the first flag",
                seen=shlex.join(words[position:end]),
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


def _given(flag: str, values: Sequence[str]) -> Argument:
    name, equals, inline = flag.partition("=")
    if equals:
        values = [inline, *values]
    key = SHORT_FLAGS.get(name) or _canonical(name.lstrip("-"))
    if values:
        value: Value = _scalar(values[0]) if len(values) == 1 else [_scalar(word) for word in values]
        words = (flag, *values[1:]) if equals else (flag, *values)
        return Argument(key, words, value)
    if key.startswith("no-"):
        return Argument(key.removeprefix("no-"), (flag,), False)
    return Argument(key, (flag,), True)


def _canonical(name: str) -> str:
    """Dashes in a flag's own name, as the base's parser has it; keys behind a dot stay."""
    root, dot, path = name.partition(".")
    return root.replace("_", "-") + dot + path


def _scalar(word: str) -> Value:
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return word if value is None else value


def _container_words(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    words = ["--recipe", recipe.name]
    return [*words, "--", *overrides] if overrides else words


def _port(command: ServeCommand) -> int:
    port = command.values.get("port", DEFAULT_PORT)
    if isinstance(port, bool) or not isinstance(port, int):
        raise OverlayError(
            "--port is not a number", seen=text_of(port), wanted="1 to 65535", fix="pass a port"
        )
    return port


def _refuse_secrets(command: ServeCommand) -> None:
    """A rendered line is meant to be kept: a secret in it would be printed, or be useless hidden."""
    for own in command.arguments:
        if own.key in SECRET_FLAGS:
            raise OverlayError(
                f"--{own.key} would be written into the rendered text",
                seen=f"--{own.key} {HIDDEN}",
                wanted=f"the secret in the environment variable {SECRET_FLAGS[own.key]}",
                fix=f"drop --{own.key} and pass -e {SECRET_FLAGS[own.key]}",
            )


def docker_line(recipe: Recipe, overrides: Sequence[str] = (), image: str = DEFAULT_IMAGE) -> str:
    """The ``docker run`` line, for a shell. The Hugging Face token is passed by name alone.

    Raises:
        OverlayError: as ``build_command``; or an override that carries a secret.
    """
    command = build_command(recipe, overrides)
    _refuse_secrets(command)
    port = _port(command)
    parts = ["docker run --rm"]
    parts += [f"--device {device}" for device in DEVICES]
    parts += [f"--group-add {GROUP}", "--ipc=host", f"--security-opt {SECURITY}", f"-p {port}:{port}"]
    # Double quotes: the shell that runs the line fills in the home folder.
    parts += [f'-v "$HOME/{host}:{inside}"' for host, inside in CACHES]
    parts += [f"-e {TOKEN_VARIABLE}", shlex.quote(image)]
    parts.append(shlex.join(_container_words(recipe, overrides)))
    return " \\\n  ".join(parts)


def compose_text(recipe: Recipe, overrides: Sequence[str] = (), image: str = DEFAULT_IMAGE) -> str:
    """A compose file (YAML text) with one service, ``server``.

    Raises:
        OverlayError: as ``docker_line``.
    """
    command = build_command(recipe, overrides)
    _refuse_secrets(command)
    port = _port(command)
    service: dict[str, object] = {
        "image": image,
        # Compose reads $ as the start of a variable.
        "command": [word.replace("$", "$$") for word in _container_words(recipe, overrides)],
        "devices": [f"{device}:{device}" for device in DEVICES],
        "group_add": [GROUP],
        "ipc": "host",
        "security_opt": [SECURITY],
        "ports": [f"{port}:{port}"],
        "volumes": [f"${{HOME}}/{host}:{inside}" for host, inside in CACHES],
        "environment": [TOKEN_VARIABLE],
        # The server finishes its requests and frees the GPUs' peer memory.
        "stop_grace_period": "60s",
    }
    text: str = yaml.safe_dump({"services": {"server": service}}, sort_keys=False)
    return text
