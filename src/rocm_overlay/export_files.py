# SPDX-License-Identifier: Apache-2.0
"""The files of each pull request as they stand in upstream's tree: overlay, patched files, tests, CI."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.export_imports import refuse_missing_imports
from rocm_overlay.export_plan import FOLDER, NAME, Carried, ExportPlan, PullRequest
from rocm_overlay.patching import Outcome, apply_diff
from rocm_overlay.plan import Sources
from rocm_overlay.textio import decode
from rocm_overlay.upstream_style import COPYRIGHT, SPDX, Ruff, restyle, upstream_markdown

# Our tests are not typed: a lambda that records its call, a namespace that stands for a class.
TESTS_TYPES = '# mypy: disable-error-code="attr-defined,func-returns-value,var-annotated"'
# What only this project has: its modules, folders, verbs and the words for them.
OWN = re.compile(
    r"\b(rocm[_-]overlay|cdnasim|tests\.(?:unit|harness|tiny)|tests/(?:unit|sim|harness)|overlay/vllm"
    r"|laid tree|pinned base|the overlay)\b|`make [a-z]"
)
DOCUMENT = re.compile(r"(?<![\w/.])docs/[\w/.-]+\.md\b")
# A file's text, or None where the pull request removes it.
Files = dict[str, str | None]


class Tree:
    """Upstream's tree as it stands before a pull request: the base, and what earlier ones changed."""

    def __init__(self, base: Path, changed: Mapping[str, str | None] | None = None) -> None:
        self.base = base
        self.changed: dict[str, str | None] = dict(changed or {})

    def read(self, path: str) -> str | None:
        """A file's text; None where it is not there."""
        if path in self.changed:
            return self.changed[path]
        file = self.base / path
        return decode(file.read_bytes(), path) if file.is_file() else None

    def with_files(self, files: Files) -> Tree:
        """The tree after a pull request."""
        return Tree(self.base, {**self.changed, **files})


def module_renames(plan: ExportPlan) -> dict[str, str]:
    """How each carried test module is called here and in upstream's tree."""
    renames = {}
    for pull in plan.pulls:
        for one in pull.tests:
            if one.source.endswith(".py") and one.source.startswith("tests/"):
                renames[_module(one.source)] = _module(one.target)
    return {**renames, **plan.renames}


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def rename_modules(text: str, renames: Mapping[str, str]) -> str:
    """A test's text with the modules that it imports called as upstream's tree calls them."""
    for old in sorted(renames, key=len, reverse=True):
        new = renames[old]
        (package, _, leaf), (new_package, _, new_leaf) = old.rpartition("."), new.rpartition(".")
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
        pattern = rf"^(\s*)from {re.escape(package)} import {re.escape(leaf)}(?: as (\w+))?(?=\s|$)"

        def replaced(match: re.Match[str], made: tuple[str, str, str] = (new_package, new_leaf, leaf)) -> str:
            alias = match[2] or made[2]
            renamed = f" as {alias}" if alias != made[1] else ""
            return f"{match[1]}from {made[0]} import {made[1]}{renamed}"

        text = re.sub(pattern, replaced, text, flags=re.MULTILINE)
    return text


def without_tests(text: str, carried: Carried) -> str:
    """A test file's text without the tests that stay here.

    Raises:
        OverlayError: one of them is not in it.
    """
    if not carried.omit:
        return text
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    if missing := sorted(set(carried.omit) - set(found)):
        raise OverlayError(
            f"{FOLDER}/{NAME}: omit names no test of {carried.source}", seen=", ".join(missing)
        )
    lines = text.split("\n")
    for name in sorted(carried.omit, key=lambda one: -found[one].lineno):
        node = found[name]
        first = min([node.lineno, *[one.lineno for one in node.decorator_list]]) - 1
        del lines[first : node.end_lineno]
    return "\n".join(lines)


def rename_files(text: str, plan: ExportPlan) -> str:
    """A document's text with the carried tests at upstream's paths."""
    for one in (carried for pull in plan.pulls for carried in pull.tests):
        text = text.replace(f"`{one.source}`", f"`{one.target}`")
    return text


def without_sections(text: str, carried: Carried) -> str:
    """A document's text without the sections that stay here, by their headings.

    Raises:
        OverlayError: one of them is not in it.
    """
    parts = re.split(r"(?m)^(?=#+ )", text)
    headings = [part.partition("\n")[0].lstrip("# ") for part in parts]
    if missing := sorted(set(carried.omit) - set(headings)):
        raise OverlayError(
            f"{FOLDER}/{NAME}: omit names no section of {carried.source}", seen=", ".join(missing)
        )
    kept = [part for part, heading in zip(parts, headings, strict=True) if heading not in carried.omit]
    return "".join(kept).rstrip("\n") + "\n"


def pull_files(
    pull: PullRequest, plan: ExportPlan, sources: Sources, root: Path, before: Tree, ruff: Ruff
) -> Files:
    """Every file that a pull request adds, changes or removes.

    Args:
        pull: the pull request.
        plan: the manifest, for the names of the tests' modules.
        sources: overlay and series.
        root: the project's folder, which holds the tests.
        before: the tree that the pull request applies to.
        ruff: upstream's.

    Raises:
        OverlayError: a patch or an edit does not apply, a removed file is not there, or a test still
            imports what upstream does not have.
    """
    ours = {
        file.path: decode(file.content, file.path)
        for file in sources.overlay.files
        if file.path in pull.files
    }
    renames = module_renames(plan)
    carried = {}
    for one in (*pull.tests, *pull.ci, *pull.docs):
        text = (root / one.source).read_text(encoding="utf-8")
        if one.source.endswith(".md"):
            text = upstream_markdown(rename_files(without_sections(text, one), plan))
        else:
            text = without_tests(text, one)
        if one.target.endswith(".py"):
            text = rename_modules(text, renames)
        if Path(one.target).name.startswith("test_") and one.target.endswith(".py"):
            text = text.replace(SPDX, f"{SPDX}\n{COPYRIGHT}\n{TESTS_TYPES}", 1)
        carried[one.target] = text
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-style-") as folder:
        files: Files = dict(restyle({**ours, **carried}, ruff, Path(folder)))
    own = set(files)
    files |= _patched(pull, sources, before)
    for edit in pull.edits:
        text = files.get(edit.path) or before.read(edit.path) or ""
        if text.count(edit.old) != edit.count:
            raise OverlayError(
                f"{FOLDER}/{NAME}: {pull.name}: an edit of {edit.path} does not fit",
                seen=f"{edit.old!r} stands there {text.count(edit.old)} times",
                wanted=f"{edit.count} times",
            )
        files[edit.path] = text.replace(edit.old, edit.new)
    _refuse_leftovers(pull, {path: files[path] for path in sorted(own)}, before.with_files(files))
    for path in pull.remove:
        if before.read(path) is None:
            raise OverlayError(f"{FOLDER}/{NAME}: {pull.name} removes what is not there", seen=path)
        files[path] = None
    return dict(sorted(files.items()))


def _patched(pull: PullRequest, sources: Sources, before: Tree) -> Files:
    files: Files = {}
    for patch in sources.series.patches:
        if patch.name not in pull.patches:
            continue
        for diff in patch.diffs:
            text = files.get(diff.path) or before.read(diff.path) or ""
            applied = apply_diff(text, diff)
            if applied.outcome is not Outcome.CLEAN:
                raise OverlayError(
                    f"{pull.name}: patches/{patch.name} {applied.outcome.value} on what it depends on",
                    seen=f"{diff.path}: {applied.detail}",
                    fix=f"add the pull request that it needs to its depends in {FOLDER}/{NAME}",
                )
            files[diff.path] = applied.text
    return files


def _refuse_leftovers(pull: PullRequest, files: Files, tree: Tree) -> None:
    """What is carried must not name what only this project has: modules, folders, verbs, documents."""
    found = []
    for path, text in files.items():
        for line, words in enumerate((text or "").split("\n"), start=1):
            named = [one[0] for one in OWN.finditer(words)]
            named += [one for one in DOCUMENT.findall(words) if tree.read(one) is None]
            found += [f"{path}: {one} in line {line}" for one in named]
    if found:
        raise OverlayError(
            f"{FOLDER}/{NAME}: {pull.name} names what upstream does not have",
            seen="; ".join(found),
            fix="carry that as well, name its stand-in under [rename], or write the text for both",
        )


def trees(plan: ExportPlan, sources: Sources, root: Path, base: Path, ruff: Ruff) -> dict[str, Files]:
    """The files of every pull request that has any, each on top of what it depends on."""
    made: dict[str, Files] = {}
    for pull in plan.pulls:
        if pull.held_back:
            continue
        before = Tree(base)
        for other in _below(plan, pull):
            if other.name in made:
                before = before.with_files(made[other.name])
        made[pull.name] = pull_files(pull, plan, sources, root, before, ruff)
        refuse_missing_imports(pull, plan, base, before.changed, made[pull.name])
    return made


def _below(plan: ExportPlan, pull: PullRequest) -> Sequence[PullRequest]:
    return plan.closure(pull.name)[:-1]
