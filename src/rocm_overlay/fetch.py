# SPDX-License-Identifier: Apache-2.0
"""The pinned base's source: downloaded by pip, checked by hash, cached, unpacked to build/base."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

from rocm_overlay.archives import extract_all
from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import VllmPin
from rocm_overlay.processes import run_bound
from rocm_overlay.project import Project
from rocm_overlay.staging import staging_folder

STAMP_NAME = ".base.json"

# pip reads a source artefact's metadata through its PEP 517 backend, and vLLM's imports torch. The
# artefact already carries its metadata as PKG-INFO, so the download runs with this backend in place
# of setuptools: nothing is built, nothing beside the artefact is installed.
METADATA_BACKEND = """
import email, pathlib, shutil

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    about = email.message_from_string(pathlib.Path("PKG-INFO").read_text(encoding="utf-8"))
    folder = pathlib.Path(metadata_directory) / f"{about['Name']}-{about['Version']}.dist-info"
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("this backend only reads metadata")
"""


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_sdist(pin: VllmPin, cache: Path, given: Path | None = None) -> Path:
    """The pinned source artefact in the cache, downloaded when it is not there.

    Args:
        pin: the version and hash wanted.
        cache: the folder of downloads; made when missing.
        given: a file to take instead of a download (a mirror's, or carried to an offline machine).

    Raises:
        OverlayError: the artefact has another hash, or there is neither cache nor network.
    """
    target = cache / pin.sdist
    if given is None and target.is_file():
        if sha256_of(target) == pin.sha256:
            return target
        print(
            f"{target} has {target.stat().st_size} bytes and a wrong hash: downloading it again",
            file=sys.stderr,
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OverlayError(
            f"the cache {cache} cannot be made", seen=error, fix="correct ROCM_OVERLAY_CACHE"
        ) from None
    with staging_folder(cache, "fetch") as staging:
        fresh = _copy_given(given, staging) if given else _pip_download(pin.version, staging, pin.sha256)
        found = sha256_of(fresh)
        if found != pin.sha256:
            raise OverlayError(
                f"{fresh.name} is not the pinned artefact",
                seen=f"sha256 {found} ({fresh.stat().st_size} bytes)",
                wanted=f"sha256 {pin.sha256}",
                fix="fetch it again (a short file is a truncated download), or correct the pin in base.toml",
            )
        fresh.replace(target)
    return target


def _copy_given(given: Path, staging: Path) -> Path:
    if not given.is_file():
        raise OverlayError("no such artefact", seen=given, fix="give the path of the vLLM source archive")
    return Path(shutil.copy(given, staging))


def _pip_download(version: str, staging: Path, sha256: str = "") -> Path:
    """The source archive of a version through pip, held to ``sha256`` when one is given."""
    backend = staging / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(METADATA_BACKEND, encoding="utf-8")
    wanted = staging / "requirements.txt"
    wanted.write_text(
        f"vllm=={version}" + (f" --hash=sha256:{sha256}\n" if sha256 else "\n"), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary=vllm",
        "--no-build-isolation",
    ]
    command += ["--require-hashes"] if sha256 else []
    command += ["--requirement", str(wanted), "--dest", str(staging)]
    artefact = staging / f"vllm-{version}.tar.gz"
    print(f"fetching {artefact.name} (once; kept in the cache)", file=sys.stderr)
    # A connection that drops is taken up where it was; a pip too old to know the variable ignores it.
    environment = {"PIP_RESUME_RETRIES": "5", **os.environ, "PYTHONPATH": str(backend.parent)}
    done = run_bound(
        command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    others = [one.name for one in staging.glob("vllm-*.tar.gz") if one != artefact]
    if done.returncode == 0 and others:
        raise OverlayError(
            f"the package index writes vLLM {version} in another way",
            seen=version,
            wanted=others[0].removeprefix("vllm-").removesuffix(".tar.gz"),
        )
    if done.returncode or not artefact.is_file():
        raise OverlayError(
            f"pip could not fetch {artefact.name}",
            seen=_last_words(done.stderr),
            wanted=f"vllm {version} from the package index" + (f", sha256 {sha256}" if sha256 else ""),
            fix="check network, free space and pip's configuration, or: rocm-overlay fetch --from FILE",
        )
    return artefact


def fetch_version(version: str, project: Project) -> Path:
    """The unpacked source of any released version, for a look at it; nothing vouches for its hash.

    Returns:
        The folder that holds vllm/: build/bases/VERSION.

    Raises:
        OverlayError: there is no such version, or no network and it is not cached.
    """
    cached = project.cache / f"vllm-{version}.tar.gz"
    if not cached.is_file():
        project.cache.mkdir(parents=True, exist_ok=True)
        with staging_folder(project.cache, "fetch") as staging:
            _pip_download(version, staging).replace(cached)
    pin = VllmPin(version, "", cached.name, sha256_of(cached))
    target = project.build / "bases" / version
    unpack_base(pin, cached, target)
    return target


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " | ".join(line[:200] for line in lines[-6:]) or "no message"


def unpack_base(pin: VllmPin, sdist: Path, target: Path) -> bool:
    """Unpack the artefact so that ``target/vllm`` is the package; nothing is done when it already is.

    Returns:
        True when it was unpacked, False when the folder already held this artefact.

    Raises:
        OverlayError: the archive is damaged.
    """
    if is_pinned_base(pin, target):
        return False
    if target.exists():
        print(f"{target} is not the pinned source as it was unpacked: unpacking it again", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(target.parent, "unpack") as staging:
        try:
            with tarfile.open(sdist) as archive:
                extract_all(archive, staging)
        except OSError as error:
            if error.errno is not None:
                fix = f"free space and make {target.parent} writable; the archive itself is good"
                raise OverlayError(f"{sdist.name} cannot be unpacked", seen=error, fix=fix) from None
            raise _damaged(sdist, error) from None
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise _damaged(sdist, error) from None
        root = staging / f"vllm-{pin.version}"
        if not (root / "vllm" / "__init__.py").is_file():
            raise OverlayError(
                f"{sdist.name} holds no vLLM package", wanted=f"vllm-{pin.version}/vllm/__init__.py"
            )
        stamp = {"version": pin.version, "sha256": pin.sha256, "content": content_hash(root)}
        (root / STAMP_NAME).write_text(json.dumps(stamp), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        root.replace(target)
    return True


def _damaged(sdist: Path, error: Exception) -> OverlayError:
    return OverlayError(f"{sdist.name} cannot be unpacked", seen=error, fix=f"delete {sdist} and retry")


def content_hash(root: Path) -> str:
    """A hash over path and content of every Python file of the package and of its tests."""
    digest = hashlib.sha256()
    for top in ("vllm", "tests"):
        for path in sorted((root / top).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def is_pinned_base(pin: VllmPin, target: Path) -> bool:
    """Whether the folder holds the pinned source, its Python files as they were unpacked."""
    try:
        stamp = json.loads((target / STAMP_NAME).read_text(encoding="utf-8"))
        kept = {"version": pin.version, "sha256": pin.sha256} == {
            key: stamp[key] for key in ("version", "sha256")
        }
        return kept and bool(stamp["content"] == content_hash(target))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch_base(project: Project, pin: VllmPin, given: Path | None = None) -> Path:
    """The unpacked pinned source, fetched and unpacked as needed. See fetch_sdist and unpack_base."""
    if given is not None or not is_pinned_base(pin, project.base):
        unpack_base(pin, fetch_sdist(pin, project.cache, given), project.base)
    return project.base
