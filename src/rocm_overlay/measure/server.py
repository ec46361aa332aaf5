# SPDX-License-Identifier: Apache-2.0
"""A server under measurement: its pages over HTTP, and one that a session starts and stops by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.metrics_page import Page
from rocm_overlay.processes import GroupGuard
from rocm_overlay.textio import log_end

# What a page that costs the server nothing may take.
PAGE_TIMEOUT_S = 20.0
POLL_S = 0.2
STOP_TIMEOUT_S = 60
# Between two lines of progress while a server starts.
TELL_S = 30.0


def check_url(url: str, where: str) -> None:
    """Refuse an address that no server can be asked at; ``where`` is what errors call it.

    Raises:
        OverlayError: no http:// or https:// address with a host and, where it has one, a port.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or any(letter.isspace() for letter in url):
        raise OverlayError(
            f"{where} is no address of a server",
            seen=url,
            wanted="http://HOST:PORT or https://HOST:PORT",
            fix=f"correct {where}",
        )


@dataclass(frozen=True)
class Server:
    """A server at ``url``, without a slash at its end; ``name`` is what errors call it."""

    name: str
    url: str

    def get(self, path: str, timeout_s: float = PAGE_TIMEOUT_S, method: str = "GET") -> str:
        """The body of a page.

        Raises:
            OverlayError: it refuses, answers too late or with an error, or is no HTTP server.
        """
        request = urllib.request.Request(self.url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return str(answer.read().decode("utf-8", errors="replace"))
        except urllib.error.HTTPError as error:
            raise self._failed(path, f"HTTP {error.code}", "HTTP 200") from None
        except TimeoutError:
            raise self._failed(path, f"no answer in {timeout_s:g} s", "an answer") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                reason = f"no answer in {timeout_s:g} s"
            raise self._failed(path, str(reason), "an answer") from None
        except Exception as error:  # http.client's errors share no base with the ones above
            raise self._failed(path, f"{type(error).__name__}: {error}", "an HTTP answer") from None

    def _failed(self, path: str, seen: str, wanted: str) -> OverlayError:
        return OverlayError(
            f"{self.name} does not serve {self.url}{path}",
            seen=seen,
            wanted=wanted,
            fix="start the server, or correct its address",
        )

    def metrics(self) -> Page:
        """Its metrics.

        Raises:
            OverlayError: as ``get`` and ``Page.parse``.
        """
        return Page.parse(self.get("/metrics"), f"{self.url}/metrics")

    def alive(self) -> bool:
        """Whether its health page answers."""
        try:
            self.get("/health")
        except OverlayError:
            return False
        return True

    def listens(self) -> bool:
        """Whether anything takes connections at its address, a server of another kind included."""
        parts = urllib.parse.urlsplit(self.url)
        try:
            socket.create_connection((parts.hostname, parts.port), timeout=PAGE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def wait_gone(self, limit_s: float) -> bool:
        """Wait until nothing listens; whether that was in ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while self.listens():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def wait(
        self,
        limit_s: float,
        still_runs: OwnServer | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Wait until its health page answers.

        Args:
            say: takes the lines of progress.

        Raises:
            OverlayError: not in ``limit_s``, or the process ended.
        """
        started = told = time.monotonic()
        while not self.alive():
            if still_runs is not None:
                still_runs.require_running()
            passed = time.monotonic() - started
            if passed + started - told >= TELL_S:
                told = passed + started
                say(f"{self.name}: no answer from {self.url}/health after {passed:.0f} s of {limit_s:g} s")
            if passed > limit_s:
                raise OverlayError(
                    f"{self.name} is not ready",
                    seen=f"no answer from {self.url}/health in {limit_s:g} s",
                    wanted="HTTP 200",
                    fix="read the server's log, or give ready_timeout_s a larger value"
                    if still_runs is not None
                    else "start it, or correct its address",
                )
            time.sleep(POLL_S)


class OwnServer:
    """A server process of the session, in a process group of its own; ended when the block is left, or this
    process is killed.

    Args:
        server: where it will answer.
        command: its words.
        env: added to the session's own.
        log: the file for what it prints.
    """

    def __init__(self, server: Server, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.server = server
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise OverlayError(
                    f"{server.name} cannot be started",
                    seen=f"{command[0]}: {error.strerror}",
                    wanted="a command that serves",
                    fix="correct the arm's command",
                ) from None
        self.guard = GroupGuard(self.process.pid, STOP_TIMEOUT_S)

    def require_running(self) -> None:
        """Refuse a process that ended.

        Raises:
            OverlayError: it did; with the end of its log.
        """
        status = self.process.poll()
        if status is None:
            return
        raise OverlayError(
            f"{self.server.name} ended",
            seen=f"exit status {status}; {log_end(self.log)}",
            wanted="a server that runs",
            fix=f"read {self.log}",
        )

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_group(self.process, STOP_TIMEOUT_S)
        self.guard.stop()


def start_own(
    name: str,
    port: int,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    say: Callable[[str], None],
) -> OwnServer:
    """Start a server at a port of this machine that nothing else listens on.

    Args:
        name: what errors call it.
        command: its words, ``{port}`` standing for the port.
        env: added to the session's own.
        log: the file for what it prints.
        say: takes the lines of progress.

    Raises:
        OverlayError: the port stays taken, or the command cannot be started.
    """
    server = Server(name, f"http://127.0.0.1:{port}")
    # What a killed session left is ending by itself.
    if server.listens():
        say(f"something answers at {server.url}; waiting {STOP_TIMEOUT_S} s for its end")
    if not server.wait_gone(STOP_TIMEOUT_S):
        raise OverlayError(
            f"{name} cannot be started",
            seen=f"something answers at {server.url}",
            wanted="a free port",
            fix="stop it, or give the half another port",
        )
    return OwnServer(server, [word.replace("{port}", str(port)) for word in command], env, log)


def end_group(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """End a process that leads a group, and all of the group: asked first, killed after ``limit_s``."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
