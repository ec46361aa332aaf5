# SPDX-License-Identifier: Apache-2.0
"""The real Dockerfile over the stand-in base, built with buildah; the image's own commands run in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rocm_overlay.engine import Buildah, RunRequest, Shell
from rocm_overlay.image import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
TAG = "localhost/vllm-openai-rocm:image-test"
# Where the stand-in has its packages.
SITE = "/usr/local/lib/python3.13/dist-packages"
BASE_NAME = "org.opencontainers.image.base.name"

pytestmark = [
    pytest.mark.image,
    pytest.mark.xdist_group("image"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("buildah") is None or shutil.which("debootstrap") is None,
        reason="building the stand-in base takes root, buildah and debootstrap",
    ),
]


@dataclass(frozen=True)
class Image:
    """The built image, with one container of it and one of its base for all the tests."""

    engine: Buildah
    said: str
    container: str
    base_container: str

    def run(self, *arguments, entrypoint=False, mounts=(), base=False, **environment):
        request = RunRequest(TAG, arguments, entrypoint, environment, mounts)
        return self.engine.run_in(self.base_container if base else self.container, request, capture=True)

    def output(self, *arguments, **how):
        done = self.run(*arguments, **how)
        assert done.status == 0, f"{arguments}: {done.status}\n{done.output}\n{done.errors}"
        return done.output

    @property
    def labels(self):
        return self.engine.labels(TAG)

    @property
    def base(self):
        return self.labels[BASE_NAME]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout as a clone under umask 077 is: closed to every user but its owner."""
    root = tmp_path_factory.mktemp("closed") / "checkout"
    for name in (*CONTEXT, ".dockerignore", "ci"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, root / name)
    (root / "build").symlink_to(ROOT / "build")
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or os.access(path, os.X_OK) else 0o600)
    return root


def build(checkout, tag, *options):
    command = [sys.executable, "-m", "rocm_overlay.cli", "image", "--engine", "buildah", "--tag", tag]
    environment = {
        **os.environ,
        "ROCM_OVERLAY_HOME": str(checkout),
        "ROCM_OVERLAY_CACHE": str(ROOT / ".cache"),
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        [*command, *options],
        cwd=checkout,
        env=environment,
        umask=0o077,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def image(checkout):
    done = build(checkout, TAG)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    engine = Buildah(Shell())
    assert engine.answers()
    with engine.container(TAG) as ours, engine.container(engine.labels(TAG)[BASE_NAME]) as base:
        yield Image(engine, done.stdout + done.stderr, ours, base)
    engine._run("rmi", TAG)


def test_the_build_says_that_the_base_is_a_stand_in(image):
    if "stand-in" not in image.base:
        pytest.skip("the pinned image could be pulled here")
    assert "USING THE STAND-IN BASE" in image.said
    assert "vllm-openai-rocm.stand-in" in image.labels


def test_the_labels_are_those_of_what_was_laid(image):
    manifest = json.loads(image.output("rocm-overlay", "verify", "--json"))
    labels = image.labels
    assert labels["vllm-openai-rocm.overlay-hash"] == manifest["overlay_hash"]
    assert labels["vllm-openai-rocm.series-hash"] == manifest["series_hash"]
    assert labels["org.opencontainers.image.version"] == manifest["version"]
    assert labels["vllm-openai-rocm.vllm-version"] == manifest["base"]["vllm_version"]
    assert labels[BASE_NAME] == manifest["base"]["reference"]


AS_ANOTHER_USER = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("rocm-overlay", "verify"), "intact"),
        (("rocm-overlay-entrypoint", "--recipe", "mi355x-tp4", "--dry-run"), "vllm serve"),
        (("rocm-overlay", "recipes", "list"), "mi355x-tp4"),
    ],
)
def test_any_user_can_use_an_image_built_from_a_checkout_that_is_closed_to_others(
    image, checkout, command, said
):
    assert (checkout / "base.toml").stat().st_mode & 0o077 == 0
    assert said in image.output(*AS_ANOTHER_USER, *command)


def test_every_file_of_ours_and_of_vllm_can_be_read_by_every_user(image):
    listing = f"find /opt/vllm-openai-rocm {SITE} ! -type l ! -perm -a+r; find / -xdev -type d ! -perm -a+rx"
    closed = image.output("sh", "-c", listing).split()
    # Debian's own: its administrator's home and what is below some system folders.
    assert [path for path in closed if path.startswith(("/opt", "/usr", "/var/cache/vllm"))] == []


FLYDSL = "/var/cache/vllm-openai-rocm/flydsl"


def test_the_kernels_that_the_base_brings_are_found_and_any_user_can_add_to_them(image):
    linked = image.output("sh", "-c", f"cd {FLYDSL}; find . ! -type d").split()
    assert linked == ["./stand_in_0/0.pkl"]
    script = "cd stand_in_0 && cat 0.pkl && : >0.lock && rm 0.lock && mkdir ../new_1 && rmdir ../new_1"
    assert image.output(*AS_ANOTHER_USER, "sh", "-c", f"cd {FLYDSL} && {script}") == "no kernel\n"


DRIFTED = "localhost/vllm-openai-rocm:image-test-nightly"
NIGHTLY = "0.33.1.dev7+g4ba787ec9"


@pytest.fixture
def nightly(image):
    """An image over a base of another version, in which a file that we touch differs from the lock."""
    path = "vllm/models/deepseek_v41/amd/rocm.py"
    engine = image.engine
    with engine.container(image.base) as container:
        version = f"echo '__version__ = \"{NIGHTLY}\"' >{SITE}/vllm/_version.py"
        change = f"echo '# changed' >>{SITE}/{path}; {version}"
        request = RunRequest(image.base, ("sh", "-c", change), entrypoint=False)
        assert engine.run_in(container, request, capture=True).status == 0
        assert engine._run("commit", "--quiet", container, DRIFTED).status == 0
    yield path
    engine._run("rmi", DRIFTED)


def test_a_drifted_nightly_is_refused_and_where_that_is_allowed_the_image_says_so(image, checkout, nightly):
    tag = f"{TAG}-drift"
    refused = build(checkout, tag, "--base", DRIFTED)
    assert refused.returncode == 2 and nightly in refused.stderr and not image.engine.has_image(tag)
    done = build(checkout, tag, "--base", DRIFTED, "--allow-drift", nightly)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    try:
        assert f"DRIFT ALLOWED in {nightly}" in done.stderr
        labels = image.engine.labels(tag)
        assert labels["vllm-openai-rocm.drift-allowed"] == nightly
        assert labels["vllm-openai-rocm.vllm-version"] == NIGHTLY
        request = RunRequest(tag, ("rocm-overlay", "verify", "--json"), entrypoint=False)
        manifest = json.loads(image.engine.run(request, capture=True).output)
        assert [one["path"] for one in manifest["drift_allowed"]] == [nightly]
        assert manifest["base"]["vllm_version"] == NIGHTLY
    finally:
        image.engine._run("rmi", tag)


def test_a_recipe_dry_run_prints_the_server_command(image):
    said = image.output("--recipe", "mi355x-tp4", "--dry-run", entrypoint=True)
    assert "vllm serve" in said and "--tensor-parallel-size" in said


def test_an_unknown_recipe_is_refused_with_near_names(image):
    done = image.run("--recipe", "mi355-tp4", "--dry-run", entrypoint=True)
    assert done.status == 2
    assert "mi355x-tp4" in done.output + done.errors


def test_anything_else_reaches_vllm_serve_as_in_the_base_image(image):
    # Without torch the server ends at its first import, by which it is known to have been started.
    done = image.run("some/model", "--port", "1", entrypoint=True)
    assert done.status == 1
    assert "vllm/__init__.py" in done.errors and "No module named 'torch'" in done.errors


PLANT = """
import subprocess, sys
from rocm_overlay import install
laid = install.find_site() / sys.argv[1]
content = laid.read_bytes()
laid.write_bytes(content + b"#")
status = subprocess.run(["rocm-overlay", "verify"]).returncode
laid.write_bytes(content)
sys.exit(status)
"""


def test_verify_is_quick_and_finds_a_planted_change(image):
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        assert "intact" in image.output("rocm-overlay", "verify")
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 2, seconds
    laid = json.loads(image.output("rocm-overlay", "verify", "--json"))["files"][0]["path"]
    done = image.run("python3", "-c", PLANT, laid)
    assert done.status == 1 and laid in done.output + done.errors
    assert "intact" in image.output("rocm-overlay", "verify")


def test_laying_again_changes_nothing_and_is_no_error(image):
    assert "already laid" in image.output("rocm-overlay", "lay", "--installed")


def test_doctor_reports_the_overlay_as_sound_and_the_missing_gpus(image):
    done = image.run("doctor", "--recipe", "mi355x-tp4", "--json", entrypoint=True)
    rows = {row["check"]: row for row in json.loads(done.output)["rows"]}
    assert done.status == 1
    assert rows["overlay"]["status"] == "ok" and rows["flydsl"]["status"] == "ok"
    assert (rows["GPU count"]["status"], rows["GPU count"]["wanted"]) == ("fail", "4 or more (mi355x-tp4)")
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLYDSL_RUNTIME_CACHE_DIR"):
        assert rows[name]["status"] == "ok" and rows[name]["seen"].startswith("/var/cache/vllm-openai-rocm/")


ANNOUNCE = """
import sys
from importlib.metadata import entry_points
sys.argv = ["vllm", "serve"]
{entry.name: entry for entry in entry_points(group="vllm.general_plugins")}["rocm_overlay_identity"].load()()
"""


def test_without_the_entry_point_and_with_a_foreign_read_only_home_all_is_there(image, tmp_path):
    (tmp_path / "marker").touch()
    shadows = (
        tmp_path
        / ".local/lib"
        / image.output("sh", "-c", "cd /usr/lib; ls -d python3.*").strip()
        / "site-packages"
    )
    shadows.mkdir(parents=True)
    (shadows / "rocm_overlay.py").write_text("raise SystemExit('of the home folder')\n")
    how = {"mounts": [f"{tmp_path}:/root:ro"], "HOME": "/root"}
    assert image.run("sh", "-c", "test -e /root/marker && ! touch /root/new", **how).status == 0
    assert "intact" in image.output("rocm-overlay", "verify", **how)
    said = image.output("python3", "-c", ANNOUNCE, **how)
    assert image.base in said and image.labels["vllm-openai-rocm.overlay-hash"][:12] in said
    # What the user sets wins over the image's own cache folders.
    done = image.run("rocm-overlay", "doctor", "--json", **how, VLLM_CACHE_ROOT="/root/share")
    rows = {row["check"]: row for row in json.loads(done.output)["rows"]}
    assert rows["VLLM_CACHE_ROOT"]["status"] == "fail" and rows["TRITON_CACHE_DIR"]["status"] == "ok"


def test_the_build_leaves_nothing_under_home_and_no_second_copy_of_the_tool(image):
    listing = ("sh", "-c", "find /root | sort")
    assert image.output(*listing) == image.output(*listing, base=True)
    home = image.output("ls", "/opt/vllm-openai-rocm").split()
    ours = ["LICENSE", "README.md", "base.toml", "kernels", "overlay", "patches", "pyproject.toml", "recipes"]
    assert home == ours
    # Compiled kernels are asked for, and this image was built without.
    assert image.output("ls", "-A", "/opt/vllm-openai-rocm/kernels") == ""


def test_no_compiled_file_of_a_patched_one_is_left(image):
    listing = ("sh", "-c", "find / -xdev -path '*/deepseek_v41/amd/__pycache__/rocm.*.pyc'")
    assert image.output(*listing) == ""
    # The base had one, so the check above can fail.
    assert image.output(*listing, base=True) != ""


def test_nothing_of_the_building_machine_gets_into_the_image(image):
    files = "ls /etc/pip.conf /etc/xdg/pip /root/.config /etc/apt/sources.list 2>/dev/null; true"
    assert image.output("sh", "-c", files) == ""
    names = [line.partition("=")[0].lower() for line in image.output("env").splitlines()]
    assert not [name for name in names if "proxy" in name or name.startswith("pip")]
    assert (
        image.output("sh", "-c", "find / -xdev -name direct_url.json | grep -v vllm_openai_rocm; true") == ""
    )
