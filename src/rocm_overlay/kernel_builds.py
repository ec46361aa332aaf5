# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time builds of the mono kernels: every one that a recipe can reach, and what each uses."""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocm_overlay import kernel_set, recipe, table
from rocm_overlay.code_object import Resources
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.kernel_arches import MOST_ROWS
from rocm_overlay.kernel_set import Wanted
from rocm_overlay.project import Project

DOCUMENT = Path("docs/tuning/kernels.md")
TABLE_NAME = "kernels.json"
BEGIN, END = "<!-- kernels table: begin -->", "<!-- kernels table: end -->"
HEADERS = ("kernel", "VGPRs", "AGPRs", "LDS bytes", "scratch bytes", "spills", "instructions")
# Resident memory of one compiler with its libraries.
JOB_BYTES = 1 << 30
LINKERS = ("ld.lld", "ld.lld-20", "ld.lld-19")
# A compilation takes seconds; one that takes this long hangs.
ANSWER_SECONDS = 600


@dataclass(frozen=True)
class Built:
    """One compiled kernel."""

    wanted: Wanted
    name: str
    compiled: bool
    seconds: float
    resources: Resources


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("kernels", help="compile the mono kernels ahead of time, without a GPU")
    parser.add_argument("--arch", default="gfx950", help=f"{' or '.join(MOST_ROWS)} (default: gfx950)")
    parser.add_argument("--out", type=Path, help="the folder to fill (default: build/kernels)")
    parser.add_argument("--overlay", type=Path, help="the folder that holds vllm/ (default: overlay)")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once (default: one a core)")
    parser.add_argument("--every", action="store_true", help="all widths, not only those of the recipes")
    parser.add_argument(
        "--only", action="append", default=[], metavar=kernel_set.FORM, help="this one; repeatable"
    )
    parser.add_argument(
        "--flydsl",
        type=Path,
        metavar="FOLDER",
        help="compile with the flydsl in this folder, not the installed",
    )
    parser.add_argument("--write", action="store_true", help=f"write the table to {DOCUMENT}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The verb ``kernels``."""
    project = Project.find()
    out = arguments.out or project.build / "kernels"
    wanted = choose(project, arguments.arch, arguments.only, every=arguments.every)
    if not wanted:
        print(f"{nothing_for(arguments.arch)}: nothing to do")
        return 0
    overlay = arguments.overlay or project.overlay
    built = compile_all(
        wanted, overlay, out, arguments.jobs or default_jobs(len(wanted)), say, flydsl=arguments.flydsl
    )
    write_json(out / TABLE_NAME, built)
    print(render(built))
    compiled = sum(one.compiled for one in built)
    print(f"{len(built)} kernels in {out}: {compiled} compiled, {len(built) - compiled} were there")
    check(built)
    if arguments.write:
        document = project.root / DOCUMENT
        document.write_text(with_table(document.read_text(encoding="utf-8"), built), encoding="utf-8")
        write_json(document.with_suffix(".json"), built)
    return 0


def choose(project: Project, arch: str, only: Sequence[str], *, every: bool = False) -> list[Wanted]:
    """The kernels to compile."""
    if only:
        return [kernel_set.parse(text, arch) for text in only]
    return kernel_set.every(arch) if every else kernel_set.of_recipes(recipe.load_all(project.recipes), arch)


def nothing_for(arch: str) -> str:
    """Why no recipe reaches a kernel for ``arch``."""
    if arch not in MOST_ROWS:
        return f"no mono kernels for {arch} (there are some for {', '.join(MOST_ROWS)})"
    return f"no recipe for {arch} decodes on the mono kernels"


def check(built: Sequence[Built]) -> None:
    """Refuse kernels that use scratch or spill registers.

    Raises:
        CheckFailed: names each.
    """
    found = {one.wanted: one.resources.faults() for one in built if one.resources.faults()}
    if found:
        raise CheckFailed(
            f"{len(found)} of {len(built)} kernels use what none may",
            seen="; ".join(f"{wanted}: {', '.join(faults)}" for wanted, faults in found.items()),
            wanted="no scratch",
            fix="have the stage that needs most registers do less at once",
        )


def default_jobs(number: int) -> int:
    """Compilers to run at once: no more than cores, than memory holds, or than there is work."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // JOB_BYTES, number))


def linker_environment(folder: Path) -> dict[str, str]:
    """What has FlyDSL find a linker: nothing where ROCm's own is there, else a folder with lld in it.

    Raises:
        OverlayError: there is no linker.
    """
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    if (rocm / "llvm/bin/ld.lld").exists():
        return {}
    linker = next((path for name in LINKERS if (path := shutil.which(name))), None)
    if linker is None:
        raise OverlayError(
            "FlyDSL cannot link code objects",
            seen=f"no llvm/bin/ld.lld in {rocm} and no {' or '.join(LINKERS)} on the PATH",
            wanted="ROCm's linker, or lld",
            fix="apt-get install lld, or set ROCM_PATH",
        )
    link = folder / ".linker/llvm/bin/ld.lld"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(linker)
    return {"ROCM_PATH": str(folder / ".linker")}


def compiler_environment(out: Path, flydsl: Path | None) -> dict[str, str]:
    """The environment of compilers that fill ``out``, which is made.

    Raises:
        OverlayError: ``out`` cannot be made, ``flydsl`` holds none, or there is no linker.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OverlayError(
            f"{out} cannot be made", seen=error, wanted="a folder that this user may write", fix="give --out"
        ) from error
    if flydsl is not None and not (flydsl / "flydsl/__init__.py").is_file():
        raise OverlayError(
            f"no flydsl in {flydsl}",
            wanted="a folder that holds flydsl/ and its .dist-info",
            fix="pip install --target",
        )
    paths = (flydsl, os.environ.get("PYTHONPATH"), Path(__file__).resolve().parents[1])
    joined = os.pathsep.join(str(path) for path in paths if path)
    return {**os.environ, "PYTHONPATH": joined, **linker_environment(out)}


class Worker:
    """One compiler process, started when first asked."""

    def __init__(self, overlay: Path, out: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "rocm_overlay.kernel_worker", str(overlay), str(out)]
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def ask(self, wanted: Wanted) -> dict[str, Any]:
        """Compile one kernel; what ends the process is an answer with ``error`` too."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._errors: list[str] = []
            self._reader = threading.Thread(target=self._read_errors, args=(self._process,), daemon=True)
            self._reader.start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(asdict(wanted)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return dict(json.loads(line))
        status = process.wait()
        self._process = None
        self._reader.join()
        last = "".join(self._errors[-15:]).strip()
        return {"error": f"the compiler ended with status {status}: {last or 'it said nothing'}"}

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._errors.append(line)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def compile_all(
    wanted: Sequence[Wanted],
    overlay: Path,
    out: Path,
    jobs: int,
    report: Callable[[str], None],
    *,
    flydsl: Path | None = None,
) -> list[Built]:
    """Compile, or find compiled, every kernel of ``wanted``. What is done stays done when it is stopped.

    Args:
        wanted: the kernels.
        overlay: the folder that holds ``vllm/`` with their sources.
        out: the kernel cache to fill.
        jobs: compilers at once.
        report: takes a line of progress.
        flydsl: a folder that holds another ``flydsl`` than the installed one.

    Raises:
        OverlayError: the folder cannot be written, or kernels do not compile: all of them at once.
    """
    environment = compiler_environment(out, flydsl)
    waiting: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
    # The widest take longest: started first, they do not end alone.
    for one in sorted(wanted, key=lambda one: -one.rows):
        waiting.put(one)
    answers: dict[Wanted, dict[str, Any]] = {}
    started, lock = time.monotonic(), threading.Lock()

    def serve() -> None:
        worker = Worker(overlay, out, environment)
        try:
            while True:
                try:
                    one = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = worker.ask(one)
                with lock:
                    answers[one] = answer
                    report(progress(len(answers), len(wanted), one, answer, time.monotonic() - started))
        finally:
            worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _built(wanted, answers)


def _built(wanted: Sequence[Wanted], answers: Mapping[Wanted, Mapping[str, Any]]) -> list[Built]:
    failed = {one: answers[one]["error"] for one in wanted if "error" in answers[one]}
    if failed:
        raise OverlayError(
            f"{len(failed)} of {len(wanted)} kernels do not compile",
            seen="\n          ".join(f"{one}: {error}" for one, error in failed.items()),
            wanted="kernels that compile with the FlyDSL that is installed",
            fix="correct the first; those that compiled are kept",
        )
    return [
        Built(
            one,
            answers[one]["name"],
            answers[one]["compiled"],
            answers[one]["seconds"],
            Resources(**answers[one]["resources"]),
        )
        for one in wanted
    ]


def progress(done: int, number: int, one: Wanted, answer: Mapping[str, Any], seconds: float) -> str:
    """A line of progress."""
    what = "failed" if "error" in answer else "compiled" if answer["compiled"] else "was there"
    left = seconds / done * (number - done)
    return f"{done}/{number} {one}: {what} ({seconds:.0f} s, about {left:.0f} s left)"


def say(line: str) -> None:
    """Progress on stderr; stdout has only the result."""
    print(f"kernels: {line}", file=sys.stderr, flush=True)


def row(one: Built) -> tuple[object, ...]:
    """One kernel's line of the table."""
    r = one.resources
    spills = r.vgpr_spills + r.sgpr_spills
    return (one.wanted, r.vgprs, r.agprs, r.lds_bytes, r.scratch_bytes, spills, r.instructions)


def render(built: Sequence[Built]) -> str:
    """The table, for the terminal and the document."""
    return table.render(HEADERS, [row(one) for one in built])


def with_table(text: str, built: Sequence[Built]) -> str:
    """The document's text with the table of ``built`` between its marks."""
    if BEGIN not in text or END not in text:
        raise OverlayError(f"{DOCUMENT} has no marks for the table", wanted=f"{BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n```\n{render(built)}\n```\n{END}{after}"


def write_json(path: Path, built: Sequence[Built]) -> None:
    """The table as JSON, without what differs between runs."""
    rows = [{**asdict(one.wanted), **one.resources.as_dict()} for one in built]
    path.write_text("[\n" + ",\n".join(" " + json.dumps(one) for one in rows) + "\n]\n", encoding="utf-8")
