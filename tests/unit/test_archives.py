# SPDX-License-Identifier: Apache-2.0
"""Archives are unpacked on every Python that the tool runs on, and nothing leaves the folder."""

import io
import tarfile

import pytest

from rocm_overlay.archives import extract_all
from rocm_overlay.errors import OverlayError

FILTERED = hasattr(tarfile, "data_filter")


@pytest.fixture(params=[pytest.param("with", marks=[]), "without"], ids=lambda name: f"{name} filters")
def filters(request, monkeypatch):
    """As Python 3.11.4 and later, and as Debian 12's 3.11.2, whose extractall takes no filter."""
    if request.param == "without" and FILTERED:
        monkeypatch.delattr(tarfile, "data_filter")


def archive(**members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for name, change in members.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = 5
            change(info)
            made.addfile(info, io.BytesIO(b"hello") if info.isfile() else None)
    return tarfile.open(fileobj=io.BytesIO(data.getvalue()))


def test_files_are_unpacked_and_may_be_written(filters, tmp_path):
    extract_all(archive(a__b=lambda info: setattr(info, "mode", 0o4444)), tmp_path)
    file = tmp_path / "a/b"
    assert file.read_bytes() == b"hello" and file.stat().st_mode & 0o4600 == 0o600


def link(info):
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"


def device(info):
    info.type = tarfile.CHRTYPE


UNSAFE = {
    "above": lambda info: setattr(info, "name", "../outside"),
    "link": link,
    "device": device,
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_leaves_the_folder_is_refused(filters, tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    refusals = (OverlayError, tarfile.FilterError) if FILTERED else OverlayError
    with pytest.raises(refusals):
        extract_all(archive(x=UNSAFE[name]), folder)
    assert not list(folder.iterdir()) and not (tmp_path / "outside").exists()
