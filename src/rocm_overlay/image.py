# SPDX-License-Identifier: Apache-2.0
"""Building the image: its base from the pin, or the stand-in where that cannot be had."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rocm_overlay import engine as engines
from rocm_overlay import table
from rocm_overlay.engine import ARCHIVE, Buildah, BuildRequest, Engine, Shell
from rocm_overlay.errors import OverlayError
from rocm_overlay.pin import ImagePin, Pin, write_text_atomically
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
    """A built image: its name, its labels and how long it took."""

    reference: str
    labels: Mapping[str, str]
    base: Base
    seconds: float

    def table(self) -> str:
        """What was built, for the terminal."""
        rows = [
            ("image", self.reference),
            ("engine", self.base.engine.name),
            ("base", f"{self.base.name}{' (STAND-IN: serves nothing)' if self.base.stand_in else ''}"),
            ("base digest", self.base.digest or "none known"),
            *sorted((key, value) for key, value in self.labels.items() if key.startswith(NAME)),
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
        _say(f"base {reference} is here already")
        return _pulled(engine, reference, pinned, given)
    _say(f"pulling {reference} with {engine.name}")
    pull = engine.pull(reference)
    last = (pull.output.strip().splitlines() or [f"exit status {pull.status}"])[-1]
    if pull.status == 0:
        return _pulled(engine, reference, pinned, given, archive_id=last)
    if given or not allow_stand_in:
        raise OverlayError(
            f"the base image {reference} cannot be pulled",
            seen=last,
            wanted="a registry that answers and holds it",
            fix="correct --base, or run it where that registry can be reached" if given else mirror_hint(pin),
        )
    _say(f"the base image {reference} cannot be pulled: {last}")
    _say(mirror_hint(pin))
    return _stand_in(project, engine)


def mirror_hint(pin: Pin) -> str:
    """Where the pinned base can be had when its registry does not give it."""
    if not pin.mirror.location:
        return "no mirror was made: on a machine that still can pull, `make mirror-base TO=...` makes one"
    return f"a copy of {pin.mirror.date} is at {pin.mirror.location}: make image BASE={pin.mirror.location}"


def build_image(
    project: Project,
    pin: Pin,
    stamp: Mapping[str, str],
    base: Base,
    tag: str | None = None,
    started: float | None = None,
) -> Built:
    """Build the image over ``base`` with the project's Dockerfile.

    Args:
        project: the checkout.
        pin: its pin.
        stamp: version, overlay_hash and series_hash, as ``rocm-overlay stamp`` prints them.
        base: what to build over.
        tag: the image's name; by default one that tells a stand-in's from a real one's.
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
    tag = tag or f"{NAME}:{stamp['version']}{'-stand-in' if base.stand_in else ''}"
    started = time.monotonic() if started is None else started
    _say(f"building {tag} over {base.name} with {base.engine.name}")
    base.engine.build(
        BuildRequest(
            context=project.root,
            tag=tag,
            arguments={
                "BASE_IMAGE": base.reference,
                "BASE_REFERENCE": base.name,
                "BASE_DIGEST": base.digest,
                "VERSION": stamp["version"],
                "VLLM_VERSION": pin.vllm.version,
                "OVERLAY_HASH": stamp["overlay_hash"],
                "SERIES_HASH": stamp["series_hash"],
            },
        )
    )
    return Built(tag, base.engine.labels(tag), base, time.monotonic() - started)


def resolve_digest(shell: Shell, reference: str) -> str:
    """The digest that the registry gives for a tag now, without pulling the image.

    Raises:
        OverlayError: no command that can ask is here, or the registry does not answer.
    """
    # skopeo wants a transport; with it, a name without a registry is completed as docker does.
    asks = (
        ["skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{reference}"],
        ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", reference],
    )
    if shell.capture(["skopeo", "--version"]).status == 127:
        engines.install_packages(shell, ["skopeo"])
    seen = []
    for command in asks:
        answer = shell.capture(command)
        if answer.status == 0 and re.fullmatch(r"sha256:[0-9a-f]{64}", answer.output.strip()):
            return answer.output.strip()
        seen.append((answer.errors.strip().splitlines() or [f"exit status {answer.status}"])[-1])
    raise OverlayError(
        f"the digest of {reference} cannot be had",
        seen="; ".join(seen),
        wanted="a registry that answers, and skopeo or docker with buildx",
        fix="run it where the registry can be reached, or write the digest into base.toml",
    )


def pin_digest(project: Project, shell: Shell, architecture: str) -> str:
    """Write the digest of an architecture's pinned tag into base.toml and return it."""
    pinned = image_pin(Pin.load(project.pin_file), architecture)
    digest = resolve_digest(shell, pinned.reference)
    set_pin_values(project.pin_file, f"image.{architecture}", {"digest": digest})
    return digest


def mirror_base(
    project: Project,
    engine: Engine,
    architectures: Sequence[str],
    destination: str,
    now: datetime | None = None,
) -> str:
    """Copy the pinned base by digest to a registry or ``oci-archive:PATH``; record where and when.

    skopeo copies without unpacking, and to a registry without changing the digest; without it the
    engine pulls and pushes.

    Args:
        project: the checkout.
        engine: what copies where there is no skopeo.
        architectures: whose images are wanted; they must be the same one.
        destination: where to.
        now: the moment to record; by default this one.

    Returns:
        What was copied, by digest.

    Raises:
        OverlayError: the digest cannot be had, the architectures have different images, or the copy
            failed; base.toml is then as it was, but for a digest that was filled in.
    """
    shell = engine.shell
    for architecture in architectures:
        if not image_pin(Pin.load(project.pin_file), architecture).digest:
            _say(f"{architecture} has no digest pinned: asking the registry")
            pin_digest(project, shell, architecture)
    pin = Pin.load(project.pin_file)
    sources = sorted({image_pin(pin, architecture).pull_reference for architecture in architectures})
    if len(sources) != 1:
        raise OverlayError(
            "one destination cannot hold the images of two architectures",
            seen=", ".join(sources),
            wanted="one image a call",
            fix="give --arch, and a destination for each",
        )
    source = sources[0]
    _say(f"copying {source} to {destination}")
    for command in _copy_commands(shell, engine, source, destination):
        done = shell.stream(command)
        if done.status != 0:
            raise OverlayError(
                f"{source} could not be copied to {destination}",
                seen=(done.output.strip().splitlines() or [f"exit status {done.status}"])[-1],
                wanted="a registry that takes it, or a folder with room",
                fix=f"correct that, then run it again (failed: {' '.join(command)})",
            )
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    stamp = {"location": destination, "date": moment.strftime("%Y-%m-%d %H:%M UTC")}
    set_pin_values(project.pin_file, "mirror", stamp)
    return source


def _copy_commands(shell: Shell, engine: Engine, source: str, destination: str) -> list[list[str]]:
    if shell.capture(["skopeo", "--version"]).status == 0:
        target = destination if destination.startswith(ARCHIVE) else f"docker://{destination}"
        return [["skopeo", "copy", f"docker://{source}", target]]
    copies = engine.copy_commands(source, destination)
    if not engine.has_image(source) and engine.pull(source).status != 0:
        raise OverlayError(
            f"the base image {source} cannot be pulled",
            wanted="a registry that answers and still holds it",
            fix="run it where the registry can be reached",
        )
    return copies


def set_pin_values(path: Path, section: str, values: Mapping[str, str]) -> None:
    """Replace string values of one section of a pin file; every other line stays as it is.

    Raises:
        OverlayError: the section has no such key.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    missing = dict(values)
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("["):
            inside = line.strip() == f"[{section}]"
        key = line.partition("=")[0].strip()
        if inside and key in missing:
            lines[number] = f'{key} = "{missing.pop(key)}"\n'
    if missing:
        raise OverlayError(
            f"{path.name}: [{section}] has no {', '.join(missing)}",
            wanted=f"a line for each in [{section}]",
            fix=f"add the line to {path.name}",
        )
    write_text_atomically(path, "".join(lines))


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


def _stand_in(project: Project, engine: Engine) -> Base:
    """Assemble the stand-in base; only buildah can, so the rest of the build is buildah's too."""
    _say("!" * 70)
    _say("USING THE STAND-IN BASE: Debian, the pinned vLLM package, flydsl, lld.")
    _say("It has no ROCm and no torch: the image can be checked, it cannot serve.")
    _say("!" * 70)
    shell = engine.shell
    if any(shell.capture([name, "--version"]).status == 127 for name in STAND_IN_PACKAGES):
        engines.install_packages(shell, STAND_IN_PACKAGES)
    if not isinstance(engine, Buildah):
        engine = engines.select_engine(shell, "buildah")
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


def _say(line: str) -> None:
    print(f"image: {line}", file=sys.stderr, flush=True)
