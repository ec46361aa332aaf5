# SPDX-License-Identifier: Apache-2.0
"""The long proofs, run where the last run stopped, and the ledger of those that passed.

    python tests/sim/proofs.py [--minutes N] [--jobs N] [--only WORDS ..]     (make proofs)
    python tests/sim/proofs.py --table        (rewrites docs/proofs.md alone)
    python tests/sim/proofs.py --carry        (keeps passes whose kernels compile to the same machine code)

The tests of tests/sim that are marked ``full`` take days of a processor in all. Each that passes is written
into ``docs/proofs.json`` with a hash of what it proves (the ``subject``) and of what it proves it with (the
``instrument``: simulator and test code); what the ledger holds for the sources at hand is not run again.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from proof_ledger import (
    ROOT,
    TESTS,
    Hashes,
    LedgerError,
    alone,
    asked,
    carry,
    codes_of,
    forget,
    hashes,
    read,
    record,
    replace,
    state,
)

LEDGER, TABLE = ROOT / "docs/proofs.json", ROOT / "docs/proofs.md"
BATCH = 4  # cases a process: weights and outputs in exact memory are made once a process


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
        with alone(LEDGER.parent):  # before hours of work that could not be kept
            replace(TABLE, table_text(cases))
        if given.carry:
            kept, left = carry(LEDGER, cases)
            print(f"{kept} passes are of the same machine code, {left} are not")
        elif not given.table:
            status = run(picked, given.jobs, given.minutes)
        forget()
        with alone(LEDGER.parent):
            replace(TABLE, table_text(cases))
        if gone := sorted(read(LEDGER).keys() - set(cases)):
            print(f"{len(gone)} entries of cases that there are not: {', '.join(gone)}")
    except LedgerError as error:
        raise SystemExit(str(error)) from None
    print(TABLE.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
