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
import tempfile
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import VllmPin
from rocm_overlay.project import Project

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
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as staging:
        fresh = _copy_given(given, Path(staging)) if given else _pip_download(pin, Path(staging))
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


def _pip_download(pin: VllmPin, staging: Path) -> Path:
    backend = staging / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(METADATA_BACKEND, encoding="utf-8")
    wanted = staging / "requirements.txt"
    wanted.write_text(f"vllm=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary=vllm",
        "--no-build-isolation",
    ]
    command += ["--require-hashes", "--requirement", str(wanted), "--dest", str(staging)]
    print(f"fetching {pin.sdist} (once; kept in the cache)", file=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    done = subprocess.run(
        command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    artefact = staging / pin.sdist
    if done.returncode or not artefact.is_file():
        raise OverlayError(
            f"pip could not fetch {pin.sdist}",
            seen=_last_words(done.stderr),
            wanted=f"vllm {pin.version} from the package index, sha256 {pin.sha256}",
            fix="check the network and pip's configuration, or give the file: rocm-overlay fetch --from FILE",
        )
    return artefact


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
    stamp = {"version": pin.version, "sha256": pin.sha256}
    if _read_stamp(target) == stamp:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as staging:
        try:
            with tarfile.open(sdist) as archive:
                archive.extractall(staging, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise OverlayError(
                f"{sdist.name} cannot be unpacked", seen=error, fix=f"delete {sdist} and retry"
            ) from None
        root = Path(staging) / f"vllm-{pin.version}"
        if not (root / "vllm" / "__init__.py").is_file():
            raise OverlayError(
                f"{sdist.name} holds no vLLM package", wanted=f"vllm-{pin.version}/vllm/__init__.py"
            )
        (root / STAMP_NAME).write_text(json.dumps(stamp), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        root.replace(target)
    return True


def _read_stamp(target: Path) -> object:
    try:
        return json.loads((target / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def fetch_base(project: Project, pin: VllmPin, given: Path | None = None) -> Path:
    """The unpacked pinned source, fetched and unpacked as needed. See fetch_sdist and unpack_base."""
    if given is None and _read_stamp(project.base) == {"version": pin.version, "sha256": pin.sha256}:
        return project.base
    sdist = fetch_sdist(pin, project.cache, given)
    unpack_base(pin, sdist, project.base)
    return project.base
