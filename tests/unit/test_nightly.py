# SPDX-License-Identifier: Apache-2.0
"""The nightly rebase: on a branch of a clone, its report opened, this checkout never touched."""

import os
import shutil
import subprocess

import pytest

from rocm_overlay.project import Project
from tests.tiny_rebase import git, make_checkout, state_of

SCRIPT = Project.find().root / "ci/nightly-rebase.sh"
LANDS = """mkdir -p build; echo "# Rebased $1" >build/rebase-report.md
git commit --quiet --allow-empty --message "$1"
"""
WAITS = 'mkdir -p build; echo "# Waits" >build/rebase-report.md; exit 1\n'
BREAKS = "exit 3\n"


@pytest.fixture
def nightly(tmp_path):
    """A run of the script in a tiny checkout, with a rebase that does as told; gives the ended process."""

    def with_script(root):
        (root / "ci").mkdir()
        shutil.copy(SCRIPT, root / "ci")

    project = make_checkout(tmp_path / "p", edit=with_script)

    def run(rebase, *arguments, **variables):
        command = tmp_path / "rebase.sh"
        command.write_text(f"#!/bin/sh\n{rebase}")
        command.chmod(0o755)
        environment = {**os.environ, "REBASE": str(command), **variables}
        done = subprocess.run(
            ["bash", "ci/nightly-rebase.sh", *arguments],
            cwd=project.root, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        return done

    run.project = project
    return run


def test_a_rebase_that_lands_is_a_branch_of_the_clone_and_its_report_is_printed(nightly):
    before = state_of(nightly.project)
    done = nightly(LANDS, "1.3.0")
    assert done.returncode == 0, done.stderr
    assert "# Rebased TO=1.3.0" in done.stdout and "Rebased to vLLM 1.3.0" in done.stderr
    clone = nightly.project.build / "nightly"
    assert git(clone, "branch", "--show-current") == "nightly/rebase-1.3.0"
    assert git(clone, "log", "-1", "--format=%an %s") == "Tiny TO=1.3.0"
    assert state_of(nightly.project) == before


def test_a_rebase_that_waits_says_so_and_opens_its_report(nightly, tmp_path):
    opener = tmp_path / "open.sh"
    opener.write_text(
        '#!/bin/sh\nprintf "%s|" "$@" >"$(dirname "$0")/opened"; cat "$1" >>"$(dirname "$0")/opened"\n'
    )
    opener.chmod(0o755)
    done = nightly(WAITS, "1.3.0", OPEN=str(opener))
    assert done.returncode == 1
    opened = (tmp_path / "opened").read_text()
    assert "The rebase to vLLM 1.3.0 waits for a person|# Waits" in opened


def test_a_branch_is_pushed_where_a_remote_is_given(nightly, tmp_path):
    git(tmp_path, "init", "--quiet", "--bare", "remote.git")
    assert nightly(LANDS, "1.3.0", PUSH=str(tmp_path / "remote.git")).returncode == 0
    assert "nightly/rebase-1.3.0" in git(tmp_path / "remote.git", "branch", "--list", "nightly/*")


def test_the_pinned_version_is_nothing_new_and_a_broken_run_is_an_error(nightly):
    done = nightly(BREAKS, "1.2.3")
    assert done.returncode == 0 and "already" in done.stderr
    done = nightly(BREAKS, "1.3.0")
    assert done.returncode == 2 and "no report" in done.stderr


def test_an_image_makes_a_branch_name_too(nightly):
    assert nightly(LANDS, "registry.example/vllm:nightly").returncode == 0
    assert (
        git(nightly.project.build / "nightly", "branch", "--show-current")
        == "nightly/rebase-registry.example-vllm-nightly"
    )
