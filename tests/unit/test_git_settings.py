# SPDX-License-Identifier: Apache-2.0
"""What a user has set for git changes neither what is exported nor what a rebase writes."""

from pathlib import Path

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.export import REPOSITORY, export, source_of
from rocm_overlay.export_checks import apply_mailboxes
from rocm_overlay.gittool import diff_texts, find_renames, git_text, merge_texts
from rocm_overlay.rebase import Session
from rocm_overlay.rebase_checks import Checks
from rocm_overlay.targets import find_target
from tests.tiny import make_base, write_files
from tests.tiny_rebase import git, make_target
from tests.unit.test_export_safety import MANIFEST, UPSTREAM, checkout, contents

# Each changes a byte, a file's name or an outcome where it is not kept out.
SETTINGS = {
    "format": """
        subjectPrefix = MINE
        signOff = true
        attach = true
        numbered = true
        headers = "X-Mine: 1\\n"
        to = me@example.com
        from = Me <me@example.com>
        suffix = .mine
        thread = true
        coverLetter = true
        notes = true
        useAutoBase = true
        encodeEmailHeaders = false
    """,
    "diff": """
        context = 9
        interHunkContext = 20
        algorithm = patience
        indentHeuristic = false
        suppressBlankEmpty = true
        noprefix = true
        mnemonicPrefix = true
        renames = copies
        wsErrorHighlight = all
    """,
    "core": """
        autocrlf = true
        safecrlf = true
        abbrev = 40
        quotePath = true
        whitespace = cr-at-eol,tab-in-indent
    """,
    "i18n": """
        commitEncoding = ISO-8859-1
        logOutputEncoding = UTF-16
    """,
    "commit": """
        cleanup = strip
        gpgSign = true
    """,
    "init": """
        templateDir = {home}/template
        defaultBranch = mine
    """,
    "merge": """
        verifySignatures = true
        conflictStyle = zdiff3
        ff = no
    """,
    "apply": "whitespace = fix",
    "am": "keepcr = true",
    "color": "ui = always",
    "log": "showSignature = true",
    "status": "showUntrackedFiles = no",
}
AUTHOR = "Ada Löve <ada@example.com>"


def write_settings(home: Path, sections=SETTINGS, user: str = "") -> None:
    text = user + "".join(f"[{name}]\n{body}\n" for name, body in sections.items())
    attributes = "* text eol=crlf\n*.py ident\n"
    write_files(
        home, {".gitconfig": text.replace("{home}", str(home)), "template/info/attributes": attributes}
    )


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout that was made before the user had any of these settings."""
    monkeypatch.setenv("ROCM_OVERLAY_CACHE", str(Path.cwd() / ".cache"))
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    manifest = MANIFEST + '\n[[pr.ci]]\nfrom = "ci/steps.txt"\nto = "ci/steps.txt"\n'
    return checkout(tmp_path, manifest, **{"ci/steps.txt": "One  \nstep, \t \nand an end. \n"})


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Called, the settings hold."""
    write_settings(tmp_path / "home")
    return lambda: monkeypatch.setenv("HOME", str(tmp_path / "home"))


def branch_bytes(project):
    names = git_text("for-each-ref", "--format=%(refname)", cwd=project.build / REPOSITORY).split()
    return {name: git_text("cat-file", "-p", name, cwd=project.build / REPOSITORY) for name in names}


def test_an_export_is_the_same_to_the_byte_whatever_is_set(project, tmp_path, hostile):
    base = make_base(tmp_path / "base", UPSTREAM)
    export(project, base, tmp_path / "plain", AUTHOR)
    plain = contents(tmp_path / "plain"), branch_bytes(project)
    hostile()
    # The repository of the branches is the plain one's, then a new one.
    export(project, base, tmp_path / "mine", AUTHOR)
    assert (contents(tmp_path / "mine"), branch_bytes(project)) == plain
    (project.build / REPOSITORY).rename(tmp_path / "gone.git")
    export(project, base, tmp_path / "anew", AUTHOR)
    assert (contents(tmp_path / "anew"), branch_bytes(project)) == plain


def test_what_is_exported_applies_whatever_is_set(project, tmp_path, hostile):
    base = make_base(tmp_path / "base", UPSTREAM)
    exported = export(project, base, tmp_path / "out")
    hostile()
    patches = sorted((tmp_path / "out").glob("*/*.patch"))
    applied = apply_mailboxes(project.build / REPOSITORY, patches, tmp_path / "am", base)
    trees = [
        git_text("rev-parse", f"{name}^{{tree}}", cwd=where)
        for name, where in ((exported[-1].commit, project.build / REPOSITORY), ("HEAD", applied))
    ]
    assert trees[0] == trees[1]


def test_a_rebase_writes_the_same_commit_whatever_is_set(project, tmp_path, hostile):
    changes = {"vllm/other.py": "import os\n\n\ndef other():\n    return os.name\n"}
    target = make_target(tmp_path / "next", changes)
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(project.root), str(other))
    for key, value in (("name", "Tiny"), ("email", "tiny@example.com")):
        git(other, "config", f"user.{key}", value)
    found = []
    for root in (project.root, other):
        session = Session(type(project)(root), Checks(("tests/test_fast.py",)))
        assert session.start(lambda: target).status == "landed"
        found.append(git_text("log", "-1", "--format=%T%n%an%n%ae%n%B", cwd=root))
        hostile()
    assert found[0] == found[1]
    assert git_text("status", "--porcelain", cwd=other) == ""


def test_a_base_of_a_checkout_is_the_same_whatever_is_set(project, tmp_path, hostile):
    folder = make_base(tmp_path / "vllm")
    git(folder, "init", "--quiet")
    for key, value in (("name", "Tiny"), ("email", "tiny@example.com")):
        git(folder, "config", f"user.{key}", value)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=Base")
    before = find_target(project, str(folder))
    hostile()
    assert find_target(project, str(folder)) == before
    assert find_target(project, f"{folder}@HEAD").vllm == before.vllm


def test_diffs_merges_and_renames_are_the_same_whatever_is_set(tmp_path, hostile):
    old = "".join(f"line {number}\n\n" for number in range(30))
    new = old.replace("line 3\n", "three\n").replace("line 12\n", "twelve\n").replace("line 29\n", "")
    theirs = old.replace("line 3\n", "drei\n")
    moved = tmp_path / "moved.py"
    moved.write_text(new)

    def made():
        return (
            diff_texts(old, new, "vllm/ä.py"),
            merge_texts(new, old, theirs, ("ours", "base", "theirs")),
            find_renames({"vllm/old.py": old.encode()}, {"vllm/moved.py": moved}),
        )

    plain = made()
    assert "\n+three\n" in plain[0] and plain[1][1] == 1 and plain[2] == {"vllm/old.py": "vllm/moved.py"}
    hostile()
    assert made() == plain


def test_the_user_who_commits_is_still_the_users_own(project, tmp_path, monkeypatch):
    for key in ("name", "email"):
        git(project.root, "config", "--unset", f"user.{key}")
    target = make_target(tmp_path / "next")
    session = Session(project, Checks(("tests/test_fast.py",)))
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    with pytest.raises(OverlayError, match="git knows nobody to commit as"):
        session.start(lambda: target)
    write_settings(tmp_path / "home", user="[user]\nname = Ada\nemail = ada@example.com\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert session.start(lambda: target).status == "landed"
    assert git_text("log", "-1", "--format=%an %ae", cwd=project.root) == "Ada ada@example.com"


def test_an_untracked_file_of_the_checkout_is_a_change_whatever_is_set(project, hostile):
    hostile()
    assert source_of(project)["changed"] is False
    write_files(project.root, {"overlay/vllm/amd/ours/more.py": "A = 1\n"})
    assert source_of(project)["changed"] is True
