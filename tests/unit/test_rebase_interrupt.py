# SPDX-License-Identifier: Apache-2.0
"""An interrupted rebase leaves the checkout as it was, at once, and nothing that runs on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rocm_overlay import rebase
from rocm_overlay.errors import OverlayError
from rocm_overlay.processes import interruptible
from rocm_overlay.rebase import Session
from rocm_overlay.rebase_checks import Checks
from tests.tiny import write_files
from tests.tiny_rebase import git, make_checkout, make_session, make_target, state_of
from tests.unit.test_rebase import LANDED_AT, NEWER, STEPS, start


@pytest.fixture
def project(tmp_path):
    return make_checkout(tmp_path / "p")


# --- an interrupt, as Ctrl-C or a CI's end of a job sends it ---


@pytest.mark.parametrize("name", [one for one in STEPS if one != LANDED_AT])
def test_interrupted_at_any_step_the_checkout_is_as_it_was_at_once(project, tmp_path, name):
    before = state_of(project)

    def step(reached):
        if reached == name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(project, tmp_path, NEWER, step=step)
    # No further call is needed for it.
    assert state_of(project) == before and git(project.root, "status", "--porcelain") == ""
    if (project.build / "rebase/state.json").exists():
        assert make_session(project).go_on().status == "landed"
    else:
        assert start(project, tmp_path, NEWER).status == "landed"


@pytest.mark.parametrize("ended", [False, True])
def test_a_fast_forward_that_is_interrupted_ends_or_is_put_back(project, tmp_path, monkeypatch, ended):
    """git gets the interrupt as well: with some of its files written, or when all of it was done."""
    before, real = state_of(project), rebase.run_git

    def interrupted(arguments, *rest, **options):
        if arguments[0] != "merge":
            return real(arguments, *rest, **options)
        if ended:
            real(arguments, *rest, **options)
        else:
            write_files(project.root, {"base.toml": "half"})
            (project.root / ".git/index.lock").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(rebase, "run_git", interrupted)
    if ended:
        assert start(project, tmp_path, NEWER).status == "landed"
        assert git(project.root, "log", "-1", "--format=%s") == "Rebase to vLLM 1.3.0"
    else:
        with pytest.raises(KeyboardInterrupt):
            start(project, tmp_path, NEWER)
        assert state_of(project) == before
    assert git(project.root, "status", "--porcelain") == ""


# A fast test that says that it runs, and then runs on.
LONG = """
import os, pathlib, time
pathlib.Path(os.environ["ALIVE"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_a_rebase_started_ends_with_it(project, tmp_path, number):
    """Only the rebase itself is sent the signal, as a CI or the kernel does; SIGINT was ignored before."""
    before, alive = state_of(project), tmp_path / "alive"
    session = Session(project, Checks(("-c", LONG), {"ALIVE": str(alive)}))
    target = make_target(tmp_path / "next", NEWER)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with interruptible():
                session.start(lambda: target)
        except KeyboardInterrupt:
            os._exit(130)
        finally:
            os._exit(7)
    deadline = time.monotonic() + 60
    while not alive.exists() or not alive.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    while is_running(alive.read_text()):
        assert time.monotonic() < deadline, "the tests go on"
        time.sleep(0.02)
    assert state_of(project) == before
    make_session(project).abort()
    assert not (project.build / "rebase").exists()


# --- git in the middle of something ---

WAITING = {
    "merge": ("merge", "--quiet", "--strategy=ours", "--no-commit", "side"),
    "cherry-pick": ("cherry-pick", "side"),
    "revert": ("revert", "--no-edit", "side~1"),
    "rebase": ("rebase", "side"),
    "bisect": ("bisect", "start", "HEAD", "HEAD~1"),
}


@pytest.mark.parametrize("command", WAITING)
def test_a_command_of_git_that_waits_is_named_though_nothing_is_changed(project, tmp_path, command):
    """What its commit goes on top of is not this project's state but a step of that command."""
    root = project.root
    git(root, "switch", "--quiet", "--create", "side")
    for text in ("a\n", "b\n"):
        write_files(root, {"note": text})
        git(root, "add", "note")
        git(root, "commit", "--quiet", f"--message=Side {text}")
    git(root, "switch", "--quiet", "main")
    for text in ("c\n", "d\n"):
        write_files(root, {"note": text})
        git(root, "add", "note")
        git(root, "commit", "--quiet", f"--message=Main {text}")
    subprocess.run(["git", "-C", str(root), *WAITING[command]], capture_output=True, check=False)
    if command not in ("merge", "bisect"):
        git(root, "checkout", "--quiet", "HEAD", "--", "note")
    assert git(root, "status", "--porcelain", "--untracked-files=no") == ""
    before = state_of(project)
    with pytest.raises(OverlayError, match="in the middle of something else") as caught:
        start(project, tmp_path, NEWER)
    assert caught.value.seen == command and f"git {command}" in caught.value.fix
    assert state_of(project) == before and not (project.build / "rebase").exists()
