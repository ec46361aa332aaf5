# SPDX-License-Identifier: Apache-2.0
"""Is this machine fit to serve? One row a check, from files and package metadata only.

Nothing here imports torch or vllm or opens a device: it takes well under a second, and it works in
the very state it is there to explain.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rocm_overlay import install, table
from rocm_overlay.errors import OverlayError
from rocm_overlay.machine import NODES, Gpu, read_gpus, visible_gpus
from rocm_overlay.pin import ARCHITECTURES, Pin
from rocm_overlay.recipe import Recipe

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"

# Workgroups that a persistent kernel keeps resident at once, one a compute unit: with fewer units
# some never start, and the others wait for them.
RESIDENT_COMPUTE_UNITS = 256
GIB = 1 << 30
# The driver keeps a little of a card's nominal memory for itself.
MEMORY_TOLERANCE = 0.02
KFD_PROCESSES = Path("class/kfd/kfd/proc")


@dataclass(frozen=True)
class Row:
    """The outcome of one check."""

    check: str
    status: str
    seen: str
    wanted: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The row as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Needs:
    """What is to be served; without a recipe, any one GPU that we have kernels for."""

    name: str = "any recipe"
    architectures: tuple[str, ...] = ARCHITECTURES
    gpus: int = 1
    memory_gib: int = 0

    @classmethod
    def of(cls, recipe: Recipe | None) -> Needs:
        """The needs of a recipe. Tensor parallelism over more GPUs than it names counts."""
        if recipe is None:
            return cls()
        parallel = recipe.args.get("tensor-parallel-size", 1)
        return cls(
            name=recipe.name,
            architectures=(recipe.hardware.architecture,),
            gpus=max(recipe.gpus, parallel if isinstance(parallel, int) else 1),
            memory_gib=recipe.hardware.memory_gib,
        )


@dataclass(frozen=True)
class Machine:
    """Where the checks look; tests give folders and answers of their own.

    Attributes:
        sysfs: the folder mounted at /sys.
        proc: the folder mounted at /proc.
        environ: the environment that a server would inherit.
        version: the installed version of a package, None when it is not installed.
        verify: checks the laid overlay and returns its manifest, or raises OverlayError.
    """

    sysfs: Path
    proc: Path
    environ: Mapping[str, str]
    version: Callable[[str], str | None]
    verify: Callable[[], Mapping[str, object]]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(
            Path("/sys"), Path("/proc"), os.environ, _installed, lambda: install.verify(install.find_site())
        )


def examine(pin: Pin, machine: Machine, needs: Needs) -> list[Row]:
    """Run every check; none stops the others."""
    rows = _guarded("GPUs", _gpu_rows, needs, machine)
    for name, wanted in pin.packages.items():
        rows += _guarded(name, _package, name, wanted, pin, machine)
    rows += _guarded("overlay", _overlay, machine)
    for name, folder in cache_folders(machine.environ).items():
        rows += _guarded(name, _cache, name, folder)
    return rows


def _guarded(check: str, run: Callable[..., Row | list[Row]], *arguments: object) -> list[Row]:
    """The rows of a check; where the machine's files cannot be read, one that says so."""
    try:
        rows = run(*arguments)
    except (OSError, UnicodeError) as error:
        fix = "run it as a user who may read that; of a file that is no text, tell whose it is"
        return [Row(check, UNKNOWN, f"{type(error).__name__}: {error}", "readable files", fix)]
    return rows if isinstance(rows, list) else [rows]


def render(rows: Sequence[Row]) -> str:
    """The rows as a table, what to do about the bad ones below it, and the verdict."""
    lines = [
        table.render(
            ("check", "status", "seen", "wanted"), [(r.check, r.status, r.seen, r.wanted) for r in rows]
        )
    ]
    fixes = [f"  {row.check}: {row.fix}" for row in rows if row.fix]
    if fixes:
        lines += ["", "what to do", *fixes]
    counts = [f"{sum(row.status == status for row in rows)} {status}" for status in (OK, WARN, FAIL, UNKNOWN)]
    return "\n".join([*lines, "", ", ".join(counts)])


def cache_folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders that a server compiles kernels into, by the variable that decides each.

    The defaults are those of vLLM, Triton and FlyDSL; the image sets all three outside HOME.
    """
    home = Path(environ.get("HOME") or "/")
    triton = Path(environ.get("TRITON_HOME") or home) / ".triton" / "cache"
    vllm = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "vllm"
    return {
        "VLLM_CACHE_ROOT": Path(environ.get("VLLM_CACHE_ROOT") or vllm),
        "TRITON_CACHE_DIR": Path(environ.get("TRITON_CACHE_DIR") or triton),
        "FLYDSL_RUNTIME_CACHE_DIR": Path(
            environ.get("FLYDSL_RUNTIME_CACHE_DIR") or home / ".flydsl" / "cache"
        ),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_rows(needs: Needs, machine: Machine) -> list[Row]:
    try:
        gpus = visible_gpus(read_gpus(machine.sysfs), machine.environ)
    except OverlayError as error:
        return [Row("GPUs", FAIL, str(error.seen), str(error.wanted), str(error.fix))]
    rows = [_count(gpus, needs)]
    # A server takes the first GPUs that it sees; another one, an integrated one say, concerns nobody.
    if used := gpus[: needs.gpus]:
        rows += [_architecture(used, needs), _compute_units(used), _memory(used, needs)]
    return rows + _guarded("other processes", _holders, gpus, needs, machine)


def _count(gpus: Sequence[Gpu], needs: Needs) -> Row:
    wanted = f"{needs.gpus} or more ({needs.name})"
    if len(gpus) >= needs.gpus:
        return Row("GPU count", OK, str(len(gpus)), wanted)
    if not gpus:
        fix = "start the container with --device /dev/kfd --device /dev/dri; on the host, load amdgpu"
        return Row("GPU count", FAIL, "no AMD GPU", wanted, fix)
    fix = "use a recipe for fewer GPUs, pass all of /dev/dri, or unset HIP_VISIBLE_DEVICES"
    return Row("GPU count", FAIL, str(len(gpus)), wanted, fix)


def _architecture(gpus: Sequence[Gpu], needs: Needs) -> Row:
    seen = sorted({gpu.gfx for gpu in gpus})
    wanted = " or ".join(needs.architectures)
    if set(seen) <= set(needs.architectures):
        return Row("architecture", OK, ", ".join(seen), wanted)
    return Row(
        "architecture",
        FAIL,
        ", ".join(seen),
        wanted,
        f"use a recipe for {seen[0]} (rocm-overlay recipes list)",
    )


def _compute_units(gpus: Sequence[Gpu]) -> Row:
    wanted = f"{RESIDENT_COMPUTE_UNITS} or more, an unpartitioned card"
    partitions = [gpu for gpu in gpus if gpu.partitioned]
    if partitions:
        first = partitions[0]
        mode = f"{first.partition_mode} mode" if first.partition_mode else "a part of the card"
        seen = f"{first.compute_units} on GPU {first.index}: partitioned, {mode}"
        return Row("compute units", FAIL, seen, wanted, "on the host: amd-smi set --compute-partition SPX")
    few = [gpu for gpu in gpus if gpu.compute_units < RESIDENT_COMPUTE_UNITS]
    if few:
        seen = f"{few[0].compute_units} on GPU {few[0].index}"
        return Row("compute units", FAIL, seen, wanted, "serve without --monokernel, or on another card")
    return Row("compute units", OK, str(min(gpu.compute_units for gpu in gpus)), wanted)


def _memory(gpus: Sequence[Gpu], needs: Needs) -> Row:
    least = min(gpu.memory_bytes for gpu in gpus) / GIB
    seen = f"{least:.0f} GiB"
    if not needs.memory_gib:
        return Row("memory a GPU", OK if least else UNKNOWN, seen)
    wanted = f"{needs.memory_gib} GiB ({needs.name})"
    if least >= needs.memory_gib * (1 - MEMORY_TOLERANCE):
        return Row("memory a GPU", OK, seen, wanted)
    return Row("memory a GPU", FAIL, seen, wanted, "use a recipe for this card (rocm-overlay recipes list)")


def _holders(gpus: Sequence[Gpu], needs: Needs, machine: Machine) -> Row:
    """Who holds device memory; bad only where too few GPUs are left, or the first ones are taken."""
    check, wanted = "other processes", "none on the GPUs to be used"
    held = held_memory(machine.sysfs)
    if held is None:
        openers = processes_with_kfd(machine.proc)
        if not openers:
            return Row(check, OK if gpus else UNKNOWN, "none seen", wanted)
        pids = ", ".join(map(str, openers))
        return Row(check, WARN, f"the GPU device is open in {pids}", wanted, "stop them if they are servers")
    positions = {gpu.index for gpu in gpus}
    taken = {index: pids for index, pids in held.items() if index in positions}
    if not taken:
        return Row(check, OK, "none", wanted)
    seen = "; ".join(
        f"GPU {index}: process {', '.join(map(str, pids))}" for index, pids in sorted(taken.items())
    )
    free = [gpu.index for gpu in gpus if gpu.index not in taken]
    if not any(gpu.index in taken for gpu in gpus[: needs.gpus]):
        return Row(check, WARN, seen, wanted)
    if len(free) >= needs.gpus:
        fix = f"HIP_VISIBLE_DEVICES={','.join(map(str, free[: needs.gpus]))}, or stop them"
        return Row(check, FAIL, seen, wanted, fix)
    return Row(check, FAIL, seen, wanted, "stop them, or serve on another machine")


def held_memory(sysfs: Path) -> dict[int, list[int]] | None:
    """The processes that hold device memory, by GPU position; None where the driver does not tell.

    The numbers are the host's: inside a container they name no process of its own.
    """
    folder = sysfs / KFD_PROCESSES
    if not folder.is_dir():
        return None
    identifiers = _gpu_identifiers(sysfs)
    held: dict[int, list[int]] = {}
    for process in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for file in process.glob("vram_*"):
            index = identifiers.get(file.name.removeprefix("vram_"))
            if index is not None and process.name.isdecimal() and _number(file):
                held.setdefault(index, []).append(int(process.name))
    return held


def processes_with_kfd(proc: Path) -> list[int]:
    """Other processes with the GPU device open, as far as /proc lets us see."""
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            opened = any(str(link.readlink()) == "/dev/kfd" for link in (folder / "fd").iterdir())
        except OSError:
            continue
        if opened and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return sorted(found)


def _gpu_identifiers(sysfs: Path) -> dict[str, int]:
    """GPU position by the driver's identifier; a node of processor cores has identifier 0."""
    nodes = sorted((sysfs / NODES).glob("[0-9]*"), key=lambda node: int(node.name))
    identifiers = [str(number) for number in (_number(node / "gpu_id") for node in nodes) if number]
    return {identifier: index for index, identifier in enumerate(identifiers)}


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _package(name: str, wanted: str, pin: Pin, machine: Machine) -> Row:
    """A package against the pin. A build's own suffix (``+rocm...``) does not count."""
    seen = machine.version(name)
    if seen is None:
        return Row(
            name,
            FAIL,
            "not installed",
            wanted,
            "serve from an image built over the pinned base, which carries it",
        )
    public = seen.partition("+")[0]
    if public == wanted:
        return Row(name, OK, seen, wanted)
    if name == "flydsl":
        accepted = f"one of {', '.join(pin.compile_flydsl)}"
        if public in pin.compile_flydsl:
            return Row(name, OK, seen, accepted)
        return Row(
            name, FAIL, seen, accepted, "use the pinned base: our kernels are not compiled with this one"
        )
    return Row(
        name, WARN, seen, wanted, f"this base carries another {name} than the pinned one: test it first"
    )


def _overlay(machine: Machine) -> Row:
    try:
        manifest = machine.verify()
    except OverlayError as error:
        wanted = str(error.wanted or "laid, every file as laid")
        return Row("overlay", FAIL, error.what.splitlines()[0], wanted, error.fix or "")
    return Row(
        "overlay", OK, f"{manifest['version']}, overlay {str(manifest['overlay_hash'])[:12]}", "intact"
    )


def _cache(name: str, folder: Path) -> Row:
    """Whether a file can be made in the folder, or in the nearest one above it that exists."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fix = f"set {name} to a writable folder, or mount one there"
        return Row(name, FAIL, f"{folder}: {error.strerror}", "a writable folder", fix)
    return Row(name, OK, str(folder), "a writable folder")
