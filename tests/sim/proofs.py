# SPDX-License-Identifier: Apache-2.0
"""The long proofs, run where the last run stopped, and the ledger of those that passed.

    python tests/sim/proofs.py [--minutes N] [--jobs N] [--only WORDS ..]     (make proofs)
    python tests/sim/proofs.py --table        (rewrites docs/proofs.md alone)
    python tests/sim/proofs.py --carry        (keeps passes whose kernels compile to the same machine code)

The tests of tests/sim that are marked ``full`` take days of a processor in all. Each that passes is written
into ``docs/proofs.json`` with a hash of what it proves (the ``subject``) and of what it proves it with (the
``instrument``: simulator and test code); what the ledger holds for the sources at hand is not run again.
Docstrings, comments and layout count for neither hash.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEDGER, TABLE = ROOT / "docs/proofs.json", ROOT / "docs/proofs.md"
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
BATCH = 4  # cases a process: weights and outputs in exact memory are made once a process


# ---- hashes
def _files(paths: Iterable[Path]) -> list[Path]:
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
    for file in _files(paths):
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
def _alone(folder: Path) -> Iterator[None]:
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
    with _alone(ledger.parent):
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


# ---- as pytest's plugin: records what passes and fails
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", type=Path, help="where a case's outcome is written")
    parser.addoption("--parent-pipe", type=int, help="a pipe whose other end closes with the runner")


# Hashes of the test files to run, before any of their sources is imported.
AT_START: dict[str, Hashes] = {}


def pytest_configure(config: pytest.Config) -> None:
    for argument in config.args:
        file = Path(argument.split("::")[0]).name
        if (TESTS / file).is_file():
            AT_START[file] = hashes(file)
    pipe = config.getoption("--parent-pipe")
    if pipe is not None:
        threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: int) -> None:
    """End this process and what it started when the runner has ended, however it did."""
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def unchanged(file: str) -> bool:
    """Whether the sources are those that this process has imported."""
    forget()
    try:
        return hashes(file) == AT_START[file]
    except (OSError, SyntaxError):  # in the middle of an edit
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "setup":
        item.stash[STARTED] = time.process_time()
    if (call.when == "call" or report.failed) and not report.skipped:
        case = f"{item.path.name}::{item.nodeid.split('::', 1)[1]}"
        if not unchanged(item.path.name):
            item.session.shouldstop = f"{case} is not recorded: sources were changed while it ran"
            return report
        entry = {
            "result": report.outcome,
            **vars(AT_START[item.path.name]),
            "cpu_s": round(time.process_time() - item.stash.get(STARTED, time.process_time())),
            "codes": codes_of(asked()),
        }
        record(item.config.getoption("--ledger"), case, entry)
    return report


STARTED = pytest.StashKey[float]()


# ---- the run
def command(*arguments: str) -> list[str]:
    plain = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return [sys.executable, "-m", "pytest", *plain, *arguments]


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]),
        "PYTHONUNBUFFERED": "1",  # a case's line is wanted when it ends
        "PYTEST_ADDOPTS": "",  # what is printed is read
    }


def collect() -> list[str]:
    """Every long case of tests/sim, as ``file::test[case]``."""
    done = subprocess.run(
        command("--collect-only", "-q", "-m", "full", "tests/sim"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(),
    )
    if done.returncode:
        raise SystemExit(f"tests/sim cannot be collected:\n{done.stdout}{done.stderr}")
    found = [line.removeprefix("tests/sim/") for line in done.stdout.splitlines() if "::" in line]
    if not found:
        raise SystemExit("tests/sim holds no test marked full: wanted the long proofs")
    return found


def chosen(cases: list[str], words: list[str]) -> list[str]:
    """Those that hold one of ``words``, in that order. Raises ``SystemExit`` for a word that none holds."""
    if not words:
        return cases
    for word in words:
        if not any(word in case for case in cases):
            raise SystemExit(
                f"--only {word}: no long case of tests/sim has it in its name; --table lists them"
            )
    picked = [case for word in words for case in cases if word in case]
    return list(dict.fromkeys(picked))


def batches(cases: list[str]) -> list[list[str]]:
    """Cases of one test, ``BATCH`` at most, in the order given."""
    out: list[list[str]] = []
    for case in cases:
        same = out and len(out[-1]) < BATCH and out[-1][0].split("[")[0] == case.split("[")[0]
        if same:
            out[-1].append(case)
        else:
            out.append([case])
    return out


class Pool:
    """Runs batches in ``jobs`` processes until ``minutes`` are over. The processes and what they start end
    then, with an interrupt, and with this process."""

    def __init__(self, jobs: int, minutes: float) -> None:
        self.until = time.monotonic() + 60 * minutes
        self.jobs, self.left, self.failed = jobs, queue.Queue[list[str]](), False
        self.lock = threading.Lock()
        self.children: set[subprocess.Popen[str]] = set()

    def run(self, cases: list[str]) -> bool:
        """Whether none failed."""
        for batch in batches(cases):
            self.left.put(batch)
        workers = [threading.Thread(target=self._work) for _ in range(self.jobs)]
        over = threading.Timer(min(self.until - time.monotonic(), threading.TIMEOUT_MAX), self.stop)
        for thread in (over, *workers):
            thread.start()
        try:
            for worker in workers:
                worker.join()
        finally:
            over.cancel()
            self.stop()
            for worker in workers:
                worker.join()
        return not self.failed

    def stop(self) -> None:
        """End what runs, unrecorded, and begin nothing more."""
        with self.lock:
            self.until = -math.inf
            for child in self.children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

    def _work(self) -> None:
        while time.monotonic() < self.until:
            try:
                batch = self.left.get_nowait()
            except queue.Empty:
                return
            self._one(batch)

    def _one(self, batch: list[str]) -> None:
        names = [f"tests/sim/{case}" for case in batch]
        alive, ours = os.pipe()
        plugin = ["-p", "proofs", "--ledger", str(LEDGER), "--parent-pipe", str(alive), "-v", "--tb=short"]
        try:
            with self.lock:
                if time.monotonic() >= self.until:
                    return
                child = subprocess.Popen(
                    command(*plugin, *names),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment(),
                    pass_fds=[alive],
                    start_new_session=True,
                )
                self.children.add(child)
            lines = self._follow(child)
            # Not waited for under the lock that stop takes: its number is not another's until then.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            with self.lock:
                self.children.remove(child)
                stopped = self.until == -math.inf
            status = child.wait()
        finally:
            os.close(alive)
            os.close(ours)
        if status == 0 or (stopped and status == -signal.SIGKILL):
            return
        with self.lock:
            self.failed = True
        what = f"ended by signal {-status}: not recorded" if status < 0 else f"exit status {status}"
        print("".join(lines[-60:]) + f"{what}: {', '.join(batch)}", flush=True)

    def _follow(self, child: subprocess.Popen[str]) -> list[str]:
        """What it prints, to its end; a case's line is printed when it comes."""
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if re.search(r" (PASSED|FAILED|ERROR)\b.*%\]", line):
                print(time.strftime("%H:%M:%S"), line.split("::", 1)[1].rstrip(), flush=True)
        return lines


# ---- the table
def table_text(cases: list[str]) -> str:
    """docs/proofs.md's text."""
    entries = read(LEDGER)
    rows: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        rows[case.split("[")[0]].append(case)
    out = [
        "# Long proofs",
        "",
        "Written by `make proofs`, which runs what is missing (`MINUTES`, `JOBS`, `ONLY`) and keeps what",
        "passed in `proofs.json`, with hashes of what was proved and of simulator and test code. *holds*:",
        "passed on the sources at hand; *earlier*: passed on these kernels, but simulator or test code has",
        "changed since; *missing*: not run, or run on other kernels. Processor minutes: of what passed.",
        "",
        "| proof | cases | holds | earlier | missing | failed | processor minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    total: dict[str, int] = defaultdict(int)
    for name, members in sorted(rows.items()):
        counts: dict[str, int] = defaultdict(int)
        for case in members:
            counts[state(case, entries)] += 1
        spent = sum(
            int(str(entries[case]["cpu_s"]))
            for case in members
            if state(case, entries) in ("holds", "earlier")
        )
        cells = [
            len(members),
            *(counts[key] for key in ("holds", "earlier", "missing", "failed")),
            round(spent / 60),
        ]
        out.append(f"| {name} | " + " | ".join(str(cell) for cell in cells) + " |")
        for key, cell in zip(
            ("cases", "holds", "earlier", "missing", "failed", "minutes"), cells, strict=True
        ):
            total[key] += cell
    out.append("| **all** | " + " | ".join(str(cell) for cell in total.values()) + " |")
    return "\n".join(out) + "\n"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="stop after these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these words in their name")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument(
        "--carry", action="store_true", help="keep passes on the same machine code; run nothing"
    )
    given = parser.parse_args()
    if given.jobs < 1 or not 0 < given.minutes < math.inf:
        parser.error(f"--jobs {given.jobs} --minutes {given.minutes:g}: both must be above 0 and finite")
    return given


def run(picked: list[str], jobs: int, minutes: float) -> int:
    """Run those that do not hold; the exit status."""
    entries = read(LEDGER)
    order = {"failed": 0, "missing": 0, "earlier": 1}
    wanted = [case for case in picked if state(case, entries) != "holds"]
    wanted.sort(key=lambda case: order[state(case, entries)])
    print(f"{len(picked)} long cases, {len(picked) - len(wanted)} hold, {len(wanted)} to run", flush=True)
    try:
        return int(not Pool(jobs, minutes).run(wanted))
    except KeyboardInterrupt:
        print("interrupted: what ended before is kept", flush=True)
        return 128 + signal.SIGINT


def main() -> int:
    given = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases = collect()
    picked = chosen(cases, given.only)
    status = 0
    try:
        with _alone(LEDGER.parent):  # before hours of work that could not be kept
            replace(TABLE, table_text(cases))
        if given.carry:
            kept, left = carry(LEDGER, cases)
            print(f"{kept} passes are of the same machine code, {left} are not")
        elif not given.table:
            status = run(picked, given.jobs, given.minutes)
        forget()
        with _alone(LEDGER.parent):
            replace(TABLE, table_text(cases))
        if gone := sorted(read(LEDGER).keys() - set(cases)):
            print(f"{len(gone)} entries of cases that there are not: {', '.join(gone)}")
    except LedgerError as error:
        raise SystemExit(str(error)) from None
    print(TABLE.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
