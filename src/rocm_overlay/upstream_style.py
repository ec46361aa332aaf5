# SPDX-License-Identifier: Apache-2.0
"""Our files in upstream's style: its licence lines, its line length, its import order, its formatter.

Upstream's own ruff does the work, at the version that the pinned source's pre-commit configuration
names. What ruff leaves alone is done before it: comments and docstrings wider than upstream's lines
are filled anew, and our marks that keep a statement in one piece are taken out.
"""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.processes import run_bound
from rocm_overlay.staging import staging_folder

WIDTH = 88
SPDX = "# SPDX-License-Identifier: Apache-2.0"
COPYRIGHT = "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project"
PRAGMA = re.compile(r"#\s*(fmt:|type:|noqa|isort:|mypy:|pragma|ruff:|SPDX|!)")
FORMAT_MARK = re.compile(r"\s*#\s*fmt:\s*(skip|off|on)\b.*$")
ITEM = re.compile(r"^(\s*)([-*] |[\w.*`]+(, [\w.*`]+)*: )")
KEEP = re.compile(r'^\s*([|>=+]|={3,}|-{3,}|```|\.\. |\d+\. )|^\s*\S+::$|^\s*"""$')
# What our files do on purpose: a line that is one string, a fixture by import, vLLM's name at a
# sentence's start, a signature in a summary, arguments described together.
ACCEPTED = "E501,F811,D403,D402,D417"
RUFF_REPO = "https://github.com/astral-sh/ruff-pre-commit"


@dataclass(frozen=True)
class Ruff:
    """Upstream's ruff: the command that runs it, and the pyproject.toml that it reads."""

    command: tuple[str, ...]
    configuration: Path

    def run(self, root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it in a folder, with upstream's settings."""
        command = [*self.command, *arguments]
        return subprocess.run(command, cwd=root, text=True, capture_output=True, check=False)


def ruff_version(pre_commit: str) -> str:
    """The version of ruff that a pre-commit configuration names.

    Raises:
        OverlayError: it names none.
    """
    match = re.search(rf"repo: {re.escape(RUFF_REPO)}\s+rev: v([\d.]+)", pre_commit)
    if not match:
        raise OverlayError("the base's pre-commit configuration names no ruff", wanted=RUFF_REPO)
    return match[1]


def obtain_ruff(base: Path, tools: Path) -> Ruff:
    """Upstream's ruff, installed by pip into a folder of its own the first time.

    Args:
        base: the unpacked pinned source.
        tools: where tools are kept, one folder a version.

    Raises:
        OverlayError: pip cannot install it.
    """
    version = ruff_version((base / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    target = tools / f"ruff-{version}"
    if not (target / "bin" / "ruff").is_file():
        tools.mkdir(parents=True, exist_ok=True)
        with staging_folder(tools, "ruff") as staging:
            fresh = staging / target.name
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh)]
            done = run_bound([*command, f"ruff=={version}"], text=True, capture_output=True, check=False)
            if done.returncode:
                raise OverlayError(
                    f"ruff {version}, which the base's pre-commit configuration names, cannot be installed",
                    seen=(done.stderr.strip().splitlines() or ["no message"])[-1],
                    fix="check the network and pip's configuration",
                )
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
    return Ruff((str(target / "bin" / "ruff"),), base / "pyproject.toml")


def upstream_markdown(text: str) -> str:
    """A document of ours as upstream's markdownlint wants it: spaced table rules, fences with a language."""
    text = re.sub(r"(?m)^\|(?:-+\|)+$", lambda rule: re.sub(r"-+", " --- ", rule[0]), text)
    opening = True
    lines = text.split("\n")
    for row, line in enumerate(lines):
        if line.startswith("```"):
            lines[row] = "```text" if opening and line == "```" else line
            opening = not opening
    return "\n".join(lines)


def upstream_text(text: str) -> str:
    """A Python file of ours with upstream's licence lines, without our format marks, filled to its width."""
    lines = text.split("\n")
    if lines[0] == SPDX and lines[1:2] != [COPYRIGHT]:
        lines.insert(1, COPYRIGHT)
    text = "\n".join(FORMAT_MARK.sub("", line) for line in lines)
    return fill_docstrings(fill_comments(text))


def fill_comments(text: str) -> str:
    """Blocks of comment lines of which one is too wide, filled anew; one behind code goes above it first."""
    lines = text.split("\n")
    for row, column in _comments_behind_code(text):
        line = lines[row]
        if len(line) > WIDTH and not PRAGMA.match(line[column:]):
            indent = line[: len(line) - len(line.lstrip())]
            lines[row] = f"{indent}{line[column:]}\n{line[:column].rstrip()}"
    lines = "\n".join(lines).split("\n")
    comments = _comment_rows("\n".join(lines))
    filled: list[str] = []
    row = 0
    while row < len(lines):
        block = [lines[row]]
        indent = lines[row][: len(lines[row]) - len(lines[row].lstrip())]
        if row not in comments or PRAGMA.match(lines[row].lstrip()):
            filled += block
            row += 1
            continue
        while row + len(block) in comments and _continues(lines[row + len(block)], indent):
            block.append(lines[row + len(block)])
        row += len(block)
        filled += _fill_block(block, indent) if any(len(line) > WIDTH for line in block) else block
    return "\n".join(filled)


def _continues(line: str, indent: str) -> bool:
    return line.startswith(f"{indent}#") and not PRAGMA.match(line.lstrip()) and line.strip() != "#"


def _fill_block(block: Sequence[str], indent: str) -> list[str]:
    words = " ".join(line.strip().lstrip("#").strip() for line in block)
    return textwrap.wrap(
        words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _comment_rows(text: str) -> set[int]:
    """The rows, from 0, that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.start[0] - 1
        for token in tokens
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }


def _comments_behind_code(text: str) -> list[tuple[int, int]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0] - 1, token.start[1])
        for token in tokens
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    ]


def fill_docstrings(text: str) -> str:
    """The paragraphs of docstrings of which a line is too wide, filled anew; tables and lists stay."""
    lines = text.split("\n")
    for node in sorted(_docstrings(text), key=lambda one: -one.lineno):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        if any(len(line) > WIDTH for line in lines[first : last + 1]):
            lines[first : last + 1] = _fill_docstring(lines[first : last + 1], node.col_offset)
    return "\n".join(lines)


def _docstrings(text: str) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _fill_docstring(lines: list[str], column: int) -> list[str]:
    paragraphs: list[list[str]] = []
    for number, line in enumerate(lines):
        starts = number == 0 or not line.strip() or not paragraphs[-1][-1].strip()
        if starts or ITEM.match(line) or KEEP.match(line) or KEEP.match(paragraphs[-1][-1]) or (
            _indent(line) != _indent(paragraphs[-1][-1]) and not ITEM.match(paragraphs[-1][0])
        ):  # fmt: skip
            paragraphs.append([line])
        else:
            paragraphs[-1].append(line)
    filled: list[str] = []
    for paragraph in paragraphs:
        wide = any(len(line) > WIDTH for line in paragraph)
        filled += _fill_paragraph(paragraph) if wide and not KEEP.match(paragraph[0]) else paragraph
    return filled


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _fill_paragraph(paragraph: list[str]) -> list[str]:
    own = " " * _indent(paragraph[0])
    item = ITEM.match(paragraph[0]) and not paragraph[0].lstrip().startswith(('"', "'"))
    rest = f"{own}    " if item else own
    words = " ".join(line.strip() for line in paragraph)
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=own,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def restyle(files: Mapping[str, str], ruff: Ruff, root: Path) -> dict[str, str]:
    """Python files as upstream's formatter and fixer leave them.

    Args:
        files: texts by path; only these are restyled, and only files that are ours.
        ruff: upstream's.
        root: an empty folder to work in.

    Raises:
        OverlayError: ruff does not take a file.
    """
    (root / "pyproject.toml").write_bytes(ruff.configuration.read_bytes())
    names = sorted(name for name in files if name.endswith(".py"))
    for top in ("vllm", "tests"):
        # Its own packages, for the order of imports.
        (root / top).mkdir()
        (root / top / "__init__.py").touch()
    for name in names:
        for folder in Path(name).parents:
            # A folder is a package for the rules that ask it, as it is in upstream's tree.
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / name).write_text(upstream_text(files[name]), encoding="utf-8")
    if not names:
        return dict(files)
    for folder in {
        parent for name in names for parent in Path(name).parents if parent.parts[:1] == ("vllm",)
    }:
        if not (root / folder / "__init__.py").exists():
            (root / folder / "__init__.py").touch()
    fix, lay_out = ("check", "--fix", "--quiet", "--unfixable", "D403"), ("format", "--quiet")
    accept = ("check", "--quiet", "--select", ACCEPTED, "--add-noqa")
    steps = (fix, lay_out, fix, lay_out, accept, lay_out, accept, lay_out)
    for step in steps:
        # Ruff asks whether an imported module is there: of upstream's, only these few files are.
        own = ("--config", 'lint.isort.known-first-party = ["vllm", "tests"]')
        done = ruff.run(root, *step, *own, "--no-cache", *names)
        if done.returncode not in (0, 1) or "error:" in done.stderr:
            raise OverlayError(
                f"upstream's ruff refuses a file: {' '.join(step)}", seen=done.stderr.strip()[-400:]
            )
    return {**files, **{name: (root / name).read_text(encoding="utf-8") for name in names}}
