# SPDX-License-Identifier: Apache-2.0
"""Changing files of a package folder, all of them or none.

Order of events: everything new is written beside the package and a journal says what is about to
move; then each original is moved aside and each new file moved in; then the journal is retired in
one rename. A failure before that rename moves the originals back, so they are the same inodes with
the same times and modes. A process that is killed leaves its journal, and the next one undoes it.
One process at a time: a journal on disk must mean that its writer is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError

JOURNAL_DIR = ".vllm-rocm-overlay-journal"
RETIRED_DIR = ".vllm-rocm-overlay-retired"
JOURNAL_NAME = "journal.json"
SPARE_BYTES = 1 << 20

Step = Callable[[str], None]


def no_step(_: str) -> None:
    """The default for tests' fault injection: nothing happens between the steps."""


@contextmanager
def exclusive(root: Path, doing: str = "laying") -> Iterator[None]:
    """Hold a folder for this process; the lock goes with the process, however it ends.

    Args:
        root: the folder.
        doing: what it is held for, for the error.

    Raises:
        OverlayError: another process holds it.
    """
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OverlayError(
            f"another process is {doing} in {root}",
            seen="its lock is held",
            wanted="one at a time",
            fix="wait for it to end, then run this again",
        ) from None
    finally:
        os.close(held)


@dataclass(frozen=True)
class Write:
    """A file's new content, or its removal when ``content`` is None; path below the root."""

    path: str
    content: bytes | None


@dataclass(frozen=True)
class _Entry:
    path: str
    slot: str
    existed: bool
    added: bool


class Transaction:
    """One all-or-nothing set of changes below ``root`` (the folder that holds vllm/).

    Args:
        root: the folder the paths are relative to.
        step: called with a step's name before each change to the file system; a test raises in it.
    """

    def __init__(self, root: Path, step: Step = no_step) -> None:
        self.root = root
        self.journal = root / JOURNAL_DIR
        self._step = step

    def run(self, writes: list[Write], check: Callable[[], None] = lambda: None) -> None:
        """Make the changes, then call ``check``; if either raises, everything is as before.

        Raises:
            OverlayError: the folder cannot be written, or there is no space for the new files.
        """
        with readable_faults(self.root):
            undo_interrupted(self.root)
            self._check_space(writes)
            entries = self._plan(writes)
            try:
                self._stage(writes, entries)
                self._commit(entries)
                check()
                self._step("retire")
                self.journal.rename(self.root / RETIRED_DIR)
            except BaseException:
                undo_interrupted(self.root)
                raise
            shutil.rmtree(self.root / RETIRED_DIR, ignore_errors=True)

    def _check_space(self, writes: list[Write]) -> None:
        needed = sum(len(write.content or b"") for write in writes) + SPARE_BYTES
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise OverlayError(
                f"no space to lay the overlay in {self.root}",
                seen=f"{free} bytes free",
                wanted=f"{needed} bytes",
                fix="free space on that file system",
            )

    def _plan(self, writes: list[Write]) -> list[_Entry]:
        entries = [
            _Entry(write.path, str(slot), (self.root / write.path).exists(), write.content is not None)
            for slot, write in enumerate(writes)
        ]
        stale = [path for write in writes for path in bytecode(self.root, write.path)]
        return entries + [_Entry(path, f"c{slot}", True, False) for slot, path in enumerate(stale)]

    def _stage(self, writes: list[Write], entries: list[_Entry]) -> None:
        """Write the new files and the journal; the package itself is not touched."""
        self._step("journal folder")
        for name in ("new", "old"):
            (self.journal / name).mkdir(parents=True)
        for write, entry in zip(writes, entries, strict=False):
            if write.content is not None:
                self._step(f"stage {write.path}")
                staged = self.journal / "new" / entry.slot
                staged.write_bytes(write.content)
                original = self.root / write.path
                staged.chmod(original.stat().st_mode & 0o7777 if entry.existed else 0o644)
        record = {
            "entries": [vars(entry) for entry in entries],
            "folders": [str(path.relative_to(self.root)) for path in self._new_folders(writes)],
            "modes": self._modes(entries),
        }
        self._step("journal")
        staged = self.journal / f"{JOURNAL_NAME}.part"
        staged.write_text(json.dumps(record), encoding="utf-8")
        staged.rename(self.journal / JOURNAL_NAME)

    def _new_folders(self, writes: list[Write]) -> list[Path]:
        """The folders that the new files need and that are not there, outermost first."""
        missing: set[Path] = set()
        for write in writes:
            if write.content is not None:
                folder = (self.root / write.path).parent
                while not folder.exists():
                    missing.add(folder)
                    folder = folder.parent
        return sorted(missing)

    def _modes(self, entries: list[_Entry]) -> dict[str, int]:
        """Of each folder that a removal may empty, so that one that comes back is as it was."""
        found: dict[str, int] = {}
        for entry in entries:
            folder = (self.root / entry.path).parent
            while not entry.added and folder.is_dir() and folder != self.root:
                found[folder.relative_to(self.root).as_posix()] = folder.stat().st_mode & 0o7777
                folder = folder.parent
        return found

    def _commit(self, entries: list[_Entry]) -> None:
        for entry in entries:
            target = self.root / entry.path
            if entry.existed:
                self._step(f"move aside {entry.path}")
                target.rename(self.journal / "old" / entry.slot)
            if entry.added:
                self._step(f"move in {entry.path}")
                _make_folders(target.parent)
                (self.journal / "new" / entry.slot).rename(target)
        for entry in entries:
            if not entry.added:
                self._remove_empty((self.root / entry.path).parent)

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder that holds nothing, and those above: it could still be imported, as a package."""
        while folder != self.root and folder.is_dir() and not any(folder.iterdir()):
            self._step(f"remove folder {folder.relative_to(self.root)}")
            folder.rmdir()
            folder = folder.parent


def _make_folders(folder: Path) -> None:
    """Make the folder and those above it, each as open as its parent whatever the umask."""
    if not folder.exists():
        _make_folders(folder.parent)
        folder.mkdir()
        folder.chmod(folder.parent.stat().st_mode & 0o7777)


def undo_interrupted(root: Path) -> bool:
    """Undo what an interrupted transaction left below ``root``; True when there was one."""
    shutil.rmtree(root / RETIRED_DIR, ignore_errors=True)
    journal = root / JOURNAL_DIR
    if not journal.exists():
        return False
    # Without a complete journal nothing had been moved yet.
    if (journal / JOURNAL_NAME).exists():
        record = _read_journal(journal / JOURNAL_NAME)
        for entry in reversed(record.entries):
            _undo(root, journal, entry)
        for folder in reversed(record.folders):
            shutil.rmtree(root / folder, ignore_errors=True)
        for folder, mode in record.modes.items():
            if (root / folder).is_dir() and (root / folder).stat().st_mode & 0o7777 != mode:
                (root / folder).chmod(mode)
    shutil.rmtree(journal)
    return True


@dataclass(frozen=True)
class _Record:
    entries: list[_Entry]
    folders: list[str]
    modes: dict[str, int]


def _read_journal(path: Path) -> _Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return _Record(
            [_Entry(**fields) for fields in record["entries"]],
            [str(one) for one in record["folders"]],
            {str(folder): int(mode) for folder, mode in record.get("modes", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OverlayError(
            f"the journal {path} is damaged",
            seen=error,
            wanted="the record of an interrupted lay",
            fix=f"reinstall the base package, remove {path.parent}, then lay",
        ) from error


def _undo(root: Path, journal: Path, entry: _Entry) -> None:
    target, kept = root / entry.path, journal / "old" / entry.slot
    if kept.exists():
        _make_folders(target.parent)
        kept.replace(target)
    elif not entry.existed:
        target.unlink(missing_ok=True)


def bytecode(root: Path, path: str) -> Iterator[str]:
    """The compiled files of a module: Python would drop a stale one, but only by time and size."""
    source = root / path
    for compiled in sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")):
        yield compiled.relative_to(root).as_posix()


@contextmanager
def readable_faults(root: Path) -> Iterator[None]:
    """Turn the file system's refusals into errors that say what to do."""
    try:
        yield
    except PermissionError as error:
        raise OverlayError(
            f"{root} cannot be written",
            seen=error,
            wanted="a writable package folder",
            fix="run as its owner",
        ) from error
    except OSError as error:
        with suppress(OSError):
            undo_interrupted(root)
        raise OverlayError(
            f"laying in {root} failed; the package is as it was",
            seen=error,
            wanted="a writable file system with space for the new files",
            fix="free space on that file system and see that it is writable, then retry",
        ) from error
