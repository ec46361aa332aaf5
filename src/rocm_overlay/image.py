# SPDX-License-Identifier: Apache-2.0
"""Building the image: its base from the pin, or the stand-in where that cannot be had."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay import engine as engines
from rocm_overlay import table
from rocm_overlay.engine import ARCHIVE, Buildah, BuildRequest, Engine, RunRequest
from rocm_overlay.errors import OverlayError
from rocm_overlay.fetch import fetch_base
from rocm_overlay.pin import ImagePin, Pin
from rocm_overlay.project import Project

NAME = "vllm-openai-rocm"
STAND_IN_LABEL = f"{NAME}.stand-in"
STAND_IN_SCRIPT = Path("ci/stand-in-base.sh")
STAND_IN_PACKAGES = ("buildah", "debootstrap")
# The files of the checkout that the Dockerfile copies.
CONTEXT = (
    *("Dockerfile", "base.toml", "pyproject.toml", "README.md", "LICENSE"),
    *("src/rocm_overlay", "overlay", "patches", "recipes"),
)
# What the base itself says of its vllm, found as the overlay will find it, without importing it.
VERSION_SCRIPT = (
    "import importlib.util, pathlib, runpy; "
    "package = pathlib.Path(importlib.util.find_spec('vllm').submodule_search_locations[0]); "
    "print(runpy.run_path(str(package / '_version.py'))['__version__'])"
)


@dataclass(frozen=True)
class Base:
    """The image to build over.

    Attributes:
        reference: what the engine knows it by, for FROM.
        name: what is recorded of it.
        digest: its registry digest, or '' where none is known.
        engine: the engine whose storage holds it.
        stand_in: whether it is the stand-in.
    """

    reference: str
    name: str
    digest: str
    engine: Engine
    stand_in: bool = False


@dataclass(frozen=True)
class Built:
    """A built image: its names, its labels and how long it took."""

    tags: Sequence[str]
    labels: Mapping[str, str]
    base: Base
    seconds: float

    def table(self) -> str:
        """What was built, for the terminal."""
        rows = [
            *(("image", tag) for tag in self.tags),
            ("engine", self.base.engine.name),
            ("base", f"{self.base.name}{' (STAND-IN: serves nothing)' if self.base.stand_in else ''}"),
            ("base digest", self.base.digest or "none known"),
            *sorted((key, value or "none") for key, value in self.labels.items() if key.startswith(NAME)),
            ("wall time", f"{self.seconds:.1f} s"),
        ]
        return table.render(("built", ""), rows)


def image_pin(pin: Pin, architecture: str) -> ImagePin:
    """The pinned image of an architecture.

    Raises:
        OverlayError: the pin has none for it.
    """
    if architecture not in pin.images:
        raise OverlayError(
            f"no image is pinned for {architecture}",
            seen=architecture,
            wanted=f"one of {', '.join(sorted(pin.images))}",
            fix="give --arch one of these",
        )
    return pin.images[architecture]


def obtain_base(
    project: Project, pin: Pin, architecture: str, engine: Engine, *, given: str | None, allow_stand_in: bool
) -> Base:
    """The base image, pulled if it is not here: the one given, the pinned one, or the stand-in.

    Args:
        project: the checkout.
        pin: its pin.
        architecture: whose image of the pin is wanted.
        engine: the engine to pull with.
        given: an image that takes the place of the pinned one; no stand-in for it.
        allow_stand_in: whether the stand-in may take the place of a pinned image that cannot be
            pulled.

    Raises:
        OverlayError: the base cannot be pulled and no stand-in may or can be made.
    """
    pinned = image_pin(pin, architecture)
    reference = given or pinned.pull_reference
    if engine.has_image(reference):
        say(f"base {reference} is here already")
        return _pulled(engine, reference, pinned, given)
    say(f"pulling {reference} with {engine.name}")
    pull = engine.pull(reference)
    last = (pull.output.strip().splitlines() or [f"exit status {pull.status}"])[-1]
    if pull.status == 0:
        return _pulled(engine, reference, pinned, given, archive_id=last)
    if given or not allow_stand_in:
        raise OverlayError(
            f"the base image {reference} cannot be pulled",
            seen=last,
            wanted="a registry that answers and holds it",
            fix="correct --base, or run it where that registry can be reached"
            if given
            else mirror_hint(pin, architecture),
        )
    say(f"the base image {reference} cannot be pulled: {last}")
    say(mirror_hint(pin, architecture))
    return _stand_in(project, pin, engine)


def mirror_hint(pin: Pin, architecture: str) -> str:
    """Where an architecture's pinned base can be had when its registry does not give it."""
    mirror = pin.mirrors[architecture]
    if not mirror.location:
        command = f"make mirror-base ARCH={architecture} TO=..."
        return f"no mirror was made for {architecture}; on a machine that still can pull: {command}"
    command = f"make image ARCH={architecture} BASE={mirror.location}"
    return f"a copy of {mirror.date} is at {mirror.location}: {command}"


def image_tags(pin: Pin, architecture: str, version: str, *, stand_in: bool) -> tuple[str, ...]:
    """The names of an architecture's image.

    Commands name a real image with its version or with nothing, so that it has both names. A
    stand-in has neither: it serves nothing. Where the architectures' bases differ, so do the
    images, and each name says whose it is.
    """
    if stand_in:
        return (f"{NAME}:{version}-stand-in",)
    if len({one.pull_reference for one in pin.images.values()}) == 1:
        return (f"{NAME}:{version}", NAME)
    return (f"{NAME}:{version}-{architecture}", f"{NAME}:{architecture}")


def base_vllm_version(base: Base) -> str:
    """The version of the vllm package in a base image: a nightly's is not the pin's.

    Raises:
        OverlayError: the image has none for its python3.
    """
    request = RunRequest(base.reference, ["python3", "-c", VERSION_SCRIPT], entrypoint=False)
    done = base.engine.run(request, capture=True)
    said = done.output.strip().splitlines()
    if done.status != 0 or not said:
        raise OverlayError(
            f"the base image {base.name} has no vllm package that its python3 finds",
            seen=(done.errors.strip().splitlines() or [f"exit status {done.status}"])[-1],
            wanted="an image with vLLM installed",
            fix="correct --base, or the reference in base.toml",
        )
    return said[-1]


def check_drift_paths(paths: Sequence[str]) -> None:
    """Refuse a path that the Dockerfile, which is given a list with spaces between, would not get."""
    for path in paths:
        if not re.fullmatch(r"[\w./+-]+", path):
            raise OverlayError(
                "--allow-drift takes the path of one file",
                seen=repr(path),
                wanted="a path such as vllm/models/deepseek_v41/amd/rocm.py",
                fix="give --allow-drift once a file (make image ALLOW_DRIFT='one two')",
            )


def build_image(
    project: Project,
    stamp: Mapping[str, str],
    base: Base,
    tags: Sequence[str],
    *,
    allow_drift: Sequence[str] = (),
    compile_kernels: bool = False,
    started: float | None = None,
) -> Built:
    """Build the image over ``base`` with the project's Dockerfile.

    Args:
        project: the checkout.
        stamp: version, overlay_hash and series_hash, as ``rocm-overlay stamp`` prints them.
        base: what to build over.
        tags: the image's names.
        allow_drift: files of the base whose difference from the lock is accepted.
        compile_kernels: whether the mono kernels are compiled into the image.
        started: when the work on the image began (``time.monotonic``), for the wall time.

    Raises:
        OverlayError: the checkout lacks a file, or a step of the Dockerfile failed.
    """
    missing = [name for name in CONTEXT if not (project.root / name).exists()]
    if missing:
        raise OverlayError(
            f"{project.root} lacks files of the image",
            seen=f"no {', '.join(missing)}",
            wanted="a checkout of the project",
            fix="build from a checkout, not from the image's own copy",
        )
    started = time.monotonic() if started is None else started
    version = base_vllm_version(base)
    if allow_drift:
        _shout(f"DRIFT ALLOWED in {', '.join(allow_drift)}", "what is laid there was never tested over it")
    replaced = base.engine.has_image(tags[0])
    say(f"building {', '.join(tags)} over {base.name} (vLLM {version}) with {base.engine.name}")
    base.engine.build(
        BuildRequest(
            context=project.root,
            tags=tags,
            arguments={
                "BASE_IMAGE": base.reference,
                "BASE_REFERENCE": base.name,
                "BASE_DIGEST": base.digest,
                "VERSION": stamp["version"],
                "VLLM_VERSION": version,
                "OVERLAY_HASH": stamp["overlay_hash"],
                "SERIES_HASH": stamp["series_hash"],
                "ALLOW_DRIFT": " ".join(allow_drift),
                "COMPILE_KERNELS": "yes" if compile_kernels else "no",
            },
        )
    )
    if replaced:
        prune = " ".join(base.engine.prune_command())
        say(f"the image that was {tags[0]} is still here without a name; to remove all such: {prune}")
    return Built(tags, base.engine.labels(tags[0]), base, time.monotonic() - started)


def _pulled(
    engine: Engine, reference: str, pinned: ImagePin, given: str | None, archive_id: str = ""
) -> Base:
    # An archive's image is known by the id that the pull printed last, and named by its file.
    archived = reference.startswith(ARCHIVE)
    local = archive_id if archived else reference
    name = ARCHIVE + Path(reference.removeprefix(ARCHIVE)).name if archived else reference
    stand_in = STAND_IN_LABEL in engine.labels(local)
    digest = engine.repository_digest(local) or ("" if given else pinned.digest)
    return Base(local, name, "" if stand_in else digest, engine, stand_in)


def _stand_in(project: Project, pin: Pin, engine: Engine) -> Base:
    """Assemble the stand-in base; only buildah can, so the rest of the build is buildah's too."""
    _shout(
        "USING THE STAND-IN BASE: Debian, the pinned vLLM package, flydsl, lld.",
        "It has no ROCm and no torch: the image can be checked, it cannot serve.",
    )
    shell = engine.shell
    if any(shell.capture([name, "--version"]).status == 127 for name in STAND_IN_PACKAGES):
        engines.install_packages(shell, STAND_IN_PACKAGES)
    if not isinstance(engine, Buildah):
        engine = engines.select_engine(shell, "buildah")
    fetch_base(project, pin.vllm)
    made = shell.stream([str(project.root / STAND_IN_SCRIPT)])
    reference = (made.output.strip().splitlines() or [""])[-1]
    if made.status != 0:
        raise OverlayError(
            "the stand-in base could not be made",
            seen=reference,
            wanted="root, buildah and debootstrap",
            fix=f"correct what the lines above name, then run {STAND_IN_SCRIPT} again",
        )
    return Base(reference, reference, "", engine, stand_in=True)


def _shout(*lines: str) -> None:
    for line in ("!" * 70, *lines, "!" * 70):
        say(line)


def say(line: str) -> None:
    """A line of progress on stderr; stdout has only the result."""
    print(f"image: {line}", file=sys.stderr, flush=True)
