# SPDX-License-Identifier: Apache-2.0
"""Laying in place is all or nothing, and the manifest tells later whether it is still intact."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rocm_overlay import install
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.transaction import JOURNAL_DIR, Transaction, Write, undo_interrupted
from tests.tiny import OVERLAY, make_base, make_project, make_sources, snapshot, write_files

COMPILED = "vllm/amd/__pycache__/rocm.cpython-312.pyc"
OTHER_COMPILED = "vllm/amd/__pycache__/rocm_other.cpython-312.pyc"


@pytest.fixture
def sources(tmp_path):
    return make_sources(tmp_path / "project")


@pytest.fixture
def site(tmp_path):
    site = make_base(tmp_path / "site")
    write_files(site, {COMPILED: "stale", OTHER_COMPILED: "of another module"})
    (site / "vllm/amd/rocm.py").chmod(0o640)
    return site


def test_lay_writes_what_the_plan_says(sources, site):
    plan = install.lay(sources, site, "image:tag", "sha256:abc")
    assert (site / "vllm/amd/ours/kernel.py").read_text() == OVERLAY["vllm/amd/ours/kernel.py"]
    assert "if gate():" in (site / "vllm/amd/rocm.py").read_text()
    assert not (site / "vllm/amd/old.py").exists()
    assert (site / "vllm/amd/rocm.py").stat().st_mode & 0o777 == 0o640
    assert not (site / COMPILED).exists() and (site / OTHER_COMPILED).exists()
    assert not list(site.glob(".vllm-rocm-overlay*"))
    manifest = install.verify(site)
    assert manifest["base"] == {"vllm_version": "1.2.3", "reference": "image:tag", "digest": "sha256:abc"}
    assert len(manifest["files"]) == len(plan.changes) == 4


def steps_of(sources, site):
    """Every step of a lay, as names."""
    names = []
    install.lay(sources, site, step=names.append)
    return names


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        KeyboardInterrupt(),
    ],
    ids=["no-space", "read-only", "interrupt"],
)
def test_a_fault_at_any_step_leaves_the_package_as_it_was(sources, site, tmp_path, fault):
    twin = make_base(tmp_path / "twin")
    write_files(twin, {COMPILED: "stale", OTHER_COMPILED: "of another module"})
    names = steps_of(sources, twin)
    assert len(names) >= 14
    before = snapshot(site)
    for stop in range(len(names)):
        seen = []

        def step(name, stop=stop, seen=seen):
            seen.append(name)
            if len(seen) == stop + 1:
                raise fault

        with pytest.raises((OverlayError, KeyboardInterrupt)):
            install.lay(sources, site, step=step)
        assert seen == names[: stop + 1]
        assert snapshot(site) == before, names[stop]
        assert not (site / "vllm/amd/ours").exists() and not list(site.glob(".vllm-rocm-overlay*"))


KILLED = """
import os, signal, sys
from pathlib import Path
from rocm_overlay import install
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
left = [int(sys.argv[3])]
def step(name):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
install.lay(Sources.load(Project(Path(sys.argv[1]))), Path(sys.argv[2]), step=step)
"""


def test_a_killed_lay_is_undone_by_the_next_start(sources, site, tmp_path):
    """SIGKILL leaves no time to undo: the journal does, whatever the step."""
    before = snapshot(site)
    project = tmp_path / "project"
    for steps in (0, 4, 7, 9, 12):
        command = [sys.executable, "-c", KILLED, str(project), str(site), str(steps)]
        done = subprocess.run(command, cwd=Path.cwd(), check=False)
        assert done.returncode == -signal.SIGKILL
        undo_interrupted(site)
        assert snapshot(site) == before and not (site / JOURNAL_DIR).exists()
    assert install.lay(sources, site) is not None
    install.verify(site)


def test_a_failed_final_check_undoes_everything(sources, site, monkeypatch):
    before = snapshot(site)
    monkeypatch.setattr(install, "_verify_files", lambda _: (_ for _ in ()).throw(CheckFailed("planted")))
    with pytest.raises(CheckFailed, match="planted"):
        install.lay(sources, site)
    assert snapshot(site) == before


def test_laid_twice_is_recognised_and_changes_nothing(sources, site):
    install.lay(sources, site)
    before = snapshot(site)
    assert install.lay(sources, site) is None
    assert snapshot(site) == before


def test_another_overlay_on_top_is_refused(sources, site, tmp_path):
    install.lay(sources, site)
    project = make_project(tmp_path / "second")
    write_files(project.overlay, {"vllm/amd/ours/kernel.py": "def launch():\n    return 2\n"})
    other = type(sources).load(project)
    before = snapshot(site)
    with pytest.raises(CheckFailed, match="another overlay"):
        install.lay(other, site)
    assert snapshot(site) == before


@pytest.mark.parametrize(
    ("damage", "state"),
    [
        (lambda site: (site / "vllm/amd/rocm.py").write_text("x"), "changed"),
        (lambda site: (site / "vllm/amd/ours/kernel.py").unlink(), "missing"),
        (lambda site: (site / "vllm/amd/old.py").write_text(""), "back again"),
        (lambda site: (site / install.MANIFEST_PATH).write_text("{"), "damaged"),
        (lambda site: (site / install.MANIFEST_PATH).write_text("[]"), "damaged"),
        (lambda site: (site / install.MANIFEST_PATH).unlink(), "not laid"),
    ],
    ids=["changed", "missing", "back", "manifest", "manifest-form", "manifest-gone"],
)
def test_verify_finds_each_kind_of_damage(sources, site, damage, state):
    install.lay(sources, site)
    damage(site)
    with pytest.raises(CheckFailed, match=state):
        install.verify(site)


def test_drift_is_refused_and_nothing_is_changed(sources, site):
    (site / "vllm/amd/rocm.py").write_text("# another upstream\n")
    before = snapshot(site)
    with pytest.raises(CheckFailed, match="differ from the pinned base"):
        install.lay(sources, site)
    assert snapshot(site) == before


def test_allowed_drift_is_in_the_manifest(sources, site):
    (site / "vllm/amd/old.py").write_text("changed = 1\n")
    install.lay(sources, site, allow_drift=["vllm/amd/old.py"])
    (recorded,) = json.loads((site / install.MANIFEST_PATH).read_text())["drift_allowed"]
    assert recorded["path"] == "vllm/amd/old.py" and recorded["state"] == "changed"


RIVAL = """
import sys, time
from pathlib import Path
from rocm_overlay import install
from rocm_overlay.errors import OverlayError
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
sources = Sources.load(Project(Path(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
try:
    plan = install.lay(sources, Path(sys.argv[2]), step=lambda _: time.sleep(0.002))
    print("laid" if plan else "already")
except OverlayError as error:
    print("busy" if "another process" in error.what else error.render())
"""


def test_of_two_lays_at_once_one_lays_and_the_other_waits_or_finds_it_done(sources, site, tmp_path):
    """A live journal must never be taken for an abandoned one."""
    command = [sys.executable, "-c", RIVAL, str(tmp_path / "project"), str(site)]
    rivals = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        rival.stdin.write("\n")
        rival.stdin.flush()
    said = sorted(rival.communicate()[0].strip() for rival in rivals)
    assert said.count("laid") == 1 and set(said) <= {"laid", "busy", "already"}
    install.verify(site, sources)


def test_while_another_process_lays_nothing_is_undone(sources, site):
    inside = []

    def step(name):
        if name.startswith("move in") and not inside:
            inside.append(name)
            with pytest.raises(OverlayError, match="another process"):
                install.lay(sources, site)

    install.lay(sources, site, step=step)
    assert inside
    install.verify(site, sources)


def test_verify_reports_an_interrupted_lay_until_the_next_one(sources, site, tmp_path):
    """Killed at the last rename: every file is in place, but nobody said that it is done."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "project"), str(site)]
    names = steps_of(sources, make_base(tmp_path / "twin"))
    # The twin has no compiled files, so this site has one step more.
    subprocess.run([*command, str(len(names))], check=False)
    with pytest.raises(CheckFailed, match="interrupted"):
        install.verify(site)
    assert install.lay(sources, site) is not None
    install.verify(site, sources)


def test_new_folders_are_as_open_as_their_parent_whatever_the_umask(sources, site):
    before = os.umask(0o077)
    try:
        install.lay(sources, site)
    finally:
        os.umask(before)
    ours = site / "vllm/amd/ours"
    assert ours.stat().st_mode == (site / "vllm/amd").stat().st_mode
    assert (ours / "kernel.py").stat().st_mode & 0o777 == 0o644


def test_a_damaged_journal_is_named_and_the_package_left_alone(sources, site):
    write_files(site, {f"{JOURNAL_DIR}/journal.json": "{}"})
    before = snapshot(site)
    with pytest.raises(OverlayError, match="journal"):
        install.lay(sources, site)
    assert snapshot(site) == before


def test_a_manifest_of_fewer_files_is_not_intact(sources, site):
    install.lay(sources, site)
    path = site / install.MANIFEST_PATH
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "files": manifest["files"][:1]}))
    install.verify(site)
    with pytest.raises(CheckFailed, match="another overlay"):
        install.verify(site, sources)
    path.write_text(json.dumps({**manifest, "series_hash": "0" * 64}))
    with pytest.raises(CheckFailed, match="another overlay"):
        install.verify(site, sources)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [{}]},
        {"files": [{"path": "/etc/passwd", "action": "patched", "sha256": ""}]},
        {"files": [{"path": "vllm/x.py", "action": "bent", "sha256": ""}]},
        {"base": {}},
        {"drift_allowed": 3},
        {"version": None},
    ],
)
def test_a_manifest_of_another_form_is_damaged(sources, site, change):
    install.lay(sources, site)
    path = site / install.MANIFEST_PATH
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckFailed, match="damaged"):
        install.verify(site)


def test_a_compiled_file_that_python_would_not_compare_is_a_fault(sources, site):
    install.lay(sources, site)
    timed = b"\x00\x00\x0d\x0a" + (0).to_bytes(4, "little") + b"rest"
    unchecked = b"\x00\x00\x0d\x0a" + (1).to_bytes(4, "little") + b"rest"
    (site / COMPILED).write_bytes(timed)
    install.verify(site)
    (site / COMPILED).write_bytes(unchecked)
    with pytest.raises(CheckFailed, match="never compared"):
        install.verify(site)


def test_too_little_space_is_found_before_anything_is_written(sources, site, monkeypatch):
    before = snapshot(site)
    usage = os.statvfs(site)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 10, "total": usage.f_blocks})())
    with pytest.raises(OverlayError, match="no space"):
        install.lay(sources, site)
    assert snapshot(site) == before


def test_a_read_only_package_folder_is_named(sources, site, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    before = snapshot(site)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OverlayError, match="cannot be written"):
        install.lay(sources, site)
    assert snapshot(site) == before


def test_the_package_is_found_without_importing_it(tmp_path):
    write_files(tmp_path, {"vllm/__init__.py": "raise RuntimeError('imported')\n"})
    code = "from rocm_overlay.install import find_site; import sys; print(find_site(), 'vllm' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path), "False"]


def test_no_package_and_a_folder_without_one_are_errors(tmp_path, monkeypatch):
    with pytest.raises(OverlayError, match="holds no vllm"):
        install.check_site(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(OverlayError, match="no vllm package"):
        install.find_site()


def test_verify_takes_less_than_two_seconds(sources, site):
    install.lay(sources, site)
    started = time.monotonic()
    install.verify(site)
    assert time.monotonic() - started < 2


def test_a_folder_that_a_removal_empties_goes_and_comes_back_where_the_lay_fails(tmp_path):
    """Python would import an empty folder as a package."""
    files = {
        "vllm/amd/old/deep/one.py": "",
        "vllm/amd/old/deep/__pycache__/one.cpython-312.pyc": "",
        "vllm/amd/old/two.py": "",
        "vllm/amd/kept.py": "",
    }
    writes = [Write(path, None) for path in files if path.endswith(".py") and "old" in path]
    names = []
    Transaction(write_files(tmp_path / "whole", files), names.append).run(writes)
    assert [path.name for path in (tmp_path / "whole/vllm/amd").iterdir()] == ["kept.py"]
    assert [name for name in names if name.startswith("remove folder")] == [
        f"remove folder vllm/amd/old{inner}" for inner in ("/deep/__pycache__", "/deep", "")
    ]
    site = write_files(tmp_path / "site", files)
    for folder, mode in (("old/deep/__pycache__", 0o700), ("old/deep", 0o750), ("old", 0o2775)):
        (site / "vllm/amd" / folder).chmod(mode)

    def there():
        return sorted((path.relative_to(site), path.stat().st_mode) for path in site.rglob("*"))

    before = there()
    for stop in names:

        def step(name, stop=stop):
            if name == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Transaction(site, step).run(writes)
        assert there() == before, stop
