# SPDX-License-Identifier: Apache-2.0
"""A session of runs: arms on halves, swapped each round, resumed where it stopped.

In round r, arm i serves on half (i + r - 1) modulo the number of halves. All arms of a round serve at once,
as the node's halves do in production, and are measured in turns: every arm's run k before anyone's run k + 1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.client import Client, Outcome
from rocm_overlay.measure.metrics_page import Page, Window
from rocm_overlay.measure.proof import Proof, prove
from rocm_overlay.measure.records import Record, ResultSet, keep_launches, kept_launches
from rocm_overlay.measure.resume import attempts, begin, evidence_of_arm, goes_on, require_same
from rocm_overlay.measure.server import OwnServer, Server, start_own
from rocm_overlay.measure.trace import read_trace
from rocm_overlay.measure.traced import traced
from rocm_overlay.measure.workload import Pass, Point, Profile, pass_of, promise
from rocm_overlay.recipe import Recipe

# The share of failed requests above which a session stops: the server is then not the one to be measured.
MOST_FAILED = 0.1
# Of each answer in a traced pass: a trace holds every launch, and more steps say no more.
TRACED_TOKENS = 32


@dataclass(frozen=True)
class Half:
    """A part of the node: the port of its server, and the variables that confine it, such as the GPUs."""

    name: str
    port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """A build that is measured.

    Attributes:
        command: starts its server, ``{port}`` standing for the half's port; or
        urls: of servers that somebody else started, by half.
        traces: the folder that its server's profiler writes into; each point's launches are then counted.
    """

    name: str
    command: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    traces: Path | None = None


@dataclass(frozen=True)
class Session:
    """All that a session is made of; ``evidence`` is every arm's, before its own."""

    recipe: Recipe
    profile: Profile
    client: Client
    arms: tuple[Arm, ...]
    halves: tuple[Half, ...]
    evidence: Mapping[str, Any]
    ready_timeout_s: float = 3600.0
    first_round: int = 1

    def rounds(self) -> range:
        """The numbers of its rounds."""
        return range(self.first_round, self.first_round + self.profile.rounds)

    def half_of(self, arm: Arm, number: int) -> Half:
        """Where an arm serves in a round."""
        return self.halves[(self.arms.index(arm) + number - 1) % len(self.halves)]

    def identities(self) -> list[tuple[str, str, int, int]]:
        """Every run, in the order in which they are made."""
        return [
            (arm.name, point.name, number, run)
            for number in self.rounds()
            for point in self.profile.points
            for run in range(1, self.profile.runs + 1)
            for arm in self.arms
        ]


@dataclass
class Progress:
    """Counts runs and tells of them, one line each."""

    say: Callable[[str], None]
    total: int
    done: int
    started: float = field(default_factory=time.monotonic)
    made: int = 0

    def tell(self, record: Record, failed: Sequence[str]) -> None:
        """One finished run."""
        self.done += 1
        self.made += 1
        left = (time.monotonic() - self.started) / self.made * (self.total - self.done)
        itl = record.figures.get("itl_p50_ms")
        figure = "" if itl is None else f", ITL p50 {itl:.3f} ms"
        faults = f"; NOT PROVED: {', '.join(failed)}" if failed else ""
        where = f"round {record.round}, run {record.run}"
        what = f"[{self.done}/{self.total}] {record.arm}, {record.point}, {where}"
        self.say(f"{what}{figure}{faults}; about {left:.0f} s left")


class Bench:
    """Runs a session into a result set.

    Args:
        say: takes the lines of progress.

    Raises:
        OverlayError: the set holds runs of another session under the same names.
    """

    def __init__(self, session: Session, results: ResultSet, say: Callable[[str], None]) -> None:
        self.session = session
        self.results = results
        self.say = say
        require_same(session, results.records, results.file)
        wanted = session.identities()
        kept = results.done() & set(wanted)
        self.progress = Progress(say, len(wanted), len(kept))
        if results.torn:
            say(f"a torn last line was set aside in {results.file}.torn; its run is made again")
        if kept:
            say(f"{len(kept)} of {len(wanted)} runs are in {results.file} already")

    def run(self) -> list[str]:
        """Make every run that the result set lacks.

        Returns:
            A line for each proof that failed, of all the session's runs.

        Raises:
            OverlayError: a server that is not there, dies, or fails too many requests; or a client that
                fails. What was measured is kept, and the error says how much.
        """
        with goes_on(self._kept, self.say):
            for number in self.session.rounds():
                self._round(number)
        wanted = set(self.session.identities())
        return [
            line for record in self.results.records if record.identity in wanted for line in faults(record)
        ]

    def _kept(self) -> str:
        return f"{self.progress.done} of {self.progress.total} runs are kept in {self.results.file}"

    def _missing(self, number: int) -> list[tuple[Point, int, Arm]]:
        done = self.results.done()
        return [
            (point, run, arm)
            for point in self.session.profile.points
            for run in range(1, self.session.profile.runs + 1)
            for arm in self.session.arms
            if (arm.name, point.name, number, run) not in done
        ]

    def _round(self, number: int) -> None:
        missing = self._missing(number)
        needed = {arm.name for _, _, arm in missing}
        needed |= {arm.name for arm in self.session.arms if self._untraced(arm)}
        if not needed:
            return
        with contextlib.ExitStack() as stack:
            arms = [arm for arm in self.session.arms if arm.name in needed]
            own = {arm.name: self._start(arm, number, stack) for arm in arms}
            for arm in arms:
                server, process = own[arm.name]
                server.wait(self.session.ready_timeout_s if process else 0.0, process, self.say)
                self._warm_up(server, process, number)
            for point, run, arm in missing:
                self._measure(arm, *own[arm.name], self._begin(arm, point, number, run))
            for arm in arms:
                self._count_launches(arm, *own[arm.name], number)

    def _start(self, arm: Arm, number: int, stack: contextlib.ExitStack) -> tuple[Server, OwnServer | None]:
        half = self.session.half_of(arm, number)
        name = f"arm {arm.name}" + (f" on half {half.name}" if half.name else "")
        if not arm.command:
            if half.name not in arm.urls:
                raise OverlayError(
                    f"{name} has no address",
                    seen=", ".join(arm.urls) or "none",
                    wanted=f"the address of its server on half {half.name}",
                    fix=f"add it to the arm's urls, or serve one half a call with --round {number}",
                )
            return Server(name, arm.urls[half.name].rstrip("/")), None
        log = self.results.folder / "raw" / f"round-{number}" / f"{arm.name}-server.log"
        process = start_own(name, half.port, arm.command, {**half.env, **arm.env}, log, self.say)
        return process.server, stack.enter_context(process)

    def _raw(self, arm: str, number: int, name: str) -> Path:
        safe = name.replace("/", "-").replace(" ", "-")
        return self.results.folder / "raw" / f"round-{number}" / f"{arm}-{safe}.json"

    def _begin(self, arm: Arm, point: Point, number: int, run: int) -> Pass:
        """The pass that is sent next, marked as begun: an interrupted one has sent prompts already."""
        profile = self.session.profile
        attempt = begin(self._raw(arm.name, number, f"{point.name} run {run}").with_suffix(".begun"))
        if profile.repeats == "same" and run > 1:
            first = self._raw(arm.name, number, f"{point.name} run 1").with_suffix(".begun")
            attempt = attempts(first) or 1
        return pass_of(profile, point, number, run, arm.name, attempt)

    def _warm_up(self, server: Server, process: OwnServer | None, number: int) -> None:
        point = self.session.profile.warmup
        own = Pass(point, number, 1, point.seed, first=True)
        file = self._raw(server.name.replace(" ", "-"), number, "warmup")
        self._client(server, process, own, file)

    def _client(self, server: Server, process: OwnServer | None, own: Pass, file: Path) -> Outcome:
        """One run of the client. Where it fails and the server is gone, that is the error."""
        try:
            outcome = self.session.client.run(server, own, file, self.session.profile.run_timeout_s)
        except OverlayError as error:
            _require_alive(server, process, f"{own.point.name}: {error.what}")
            raise
        if outcome.failed:
            # A run that a server's end cut short is made again; its raw result stays.
            _require_alive(server, process, f"{own.point.name}: {len(outcome.failed)} requests failed")
        return outcome

    def _measure(self, arm: Arm, server: Server, process: OwnServer | None, own: Pass) -> None:
        before, trouble = _scrape(server)
        file = self._raw(arm.name, own.round, f"{own.point.name} run {own.run}")
        outcome = self._client(server, process, own, file)
        window = None
        if before is not None:
            after, trouble = _scrape(server)
            if after is not None:
                window, trouble = _window(before, after)
        record = self._record(arm, own, outcome, window, trouble)
        self.results.append(record)
        failed = [name for name, proof in record.proofs.items() if proof["ok"] is False]
        self.progress.tell(record, failed)
        if len(outcome.failed) > MOST_FAILED * own.point.prompts:
            raise OverlayError(
                f"{server.name} fails requests at {own.point.name}",
                seen=record.proofs["requests"]["says"],
                wanted=f"at most {MOST_FAILED:.0%}",
                fix="look at the server's log; this run is kept, marked as not proved",
            )

    def _untraced(self, arm: Arm) -> list[Point]:
        if arm.traces is None:
            return []
        known = kept_launches(self.results.folder).get(arm.name, {})
        return [point for point in self.session.profile.points if point.name not in known]

    def _count_launches(self, arm: Arm, server: Server, process: OwnServer | None, number: int) -> None:
        """Take a trace at each point that lacks one, in a short pass after the round's runs."""
        for point in self._untraced(arm):
            short = replace(
                point, prompts=point.concurrency, output_tokens=min(point.output_tokens, TRACED_TOKENS)
            )
            own = Pass(short, number, 1, point.seed, first=False)
            file = self._raw(arm.name, number, f"{point.name} traced")
            assert arm.traces is not None
            with traced(server, arm.traces) as found:
                self._client(server, process, own, file)
            launches = read_trace(found.file)
            keep_launches(self.results.folder, arm.name, point.name, launches.by_kernel)
            total = sum(launches.by_kernel.values())
            self.say(
                f"{arm.name}, {point.name}: {total} launches a step, in {launches.steps} steps of a trace"
            )

    def _record(self, arm: Arm, own: Pass, outcome: Outcome, window: Window | None, trouble: str) -> Record:
        session = self.session
        evidence = {**evidence_of_arm(session, arm, own.round), "seed": own.seed}
        promised = promise(session.recipe, own.point.concurrency)
        proofs = prove(own, session.profile, promised, outcome, window, evidence)
        proofs["metrics"] = Proof(window is not None, trouble or "read before and after")
        figures = dict(outcome.figures)
        length = window.acceptance_length() if window else None
        # On passes that repeat prompts the acceptance length moves by itself.
        if length is not None and own.first:
            figures["acceptance_length"] = length
        extra = dict(own.extra)
        if window and own.first:
            extra["acceptance_by_position"] = window.acceptance_by_position()
        return Record(
            arm=arm.name,
            point=own.point.name,
            round=own.round,
            half=session.half_of(arm, own.round).name,
            run=own.run,
            figures=figures,
            seed=own.seed,
            requests=outcome.requests,
            proofs={name: asdict(proof) for name, proof in proofs.items()},
            evidence={**evidence, **extra},
        )


def _require_alive(server: Server, process: OwnServer | None, during: str) -> None:
    """Refuse a server that is gone, by its process where it is ours, else by its health page."""
    if process is not None:
        process.require_running()
    if not server.alive():
        raise OverlayError(
            f"{server.name} died during {during}",
            seen=f"no answer from {server.url}/health",
            wanted="a server that runs",
            fix="read the server's log and start it again",
        )


def _scrape(server: Server) -> tuple[Page | None, str]:
    """Its metrics, or None and what is wrong with them: a figure is not lost for want of them."""
    try:
        return server.metrics(), ""
    except OverlayError as error:
        return None, f"{error.what}: {error.seen}"


def _window(before: Page, after: Page) -> tuple[Window | None, str]:
    try:
        return Window(before, after), ""
    except OverlayError as error:
        return None, f"{error.what}: {error.seen}"


def faults(record: Record) -> list[str]:
    """A line for each proof of a record that failed."""
    return [
        f"{record.arm}, {record.point}, round {record.round}, run {record.run}: {name}: {proof['says']}"
        for name, proof in record.proofs.items()
        if proof["ok"] is False
    ]
