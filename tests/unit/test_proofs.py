# SPDX-License-Identifier: Apache-2.0
"""The ledger of long proofs: what passed is not run again, and what it was passed on is known."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "sim"
sys.path.insert(0, str(SIM))
import proof_ledger  # noqa: E402
import proofs  # noqa: E402

TESTS = """
import time
import pytest

@pytest.mark.full
@pytest.mark.parametrize("n", range(6))
def test_good(n):
    assert n >= 0

@pytest.mark.full
def test_bad():
    assert False, "the planted fault"

@pytest.mark.full
def test_slow():
    time.sleep(600)

def test_short():
    pass
"""
PASSED = {f"test_flow.py::test_good[{n}]" for n in range(6)}


@dataclass(frozen=True)
class Tree:
    """A small repository with the runner in it."""

    root: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tests/sim/proofs.py", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=120)

    def ledger(self) -> dict[str, dict[str, object]]:
        return json.loads((self.root / "docs/proofs.json").read_text())

    def row(self, test: str) -> list[str]:
        """Cases, holds, earlier, missing, failed, minutes of one test in the table."""
        lines = (self.root / "docs/proofs.md").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith(f"| test_flow.py::{test} ")]
        return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for folder in ("docs", "src/cdnasim/core", "tests/sim/mono", "tests/sim/base"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/cdnasim/core/core.cpp").write_text("int answer = 42;\n")
    for name in (
        "counts",
        "device",
        "errors",
        "native",
        "opcodes",
        "operands",
        "program",
        "timing",
        "flydsl_front",
        "triton_front",
    ):
        (tmp_path / f"src/cdnasim/{name}.py").touch()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["full: long"]\n')
    (tmp_path / "tests/sim/test_flow.py").write_text(TESTS)
    for name in ("proofs.py", "proof_ledger.py"):
        shutil.copy(SIM / name, tmp_path / "tests/sim" / name)
    return Tree(tmp_path)


def test_what_passed_is_kept_and_what_failed_is_run_again(tree: Tree) -> None:
    first = tree.run("--only", "good", "bad", "--jobs", "2")
    assert first.returncode == 1
    assert "7 long cases, 0 hold, 7 to run" in first.stdout
    assert "the planted fault" in first.stdout
    assert {case for case, entry in tree.ledger().items() if entry["result"] == "passed"} == PASSED
    assert tree.row("test_good")[:5] == ["6", "6", "0", "0", "0"]
    assert tree.row("test_bad")[:5] == ["1", "0", "0", "0", "1"]
    assert "7 long cases, 6 hold, 1 to run" in tree.run("--only", "good", "bad").stdout


def test_a_changed_instrument_makes_a_pass_an_earlier_one(tree: Tree) -> None:
    assert tree.run("--only", "good").returncode == 0
    (tree.root / "src/cdnasim/timing.py").write_text("beside = 1\n")
    (tree.root / "tests/sim/mono/other.py").write_text("beside = 1\n")
    tree.run("--table")
    assert tree.row("test_good")[:5] == ["6", "6", "0", "0", "0"]
    (tree.root / "src/cdnasim/core/core.cpp").write_text("int answer = 43;\n")
    tree.run("--table")
    assert tree.row("test_good")[:5] == ["6", "0", "6", "0", "0"]
    assert "6 long cases, 0 hold, 6 to run" in tree.run("--only", "good").stdout


def test_comments_and_docstrings_change_nothing(tree: Tree) -> None:
    assert tree.run("--only", "good").returncode == 0
    (tree.root / "tests/sim/test_flow.py").write_text('"""What it is."""\n# why\n' + TESTS)
    tree.run("--table")
    assert tree.row("test_good")[:2] == ["6", "6"]


def test_what_a_test_imports_is_its_instrument(tree: Tree) -> None:
    """Also what its modules import, by relative names or within functions."""
    sim = tree.root / "tests/sim"
    (sim / "mono/__init__.py").touch()
    (sim / "mono/near.py").write_text("def f():\n    from .far import x\n")
    (sim / "mono/far.py").write_text("x = 1\n")
    (sim / "test_flow.py").write_text("from mono import near\n" + TESTS)
    assert tree.run("--only", "good").returncode == 0
    (sim / "mono/far.py").write_text("x = 2\n")
    tree.run("--table")
    assert tree.row("test_good")[:5] == ["6", "0", "6", "0", "0"]


SOURCES = """
from pathlib import Path
ROOT = Path(__file__).parents[3]
OVERLAY = ROOT / "overlay/vllm"
ASKED = {}
def parse_build(name):
    return name, "gfx950", {}
def compiled_kind(kind, arch, **fields):
    return kind
def code_hash(kernels):
    return (ROOT / "code.txt").read_text()
"""
USER = """
import pytest
from mono import sources

@pytest.mark.full
def test_launch():
    sources.ASKED["ffn"] = sources.OVERLAY

@pytest.mark.full
def test_planted_fault():
    sources.ASKED["ffn"] = sources.ROOT / "mutant"
"""


@pytest.fixture
def kernels(tree: Tree) -> Tree:
    """With kernel sources, and proofs of them that passed."""
    shutil.copytree(proof_ledger.ROOT / "overlay", tree.root / "overlay")
    (tree.root / "code.txt").write_text("s_endpgm")
    (tree.root / "tests/sim/mono/sources.py").write_text(SOURCES)
    (tree.root / "tests/sim/mono/__init__.py").touch()
    (tree.root / "tests/sim/test_mono_flow.py").write_text(USER)
    assert tree.run("--only", "mono_flow").returncode == 0
    return tree


def change(tree: Tree, file: str) -> None:
    path = tree.root / "overlay/vllm/models/deepseek_v41/amd/mono" / file
    path.write_text(path.read_text() + "\nEXTRA = 1\n")


def state_of(tree: Tree, test: str) -> str:
    text = (tree.root / "docs/proofs.md").read_text()
    (line,) = [line for line in text.splitlines() if f"test_mono_flow.py::{test} " in line]
    counts = [int(cell) for cell in line.split("|")[3:7]]
    return ("holds", "earlier", "missing", "failed")[counts.index(1)]


def test_a_change_of_the_sources_alone_is_carried_over_but_for_planted_faults(kernels: Tree) -> None:
    change(kernels, "kernels/ffn.py")
    kernels.run("--table")
    assert state_of(kernels, "test_launch") == "missing"
    assert "1 passes are of the same machine code, 1 are not" in kernels.run("--carry").stdout
    assert state_of(kernels, "test_launch") == "holds"
    assert state_of(kernels, "test_planted_fault") == "missing"


@pytest.mark.parametrize("changed", ["code", "reference"])
def test_other_machine_code_and_another_reference_are_not_carried_over(kernels: Tree, changed: str) -> None:
    if changed == "code":
        change(kernels, "kernels/ffn.py")
        (kernels.root / "code.txt").write_text("s_nop 0")
    else:
        change(kernels, "reference/ffn.py")
    assert "0 passes are of the same machine code, 2 are not" in kernels.run("--carry").stdout
    assert state_of(kernels, "test_launch") == "missing"


def test_time_that_is_over_ends_a_case_unrecorded(tree: Tree) -> None:
    done = tree.run("--only", "slow", "--minutes", "0.1")
    assert done.returncode == 0
    assert not (tree.root / "docs/proofs.json").exists()
    assert tree.row("test_slow")[:5] == ["1", "0", "0", "1", "0"]


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (("--only", "god"), "--only god: no long case"),
        (("--jobs", "0"), "both must be above 0"),
        (("--minutes", "-1"), "both must be above 0"),
        (("--minutes", "nan"), "both must be above 0 and finite"),
        (("--minutes", "inf"), "both must be above 0 and finite"),
    ],
)
def test_a_wrong_request_is_refused(tree: Tree, arguments: tuple[str, ...], wanted: str) -> None:
    done = tree.run(*arguments)
    assert done.returncode != 0
    assert wanted in done.stderr
    assert not (tree.root / "docs/proofs.json").exists()


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


WITH_A_CHILD = """
import subprocess, sys
from pathlib import Path
import pytest

@pytest.mark.full
@pytest.mark.parametrize("n", range(2))
def test_child(n):
    if n:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("pid.part").write_text(str(child.pid))
        Path("pid.part").rename("pid")
        child.wait()

@pytest.mark.full
def test_next():
    Path("next").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_runs_ends_with_the_runner(tree: Tree, number: signal.Signals) -> None:
    """Also what a case has started. What ended before is kept, and nothing more begins."""
    (tree.root / "tests/sim/test_flow.py").write_text(WITH_A_CHILD)
    command = [sys.executable, "tests/sim/proofs.py", "--jobs", "1"]
    # A shell's background job, as a CI's may be, hands on that SIGINT is ignored.
    runner = subprocess.Popen(
        command,
        cwd=tree.root,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until((tree.root / "pid").exists)
        child = int((tree.root / "pid").read_text())
        assert not ended(child)
        runner.send_signal(number)
        out = runner.communicate(timeout=60)[0]
        until(lambda: ended(child), 20)
    finally:
        runner.kill()
    assert set(tree.ledger()) == {"test_flow.py::test_child[0]"}
    assert not (tree.root / "next").exists()
    if number != signal.SIGKILL:
        assert runner.returncode == 130 and "interrupted: what ended before is kept" in out
        assert tree.row("test_child")[:5] == ["2", "1", "0", "1", "0"]


def test_what_a_case_has_started_ends_with_the_time(tree: Tree) -> None:
    (tree.root / "tests/sim/test_flow.py").write_text(WITH_A_CHILD)
    assert tree.run("--jobs", "1", "--minutes", "0.15").returncode == 0
    assert ended(int((tree.root / "pid").read_text()))
    assert not (tree.root / "next").exists()


def test_a_case_that_is_killed_is_no_end_of_the_time(tree: Tree) -> None:
    """As where memory runs out."""
    text = TESTS.replace("time.sleep(600)", "import os; os.kill(os.getpid(), 9)")
    (tree.root / "tests/sim/test_flow.py").write_text(text)
    done = tree.run("--only", "slow")
    assert done.returncode == 1
    assert "ended by signal 9: not recorded: test_flow.py::test_slow" in done.stdout


def test_a_pass_of_sources_that_were_edited_meanwhile_is_not_recorded(tree: Tree) -> None:
    """What ran was imported before; its hash would be that of what did not run."""
    edit = 'open("src/cdnasim/core/core.cpp", "a").write("int more;")'
    text = TESTS.replace("assert n >= 0", f"if n == 1: {edit}")
    (tree.root / "tests/sim/test_flow.py").write_text(text)
    done = tree.run("--only", "test_good", "--jobs", "1")
    assert done.returncode == 1
    assert "test_good[1] is not recorded: sources were changed while it ran" in done.stdout
    assert "PASSED" in done.stdout
    good = {case for case in PASSED if case[-2] in "45"}  # of the second process, and its sources
    assert set(tree.ledger()) == good | {"test_flow.py::test_good[0]"}
    assert tree.row("test_good")[:5] == ["6", "2", "1", "3", "0"]


ENTRY = {"result": "passed", "subject": "", "instrument": "", "reference": "", "cpu_s": 1, "codes": {}}


@pytest.mark.parametrize(
    "text, wanted",
    [
        ('{"a": ', "is no JSON"),
        ("[]", "holds a list, wanted an entry a case"),
        ('{"test_flow.py::test_bad": {"result": "passed"}}', "test_bad has no valid subject, instrument"),
        (json.dumps({"test_flow.py::test_bad": ENTRY | {"cpu_s": "?"}}), "test_bad has no valid cpu_s"),
    ],
)
def test_a_ledger_that_is_not_whole_is_refused_and_left(tree: Tree, text: str, wanted: str) -> None:
    (tree.root / "docs/proofs.json").write_text(text)
    for arguments in ((), ("--table",), ("--carry",)):
        done = tree.run(*arguments)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert wanted in done.stderr and "git checkout docs/proofs.json" in done.stderr
    assert (tree.root / "docs/proofs.json").read_text() == text


def test_what_cannot_be_kept_is_not_run(tree: Tree) -> None:
    (tree.root / "docs/proofs.md.part").mkdir()
    done = tree.run("--only", "slow")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "proofs.md cannot be written" in done.stderr


def test_a_write_that_fails_leaves_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "proofs.json"
    assert proof_ledger.record(ledger, "a", dict(ENTRY))
    before = ledger.read_text()

    def full(path: Path, text: str) -> int:
        with path.open("w") as out:
            out.write(text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(proof_ledger.LedgerError, match=r"No space left on device.*it is as it was"):
        proof_ledger.record(ledger, "b", dict(ENTRY))
    assert ledger.read_text() == before and list(tmp_path.iterdir()) == [ledger]


def test_an_entry_that_has_changed_meanwhile_is_not_carried_over(tmp_path: Path) -> None:
    ledger = tmp_path / "proofs.json"
    failed = ENTRY | {"result": "failed"}
    proof_ledger.record(ledger, "a", failed)
    assert not proof_ledger.record(ledger, "a", ENTRY | {"subject": "b"}, instead_of=dict(ENTRY))
    assert proof_ledger.read(ledger) == {"a": failed}


def test_entries_of_tests_that_went_are_named_and_in_nobodys_way(kernels: Tree) -> None:
    shutil.move(kernels.root / "tests/sim/test_mono_flow.py", kernels.root / "tests/sim/test_mono_new.py")
    change(kernels, "kernels/ffn.py")
    done = kernels.run("--carry")
    assert "0 passes are of the same machine code, 0 are not" in done.stdout
    assert "2 entries of cases that there are not: test_mono_flow.py::test_launch" in done.stdout


def test_a_build_that_cannot_be_made_any_more_is_left(kernels: Tree) -> None:
    change(kernels, "kernels/ffn.py")
    path = kernels.root / "tests/sim/mono/sources.py"
    path.write_text(path.read_text().replace("return kind", "raise RuntimeError('it does not compile')"))
    done = kernels.run("--carry")
    assert "it does not compile" in done.stdout
    assert "0 passes are of the same machine code, 2 are not" in done.stdout


def test_pytests_own_options_in_the_environment_change_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q -x --deselect tests/sim/test_flow.py::test_good")
    assert "6 long cases, 0 hold, 6 to run" in tree.run("--only", "good").stdout
    assert tree.row("test_good")[:5] == ["6", "6", "0", "0", "0"]


@pytest.mark.parametrize(
    "words", ["test_two_hundred_schedules[6-4", "a[bc] d", "it's", 'the "first"', "(a|b)", "a;b", "*"]
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_make_hands_words_on_as_they_are(tmp_path: Path, words: str, by: str) -> None:
    """Brackets, quotes and stars of a case's name are none of the shell's."""
    shutil.copy(proof_ledger.ROOT / "Makefile", tmp_path)
    (tmp_path / "ci").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "abc").touch()
    saved = f'#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open("argv", "w"))\n'
    for name, text in {
        "ci/setup.sh": "#!/bin/sh\n",
        ".venv/bin/rocm-overlay": "#!/bin/sh\n",
        ".venv/bin/python": saved,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    arguments, environment = ["make", "-s", "proofs"], dict(os.environ)
    if by == "argument":
        arguments.append(f"ONLY={words}")
    else:
        environment["ONLY"] = words
    subprocess.run(arguments, cwd=tmp_path, env=environment, check=True)
    wanted = ["tests/sim/proofs.py", "--minutes", "60", "--jobs", "2", "--only", *words.split()]
    assert json.loads((tmp_path / "argv").read_text()) == wanted


@pytest.mark.parametrize("name", ["down.py", "geometry.py", "gfx942.py", "handoff.py", "ffn.py"])
def test_a_change_of_the_kernels_is_a_change_of_the_subject(tmp_path: Path, name: str) -> None:
    """Stages, shapes, architectures and reference are what the proofs of ``test_mono*`` prove."""
    shutil.copytree(proof_ledger.ROOT / "overlay", tmp_path / "overlay")
    kernels = tuple(tmp_path / path.relative_to(proof_ledger.ROOT) for path in proof_ledger.KERNELS)
    proof_ledger.hash_of.cache_clear()
    before = proof_ledger.hash_of(kernels)
    changed = [file for file in proof_ledger.files_of(kernels) if file.name == name]
    assert changed
    for file in changed:
        text = file.read_text()
        file.write_text(text + "\nEXTRA = 1\n")
        proof_ledger.hash_of.cache_clear()
        assert proof_ledger.hash_of(kernels) != before
        file.write_text(text)


def test_what_is_compared_with_the_base_is_proved_of_its_kernels_too() -> None:
    """A rebase changes them: a comparison that passed on the last base holds no more."""
    for file in ("test_mono_layer_beside_base.py", "test_mono_bench.py", "test_mono_demo.py"):
        subject = next(paths for stem, paths in proof_ledger.SUBJECTS.items() if file.startswith(stem))
        assert proof_ledger.BASE_KERNELS in subject and set(proof_ledger.KERNELS) < set(subject)
        assert (
            proof_ledger.hashes(file).reference
            == proof_ledger.hashes("test_mono_handoffs.py").reference
            != ""
        )


def test_modules_above_the_simulators_tests_are_instrument_too() -> None:
    names = {
        file.relative_to(proof_ledger.ROOT).as_posix()
        for file in proof_ledger.instrument_files(SIM / "test_swa_decode_meta.py")
    }
    assert {"tests/swa_cases.py", "tests/swa_ragged.py", "tests/harness/interpreter.py"} <= names


def test_a_build_with_a_planted_fault_is_never_taken_for_the_plain_one() -> None:
    from mono import sources

    sources.ASKED.clear()
    try:
        for overlay in (sources.OVERLAY, Path("mutant"), sources.OVERLAY):
            sources.note_asked("ffn-gfx950-rows1", overlay)
        assert {"ffn-gfx950-rows1": Path("mutant")} == sources.ASKED
        assert proof_ledger.codes_of(dict(sources.ASKED)) == {}
    finally:
        sources.ASKED.clear()


def test_the_table_is_that_of_the_ledger() -> None:
    """After a change of kernels, simulator or tests: ``python tests/sim/proofs.py --table``."""
    assert proofs.TABLE.read_text() == proofs.table_text(proofs.collect())
