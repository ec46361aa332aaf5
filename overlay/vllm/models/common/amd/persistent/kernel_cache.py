# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: found by build key, compiled where missing, never shared half-written.

An entry is a folder ``<root>/<kernel name with digest>`` with what FlyDSL cached (``*.pkl`` below its own
folder names) and ``entry.json``. A process gives FlyDSL a private folder of links to one entry's files. So
FlyDSL's locks, which wait up to ten minutes for another process, are never contended; entries may lie where
the process cannot write; and a kernel never meets another's files, which FlyDSL's key does not tell apart
where only a captured object, such as the geometry, differs. What FlyDSL then had to compile is published by
one rename.

The first folder that has the entry wins: shipped ones (the image's) before the writable one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .build import DIGEST_LENGTH, Build, KernelBuildError, toolchain

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "VLLM_MONO_KERNEL_CACHE"
SHIPPED_VARIABLE = "VLLM_MONO_KERNELS_SHIPPED"
ENTRY = "entry.json"
# Longer than a compilation, which takes seconds, on a crowded machine; shorter than anyone's patience.
LOCK_SECONDS = 180.0

# FlyDSL reads its settings from the process's environment.
_environment_lock = threading.Lock()


@dataclass
class Counters:
    """What preparing kernels has done in this process."""

    loaded: int = 0
    compiled: int = 0
    compiled_names: list[str] = field(default_factory=list)


def kernel_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The writable folder: ``VLLM_MONO_KERNEL_CACHE``, or ``mono_kernels`` in vLLM's cache root."""
    if chosen := environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    root = environ.get("VLLM_CACHE_ROOT")
    if not root:
        base = environ.get("XDG_CACHE_HOME")
        root = str(Path(base) / "vllm" if base else Path.home() / ".cache" / "vllm")
    return Path(root).expanduser() / "mono_kernels"


def shipped_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Folders of ahead-of-time builds, which are only read: ``VLLM_MONO_KERNELS_SHIPPED``, colons between."""
    return tuple(Path(one) for one in environ.get(SHIPPED_VARIABLE, "").split(os.pathsep) if one)


class KernelCache:
    """Where this process finds and keeps compiled kernels.

    Args:
        folder: the writable folder; made when something is first kept.
        shipped: folders that are searched before it and never written.
        lock_seconds: how long to wait for another process that compiles the same kernel before compiling it
            too.
    """

    def __init__(
        self, folder: Path, shipped: tuple[Path, ...] = (), lock_seconds: float = LOCK_SECONDS
    ) -> None:
        self.folder, self.shipped, self.lock_seconds = folder, shipped, lock_seconds
        self.counters = Counters()
        self._launchers: dict[str, Any] = {}

    @classmethod
    def of_process(cls) -> KernelCache:
        """The cache that the environment names."""
        return cls(kernel_folder(), shipped_folders())

    def require_writable(self) -> None:
        """Make the writable folder and try it.

        Raises:
            KernelBuildError: it cannot be made or written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise KernelBuildError(
                f"the kernel cache {self.folder} cannot be written: {error.strerror or error}. Wanted: a "
                f"folder that this user may write. Set {FOLDER_VARIABLE} to one, or VLLM_CACHE_ROOT, or "
                "mount a volume there"
            ) from error

    def find(self, build: Build) -> Path | None:
        """The entry of ``build``, whole and as it was written; None where there is none."""
        for root in (*self.shipped, self.folder):
            folder = root / build.name
            if (folder / ENTRY).is_file():
                if (why := entry_fault(folder)) is None:
                    return folder
                logger.warning("kernel %s in %s is not used: %s", build.name, root, why)
        return None

    def launcher(self, build: Build) -> Any:
        """The launcher of ``build``, which is loaded, or compiled and kept: calling it never compiles.

        Raises:
            KernelBuildError: it does not compile, or what was compiled cannot be kept.
        """
        if build.name not in self._launchers:
            self._launchers[build.name] = self._prepare(build)
        return self._launchers[build.name]

    def _prepare(self, build: Build) -> Any:
        entry = self.find(build)
        if entry is None:
            self.require_writable()
            logger.warning("compiling the kernel %s: %s", build.name, self._why_missing(build))
            with self._lock(build):
                # Another process may have kept it while this one waited.
                entry = self.find(build)
                return self._open(build, entry)
        return self._open(build, entry)

    def _open(self, build: Build, entry: Path | None) -> Any:
        with tempfile.TemporaryDirectory(prefix="mono-kernel-") as private:
            scratch = Path(private)
            if entry is not None:
                link_tree(entry, scratch)
            launch, arguments = build.make(build.name)
            with flydsl_settings(build.arch, scratch):
                try:
                    launch(*arguments)
                except Exception as error:
                    raise KernelBuildError(f"the kernel {build.name} does not compile: {error}") from error
            made = [file for file in scratch.rglob("*.pkl") if not file.is_symlink()]
            if made or entry is None:
                self._keep(build, made, scratch, found=entry is not None)
            else:
                self.counters.loaded += 1
        return launch

    def _keep(self, build: Build, made: list[Path], scratch: Path, *, found: bool) -> None:
        self.counters.compiled += 1
        self.counters.compiled_names.append(build.name)
        if found:
            logger.warning("compiled the kernel %s: FlyDSL did not take the entry that there is", build.name)
        if not made:
            raise KernelBuildError(f"FlyDSL compiled {build.name} and wrote nothing to its cache")
        self.require_writable()
        publish(build, made, scratch, self.folder)

    def _why_missing(self, build: Build) -> str:
        roots = [str(root) for root in (*self.shipped, self.folder)]
        stale = sorted(
            path.name[-DIGEST_LENGTH:] for root in roots for path in Path(root).glob(f"{build.title}_*")
        )
        of_others = f"; stale entries of {', '.join(stale)} are left alone" if stale else ""
        return f"no entry of these sources and FlyDSL {toolchain().flydsl} in {' or '.join(roots)}{of_others}"

    @contextlib.contextmanager
    def _lock(self, build: Build) -> Iterator[None]:
        """Keep other processes from compiling the same, for a bounded time. Without a lock, since the bound
        has passed or the file system has none, both compile: entries are published whole either way."""
        descriptor = os.open(self.folder / f".{build.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = time.monotonic() + self.lock_seconds
            while not _try_lock(descriptor):
                if time.monotonic() > end:
                    logger.warning("another process holds the lock of %s: going on without it", build.name)
                    break
                time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether the lock was taken, or cannot be had on this file system at all."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


@contextlib.contextmanager
def flydsl_settings(arch: str, cache: Path) -> Iterator[None]:
    """FlyDSL compiles for ``arch`` into ``cache`` and launches nothing."""
    values = {
        "ARCH": arch,
        "COMPILE_ONLY": "1",
        "FLYDSL_RUNTIME_CACHE_DIR": str(cache),
        "FLYDSL_RUNTIME_ENABLE_CACHE": "1",
    }
    # Either would keep FlyDSL from its cache.
    without = ("FLYDSL_DUMP_IR", "FLYDSL_DEBUG_DUMP_IR", "FLYDSL_DEBUG_DUMP_ASM", "FLYDSL_RUNTIME_RUN_ONLY")
    with _environment_lock:
        before = {name: os.environ.get(name) for name in (*values, *without)}
        os.environ.update(values)
        for name in without:
            os.environ.pop(name, None)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def link_tree(entry: Path, scratch: Path) -> None:
    """Links in ``scratch`` to every file of ``entry`` that FlyDSL wrote, in the same folders."""
    for file in sorted(entry.rglob("*.pkl")):
        link = scratch / file.relative_to(entry)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())


def publish(build: Build, made: list[Path], scratch: Path, root: Path) -> Path:
    """Write the entry of ``build`` beside the others and rename it into place; the entry that another
    process finished first stays.

    Raises:
        KernelBuildError: the folder cannot be written.
    """
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{build.title}-", dir=root))
        files = {}
        for file in made:
            name = file.relative_to(scratch).as_posix()
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, temporary / name)
            files[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        about = {"kernel": build.name, "flydsl": toolchain().flydsl, "llvm": toolchain().llvm, "files": files}
        (temporary / ENTRY).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        _open_to_all(temporary)
        return _into_place(temporary, root / build.name)
    except OSError as error:
        raise KernelBuildError(f"the kernel {build.name} cannot be kept in {root}: {error}") from error


def _into_place(temporary: Path, target: Path) -> Path:
    for _ in range(2):
        try:
            temporary.rename(target)
            return target
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if entry_fault(target) is None:
            break
        # What is there is damaged: out of the way, and again.
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=target.parent))
        with contextlib.suppress(OSError):
            target.rename(aside / "entry")
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    return target


def _open_to_all(folder: Path) -> None:
    """Entries are for every user that may reach the cache; FlyDSL writes its files for their owner alone."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def entry_fault(folder: Path) -> str | None:
    """Why an entry cannot be used, None where it can."""
    try:
        about = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
        for name, digest in about["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"it cannot be read: {error!r}"
    return None if about["files"] else "it holds no kernel"
