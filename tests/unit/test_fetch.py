# SPDX-License-Identifier: Apache-2.0
"""The base is the pinned artefact or an error; once cached it needs no network."""

import errno
import io
import os
import tarfile
from types import SimpleNamespace

import pytest

from rocm_overlay import fetch
from rocm_overlay.errors import OverlayError
from rocm_overlay.fetch import fetch_base, fetch_sdist, fetch_version, sha256_of, unpack_base
from rocm_overlay.pin import Pin, VllmPin
from tests.tiny import BASE, make_project, write_files


def make_sdist(path, files=BASE, version="1.2.3"):
    """An archive as vLLM's: its build backend cannot run here, its metadata lies beside it."""
    about = {
        "PKG-INFO": f"Metadata-Version: 2.2\nName: vllm\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = ["torch"]\nbuild-backend = "setuptools.build_meta"\n',
        "setup.py": "raise RuntimeError('the build must not run')\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**about, **files}.items():
            entry = tarfile.TarInfo(f"vllm-{version}/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def sdist(tmp_path):
    return make_sdist(tmp_path / "vllm-1.2.3.tar.gz")


@pytest.fixture
def pin(sdist):
    return VllmPin("1.2.3", "abc", "vllm-1.2.3.tar.gz", sha256_of(sdist))


@pytest.fixture
def no_network(monkeypatch):
    """pip answers as it does without a network; the calls are kept."""
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found for vllm==1.2.3\n")

    monkeypatch.setattr(fetch, "run_bound", run)
    return calls


@pytest.fixture
def local_index(monkeypatch, sdist):
    """pip as it is, with the archive's folder in place of an index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))


def test_pip_downloads_the_archive_without_building_it(tmp_path, pin, local_index):
    assert sha256_of(fetch_sdist(pin, tmp_path / "cache")) == pin.sha256
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [pin.sdist]


def test_an_index_with_another_archive_is_refused_by_hash(tmp_path, pin, sdist, local_index):
    make_sdist(sdist, {"vllm/__init__.py": "tampered"})
    with pytest.raises(OverlayError, match="could not fetch") as error:
        fetch_sdist(pin, tmp_path / "cache")
    assert "hash" in error.value.render().lower() or "DO NOT MATCH" in error.value.render()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_version_that_the_index_writes_in_another_way_is_given_in_its_way(tmp_path, monkeypatch):
    make_sdist(tmp_path / "vllm-1.2.0.tar.gz", version="1.2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OverlayError, match=r"writes vLLM 1\.2 in another way") as error:
        fetch.fetch_version("1.2", make_project(tmp_path / "p"))
    assert error.value.wanted == "1.2.0"


def test_a_given_artefact_is_checked_and_cached(tmp_path, pin, sdist, no_network):
    cached = fetch_sdist(pin, tmp_path / "cache", given=sdist)
    assert sha256_of(cached) == pin.sha256
    assert fetch_sdist(pin, tmp_path / "cache") == cached and not no_network


def test_offline_without_a_cache_says_what_to_do(tmp_path, pin, no_network):
    with pytest.raises(OverlayError, match="--from FILE") as error:
        fetch_sdist(pin, tmp_path / "cache")
    assert "No matching distribution" in error.value.render() and len(no_network) == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_is_asked_for_the_exact_hash(tmp_path, pin, no_network):
    with pytest.raises(OverlayError):
        fetch_sdist(pin, tmp_path / "cache")
    assert {"--require-hashes", "--no-deps", "--no-binary=vllm"} <= set(no_network[0])


@pytest.mark.parametrize("size", [100, 0])
def test_a_truncated_artefact_is_refused_and_not_cached(tmp_path, pin, sdist, size):
    short = tmp_path / "short" / pin.sdist
    short.parent.mkdir()
    short.write_bytes(sdist.read_bytes()[:size])
    with pytest.raises(OverlayError, match="not the pinned artefact") as error:
        fetch_sdist(pin, tmp_path / "cache", given=short)
    assert f"{size} bytes" in error.value.render() and pin.sha256 in error.value.render()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_entry_is_downloaded_again_never_used(tmp_path, pin, sdist, no_network, capsys):
    cached = fetch_sdist(pin, tmp_path / "cache", given=sdist)
    cached.write_bytes(cached.read_bytes()[:-1])
    with pytest.raises(OverlayError, match="could not fetch"):
        fetch_sdist(pin, tmp_path / "cache")
    assert len(no_network) == 1 and "wrong hash" in capsys.readouterr().err


def test_a_missing_given_file_is_an_error(tmp_path, pin):
    with pytest.raises(OverlayError, match="no such artefact"):
        fetch_sdist(pin, tmp_path / "cache", given=tmp_path / "gone.tar.gz")


def test_unpacking_gives_the_package_once(tmp_path, pin, sdist):
    assert unpack_base(pin, sdist, tmp_path / "base") is True
    assert (tmp_path / "base/vllm/other.py").read_text() == BASE["vllm/other.py"]
    assert unpack_base(pin, sdist, tmp_path / "base") is False


def test_another_pin_replaces_the_unpacked_base(tmp_path, pin, sdist):
    unpack_base(pin, sdist, tmp_path / "base")
    (tmp_path / "second").mkdir()
    second = make_sdist(tmp_path / "second" / "vllm-1.2.4.tar.gz", {"vllm/__init__.py": "new"}, "1.2.4")
    other = VllmPin("1.2.4", "abc", second.name, sha256_of(second))
    assert unpack_base(other, second, tmp_path / "base") is True
    assert not (tmp_path / "base/vllm/other.py").exists()


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_an_archive_that_cannot_be_unpacked_leaves_the_old_base(tmp_path, pin, sdist, content):
    unpack_base(pin, sdist, tmp_path / "base")
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(sdist.read_bytes()[:-40] if content is None else content)
    other = VllmPin("1.2.4", "abc", "broken.tar.gz", "0" * 64)
    with pytest.raises(OverlayError, match="cannot be unpacked"):
        unpack_base(other, broken, tmp_path / "base")
    assert (tmp_path / "base/vllm/other.py").exists()


def test_an_archive_without_the_package_is_an_error(tmp_path):
    empty = make_sdist(tmp_path / "e.tar.gz", {"README": "x"})
    with pytest.raises(OverlayError, match="holds no vLLM package"):
        unpack_base(VllmPin("1.2.3", "", "e.tar.gz", "0" * 64), empty, tmp_path / "base")


def test_an_unpacked_base_needs_neither_cache_nor_network(tmp_path, pin, sdist, no_network):
    project = make_project(tmp_path / "p", pin_sha=pin.sha256)
    loaded = Pin.load(project.pin_file).vllm
    fetch_base(project, loaded, given=sdist)
    (project.cache / pin.sdist).unlink()
    assert fetch_base(project, loaded) == project.base and not no_network


def test_a_base_that_was_edited_or_lost_a_file_is_unpacked_again(tmp_path, pin, sdist, capsys):
    """The lock is made from build/base: an edit there must never become the pin."""
    target = tmp_path / "base"
    unpack_base(pin, sdist, target)
    for spoil in (lambda file: file.write_text("edited = True\n"), lambda file: file.unlink()):
        spoil(target / "vllm/amd/rocm.py")
        assert unpack_base(pin, sdist, target) is True
        assert (target / "vllm/amd/rocm.py").read_text() == BASE["vllm/amd/rocm.py"]
        assert "unpacking it again" in capsys.readouterr().err
    (target / "vllm/__pycache__").mkdir()
    (target / "vllm/__pycache__/x.cpython-312.pyc").write_bytes(b"compiled by a run")
    assert unpack_base(pin, sdist, target) is False


def test_what_killed_runs_left_is_swept_and_nothing_of_the_users_with_it(tmp_path, pin, sdist):
    """The cache may be a folder that holds other things."""
    cache = tmp_path / "cache"
    kept = [".fetch-2024-holiday", ".fetch-mine-x", f".rocm-overlay-fetch-{os.getpid()}-abcdefgh",
            ".rocm-overlay-fetch-notes", ".rocm-overlay-fetch-999999999-abcdefgh-copy"]  # fmt: skip
    swept = [".rocm-overlay-fetch-999999999-abcdefgh", ".rocm-overlay-unpack-999999998-abcdefg_"]
    write_files(cache, {f"{name}/file": "x" for name in (*kept, *swept)})
    fetch_sdist(pin, cache, given=sdist)
    assert {path.name for path in cache.iterdir()} == {*kept, pin.sdist}


def test_a_full_disk_does_not_blame_the_archive(tmp_path, pin, sdist, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.extractall", full)
    with pytest.raises(OverlayError, match="No space left") as error:
        unpack_base(pin, sdist, tmp_path / "base")
    assert "archive itself is good" in error.value.render()


def test_a_cache_that_cannot_be_made_is_named(tmp_path, pin):
    (tmp_path / "file").write_text("")
    with pytest.raises(OverlayError, match="ROCM_OVERLAY_CACHE"):
        fetch_sdist(pin, tmp_path / "file/cache")


def test_another_version_is_fetched_beside_the_pinned_base(tmp_path, pin, local_index):
    project = make_project(tmp_path / "p")
    assert fetch_version("1.2.3", project) == project.build / "bases/1.2.3"
    assert (project.build / "bases/1.2.3/vllm/other.py").exists() and not project.base.exists()
