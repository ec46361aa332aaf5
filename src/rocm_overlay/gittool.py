# SPDX-License-Identifier: Apache-2.0
"""git, as the tool calls it: three-way merges, diffs, renames, and the checkout itself."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_overlay.errors import OverlayError

CONTEXT_LINES = 2
MARKER_SIZE = 7
# What git writes at the start of a line for a conflict, the ancestor's part included.
MARKERS = ("<" * MARKER_SIZE, "|" * MARKER_SIZE, ">" * MARKER_SIZE)
# A user's settings must change neither a diff's form nor a merge, nor what is read of a checkout.
PLAIN = ("-c", "core.autocrlf=false", "-c", "core.quotePath=false", "-c", "diff.noprefix=false",
         "-c", "diff.mnemonicPrefix=false", "-c", "commit.gpgSign=false", "-c", "core.hooksPath=/dev/null",
         "-c", "core.attributesFile=/dev/null", "-c", "core.excludesFile=/dev/null", "-c", "gc.auto=0",
         "-c", "core.fsmonitor=false", "-c", "advice.detachedHead=false", "-c", "color.ui=false",
         "-c", "log.showSignature=false", "-c", "i18n.logOutputEncoding=utf-8",
         "-c", "i18n.commitEncoding=utf-8")  # fmt: skip
# In repositories that this tool makes, and where there is none, no setting of the user or the machine holds:
# what is made is the same for everybody. The user's own checkouts keep theirs (who is trusted, who commits).
OWN: Mapping[str, str] = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
}


def run_git(
    arguments: Sequence[str],
    cwd: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    given: bytes | None = None,
    good: Sequence[int] = (0,),
) -> tuple[int, bytes]:
    """Run git and return its exit status and output.

    Args:
        arguments: what follows ``git``.
        cwd: the folder to run in.
        environment: variables beside the process's own; those that point git at another repository
            or index are taken out.
        given: bytes for its standard input.
        good: the exit statuses that are no error.

    Raises:
        OverlayError: git is missing, or ends with another status.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *PLAIN, *arguments],
            cwd=cwd,
            env={**clean, "LC_ALL": "C", **(environment or {})},
            input=given if given is not None else b"",
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise OverlayError("git is not installed", wanted="git 2.35 or newer", fix="install git") from None
    if done.returncode not in good:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OverlayError(
            f"git {' '.join(arguments[:3])} failed",
            seen=" | ".join(words[-4:]) or f"exit status {done.returncode}",
            fix="correct what git names",
        )
    return done.returncode, done.stdout


def git_text(*arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """What git prints, without the last line's end."""
    return run_git(arguments, cwd, environment=environment)[1].decode("utf-8").rstrip("\n")


def merge_texts(ours: str, base: str, theirs: str, labels: tuple[str, str, str]) -> tuple[str, int]:
    """Three-way merge by ``git merge-file``: the text, with diff3 markers where both sides changed, and
    the number of conflicts.

    Args:
        ours: the text that the change is merged into.
        base: the ancestor of both.
        theirs: the ancestor with the change.
        labels: what the markers call the three.
    """
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-merge-") as folder:
        paths = [Path(folder) / name for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_bytes(text.encode("utf-8"))
        named = [part for label in labels for part in ("-L", label)]
        command = [
            "merge-file",
            "-p",
            "-q",
            "--diff3",
            f"--marker-size={MARKER_SIZE}",
            *named,
            *map(str, paths),
        ]
        # The status is the number of conflicts, 127 at most; above it git failed.
        status, merged = run_git(command, environment=OWN, good=range(128))
    return merged.decode("utf-8"), status


def has_markers(text: str) -> bool:
    """Whether a line is a conflict's marker."""
    return any(line.startswith(marker) and line[MARKER_SIZE : MARKER_SIZE + 1] in ("", " ")
               for line in text.splitlines() for marker in MARKERS)  # fmt: skip


def diff_texts(old: str, new: str, path: str, context: int = CONTEXT_LINES) -> str:
    """The unified diff of a file from its '---' line on, '' where nothing differs."""
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-diff-") as folder:
        for side, text in (("a", old), ("b", new)):
            target = Path(folder) / side / path
            target.parent.mkdir(parents=True)
            target.write_bytes(text.encode("utf-8"))
        command = ["diff", "--no-index", "--no-color", "--no-ext-diff", "--no-prefix", f"-U{context}"]
        printed = run_git([*command, f"a/{path}", f"b/{path}"], Path(folder), environment=OWN, good=(0, 1))[1]
    text = printed.decode("utf-8")
    start = text.find("--- ")
    return text[start:] if start >= 0 else ""


def find_renames(gone: Mapping[str, bytes], candidates: Mapping[str, Path]) -> dict[str, str]:
    """Where files went, by git's own likeness of contents (half of it at least).

    Args:
        gone: the old contents of files that are not there any more, by path.
        candidates: files that may be one of them, by path.
    """
    if not gone or not candidates:
        return {}
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-renames-") as folder:
        root = Path(folder)
        for path, content in gone.items():
            _write(root / "old" / path, content)
        for path, file in candidates.items():
            _write(root / "new" / path, file.read_bytes())
        command = [
            "diff",
            "--no-index",
            "--no-ext-diff",
            "-M50%",
            "-l0",
            "--name-status",
            "--diff-filter=R",
            "-z",
        ]
        printed = run_git([*command, "old", "new"], root, environment=OWN, good=(0, 1))[1].decode("utf-8")
    words = printed.split("\0")
    found = {}
    for at, word in enumerate(words):
        if re.fullmatch(r"R\d{3}", word):
            found[words[at + 1].removeprefix("old/")] = words[at + 2].removeprefix("new/")
    return found


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
