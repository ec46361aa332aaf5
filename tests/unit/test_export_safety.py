# SPDX-License-Identifier: Apache-2.0
"""An export beside another, one that was killed, and what an export refuses; on the tiny distribution."""

import json
import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from rocm_overlay import export_files
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.export import LISTING, PLACEHOLDER, REPOSITORY, export, held
from rocm_overlay.export_checks import run_tests
from rocm_overlay.export_plan import load_plan, merged_pulls
from rocm_overlay.export_tests import refuse_unclaimed_tests
from rocm_overlay.gittool import git_text
from rocm_overlay.plan import Sources
from rocm_overlay.project import Project
from rocm_overlay.transaction import exclusive
from tests.tiny import DIFF, HEADER, make_base, write_files
from tests.tiny_rebase import git, make_checkout

PROJECT = Project.find()
MANIFEST = """
[rename]

[stays]

[[pr]]
name = "gate"
title = "[ROCm] Gate"
files = ["vllm/amd/ops/*"]
patches = ["*-gate.patch"]
merged_when = "base vllm/amd/ops/__init__.py defines gate"
purpose = ["A gate."]

[[pr]]
name = "kernel"
title = "[ROCm] Kernel"
depends = ["gate"]
files = ["vllm/amd/ours/*"]
remove = ["vllm/amd/old.py"]
merged_when = "never: recognised file by file"
purpose = ["A kernel."]
"""
UPSTREAM = {
    ".pre-commit-config.yaml": (PROJECT.base / ".pre-commit-config.yaml").read_text(),
    "pyproject.toml": "[tool.ruff]\nline-length = 88\n",
}


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    """Upstream's ruff is in the checkout's cache."""
    monkeypatch.setenv("ROCM_OVERLAY_CACHE", str(PROJECT.cache))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path / "base", UPSTREAM)


def checkout(tmp_path, manifest=MANIFEST, **files):
    extra = {"upstream/prs.toml": manifest, **files}
    return make_checkout(tmp_path / "p", edit=lambda root: write_files(root, extra))


@pytest.fixture
def project(tmp_path):
    return checkout(tmp_path)


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def branches(project):
    return git(project.build / REPOSITORY, "for-each-ref", "--format=%(refname:short) %(objectname)")


# --- two at once ---


def test_a_second_export_is_refused_while_one_runs_and_changes_nothing(project, base, tmp_path):
    export(project, base, tmp_path / "out")
    before = contents(tmp_path / "out"), branches(project)
    with (
        exclusive(project.build / REPOSITORY, "exporting"),
        pytest.raises(OverlayError, match="another process is exporting"),
    ):
        export(project, base, tmp_path / "out", "Other <other@example.com>")
    assert (contents(tmp_path / "out"), branches(project)) == before


def test_two_processes_that_export_at_once_leave_one_whole_export(project, base, tmp_path):
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                export(project, base, tmp_path / "out")
                code = 0
            except OverlayError as error:
                code = 1 if "another process is exporting" in str(error) else 2
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert 0 in codes and set(codes) <= {0, 1}
    export(project, base, tmp_path / "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_what_is_exported_and_checked_is_held_for_both(project, base, tmp_path):
    with held(project):
        export(project, base, tmp_path / "out")
        with (
            pytest.raises(OverlayError, match="another process is exporting"),
            exclusive(project.build / REPOSITORY, "exporting"),
        ):
            pass
    with exclusive(project.build / REPOSITORY, "exporting"):
        pass


# --- a run that was killed ---

STEPS = ("repository", "base", "commits", "branches", "move aside", "move in")


def test_the_steps_at_which_an_export_is_killed_are_all_of_them(project, base, tmp_path):
    seen = []
    export(project, base, tmp_path / "out", step=seen.append)
    assert tuple(seen) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_killed_at_any_step_the_next_export_is_as_if_there_had_been_none(project, base, tmp_path, name):
    target = tmp_path / "out"
    export(project, base, tmp_path / "wanted")
    wanted = contents(tmp_path / "wanted"), branches(project)
    export(project, base, target, "Earlier <earlier@example.com>")
    earlier = contents(target)
    child = os.fork()
    if child == 0:
        try:
            export(project, base, target, step=lambda at: os.kill(os.getpid(), 9) if at == name else None)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    # Whole or, between the two renames, not there: never a part of it.
    assert not target.exists() if name == "move in" else contents(target) == earlier
    export(project, base, target)
    assert (contents(target), branches(project)) == wanted
    assert not list(tmp_path.glob(".rocm-overlay-*")) and not list(
        (project.build / REPOSITORY).glob("index.*")
    )


@pytest.mark.parametrize("left", ["index.lock", "refs/heads/base.lock", "HEAD.lock", "packed-refs.lock"])
def test_a_lock_that_a_killed_git_left_is_no_obstacle(project, base, tmp_path, left):
    export(project, base, tmp_path / "out")
    write_files(project.build / REPOSITORY, {left: ""})
    export(project, base, tmp_path / "out")


def test_a_repository_that_was_begun_only_is_finished(project, base, tmp_path):
    (project.build / REPOSITORY).mkdir(parents=True)
    assert len(export(project, base, tmp_path / "out")) == 2


def test_a_damaged_index_is_made_anew(project, base, tmp_path):
    export(project, base, tmp_path / "out")
    (project.build / REPOSITORY / "index").write_bytes(b"DIRC nothing")
    export(project, base, tmp_path / "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_branches_of_pull_requests_that_are_no_more_are_gone(project, base, tmp_path):
    export(project, base, tmp_path / "out")
    git(project.build / REPOSITORY, "branch", "pr/forgotten", "base")
    export(project, base, tmp_path / "out")
    assert "forgotten" not in branches(project)


# --- where it is written, and from what ---


def test_a_file_in_the_targets_place_stays(project, base, tmp_path):
    write_files(tmp_path, {"thesis.txt": "all of it"})
    with pytest.raises(OverlayError, match=r"thesis\.txt is no export"):
        export(project, base, tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


FOREIGN = {
    "a folder of somebody's": {"thesis.txt": "all of it"},
    "with a list of somebody's": {"thesis.txt": "all of it", LISTING: '["Dark", "Lost"]'},
    "with half of our list": {
        "thesis.txt": "all of it",
        LISTING: '{"pull_requests": [{"folder": "01-gate"}]}',
    },
    "a file beside an export": {"thesis.txt": "all of it"},
    "a file in an export": {"01-gate/reply.md": "Thanks!"},
    "a text that was edited": {"01-gate/BODY.md": "Better words."},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_no_export_wrote_is_named_and_stays(project, base, tmp_path, name):
    target = tmp_path / "out"
    if "an export" in name or "edited" in name:
        export(project, base, target)
    write_files(target, FOREIGN[name])
    before = contents(target), branches(project) if (project.build / REPOSITORY).exists() else ""
    with pytest.raises(OverlayError, match="is no export") as caught:
        export(project, base, target)
    assert next(iter(FOREIGN[name])) in caught.value.seen and "--out" in caught.value.fix
    assert (contents(target), branches(project) if before[1] else "") == before


def test_what_comes_into_the_target_while_an_export_runs_stays(project, base, tmp_path):
    export(project, base, tmp_path / "out")
    with pytest.raises(OverlayError, match="is no export"):
        export(
            project,
            base,
            tmp_path / "out",
            step=lambda at: write_files(tmp_path / "out", {"mine": "x"}) if at == "branches" else None,
        )
    assert (tmp_path / "out/mine").read_text() == "x"


def test_a_link_in_the_targets_place_is_not_followed(project, base, tmp_path):
    export(project, base, tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(OverlayError, match="is no export"):
        export(project, base, tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "real" / LISTING).is_file()


def test_a_part_of_an_export_is_replaced(project, base, tmp_path):
    export(project, base, tmp_path / "out")
    whole = contents(tmp_path / "out")
    (tmp_path / "out/01-gate/BODY.md").unlink()
    export(project, base, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_interrupted_at_any_step_the_earlier_export_is_there(project, base, tmp_path):
    """As Ctrl-C does it: Python's own clean-up runs."""
    target = tmp_path / "out"
    export(project, base, target, "Earlier <earlier@example.com>")
    earlier = contents(target)
    for name in STEPS:

        def step(at, name=name):
            if at == name:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export(project, base, target, step=step)
        assert contents(target) == earlier, name
        assert not list(tmp_path.glob(".rocm-overlay-*")), name


def test_other_folders_beside_the_target_stay(project, base, tmp_path):
    write_files(tmp_path, {".export-2024-holiday/photo": "x", ".rocm-overlay-export-notes/n": "x"})
    export(project, base, tmp_path / "out")
    assert (tmp_path / ".export-2024-holiday/photo").exists()
    assert (tmp_path / ".rocm-overlay-export-notes/n").exists()


def test_a_relative_target_and_one_with_a_space_are_written(project, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(project, base, Path("some where"))
    assert (tmp_path / "some where" / LISTING).is_file()


def test_the_listing_says_from_which_commit_and_whether_it_had_changes(project, base, tmp_path):
    def source():
        return json.loads((tmp_path / "out" / LISTING).read_text())["project"]

    export(project, base, tmp_path / "out")
    assert source() == {"commit": git(project.root, "rev-parse", "HEAD"), "changed": False}
    write_files(project.root, {"overlay/vllm/amd/ours/kernel.py": "def launch():\n    return 2\n"})
    export(project, base, tmp_path / "out")
    assert source()["changed"] is True


@pytest.mark.parametrize("author", ["somebody", "A <a", "", "<>", "A B", "A\nB <a@b>"])
def test_an_author_that_git_would_not_take_is_refused(project, base, tmp_path, author):
    with pytest.raises(OverlayError, match="the author"):
        export(project, base, tmp_path / "out", author)
    assert not (tmp_path / "out").exists()


def test_the_author_signs_off(project, base, tmp_path):
    export(project, base, tmp_path / "out", "Ada Löve <ada@example.com>")
    message = git_text("log", "-1", "--format=%an %ae%n%B", "pr/gate", cwd=project.build / REPOSITORY)
    assert message.startswith("Ada Löve ada@example.com")
    assert "Signed-off-by: Ada Löve <ada@example.com>" in message and PLACEHOLDER not in message


@pytest.mark.parametrize("given", ["yesterday", "-5", "1.5", "1 +0100", "99999999999"])
def test_a_time_that_is_none_is_named_before_anything_is_made(project, base, tmp_path, monkeypatch, given):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", given)
    with pytest.raises(OverlayError, match="SOURCE_DATE_EPOCH is no time"):
        export(project, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what does not fit ---

KERNEL, LAUNCH = "overlay/vllm/amd/ours/kernel.py", "def launch():\n    return 1\n"
IMPORTS = {
    "a module of a pull request that it does not depend on": (
        "def later():\n    from vllm.amd.ops import gate\n    return gate\n",
        "vllm.amd.ops:gate (of gate)",
    ),
    "a module that is nowhere": ("import vllm.amd.nowhere\n\nA = vllm\n", "vllm.amd.nowhere"),
    "a name that the module does not have": (
        "from vllm.other import touched\n\nA = touched\n",
        "vllm.other:touched",
    ),
    "a relative one": ("from ..nowhere import x\n\nA = x\n", "vllm.amd.nowhere:x"),
    "one by its name": (
        "import importlib\n\nimportlib.import_module('vllm.amd.gone')\n",
        "vllm.amd.gone",
    ),
}


@pytest.mark.parametrize(("text", "says"), IMPORTS.values(), ids=IMPORTS)
def test_an_import_that_upstream_would_not_find_is_named(tmp_path, base, text, says):
    alone = MANIFEST.replace('depends = ["gate"]\n', "")
    project = checkout(tmp_path, alone)
    write_files(project.root, {KERNEL: f"{text}\n\n{LAUNCH}"})
    with pytest.raises(OverlayError, match="kernel imports what neither") as caught:
        export(project, base, tmp_path / "out")
    assert f"vllm/amd/ours/kernel.py: {says}" in str(caught.value)


def test_an_import_of_what_it_depends_on_is_found(tmp_path, base):
    project = checkout(tmp_path)
    text = "from vllm.amd import ops\nfrom vllm.amd.ops import gate\nfrom . import kernel\n\n"
    text += "A = (ops, gate, kernel)\n"
    write_files(project.root, {KERNEL: f"{text}\n\n{LAUNCH}"})
    assert len(export(project, base, tmp_path / "out")) == 2


def test_what_upstreams_own_file_imports_in_vain_is_upstreams_matter(tmp_path):
    compiled = (
        "import os\nimport vllm._compiled\n\n\ndef build(cam):\n    # one\n    # two\n    base = os.sep\n"
    )
    base = make_base(tmp_path / "b", {**UPSTREAM, "vllm/amd/rocm.py": compiled + "    return base\n"})
    project = make_checkout(
        tmp_path / "p",
        patch=HEADER + DIFF.replace("-4,5 +4,7", "-5,5 +5,7"),
        base=base,
        edit=lambda root: write_files(root, {"upstream/prs.toml": MANIFEST}),
    )
    assert len(export(project, base, tmp_path / "out")) == 2


def test_a_new_overlay_file_without_a_group_is_named(project, base, tmp_path):
    write_files(project.root, {"overlay/vllm/amd/new_kernel.py": "x = 1\n"})
    entry = '[[file]]\npath = "vllm/amd/new_kernel.py"\nkind = "new"\nwhy = "x"\nupstream = "planned"\n'
    manifest = project.overlay / "manifest.toml"
    manifest.write_text(manifest.read_text() + "\n" + entry + 'symbols = ["x"]\n')
    with pytest.raises(OverlayError, match=r"overlay file vllm/amd/new_kernel\.py belongs to no"):
        export(project, base, tmp_path / "out")


LEFTOVERS = {
    "a module": "# As rocm_overlay.export does.",
    "the simulator": "# Checked by cdnasim.",
    "a folder": "# See tests/unit/test_plan.py.",
    "a verb": "# `make kernels` compiles it.",
    "a document": "# See docs/memory_model.md.",
    "our words": "# In the laid tree.",
}


@pytest.mark.parametrize("line", LEFTOVERS.values(), ids=LEFTOVERS)
def test_a_text_that_names_what_upstream_does_not_have_is_refused(project, base, tmp_path, line):
    write_files(project.root, {KERNEL: f"{line}\n{LAUNCH}"})
    with pytest.raises(OverlayError, match=r"kernel names what upstream does not have") as caught:
        export(project, base, tmp_path / "out")
    assert "vllm/amd/ours/kernel.py: " in str(caught.value.seen) and "in line" in str(caught.value.seen)


DOCUMENT = """\
# Hand-offs

`tests/test_carried.py` shows it.

| a | b |
|---|---|

```
picture
```

## Ours alone

`make test`

## Last

```python
x = 1
```
"""


def test_a_document_goes_without_its_own_sections_and_in_upstreams_form(tmp_path, base):
    carried = """
[[pr.test]]
from = "tests/test_carried.py"
to = "tests/kernels/test_carried.py"

[[pr.doc]]
from = "docs/hand_offs.md"
to = "docs/design/hand_offs.md"
omit = ["Ours alone"]
"""
    files = {
        "docs/hand_offs.md": DOCUMENT,
        "tests/test_carried.py": "# See docs/design/hand_offs.md.\nX = 1\n",
    }
    project = checkout(tmp_path, MANIFEST + carried, **files)
    export(project, base, tmp_path / "out")
    text = git_text("show", "pr/kernel:docs/design/hand_offs.md", cwd=project.build / REPOSITORY)
    assert "Ours alone" not in text and "`tests/kernels/test_carried.py` shows it." in text
    assert "| --- | --- |" in text and "```text\npicture\n```" in text and "```python\nx = 1\n```" in text
    write_files(project.root, {"upstream/prs.toml": MANIFEST + carried.replace("Ours alone", "Of others")})
    with pytest.raises(OverlayError, match=r"omit names no section of docs/hand_offs\.md"):
        export(project, base, tmp_path / "out")


TESTS_VLLM = "from vllm.amd.ours import kernel\n\n\ndef test_it():\n    assert kernel\n"


def test_a_test_of_vllms_code_goes_with_a_pull_request_or_says_why_not(tmp_path):
    project = checkout(tmp_path, **{"tests/unit/test_kernel.py": TESTS_VLLM})

    def refuse(manifest):
        write_files(project.root, {"upstream/prs.toml": manifest})
        refuse_unclaimed_tests(load_plan(project.root, Sources.load(project)), project.root)

    with pytest.raises(OverlayError, match=r"tests/unit/test_kernel\.py"):
        refuse(MANIFEST)
    entry = '[stays]\n"tests/unit/test_k*.py" = "needs our simulator"\n'
    refuse(MANIFEST.replace("[stays]\n", entry))
    carried = '[[pr.test]]\nfrom = "tests/unit/test_kernel.py"\nto = "tests/kernels/*"\n'
    refuse(MANIFEST + carried)
    with pytest.raises(OverlayError, match="names no test that would be carried"):
        refuse(MANIFEST.replace("[stays]\n", entry) + carried)


def test_an_edit_that_fits_no_more_is_named(tmp_path, base):
    edit = '[[pr.edit]]\npath = "vllm/other.py"\nold = "touched = False"\nnew = "x"\n'
    project = checkout(tmp_path, MANIFEST + edit)
    with pytest.raises(OverlayError, match=r"an edit of vllm/other\.py does not fit"):
        export(project, base, tmp_path / "out")


def test_a_pull_request_of_edits_alone_is_recognised_where_upstream_has_them(tmp_path):
    entry = """
[[pr]]
name = "text"
title = "[ROCm] Text"
merged_when = "never: edit by edit"
purpose = ["A text."]

[[pr.edit]]
path = "recipes/x.yaml"
old = "one"
new = "one two"
"""
    project = checkout(tmp_path, MANIFEST + entry)
    sources = Sources.load(project)
    plan = load_plan(project.root, sources)
    for number, (text, wanted) in enumerate([("one\n", []), ("one two\n", ["text"]), ("", [])]):
        root = make_base(tmp_path / f"b{number}", {"recipes/x.yaml": text})
        assert [one.pull.name for one in merged_pulls(plan, sources, root)] == wanted


# --- as upstream's image runs them ---


def test_tests_run_with_the_package_elsewhere_as_in_upstreams_image(tmp_path):
    own = "from pathlib import Path\n\nimport vllm\n\n\n"
    text = "def test_it():\n    assert Path(vllm.__file__).parents[2] == Path(__file__).parents[1]\n"
    write_files(tmp_path, {"vllm/__init__.py": "", "tests/test_x.py": own + text})
    assert "1 passed" in run_tests(tmp_path, ["python -m pytest tests/test_x.py"])
    assert (tmp_path / "vllm/__init__.py").is_file() and not (tmp_path / "src").exists()


@pytest.mark.parametrize("assertion, passes", [("True", True), ("False", False)])
def test_lines_below_pytests_own_do_not_hide_it(tmp_path, assertion, passes):
    """vLLM's metrics print at the process's end."""
    late = "import atexit\n\natexit.register(print, 'metrics: 3 steps')\n\n\n"
    write_files(tmp_path, {"tests/test_x.py": late + f"def test_it():\n    assert {assertion}\n"})
    with nullcontext() if passes else pytest.raises(CheckFailed):
        assert "1 passed" in run_tests(tmp_path, ["python -m pytest tests/test_x.py"])


def test_the_tool_says_that_a_changed_checkout_is_exported(project):
    write_files(project.root, {"new.txt": ""})
    from rocm_overlay.export import source_of

    assert source_of(project)["changed"] is True
    assert export_files.FOLDER == "upstream"
    subprocess.run(["rm", "-rf", str(project.root / ".git")], check=True)
    assert source_of(project) == {"commit": "", "changed": True}
