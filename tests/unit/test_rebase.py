# SPDX-License-Identifier: Apache-2.0
"""A rebase ends in one commit, or the checkout is as it was: whatever conflicts, fails or kills it."""

import json
import os
import shutil
import signal
import tomllib
from pathlib import Path

import pytest

from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.kept import kept_problems
from rocm_overlay.plan import Sources, find_drift
from rocm_overlay.rebase import State
from tests.tiny import BASE, DIFF, HEADER, write_files
from tests.tiny_rebase import git, make_checkout, make_session, make_target, state_of

ROCM, OPS, KERNEL = "vllm/amd/rocm.py", "vllm/amd/ops/__init__.py", "vllm/amd/ours/kernel.py"
PATCH = "0001-amd-gate.patch"
TEXT = BASE[ROCM]
NEWER = {ROCM: "# new\n# lines\n" + TEXT}
CLASHING = {ROCM: TEXT.replace("# two", "# 2")}
MERGED = CLASHING[ROCM].replace("    # 2\n", "    # 2\n    if gate():\n        return None\n")


@pytest.fixture
def project(tmp_path):
    return make_checkout(tmp_path / "p")


def start(project, tmp_path, changes=None, **options):
    return make_session(project, **options).start(lambda: make_target(tmp_path / "new", changes))


def report_of(project):
    return json.loads((project.build / "rebase-report.json").read_text())


def test_pin_lock_patches_and_kept_bases_change_in_one_commit_with_a_summary(project, tmp_path):
    before = git(project.root, "rev-parse", "HEAD")
    report = start(project, tmp_path, NEWER)
    assert report.status == "landed" and report_of(project)["status"] == "landed"
    assert git(project.root, "rev-parse", "HEAD~1") == before and not git(
        project.root, "status", "--porcelain"
    )
    names = set(git(project.root, "diff", "--name-only", before).splitlines())
    assert {"base.toml", f"patches/{PATCH}"} < names
    assert all(name.startswith(("base.toml", "patches/")) for name in names)
    message = git(project.root, "log", "-1", "--format=%an%n%B")
    assert "Tiny" in message and "Rebase to vLLM 1.3.0" in message and f"{ROCM}: changed outside" in message
    sources = Sources.load(project)
    assert sources.pin.vllm.version == "1.3.0" and find_drift(sources, tmp_path / "new") == []
    assert sources.pin.images["gfx950"].reference == "vllm/vllm-openai-rocm:v1.3.0"
    assert kept_problems(project.patches, sources.pin.locked()) == []
    assert not (project.build / "rebase").exists()


def test_a_base_that_changes_nothing_of_ours_moves_the_pin_alone(project, tmp_path):
    start(project, tmp_path)
    assert git(project.root, "diff", "--name-only", "HEAD~1") == "base.toml"


def test_there_and_back_gives_the_same_files(tmp_path):
    # As git writes a hunk: with the line before it that looks like a heading.
    project = make_checkout(tmp_path / "p", HEADER + DIFF.replace("+4,7 @@", "+4,7 @@ import os"))
    before = state_of(project)["files"]
    start(project, tmp_path, NEWER)
    first = make_target(tmp_path / "p-pinned", {"vllm/_version.py": BASE["vllm/_version.py"]})
    pin = tomllib.loads(before["base.toml"].decode())["vllm"]
    back = type(first)("version", "1.2.3", type(first.vllm)(**pin), first.root)
    make_session(project).start(lambda: back)
    assert state_of(project)["files"] == before


def test_a_conflict_leaves_the_checkout_alone_and_shows_what_is_to_be_decided(project, tmp_path):
    before = state_of(project)
    with pytest.raises(CheckFailed, match="1 places to decide"):
        start(project, tmp_path, CLASHING)
    assert state_of(project) == before
    folder = project.build / "rebase/conflicts" / PATCH / "vllm/amd"
    assert "<<<<<<<" in (folder / "rocm.py").read_text()
    assert "+    # 2" in (folder / "rocm.py.upstream.diff").read_text()
    assert "Why: the call site" in (folder / "rocm.py.intent.txt").read_text()
    assert report_of(project)["conflicts"][0]["owner"] == PATCH


def test_a_merged_file_and_continue_end_it(project, tmp_path):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    with pytest.raises(CheckFailed, match="markers are left"):
        make_session(project).go_on()
    (project.build / "rebase/conflicts" / PATCH / ROCM).write_text(MERGED)
    assert make_session(project).go_on().status == "landed"
    assert "+    if gate():" in (project.patches / PATCH).read_text()


def test_a_dropped_patch_is_gone_from_the_series_lock_and_table(project, tmp_path):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    with pytest.raises(OverlayError, match="no such patch"):
        make_session(project).go_on(drop=["0009-not-there.patch"])
    make_session(project).go_on(drop=[PATCH])
    sources = Sources.load(project)
    assert sources.series.patches == () and ROCM not in sources.pin.locked()
    assert PATCH not in (project.patches / "README.md").read_text()


def test_a_replaced_file_that_changed_waits_until_it_is_accepted(project, tmp_path):
    with pytest.raises(CheckFailed, match="read upstream's change"):
        start(project, tmp_path, {OPS: BASE[OPS] + "# more\n"})
    assert "+# more" in (project.build / "rebase/conflicts/overlay" / f"{OPS}.upstream.diff").read_text()
    assert make_session(project).go_on(accept=[OPS]).status == "landed"


def test_an_entry_that_was_corrected_in_the_clone_is_part_of_the_commit(project, tmp_path):
    with pytest.raises(CheckFailed, match="kind"):
        start(project, tmp_path, {OPS: None})
    manifest = project.build / "rebase/repo/overlay/manifest.toml"
    manifest.write_text(manifest.read_text().replace('"replaces"', '"new"'))
    make_session(project).go_on()
    assert {file.kind for file in Sources.load(project).overlay.files} == {"new"}


def test_what_is_upstream_is_dropped_files_entries_and_patches(project, tmp_path):
    gated = TEXT.replace("    # two\n", "    # two\n    if gate():\n        return None\n")
    theirs = {ROCM: gated, KERNEL: "def launch():\n    return 1\n", "vllm/amd/old.py": None}
    report = start(project, tmp_path, theirs)
    assert set(report.as_json()["dropped"]) == {PATCH, KERNEL, "vllm/amd/old.py"}
    sources = Sources.load(project)
    assert [file.path for file in sources.overlay.files] == [OPS] and not sources.overlay.removals
    assert "landed" in git(project.root, "log", "-1", "--format=%B")


FAULTS = {
    "a failing test": (
        lambda root: write_files(root, {"tests/test_fast.py": "assert 0\n"}),
        "tests",
    ),
    "a module that does not import": (
        lambda root: write_files(root, {f"overlay/{KERNEL}": "import vllm.gone\n\nlaunch = 1\n"}),
        "import",
    ),
}


@pytest.mark.parametrize(("spoil", "check"), FAULTS.values(), ids=FAULTS)
def test_a_carried_tree_that_fails_leaves_the_checkout_alone_and_can_be_corrected(tmp_path, spoil, check):
    project = make_checkout(tmp_path / "p", edit=spoil)
    before = state_of(project)
    with pytest.raises(CheckFailed, match=f"fails: .*{check}"):
        start(project, tmp_path, NEWER)
    assert state_of(project) == before and report_of(project)["status"] == "checks failed"
    repo = project.build / "rebase/repo"
    write_files(
        repo,
        {"tests/test_fast.py": "assert 1\n", f"overlay/{KERNEL}": "def launch():\n    pass\n"},
    )
    assert make_session(project).go_on().status == "landed"


def test_a_module_that_needs_what_this_machine_lacks_is_named_and_stops_nothing(tmp_path):
    def needy(root):
        write_files(
            root, {f"overlay/{KERNEL}": "import aiter_of_amd\n\n\ndef launch():\n    return aiter_of_amd\n"}
        )

    report = start(make_checkout(tmp_path / "p", edit=needy), tmp_path, NEWER)
    assert ("vllm.amd.ours.kernel", "needs aiter_of_amd") in [
        (one.what, one.found) for one in report.findings
    ]


def test_abort_undoes_it(project, tmp_path):
    before = state_of(project)
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    make_session(project).abort()
    assert state_of(project) == before and not (project.build / "rebase").exists()
    for verb in (make_session(project).abort, make_session(project).go_on):
        with pytest.raises(OverlayError, match="no rebase is under way"):
            verb()


def test_a_second_start_and_uncommitted_changes_are_refused(project, tmp_path):
    (project.root / "base.toml").write_text((project.root / "base.toml").read_text() + "\n")
    with pytest.raises(OverlayError, match="in no commit"):
        start(project, tmp_path)
    git(project.root, "checkout", "base.toml")
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    with pytest.raises(OverlayError, match="under way"):
        start(project, tmp_path)


@pytest.mark.parametrize("name", ["vllm/nope.py", "vllm/amd/rocm.py", "vllm.nope.f", "0001-amd-gate.patch"])
def test_a_name_that_no_row_has_is_not_accepted(project, tmp_path, name):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    before = (project.build / "rebase/state.json").read_text()
    with pytest.raises(OverlayError, match="nothing to accept of that name") as caught:
        make_session(project).go_on([name])
    assert caught.value.seen == name and (project.build / "rebase/state.json").read_text() == before


def test_without_its_clone_a_rebase_says_so_and_can_be_undone(project, tmp_path):
    before = state_of(project)
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    shutil.rmtree(project.build / "rebase/repo")
    with pytest.raises(OverlayError, match="clone is gone"):
        make_session(project).go_on()
    make_session(project).abort()
    assert state_of(project) == before and not (project.build / "rebase").exists()


@pytest.mark.parametrize(
    "spoil", [shutil.rmtree, lambda root: write_files(root, {"vllm/other.py": "x = 1\n"})]
)
def test_a_base_that_is_gone_or_changed_meanwhile_is_not_gone_on_with(project, tmp_path, spoil):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    spoil(Path(json.loads((project.build / "rebase/state.json").read_text())["target"]["root"]))
    with pytest.raises(OverlayError, match="is not as it was when it started"):
        make_session(project).go_on()


def test_a_damaged_record_can_be_undone_where_the_checkout_is_clean(project, tmp_path):
    before = state_of(project)
    for text in ("", "{}", '{"start": 1, "other": 2}', "[]"):
        with pytest.raises(CheckFailed):
            start(project, tmp_path, CLASHING)
        (project.build / "rebase/state.json").write_text(text)
        for verb in (make_session(project).go_on, lambda: start(project, tmp_path, CLASHING)):
            with pytest.raises(OverlayError, match="cannot be read"):
                verb()
        make_session(project).abort()
        assert state_of(project) == before and not (project.build / "rebase").exists()


def test_a_damaged_record_beside_changes_is_for_a_person(project, tmp_path):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    (project.build / "rebase/state.json").write_text("")
    (project.root / "base.toml").write_text("half of a landing")
    with pytest.raises(OverlayError, match="cannot be read"):
        make_session(project).abort()
    assert (project.build / "rebase").exists()


def test_a_checkout_that_moved_on_meanwhile_is_not_overwritten(project, tmp_path):
    with pytest.raises(CheckFailed):
        start(project, tmp_path, CLASHING)
    git(project.root, "commit", "--allow-empty", "--quiet", "--message=Meanwhile")
    before = state_of(project)
    (project.build / "rebase/conflicts" / PATCH / ROCM).write_text(MERGED)
    with pytest.raises(OverlayError, match="moved on"):
        make_session(project).go_on()
    assert state_of(project) == before


def test_a_damaged_kept_base_is_refused_before_anything_starts(project, tmp_path):
    kept = sorted((project.patches / "bases").iterdir())[0]
    kept.write_bytes(kept.read_bytes()[:-9])
    git(project.root, "commit", "--all", "--quiet", "--message=Damage")
    with pytest.raises(OverlayError, match="kept bases"):
        start(project, tmp_path, NEWER)


def steps_of(tmp_path):
    """Every step of a rebase that lands at once and of one that goes on after a conflict, in order."""
    seen = []
    shutil.rmtree(tmp_path / "steps", ignore_errors=True)
    project = make_checkout(tmp_path / "steps/p")
    start(project, tmp_path / "steps", NEWER, step=seen.append)
    return list(dict.fromkeys(seen))


LANDED_AT = "clean up"
STEPS = (
    "work folder", "clone", "state", "report", "conflicts", "carried record", "write", "checks", "commit",
    "fetch", "landing", "fast-forward", LANDED_AT,
)  # fmt: skip


def test_the_steps_at_which_a_rebase_is_killed_are_all_of_them(tmp_path):
    assert set(steps_of(tmp_path)) == set(STEPS)


def killed_at(name, run):
    """Run in a process of its own that is killed at a step; no clean-up of any kind runs in it."""
    child = os.fork()
    if child == 0:

        def step(reached):
            if reached == name:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            run(step)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("name", STEPS)
def test_killed_at_any_step_the_checkout_is_as_it_was(project, tmp_path, name):
    before = state_of(project)
    killed_at(name, lambda step: start(project, tmp_path, NEWER, step=step))
    if name == LANDED_AT:
        assert git(project.root, "log", "-1", "--format=%s") == "Rebase to vLLM 1.3.0"
        with pytest.raises(OverlayError, match="landed already"):
            make_session(project).go_on()
        assert not git(project.root, "status", "--porcelain")
        return
    assert state_of(project) == before
    if (project.build / "rebase/state.json").exists():
        assert make_session(project).go_on().status == "landed"
    else:
        assert start(project, tmp_path, NEWER).status == "landed"


@pytest.mark.parametrize("name", ["clone", "write", "landing"])
def test_abort_after_a_kill_leaves_nothing(project, tmp_path, name):
    before = state_of(project)
    killed_at(name, lambda step: start(project, tmp_path, NEWER, step=step))
    make_session(project).abort()
    assert state_of(project) == before and not (project.build / "rebase").exists()


def test_a_fast_forward_that_was_cut_in_the_middle_is_put_back(project, tmp_path):
    """git was killed between its files: some are new, its lock is there, the branch has not moved."""
    before = state_of(project)
    killed_at("fast-forward", lambda step: start(project, tmp_path, NEWER, step=step))
    commit = State(**json.loads((project.build / "rebase/state.json").read_text())).commit
    for path in git(project.root, "diff", "--name-only", "--diff-filter=AM", "HEAD", commit).splitlines()[:3]:
        content = git(project.root, "show", f"{commit}:{path}") if not path.endswith(".xz") else "part"
        write_files(project.root, {path: content})
    (project.root / ".git/index.lock").touch()
    make_session(project).abort()
    assert state_of(project) == before


def added_by(project, tmp_path):
    """A file that the rebase to the newer base adds."""
    other = make_checkout(tmp_path / "other/p")
    start(other, tmp_path / "other", NEWER)
    return git(other.root, "diff", "--name-only", "--diff-filter=A", "HEAD~1").splitlines()[0]


@pytest.mark.parametrize("ignored", [False, True])
def test_a_file_in_no_commit_where_the_rebase_adds_one_is_kept(project, tmp_path, ignored):
    path = added_by(project, tmp_path)
    if ignored:
        write_files(project.root, {".git/info/exclude": f"/{path}\n"})

    # It comes while the rebase runs: before, the kept bases are not the lock's.
    def step(name):
        if name == "commit":
            write_files(project.root, {path: "mine\n"})

    with pytest.raises(OverlayError, match="files that are in no commit") as caught:
        start(project, tmp_path, NEWER, step=step)
    assert path in caught.value.seen and (project.root / path).read_text() == "mine\n"
    (project.root / path).rename(tmp_path / "mine")
    assert make_session(project).go_on().status == "landed"


@pytest.mark.parametrize("verb", ["start", "go_on", "abort"])
def test_what_was_edited_after_a_landing_that_was_killed_stays(project, tmp_path, verb):
    killed_at(LANDED_AT, lambda step: start(project, tmp_path, NEWER, step=step))
    write_files(project.root, {"tests/test_fast.py": "assert 'mine'\n"})
    session = make_session(project)
    with pytest.raises(OverlayError):
        start(project, tmp_path, NEWER) if verb == "start" else getattr(session, verb)()
    assert (project.root / "tests/test_fast.py").read_text() == "assert 'mine'\n"
    assert git(project.root, "log", "-1", "--format=%s") == "Rebase to vLLM 1.3.0"


@pytest.mark.parametrize("verb", ["start", "go_on", "abort"])
def test_a_commit_made_after_a_landing_that_was_cut_short_stays(project, tmp_path, verb):
    killed_at("fast-forward", lambda step: start(project, tmp_path, NEWER, step=step))
    write_files(project.root, {"tests/test_fast.py": "assert 'mine'\n"})
    git(project.root, "commit", "--all", "--quiet", "--message=Mine")
    session = make_session(project)
    with pytest.raises(OverlayError, match="has moved on since a landing was cut short"):
        start(project, tmp_path, NEWER) if verb == "start" else getattr(session, verb)()
    assert git(project.root, "log", "-1", "--format=%s") == "Mine"
