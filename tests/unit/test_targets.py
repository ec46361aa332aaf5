# SPDX-License-Identifier: Apache-2.0
"""What TO may be: a version, an image, a checkout at a commit; and what is made of one is always the same."""

import shutil
import tarfile
from pathlib import Path

import pytest

from rocm_overlay import targets
from rocm_overlay.engine import Completed, Engine
from rocm_overlay.errors import OverlayError
from rocm_overlay.fetch import is_pinned_base, sha256_of
from rocm_overlay.pin import Pin, VllmPin
from rocm_overlay.project import Project
from rocm_overlay.rebase import Session
from rocm_overlay.rebase_checks import Checks
from rocm_overlay.targets import Target, find_target, image_values, write_archive
from tests.tiny import make_base, make_project, write_files
from tests.tiny_rebase import git, make_checkout

VERSION = "__version__ = version = '1.3.0.dev7+gabc1234'\n"
BUILT = {"vllm/_version.py": VERSION + "__commit_id__ = commit_id = 'gabc12345'\n"}
REFERENCE = "registry.example/vllm-rocm:nightly-abc"


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path / "p")


@pytest.fixture
def checkout(tmp_path):
    """A vLLM checkout of two commits; the second changes a file that we patch."""
    root = make_base(tmp_path / "checkout", {"docs/index.md": "not packed\n"})
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "config", "user.name", "Up")
    git(root, "config", "user.email", "up@example.com")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=One")
    write_files(root, {"vllm/amd/rocm.py": "second = True\n"})
    git(root, "commit", "--all", "--quiet", "--message=Two")
    return root


class OneImage(Engine):
    """An engine that knows one image, whose package is a folder."""

    name = "one"

    def __init__(self, package, reference=REFERENCE, status=0):
        self.package, self.reference, self.status, self.pulled = package, reference, status, []

    def answers(self):
        return True

    def has_image(self, reference):
        return reference in self.pulled

    def pull(self, reference):
        if reference == self.reference:
            self.pulled.append(reference)
        return Completed(int(reference != self.reference), "manifest unknown")

    def repository_digest(self, reference):
        return "sha256:" + "d" * 64

    def run(self, request, *, capture=False):
        assert request.image == self.reference and not request.entrypoint
        (mount,) = request.mounts
        shutil.copytree(self.package / "vllm", Path(mount.removesuffix(":/taken")) / "vllm")
        return Completed(self.status, "", "no python3")

    def labels(self, reference):
        raise AssertionError

    build = copy_commands = prune_command = labels


def test_a_checkout_is_taken_at_its_commit_and_says_so(project, checkout):
    found = find_target(project, str(checkout))
    assert found.kind == "checkout" and found.vllm.commit == git(checkout, "rev-parse", "HEAD")
    assert (Path(found.root) / "vllm/amd/rocm.py").read_text() == "second = True\n"
    assert not (Path(found.root) / "docs").exists()
    assert is_pinned_base(found.vllm, Path(found.root))
    assert sha256_of(project.cache / found.vllm.sdist) == found.vllm.sha256


def test_another_commit_of_a_checkout_can_be_named(project, checkout):
    first = git(checkout, "rev-parse", "HEAD~1")
    found = find_target(project, f"{checkout}@{first[:10]}")
    assert found.vllm.commit == first
    assert "second" not in (Path(found.root) / "vllm/amd/rocm.py").read_text()
    with pytest.raises(OverlayError, match="no such commit"):
        find_target(project, f"{checkout}@{'0' * 40}")


def test_changes_in_no_commit_are_refused(project, checkout):
    write_files(checkout, {"vllm/amd/rocm.py": "third = True\n"})
    with pytest.raises(OverlayError, match="in no commit"):
        find_target(project, str(checkout))


def test_a_folder_that_is_no_checkout_is_taken_as_it_is(project, tmp_path):
    found = find_target(project, str(make_base(tmp_path / "site", BUILT)))
    assert (found.vllm.version, found.vllm.commit) == ("1.3.0.dev7+gabc1234", "abc12345")


def test_the_archive_of_the_same_files_is_the_same_to_the_byte(tmp_path):
    for name in ("one", "two"):
        root = make_base(tmp_path / name, {"vllm/run.sh": "x\n", "vllm/__pycache__/a.pyc": "x"})
        (root / "vllm/run.sh").chmod(0o775 if name == "one" else 0o755)
        write_archive(root, "vllm-1", tmp_path / f"{name}.tar")
    assert sha256_of(tmp_path / "one.tar") == sha256_of(tmp_path / "two.tar")
    with tarfile.open(tmp_path / "one.tar") as archive:
        names = archive.getnames()
    assert "vllm-1/vllm/run.sh" in names and not any("pycache" in name for name in names)


def test_the_package_of_an_image_is_taken_out_and_the_image_is_pinned(project, tmp_path):
    engine = OneImage(make_base(tmp_path / "image", BUILT))
    found = find_target(project, REFERENCE, lambda: engine)
    assert (found.kind, found.reference, found.digest) == ("image", REFERENCE, "sha256:" + "d" * 64)
    assert (Path(found.root) / "vllm/amd/rocm.py").is_file()
    assert image_values(found, "any:thing") == {"reference": REFERENCE, "digest": found.digest}
    again = find_target(project, REFERENCE, lambda: OneImage(tmp_path / "image"))
    assert again == found


@pytest.mark.parametrize(
    ("reference", "status", "says"), [("other/image:1", 0, "pulled"), (REFERENCE, 3, "taken out")]
)
def test_an_image_that_cannot_be_had_is_named(project, tmp_path, reference, status, says):
    engine = OneImage(make_base(tmp_path / "image"), status=status)
    with pytest.raises(OverlayError, match=says):
        find_target(project, reference, lambda: engine)


@pytest.mark.parametrize("wrong", ["", "latest", "0.x", "no/such folder"])
def test_anything_else_is_refused(project, wrong):
    with pytest.raises(OverlayError, match="no such base"):
        find_target(project, wrong)


@pytest.mark.parametrize(
    ("to", "what", "fix"),
    [
        ("../no/such/vllm", "no such folder", None),
        ("/nowhere/vllm@main", "no such folder", None),
        ("~/no-such-vllm", "no such folder", None),
        ("oci-archive:/nowhere.tar", "no such image archive", "correct TO"),
        ("oci-archive:/nowhere.tar:name", "no such image archive", "correct TO"),
    ],
)
def test_a_path_that_is_not_there_is_not_taken_for_an_image(project, to, what, fix):
    with pytest.raises(OverlayError) as caught:
        find_target(project, to)
    assert (caught.value.what, caught.value.seen, caught.value.fix) == (what, to, fix)


@pytest.mark.parametrize("commit", ["nope", "--all", "v9"])
def test_a_commit_that_is_not_there_is_named(project, checkout, commit):
    with pytest.raises(OverlayError, match="no such commit in") as caught:
        find_target(project, f"{checkout}@{commit}")
    assert caught.value.seen == commit


def test_a_folder_without_the_package_names_the_argument_that_gave_it(project, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(OverlayError, match="holds no vllm package") as caught:
        find_target(project, str(tmp_path / "empty"))
    assert caught.value.fix == "correct TO"


def test_a_folder_with_an_at_sign_in_its_name_is_a_folder(project, tmp_path):
    make_base(tmp_path / "a@b")
    assert find_target(project, str(tmp_path / "a@b")).kind == "checkout"


def test_a_version_is_fetched_and_its_commit_read(project, tmp_path, monkeypatch):
    root = make_base(tmp_path / "b", BUILT)
    project.cache.mkdir()
    (project.cache / "vllm-1.3.0.tar.gz").write_bytes(b"archive")
    monkeypatch.setattr(targets, "fetch_version", lambda version, _: root if version == "1.3.0" else None)
    found = find_target(project, "1.3.0")
    assert (found.kind, found.vllm.commit) == ("version", "abc12345")
    assert found.vllm.sha256 == sha256_of(project.cache / "vllm-1.3.0.tar.gz")
    assert Target.of(found.as_json()) == found


@pytest.mark.parametrize(
    ("kind", "reference", "wanted"),
    [
        ("version", "vllm/rocm:v1.2.3", {"reference": "vllm/rocm:v1.3.0", "digest": ""}),
        ("version", "vllm/rocm:nightly-abc", None),
        ("checkout", "vllm/rocm:v1.2.3", None),
    ],
)
def test_the_image_follows_a_version_from_one_release_tag_to_the_next(kind, reference, wanted):
    assert image_values(Target(kind, "", VllmPin("1.3.0", "", "", ""), ""), reference) == wanted


def test_a_rebase_to_an_image_pins_it_by_digest(tmp_path):
    project = make_checkout(tmp_path / "p")
    engine = OneImage(make_base(tmp_path / "image", BUILT))
    Session(project, Checks(("tests/test_fast.py",))).start(
        lambda: find_target(project, REFERENCE, lambda: engine)
    )
    pin = Pin.load(Project(project.root).pin_file)
    assert pin.vllm.version == "1.3.0.dev7+gabc1234" and pin.vllm.sdist.endswith(".tar")
    assert {(one.reference, one.digest) for one in pin.images.values()} == {(REFERENCE, "sha256:" + "d" * 64)}


@pytest.mark.parametrize("commit", ["", "@HEAD"])
def test_a_checkout_without_the_package_is_named_as_it_was_given(project, tmp_path, commit):
    write_files(tmp_path / "notes", {"thesis.txt": "all of it"})
    git(tmp_path / "notes", "init", "--quiet")
    git(tmp_path / "notes", "add", "--all")
    git(tmp_path / "notes", "-c", "user.name=T", "-c", "user.email=t@x", "commit", "--quiet", "--message=x")
    given = f"{tmp_path / 'notes'}{commit}"
    with pytest.raises(OverlayError, match="holds no vllm package") as caught:
        find_target(project, given)
    assert given in caught.value.what and "rocm-overlay-checkout" not in caught.value.render()
