# SPDX-License-Identifier: Apache-2.0
"""Container engines: docker where its daemon answers, buildah otherwise.

Both do what the image verbs need behind one interface: is an image there, pull, build, labels,
run. Every command goes through a Shell, so that a test sees the commands and answers them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError

# How buildah and skopeo name an image in one file.
ARCHIVE = "oci-archive:"
ENGINES = ("docker", "buildah")
STORAGE_VARIABLE = "STORAGE_DRIVER"
# By the engine asked for: what makes one answer.
HOW_TO_GET = {
    None: "start docker, or as root: apt-get install buildah",
    "docker": "start the docker daemon (systemctl start docker), or leave --engine (ENGINE=) out",
    "buildah": "as root: apt-get install buildah; or leave --engine (ENGINE=) out",
}
TAIL_LINES = 6
DAEMON_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class Completed:
    """A finished command: its exit status, and its output (of a streamed one, the last lines)."""

    status: int
    output: str
    errors: str = ""


class Shell:
    """Runs commands on this machine."""

    def capture(self, command: Sequence[str], timeout: float | None = None) -> Completed:
        """Run quietly and return both outputs; 127 and 124 stand for not found and timed out."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except FileNotFoundError:
            return Completed(127, "", f"{command[0]}: not found")
        except subprocess.TimeoutExpired:
            return Completed(124, "", f"{command[0]}: no answer in {timeout} s")
        return Completed(done.returncode, done.stdout, done.stderr)

    def stream(self, command: Sequence[str]) -> Completed:
        """Run with both outputs shown on stderr as they come; the last lines are returned too."""
        tail: list[str] = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                sys.stderr.write(line)
                tail = [*tail, line.rstrip()][-TAIL_LINES:]
        return Completed(process.returncode, "\n".join(tail))

    def attach(self, command: Sequence[str]) -> int:
        """Run on our own terminal and return the exit status."""
        return subprocess.run(command, check=False).returncode


@dataclass(frozen=True)
class BuildRequest:
    """One image to build: the folder with the Dockerfile, its names, and the build arguments."""

    context: Path
    tags: Sequence[str]
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class RunRequest:
    """One command in an image.

    Attributes:
        image: the image's reference.
        arguments: what follows the entry point, or the whole command without one.
        entrypoint: whether the image's entry point runs, as ``docker run IMAGE`` does.
        environment: variables set for it.
        mounts: ``SOURCE:TARGET[:ro]`` bind mounts.
    """

    image: str
    arguments: Sequence[str]
    entrypoint: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[str] = ()


class Engine(ABC):
    """A container engine."""

    name: str

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    @abstractmethod
    def answers(self) -> bool:
        """Whether the engine can be used on this machine now."""

    @abstractmethod
    def has_image(self, reference: str) -> bool:
        """Whether the image is in the local storage."""

    @abstractmethod
    def pull(self, reference: str) -> Completed:
        """Pull an image, with the engine's own progress; a failure is a status, not an error."""

    @abstractmethod
    def repository_digest(self, reference: str) -> str:
        """The registry digest (``sha256:...``) of a pulled image; '' when it has none."""

    @abstractmethod
    def labels(self, reference: str) -> dict[str, str]:
        """The labels of a local image."""

    @abstractmethod
    def build(self, request: BuildRequest) -> None:
        """Build an image.

        Raises:
            OverlayError: a step failed.
        """

    @abstractmethod
    def run(self, request: RunRequest, *, capture: bool = False) -> Completed:
        """Run a command in an image and throw the container away.

        Args:
            request: the image and the command.
            capture: return the output rather than show it.
        """

    @abstractmethod
    def prune_command(self) -> list[str]:
        """The command with which a user removes images that lost their name to a newer build."""

    @abstractmethod
    def copy_commands(self, reference: str, destination: str) -> list[list[str]]:
        """The commands that copy a pulled image to a registry or an ``oci-archive:PATH``."""

    def _inspect(self, command: Sequence[str]) -> str:
        done = self.shell.capture(command)
        if done.status != 0:
            raise OverlayError(
                f"{self.name} cannot inspect the image {command[-1]}",
                seen=_last_line(done.errors),
                fix="build or pull it first",
            )
        return done.output.strip()

    def _require(self, done: Completed, what: str) -> None:
        if done.status != 0:
            raise OverlayError(
                what,
                seen=f"exit status {done.status}: {_last_line(done.output or done.errors)}",
                fix="correct what the lines above name, then run it again",
            )

    def _finish(self, command: Sequence[str], capture: bool) -> Completed:
        return self.shell.capture(command) if capture else Completed(self.shell.attach(command), "")


class Docker(Engine):
    """The docker command with a daemon behind it."""

    name = "docker"

    def answers(self) -> bool:
        command = ["docker", "version", "--format", "{{.Server.Version}}"]
        return self.shell.capture(command, DAEMON_TIMEOUT_SECONDS).status == 0

    def has_image(self, reference: str) -> bool:
        return self.shell.capture(["docker", "image", "inspect", reference]).status == 0

    def pull(self, reference: str) -> Completed:
        return self.shell.stream(["docker", "pull", reference])

    def repository_digest(self, reference: str) -> str:
        listed = self._format(reference, "{{json .RepoDigests}}")
        return _digest_of(json.loads(listed or "null") or [])

    def labels(self, reference: str) -> dict[str, str]:
        listed = self._format(reference, "{{json .Config.Labels}}")
        return dict(json.loads(listed or "null") or {})

    def build(self, request: BuildRequest) -> None:
        command = ["docker", "build", *_build_options(request), str(request.context)]
        self._require(self.shell.stream(command), f"docker could not build {request.tags[0]}")

    def run(self, request: RunRequest, *, capture: bool = False) -> Completed:
        command = ["docker", "run", "--rm", *_run_options(request, "--env", "--volume")]
        if request.entrypoint:
            command += [request.image, *request.arguments]
        else:
            command += ["--entrypoint", request.arguments[0], request.image, *request.arguments[1:]]
        return self._finish(command, capture)

    def prune_command(self) -> list[str]:
        return ["docker", "image", "prune"]

    def _format(self, reference: str, template: str) -> str:
        return self._inspect(["docker", "image", "inspect", "--format", template, reference])

    def copy_commands(self, reference: str, destination: str) -> list[list[str]]:
        if destination.startswith(ARCHIVE):
            raise OverlayError(
                "docker cannot write an OCI archive",
                seen=destination,
                wanted="a registry reference, or skopeo or buildah on this machine",
                fix="apt-get install skopeo, then run it again",
            )
        return [["docker", "tag", reference, destination], ["docker", "push", destination]]


class Buildah(Engine):
    """buildah, which needs no daemon.

    BUILDAH_ISOLATION and STORAGE_DRIVER are the names that containers tools use; what the user sets
    wins. Without them, isolation is chroot (it needs no OCI runtime), and storage is what buildah
    chooses where that can mount, else vfs (it needs no mounts, at the price of a copy a layer).
    """

    name = "buildah"

    def answers(self) -> bool:
        os.environ.setdefault("BUILDAH_ISOLATION", "chroot")
        if self._run("--version").status != 0:
            return False
        if STORAGE_VARIABLE not in os.environ and not self._can_mount():
            os.environ[STORAGE_VARIABLE] = "vfs"
        return self._run("info").status == 0

    def has_image(self, reference: str) -> bool:
        return self._run("images", "--quiet", reference).status == 0

    def pull(self, reference: str) -> Completed:
        # Given the transport, buildah completes a name without a registry as docker does; without
        # it, it asks the machine's registries.conf, which may name none.
        source = reference if reference.startswith(ARCHIVE) else f"docker://{reference}"
        return self.shell.stream(self._command("pull", source))

    def repository_digest(self, reference: str) -> str:
        return _digest_of([f"@{self._image(reference).get('FromImageDigest', '')}"])

    def labels(self, reference: str) -> dict[str, str]:
        return dict(self._config(reference).get("Labels") or {})

    def build(self, request: BuildRequest) -> None:
        # --layers=false: one new layer, since with the vfs driver each one is a copy of the base.
        options = ["--layers=false", "--pull-never", *_build_options(request)]
        done = self.shell.stream(self._command("bud", *options, str(request.context)))
        self._require(done, f"buildah could not build {request.tags[0]}")

    def run(self, request: RunRequest, *, capture: bool = False) -> Completed:
        with self.container(request.image) as container:
            return self.run_in(container, request, capture=capture)

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of an image, removed at the end; with vfs, making one copies the image."""
        started = self._run("from", "--pull-never", image)
        self._require(started, f"buildah could not start a container of {image}")
        name = started.output.strip()
        try:
            yield name
        finally:
            self._run("rm", name)

    def run_in(self, container: str, request: RunRequest, *, capture: bool = False) -> Completed:
        """Run a command in a container that is there; what it changes stays for the next."""
        command = self._command("run", *_run_options(request, "--env", "--volume"), container, "--")
        if request.entrypoint:
            # `buildah run` leaves the image's entry point out.
            command += self._config(request.image).get("Entrypoint") or []
        return self._finish([*command, *request.arguments], capture)

    def copy_commands(self, reference: str, destination: str) -> list[list[str]]:
        target = destination if destination.startswith(ARCHIVE) else f"docker://{destination}"
        return [self._command("push", reference, target)]

    def prune_command(self) -> list[str]:
        return self._command("rmi", "--prune")

    def _can_mount(self) -> bool:
        made = self._run("from", "scratch")
        if made.status != 0:
            return False
        container = made.output.strip()
        mounted = self._run("mount", container)
        self._run("rm", container)
        return mounted.status == 0

    def _command(self, *arguments: str) -> list[str]:
        # buildah takes the driver as an option only; not every release reads the variable.
        driver = os.environ.get(STORAGE_VARIABLE)
        return ["buildah", *(["--storage-driver", driver] if driver else []), *arguments]

    def _run(self, *arguments: str) -> Completed:
        return self.shell.capture(self._command(*arguments))

    def _config(self, reference: str) -> dict[str, Any]:
        return dict(self._image(reference).get("OCIv1", {}).get("config") or {})

    def _image(self, reference: str) -> dict[str, Any]:
        return dict(json.loads(self._inspect(self._command("inspect", "--type", "image", reference))))


def select_engine(shell: Shell | None = None, wanted: str | None = None) -> Engine:
    """The engine to use: the one asked for, else docker where its daemon answers, else buildah.

    Raises:
        OverlayError: no engine answers, or not the one asked for.
    """
    shell = shell or Shell()
    candidates = [engine for engine in (Docker(shell), Buildah(shell)) if wanted in (None, engine.name)]
    for engine in candidates:
        if engine.answers():
            return engine
    if wanted != "docker" and install_packages(shell, ["buildah"]) and Buildah(shell).answers():
        return Buildah(shell)
    raise OverlayError(
        f"no container engine answers{f': {wanted}' if wanted else ''}",
        seen="neither a docker daemon nor buildah" if wanted is None else f"{wanted} does not answer",
        wanted=f"one of {', '.join(ENGINES)}",
        fix=HOW_TO_GET[wanted],
    )


def install_packages(shell: Shell, packages: Sequence[str]) -> bool:
    """Install Debian packages where we may (root, and an apt): whether they are installed now."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    print(f"installing {' '.join(packages)} with apt-get", file=sys.stderr)
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if shell.stream(command).status == 0:
        return True
    return shell.stream(["apt-get", "update"]).status == 0 and shell.stream(command).status == 0


def _build_options(request: BuildRequest) -> list[str]:
    tags = [part for tag in request.tags for part in ("--tag", tag)]
    return tags + [
        part for key, value in request.arguments.items() for part in ("--build-arg", f"{key}={value}")
    ]


def _run_options(request: RunRequest, variable: str, mount: str) -> list[str]:
    options = [part for key, value in request.environment.items() for part in (variable, f"{key}={value}")]
    return options + [part for one in request.mounts for part in (mount, one)]


def _digest_of(references: Sequence[str]) -> str:
    for reference in references:
        _, _, digest = reference.partition("@")
        if digest.startswith("sha256:"):
            return digest
    return ""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
