# SPDX-License-Identifier: Apache-2.0
"""Recipes against the vLLM they are for: its own argument parser, environment table and configs.

The tree is imported in a process of its own, with this file as its program: the import takes many
seconds, leaves its marks on a process, and must see the tree and no other vLLM. It runs without a
GPU because vLLM is told that its target is the CPU; the parser and the config classes are the same
for every platform, and no engine is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_overlay.errors import CheckFailed, OverlayError

# VLLM_TARGET_DEVICE selects the CPU platform whatever the machine; no installed plugin is loaded,
# so that the tree is judged alone.
CHILD_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
TIMEOUT_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One command to check: a name for messages, its words after ``vllm serve``, its variables."""

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that the tree does not know or does not accept."""

    case: str
    what: str
    seen: str
    near: tuple[str, ...] = ()

    def __str__(self) -> str:
        hint = f"; did you mean {' or '.join(self.near)}?" if self.near else ""
        return f"{self.case}: {self.what}: {self.seen}{hint}"


def find_problems(tree: Path, cases: Sequence[Case], python: str = sys.executable) -> list[Problem]:
    """Everything in ``cases`` that the vLLM in ``tree`` would not take.

    Args:
        tree: the folder that contains ``vllm/``.
        python: an interpreter that has vLLM's dependencies.

    Raises:
        OverlayError: no vLLM in ``tree``, or it cannot be imported there.
    """
    found = _ask(tree, {"cases": [dataclasses.asdict(case) for case in cases]}, python)
    return [Problem(**{**entry, "near": tuple(entry["near"])}) for entry in found]


def read_spellings(tree: Path, python: str = sys.executable) -> dict[str, dict[str, Any]]:
    """Every flag of the ``vllm serve`` in ``tree``, as ``flags.py`` reads it from its table.

    Raises:
        OverlayError: as ``find_problems``.
    """
    spellings: dict[str, dict[str, Any]] = _ask(tree, {}, python)
    return spellings


def _ask(tree: Path, request: Mapping[str, Any], python: str) -> Any:
    """What the vLLM in ``tree`` answers, in a process of its own."""
    if not (tree / "vllm" / "envs.py").is_file():
        raise OverlayError(
            "no vLLM to check recipes against",
            seen=str(tree),
            wanted="the folder that contains vllm/",
            fix="pass --tree, or make the tree first (rocm-overlay tree)",
        )
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        sources = os.pathsep.join([str(tree.resolve()), str(Path(__file__).resolve().parents[1])])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        done = subprocess.run(
            [python, "-m", "rocm_overlay.base_flags"],
            input=json.dumps({**request, "answer": str(answer)}),
            env={**environment, **CHILD_ENVIRONMENT, "PYTHONPATH": sources},
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if done.returncode or not answer.is_file():
            raise OverlayError(
                f"the vLLM in {tree} cannot be asked for its arguments",
                seen=done.stderr.strip()[-2000:] or f"exit status {done.returncode}",
                wanted="an interpreter with vLLM's common dependencies",
                fix="run in the project's virtual environment, or in the image",
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def refuse(problems: Sequence[Problem], tree: Path) -> None:
    """Raise what was found as one error; nothing where nothing was.

    Raises:
        CheckFailed: with a line for each problem.
    """
    if problems:
        raise CheckFailed(
            f"{len(problems)} recipe settings are unknown to the vLLM in {tree}",
            seen="\n          ".join(str(problem) for problem in problems),
            wanted="flags of its vllm serve, keys of its configs, variables of its vllm/envs.py",
            fix="correct the recipe, or pin a base that knows them",
        )


# What follows runs in the process that imports the tree.


def _answer(request: Mapping[str, Any]) -> None:
    base = _Base()
    said: object = base.spellings()
    if "cases" in request:
        cases = [Case(entry["name"], tuple(entry["words"]), entry["env"]) for entry in request["cases"]]
        said = [dataclasses.asdict(problem) for case in cases for problem in base.problems(case)]
    Path(request["answer"]).write_text(json.dumps(said), encoding="utf-8")


class _Base:
    """The imported vLLM: its serve parser, its environment table, its config classes."""

    def __init__(self) -> None:
        serve = importlib.import_module("vllm.entrypoints.cli.serve")
        argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
        subparsers = argparse_utils.FlexibleArgumentParser().add_subparsers()
        (command,) = serve.cmd_init()
        self.parser = command.subparser_init(subparsers)
        self.flags: dict[str, Any] = dict(self.parser._option_string_actions)
        self.variables: dict[str, Any] = importlib.import_module("vllm.envs").environment_variables
        vllm_config = importlib.import_module("vllm.config").VllmConfig
        self.configs = {field.name: _config_class(field.type) for field in dataclasses.fields(vllm_config)}

    def spellings(self) -> dict[str, dict[str, Any]]:
        """By each flag's long name: the words that set it, those that unset it, and its values."""
        found: dict[str, dict[str, Any]] = {}
        for word, action in self.flags.items():
            longs = [name for name in action.option_strings if name.startswith("--")]
            negative: set[str] = getattr(action, "negative_option_strings", set())
            own = found.setdefault(longs[0][2:], {"on": [], "off": [], "values": _values(action)})
            own["off" if word in negative else "on"].append(word)
        return {
            name: {**own, "on": sorted(own["on"]), "off": sorted(own["off"])}
            for name, own in sorted(found.items())
        }

    def problems(self, case: Case) -> Iterator[Problem]:
        """All faults of one case; the parser is asked only when it knows every flag."""
        for name in case.env:
            # Other programs' variables are not in vLLM's table.
            if name.startswith("VLLM_") and name not in self.variables:
                yield Problem(case.name, "unknown variable", name, _near(name, self.variables))
        yield from self._variable_values(case)
        unknown = list(self._unknown_flags(case))
        yield from unknown
        nested = list(self._nested(case))
        yield from nested
        if not unknown and not nested:
            yield from self._parse(case)

    def _variable_values(self, case: Case) -> Iterator[Problem]:
        """Each variable as the table's own reader takes it."""
        for name, value in case.env.items():
            if name not in self.variables:
                continue
            before = os.environ.get(name)
            os.environ[name] = value
            try:
                self.variables[name]()
            except Exception as error:
                yield Problem(case.name, f"{name} does not take this value ({_line(error)})", value)
            finally:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before

    def _unknown_flags(self, case: Case) -> Iterator[Problem]:
        for word in case.words:
            flag = word.partition("=")[0]
            if _is_flag(flag) and _root(flag) not in self.flags:
                yield Problem(case.name, "unknown flag", flag, _near(_root(flag), self.flags))

    def _nested(self, case: Case) -> Iterator[Problem]:
        """The keys of JSON arguments, and their values where the config says a type."""
        for flag, value in itertools.pairwise(case.words):
            if not _is_flag(flag) or not value.startswith("{") or _root(flag) not in self.flags:
                continue
            config = self.configs.get(self.flags[_root(flag)].dest)
            if config is None:
                continue
            try:
                content = json.loads(value)
            except ValueError as error:
                yield Problem(case.name, f"{flag} is not JSON ({_line(error)})", value)
                continue
            yield from _config_problems(case.name, flag, config, content)

    def _parse(self, case: Case) -> Iterator[Problem]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                self.parser.parse_args(list(case.words))
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["no reason given"]
            yield Problem(case.name, "vllm serve refuses the command", lines[-1])
        except Exception as error:
            yield Problem(case.name, "vllm serve refuses the command", _line(error))


def _values(action: Any) -> str:
    """How many words a flag takes: "0", "1", "?" (one or none) or "+" (one or more)."""
    return "1" if action.nargs is None else str(action.nargs)


def _config_problems(case: str, where: str, config: type, content: Mapping[str, Any]) -> Iterator[Problem]:
    fields = {field.name: field for field in dataclasses.fields(config)}
    adapter = importlib.import_module("pydantic").TypeAdapter
    for key, value in content.items():
        if key not in fields:
            yield Problem(case, f"unknown key in {where}", key, _near(key, fields))
            continue
        inner = _config_class(fields[key].type)
        if inner is not None and isinstance(value, dict):
            yield from _config_problems(case, f"{where}.{key}", inner, value)
        elif _is_literal(fields[key].type):
            try:
                adapter(fields[key].type).validate_python(value)
            except Exception as error:
                reasons: list[Any] = getattr(error, "errors", list)()
                why = reasons[0]["msg"] if reasons else _line(error)
                yield Problem(case, f"{where}.{key} does not take this value ({why})", str(value))


def _config_class(annotation: object) -> type | None:
    """The config dataclass in ``X`` or ``X | None``, if there is one."""
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for choice in choices:
        if isinstance(choice, type) and dataclasses.is_dataclass(choice):
            return choice
    return None


def _is_literal(annotation: object) -> bool:
    """Whether the type is made of fixed values and plain ones, so that it judges a value alone."""
    plain: tuple[object, ...] = (bool, int, float, str, type(None))
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return all(_is_literal(choice) for choice in typing.get_args(annotation))
    return origin is typing.Literal or annotation in plain


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


def _root(flag: str) -> str:
    """The flag's own name in the parser's spelling: dashes, and nothing behind a dot."""
    # The parser turns -O3 into the long flag before it looks at anything.
    if flag.startswith("-O"):
        return "--optimization-level"
    root = flag.partition(".")[0]
    return "--" + root[2:].replace("_", "-") if root.startswith("--") else root


def _near(name: str, known: Iterable[str]) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, list(known), n=2))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    _answer(json.load(sys.stdin))
