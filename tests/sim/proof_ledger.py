# SPDX-License-Identifier: Apache-2.0
"""The ledger of the long proofs: what passed, with hashes of what it proved and of what it proved it with.

``subject`` is the hash of the kernels' sources, ``instrument`` that of simulator and test code. Docstrings,
comments and layout count for neither. ``proofs.py`` runs the proofs and writes the table.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
AMD = ROOT / "overlay/vllm/models/deepseek_v41/amd"
PERSISTENT = ROOT / "overlay/vllm/models/common/amd/persistent"
# What a launch's machine code and its float64 reference are made from, without the host's modules beside.
KERNELS = (
    *(
        PERSISTENT / f"{name}.py"
        for name in ("build", "device", "epoch", "handoff", "math", "quads", "regions")
    ),
    PERSISTENT / "isa",
    *(AMD / f"mono/{name}.py" for name in ("geometry", "regions", "stage_table")),
    AMD / "mono/kernels",
    AMD / "mono/stages",
    AMD / "mono/reference",
)
BASE_KERNELS = ROOT / "build/base/vllm/models/deepseek_v41/amd/mono"
# By the beginning of a test file's name, the first that fits.
SUBJECTS = {
    "test_mono_layer_beside_base": (*KERNELS, BASE_KERNELS),
    "test_mono_bench": (*KERNELS, BASE_KERNELS),
    "test_mono_demo": (*KERNELS, BASE_KERNELS),
    "test_mono": KERNELS,
    "test_swa": (AMD / "ops/swa_decode_meta.py", ROOT / "src/rocm_overlay/bench_swa.py"),
    "test_base": (BASE_KERNELS,),
}
# What executes a kernel, without what is beside it (real GPUs, times, pictures).
SIMULATOR = (
    ROOT / "src/cdnasim/core",
    *(
        ROOT / f"src/cdnasim/{name}.py"
        for name in (
            *("counts", "device", "errors", "flydsl_front", "native", "opcodes", "operands", "program"),
            "triton_front",
        )
    ),
)
TESTS = ROOT / "tests/sim"


# ---- hashes
def files_of(paths: Iterable[Path]) -> list[Path]:
    found = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: a proof's sources cannot be hashed")
        found += (
            sorted(p for p in path.rglob("*") if p.suffix in (".py", ".cpp", ".h"))
            if path.is_dir()
            else [path]
        )
    return found


def meaning(text: str) -> str:
    """A Python source's syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        match body:
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                node.body = rest  # type: ignore[attr-defined]
    return ast.dump(tree)


@cache
def hash_of(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files_of(paths):
        text = file.read_text()
        digest.update(file.name.encode() + b"\0" + (meaning(text) if file.suffix == ".py" else text).encode())
    return digest.hexdigest()[:16]


def _module_files(name: str) -> list[Path]:
    """The file of a module of tests/sim or of ``tests``, if it is one."""
    path = (ROOT if name.startswith("tests.") else TESTS).joinpath(*name.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def instrument_files(file: Path) -> tuple[Path, ...]:
    """A test file and the modules of tests/sim and ``tests`` that it imports, directly or not."""
    found, waiting = set(), [file]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        inside = one.is_relative_to(TESTS)
        package = ".".join(one.parent.relative_to(TESTS if inside else ROOT).parts)
        for node in ast.walk(ast.parse(one.read_text())):
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = f"{package}." if node.level else ""
                base = above.rstrip(".") if not node.module else above + node.module
                names = [base, *(f"{base}.{name.name}" for name in node.names)]
            else:
                continue
            waiting += [path for name in names for path in _module_files(name)]
    return tuple(sorted(found))


@dataclass(frozen=True)
class Hashes:
    subject: str
    instrument: str
    reference: str  # part of the subject


@cache
def hashes(file: str) -> Hashes:
    """Of a test file's proofs, for the sources at hand."""
    compiler = importlib.metadata.version("flydsl")
    paths = next((paths for stem, paths in SUBJECTS.items() if file.startswith(stem)), ())
    subject = f"{hash_of(tuple(paths))} flydsl {compiler}" if paths else ""
    reference = hash_of((AMD / "mono/reference",)) if paths[: len(KERNELS)] == KERNELS else ""
    return Hashes(subject, hash_of((*SIMULATOR, *instrument_files(TESTS / file))), reference)


def forget() -> None:
    """Have the next hashes be of the files as they are then."""
    hash_of.cache_clear()
    hashes.cache_clear()


# ---- the ledger
FIELDS = {"result": str, "subject": str, "instrument": str, "reference": str, "cpu_s": int, "codes": dict}


class LedgerError(Exception):
    """The ledger cannot be read, or nothing can be written beside it."""


def read(ledger: Path) -> dict[str, dict[str, object]]:
    """Raises ``LedgerError`` for what ``record`` cannot have written."""
    if not ledger.exists():
        return {}
    way_out = f"take the last whole one (git checkout {ledger.parent.name}/{ledger.name}) or remove it"
    try:
        entries = json.loads(ledger.read_text())
    except ValueError as error:
        raise LedgerError(f"{ledger} is no JSON ({error}): {way_out}") from None
    if not isinstance(entries, dict):
        raise LedgerError(f"{ledger} holds a {type(entries).__name__}, wanted an entry a case: {way_out}")
    for case, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        wrong = [name for name, kind in FIELDS.items() if not isinstance(fields.get(name), kind)]
        if wrong:
            raise LedgerError(f"{ledger}: {case} has no valid {', '.join(wrong)}: {way_out}")
    return entries


def replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises ``LedgerError``."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise LedgerError(f"{path} cannot be written ({error}), it is as it was") from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def record(
    ledger: Path, case: str, entry: dict[str, object], instead_of: dict[str, object] | None = None
) -> bool:
    """Add or replace one case's entry; other processes may do so at once. With ``instead_of`` only where
    that is the entry. Returns whether it was written. Raises ``LedgerError``."""
    with alone(ledger.parent):
        entries = read(ledger)
        if instead_of is not None and entries.get(case) != instead_of:
            return False
        entries[case] = entry
        lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
        replace(ledger, "{\n" + ",\n".join(lines) + "\n}\n")
        return True


def state(case: str, entries: dict[str, dict[str, object]]) -> str:
    """``holds``, ``earlier`` (same subject, another instrument), ``failed`` or ``missing``. What a change of
    the sources leaves the same in machine code is ``missing`` until ``carry``."""
    entry = entries.get(case)
    at_hand = hashes(case.split("::")[0])
    if entry is None or entry["subject"] != at_hand.subject:
        return "missing"
    if entry["result"] != "passed":
        return "failed"
    return "holds" if entry["instrument"] == at_hand.instrument else "earlier"


# ---- what was compiled
def asked() -> dict[str, Path]:
    """The builds that this process has asked for since the last call."""
    sources = sys.modules.get("mono.sources")
    found = dict(sources.ASKED) if sources else {}
    if sources:
        sources.ASKED.clear()
    return found


@cache
def code_of(build: str) -> str:
    """The hash of a build's machine code."""
    from mono import sources

    kind, arch, fields = sources.parse_build(build)
    return sources.code_hash([sources.compiled_kind(kind, arch, **fields)])


def codes_of(builds: dict[str, Path]) -> dict[str, str]:
    """By build; nothing where one has planted faults, since other sources put other code around them."""
    if any(overlay != AMD.parents[2] for overlay in builds.values()):
        return {}
    return {build: code_of(build) for build in sorted(builds)}


def same_code(codes: object) -> bool:
    """Whether every build still compiles, to this machine code."""
    assert isinstance(codes, dict)
    try:
        return bool(codes) and all(code_of(build) == code for build, code in codes.items())
    except (RuntimeError, KeyError, TypeError) as error:  # a kind or a field that is not there any more
        print(f"cannot be compared: {str(error).strip()[-300:]}")
        return False


def carry(ledger: Path, cases: Iterable[str]) -> tuple[int, int]:
    """Give passes of ``cases`` on other kernel sources the subject at hand, where the reference is the same
    and every build of theirs compiles to the same machine code. Returns how many are (kept, left)."""
    kept = left = 0
    entries = read(ledger)
    for case in sorted(entries.keys() & set(cases)):
        entry, now = entries[case], hashes(case.split("::")[0])
        if entry["subject"] == now.subject or entry["result"] != "passed":
            continue
        same = entry["reference"] == now.reference and same_code(entry["codes"])
        if same and record(ledger, case, entry | {"subject": now.subject}, instead_of=entry):
            kept += 1
        else:
            left += 1
    return kept, left
