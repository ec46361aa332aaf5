# SPDX-License-Identifier: Apache-2.0
"""The base that a rebase goes to: a released version, an image's package, or a checkout at a commit.

Each becomes what the pin needs: a source archive with a hash, and the folder that it unpacks to. An
image and a checkout have no archive of their own, so one is made of their files, the same to the byte
whenever it is made of the same files.
"""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rocm_overlay.archives import extract_all
from rocm_overlay.engine import ARCHIVE, Engine, RunRequest, Shell, select_engine
from rocm_overlay.errors import OverlayError
from rocm_overlay.fetch import fetch_version, sha256_of, unpack_base
from rocm_overlay.gittool import git_text, run_git
from rocm_overlay.install import check_site, installed_version
from rocm_overlay.pin import VllmPin
from rocm_overlay.plan import read_base
from rocm_overlay.project import Project

VERSION = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc)\d+)?(\.post\d+)?")
IMAGE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
COMMIT_LINE = re.compile(r"^__commit_id__\b.*?=\s*['\"]g?([0-9a-f]{7,40})['\"]", re.MULTILINE)
# What a checkout holds beside the package that building, testing and exporting need.
TOPS = ("vllm", "tests", "docker", "recipes", "tools", ".buildkite", ".pre-commit-config.yaml",
        "pyproject.toml", "requirements")  # fmt: skip
# Finds the package without importing it, and leaves it where the engine mounts a folder of ours.
COPY_OUT = (
    "import importlib.util, shutil, pathlib, sys; "
    "spec = importlib.util.find_spec('vllm'); "
    "site = pathlib.Path(list(spec.submodule_search_locations)[0]); "
    "shutil.copytree(site, '/taken/vllm', ignore=lambda folder, names: "
    "[name for name in names if name == '__pycache__' or name.endswith(('.so', '.pyc'))])"
)
RELEASE_TAG = re.compile(r"(?P<name>.+):v\d[\w.]*")


@dataclass(frozen=True)
class Target:
    """A base to rebase to.

    Attributes:
        kind: 'version', 'image' or 'checkout'.
        name: what the user called it.
        vllm: the pin of its source archive.
        root: the folder that holds its vllm/, as path text.
        reference: the image's reference, of an image.
        digest: the image's registry digest, '' where it has none.
    """

    kind: str
    name: str
    vllm: VllmPin
    root: str
    reference: str = ""
    digest: str = ""

    def as_json(self) -> dict[str, object]:
        """The target as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, object]) -> Target:
        """The target that ``as_json`` gave."""
        vllm = plain["vllm"]
        assert isinstance(vllm, dict)
        return cls(**{**plain, "vllm": VllmPin(**vllm)})  # type: ignore[arg-type]


def find_target(
    project: Project, to: str, engine: Callable[[], Engine] = lambda: select_engine(Shell())
) -> Target:
    """The base that ``to`` names, fetched and unpacked below build/bases.

    Args:
        project: whose cache and build folder are used.
        to: a released version, an image's reference or oci-archive:FILE, or FOLDER[@COMMIT] of a checkout.
        engine: gives the container engine when an image is asked for.

    Raises:
        OverlayError: it is none of these, or cannot be had.
    """
    if VERSION.fullmatch(to):
        return _released(project, to)
    for folder, commit in ((to, ""), (to.rpartition("@")[0], to.rpartition("@")[2])):
        if folder and Path(folder).expanduser().is_dir():
            return _checkout(project, to, Path(folder).expanduser(), commit)
    if to.startswith((".", "/", "~")):
        raise OverlayError("no such folder", seen=to, wanted="a vLLM checkout, FOLDER or FOLDER@COMMIT")
    if to.startswith(ARCHIVE) and not _archive_file(to):
        raise OverlayError("no such image archive", seen=to, wanted="oci-archive:FILE", fix="correct TO")
    if to.startswith(ARCHIVE) or IMAGE.fullmatch(to):
        return _image(project, to, engine())
    raise OverlayError(
        "no such base",
        seen=to or "nothing",
        wanted="a released version such as 0.33.0, an image's reference, or the folder of a vLLM checkout",
        fix="make rebase TO= VERSION, REGISTRY/NAME:TAG, oci-archive:FILE, FOLDER or FOLDER@COMMIT",
    )


def _archive_file(reference: str) -> bool:
    """Whether the file of an archive's reference is there; a name of an image in it may follow a colon."""
    file = reference.removeprefix(ARCHIVE)
    return any(Path(one).is_file() for one in (file, file.partition(":")[0]))


def commit_of(root: Path) -> str:
    """The commit that a package says it was built from; '' where it does not."""
    match = COMMIT_LINE.search((read_base(root, "vllm/_version.py") or b"").decode("utf-8"))
    return match[1] if match else ""


def _released(project: Project, version: str) -> Target:
    root = fetch_version(version, project)
    artefact = project.cache / f"vllm-{version}.tar.gz"
    pin = VllmPin(version, commit_of(root), artefact.name, sha256_of(artefact))
    return Target("version", version, pin, str(root))


def _checkout(project: Project, name: str, folder: Path, commit: str) -> Target:
    """A checkout at a commit, or a folder as it is."""
    inside = run_git(["rev-parse", "--is-inside-work-tree"], folder, good=(0, 128))[0] == 0
    if not commit and not (
        inside and Path(git_text("rev-parse", "--show-toplevel", cwd=folder)) == folder.resolve()
    ):
        return _made(project, Target("checkout", name, VllmPin("", "", "", ""), ""), check_site(folder, "TO"))
    asked = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit or 'HEAD'}^{{commit}}"]
    status, printed = run_git(asked, folder, good=(0, 1, 128))
    if status:
        raise OverlayError(
            f"no such commit in {folder}", seen=commit or "HEAD", fix="fetch it, or correct TO"
        )
    found = printed.decode().strip()
    if not commit and git_text("status", "--porcelain", "--untracked-files=no", cwd=folder):
        raise OverlayError(
            f"{folder} has changes that are in no commit",
            wanted="a checkout at a commit",
            fix=f"commit or drop them, or give TO={folder}@COMMIT",
        )
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-checkout-") as staging:
        present = [top for top in TOPS if git_text("ls-tree", "--name-only", found, "--", top, cwd=folder)]
        packed = run_git(["archive", "--format=tar", found, "--", *present], folder)[1]
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            extract_all(archive, staging)
        if not (Path(staging) / "vllm" / "__init__.py").is_file():
            raise OverlayError(
                f"{name} holds no vllm package",
                seen=f"commit {found[:12]} of {folder.resolve()}",
                wanted="vllm/__init__.py in it",
                fix="correct TO",
            )
        target = Target("checkout", name, VllmPin("", found, "", ""), "")
        return _made(project, target, Path(staging))


def _image(project: Project, reference: str, engine: Engine) -> Target:
    """The package of an image, taken out through the engine."""
    if not engine.has_image(reference) or not reference.startswith(ARCHIVE):
        pulled = engine.pull(reference)
        if pulled.status != 0 and not engine.has_image(reference):
            raise OverlayError(
                f"the image {reference} cannot be pulled",
                seen=(pulled.output.strip().splitlines() or [f"exit status {pulled.status}"])[-1],
                wanted="a registry that answers and holds it",
                fix="correct TO, or run it where the registry can be reached",
            )
    with tempfile.TemporaryDirectory(prefix="rocm-overlay-image-") as staging:
        # An engine that maps users writes as another one.
        Path(staging).chmod(0o777)
        request = RunRequest(
            reference, ["python3", "-c", COPY_OUT], entrypoint=False, mounts=[f"{staging}:/taken"]
        )
        done = engine.run(request, capture=True)
        if done.status != 0 or not (Path(staging) / "vllm").is_dir():
            raise OverlayError(
                f"the vllm package cannot be taken out of {reference}",
                seen=(done.errors.strip().splitlines() or [f"exit status {done.status}"])[-1],
                wanted="an image whose python3 finds vllm",
                fix="correct TO",
            )
        digest = "" if reference.startswith(ARCHIVE) else engine.repository_digest(reference)
        target = Target("image", reference, VllmPin("", "", "", ""), "", reference, digest)
        return _made(project, target, Path(staging))


def _made(project: Project, target: Target, files: Path) -> Target:
    """The target with an archive of ``files`` in the cache, and that unpacked below build/bases."""
    version = installed_version(files)
    commit = target.vllm.commit or commit_of(files)
    label = re.sub(r"[^\w.+-]", "-", version if version != "unknown" else f"0+g{commit[:9] or 'unknown'}")
    project.cache.mkdir(parents=True, exist_ok=True)
    staged = project.cache / f".{label}.part"
    try:
        write_archive(files, f"vllm-{label}", staged)
        sha256 = sha256_of(staged)
        artefact = project.cache / f"vllm-{label}-{sha256[:12]}.tar"
        staged.replace(artefact)
    finally:
        staged.unlink(missing_ok=True)
    pin = VllmPin(label, commit, artefact.name, sha256)
    root = project.build / "bases" / artefact.name.removesuffix(".tar").removeprefix("vllm-")
    unpack_base(pin, artefact, root)
    return replace(target, vllm=pin, root=str(root))


def write_archive(files: Path, prefix: str, target: Path) -> None:
    """A tar of a folder, the same to the byte for the same files: order, owners and times are fixed."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for top in TOPS:
            found = [files / top] if (files / top).is_file() else sorted((files / top).rglob("*"))
            for path in found:
                if "__pycache__" in path.parts or not path.is_file() or path.is_symlink():
                    continue
                entry = tarfile.TarInfo(f"{prefix}/{path.relative_to(files).as_posix()}")
                entry.size = path.stat().st_size
                entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                with path.open("rb") as stream:
                    archive.addfile(entry, stream)


def image_values(target: Target, reference: str) -> dict[str, str] | None:
    """What [image.ARCH] of the pin says after the rebase; None where it stays as it is.

    An image's reference is taken as it is. A version takes the release tag of the name that is
    pinned; where a nightly is pinned, the image has to be chosen by a person.
    """
    if target.kind == "image" and not target.reference.startswith(ARCHIVE):
        return {"reference": target.reference.partition("@")[0], "digest": target.digest}
    match = RELEASE_TAG.fullmatch(reference)
    if target.kind == "version" and match:
        return {"reference": f"{match['name']}:v{target.vllm.version}", "digest": ""}
    return None
