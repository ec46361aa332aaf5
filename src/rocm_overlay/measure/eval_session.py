# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate over arms: each is served in turn, asked the same, and compared with the first.

Every arm has a folder of its own, with its answers, its server's log and ``arm.json``: how it was served and
asked, and each finished task's findings. An arm that has them all is not served again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import accuracy
from rocm_overlay.measure.accuracy import ANSWERS_NAME, AnswerSet, Call, Difference
from rocm_overlay.measure.bench import read_arms
from rocm_overlay.measure.compare import markdown_table
from rocm_overlay.measure.evaluate import Finding, Gate, compare_markdown, differences, evaluate
from rocm_overlay.measure.resume import command_evidence, goes_on
from rocm_overlay.measure.server import POLL_S, OwnServer, start_own
from rocm_overlay.measure.session import Arm, Half
from rocm_overlay.textio import read_text, write_text_atomically

ARMS_FOLDER, ARM_NAME, LOG_NAME, REPORT_NAME = "arms", "arm.json", "server.log", "compare.md"
# How long the end of a server's process may take to be seen behind the end of its connections.
END_LIMIT_S = 3.0


@dataclass(frozen=True)
class EvalSession:
    """The arms, how each is served, and what each is asked.

    Attributes:
        half: where every arm serves, so that the hardware is no difference between them.
        evidence: what is recorded of every arm, before its own.
    """

    gate: Gate
    arms: tuple[Arm, ...]
    half: Half
    ready_timeout_s: float
    evidence: Mapping[str, Any]

    def env_of(self, arm: Arm) -> dict[str, str]:
        """The variables that are added for an arm's server."""
        return {**self.half.env, **arm.env}

    def evidence_of(self, arm: Arm) -> dict[str, Any]:
        """What is recorded of an arm: its build, its server's command and variables, secrets masked."""
        served = command_evidence(arm.command, self.env_of(arm))
        return {**self.evidence, **arm.evidence, **served, "half": self.half.name}


def make_session(file: Path, gate: Gate, evidence: Mapping[str, Any]) -> EvalSession:
    """A session of a file of arms.

    Raises:
        OverlayError: as ``bench.read_arms``; an arm without a command, one with traces, one whose program is
            missing; or a single arm.
    """
    arms, halves, ready = read_arms(file, in_turn=True)
    session = EvalSession(gate, arms, halves[0], ready, evidence)
    for arm in arms:
        for name, value, way in (
            ("urls", arm.urls, f"give its server's command, or ask it by itself: --url URL --arm {arm.name}"),
            ("traces", arm.traces, "leave it out: launches are counted by bench"),
        ):
            if value:
                shown = ", ".join(arm.urls.values()) if name == "urls" else value
                raise _bad(f"{file}: arms.{arm.name}.{name}", shown, "an arm with a command alone", way)
        program = arm.command[0]
        if shutil.which(program, path=session.env_of(arm).get("PATH")) is None:
            raise _bad(
                f"{file}: arms.{arm.name}.command",
                f"{program}, which is no program here",
                "a command that serves",
                "correct it, or run this where it is installed",
            )
    if len(arms) < 2:
        raise _bad(f"{file}: arms", f"{arms[0].name} alone", "two at least", "add the arm to compare it with")
    return session


def _bad(what: str, seen: object, wanted: str, fix: str) -> OverlayError:
    return OverlayError(f"{what} is not as eval --session has it", seen=seen, wanted=wanted, fix=fix)


@dataclass
class ArmRecord:
    """What is kept of an arm beside its answers.

    Attributes:
        folder: the arm's own.
        evidence: as ``EvalSession.evidence_of``.
        options: how each task is asked.
        findings: of each task that is finished.
    """

    folder: Path
    evidence: dict[str, Any]
    options: dict[str, Any]
    findings: dict[str, list[Finding]] = field(default_factory=dict)

    @property
    def answers(self) -> Path:
        """The file of its answers."""
        return self.folder / ANSWERS_NAME

    def write(self) -> None:
        """Keep it, whole or as it was."""
        self.folder.mkdir(parents=True, exist_ok=True)
        findings = {task: [[f.ok, f.name, f.says] for f in own] for task, own in self.findings.items()}
        kept = {"evidence": self.evidence, "options": self.options, "findings": findings}
        write_text_atomically(self.folder / ARM_NAME, json.dumps(kept, indent=1) + "\n")

    def missing(self, tasks: Sequence[str]) -> list[str]:
        """The tasks that are not finished."""
        return [task for task in tasks if task not in self.findings]


def read_record(folder: Path) -> ArmRecord | None:
    """What an earlier call kept of an arm; None where it kept nothing.

    Raises:
        OverlayError: it is of another form.
    """
    file = folder / ARM_NAME
    if not file.exists():
        # Answers of which nobody says how they were asked are none of this session's.
        return ArmRecord(folder, {}, {}) if (folder / ANSWERS_NAME).exists() else None
    try:
        kept = json.loads(read_text(file, str(file)))
        findings = {task: [Finding(*one) for one in own] for task, own in kept["findings"].items()}
        valid = isinstance(kept["evidence"], dict) and isinstance(kept["options"], dict)
        if not valid or any(f.ok not in (True, False, None) for own in findings.values() for f in own):
            raise ValueError("a field of another form")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OverlayError(
            f"{file} is no record of an arm",
            seen=f"{type(error).__name__}: {error}",
            wanted="evidence, options and findings",
            fix=f"restore it, or remove {folder} to ask the arm anew",
        ) from None
    record = ArmRecord(folder, kept["evidence"], kept["options"], findings)
    if not record.answers.exists():
        record.findings.clear()
    return record


def resumed(session: EvalSession, arm: Arm, folder: Path) -> ArmRecord:
    """The arm's record to go on with.

    Raises:
        OverlayError: the arm was served or asked otherwise.
    """
    evidence, options = session.evidence_of(arm), dict(session.gate.options)
    kept = read_record(folder)
    if kept is None:
        return ArmRecord(folder, evidence, options)
    pairs = {name: (kept.evidence.get(name), value) for name, value in evidence.items()}
    for task, own in options.items():
        before = kept.options.get(task)
        if before is not None:
            pairs |= {f"{task} {name}": (before.get(name), value) for name, value in own.items()}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        seen, wanted = (
            ", ".join(
                f"{name} {'not recorded' if pair[side] is None else pair[side]}"
                for name, pair in differing.items()
            )
            for side in (0, 1)
        )
        raise OverlayError(
            f"{folder} was begun otherwise",
            seen=f"{arm.name}: {seen}",
            wanted=wanted,
            fix="give the options and files that it was begun with, or --out another folder",
        )
    return ArmRecord(folder, evidence, {**kept.options, **options}, kept.findings)


@dataclass(frozen=True)
class Report:
    """What a session found.

    Attributes:
        faults: a line for each finding that is a fault, of all arms.
        lower: a line for each task on which an arm is called lower than the first.
    """

    markdown: str
    faults: tuple[str, ...]
    lower: tuple[str, ...]


class ArmsGate:
    """Runs a session into a folder.

    Args:
        say: takes the lines of progress.

    Raises:
        OverlayError: the folder holds an arm that was served or asked otherwise.
    """

    def __init__(self, session: EvalSession, folder: Path, say: Callable[[str], None]) -> None:
        self.session = session
        self.folder = folder
        self.say = say
        self.records = {
            arm.name: resumed(session, arm, folder / ARMS_FOLDER / arm.name) for arm in session.arms
        }

    def run(self) -> Report:
        """Serve and ask each arm that is not complete, then compare.

        Raises:
            OverlayError: a server that cannot be started or asked. What was answered is kept, and the error
                says how much.
        """
        with goes_on(self._kept, self.say):
            for number, arm in enumerate(self.session.arms, start=1):
                self._arm(arm, f"arm {arm.name} ({number}/{len(self.session.arms)})")
        report = self._report()
        write_text_atomically(self.folder / REPORT_NAME, report.markdown)
        return report

    def _kept(self) -> str:
        records = self.records.values()
        complete = sum(not one.missing(self.session.gate.tasks) for one in records)
        kept = sum(one.answers.read_bytes().count(b"\n") for one in records if one.answers.exists())
        return f"{complete} of {len(records)} arms are complete, {kept} answers are kept in {self.folder}"

    def _arm(self, arm: Arm, name: str) -> None:
        record = self.records[arm.name]
        missing = record.missing(self.session.gate.tasks)
        if not missing:
            self.say(f"{name}: complete in {record.folder}, not served again")
            return
        record.write()
        results = AnswerSet(record.folder)
        limit_s, port, log = self.session.ready_timeout_s, self.session.half.port, record.folder / LOG_NAME
        env = self.session.env_of(arm)
        with start_own(name, port, arm.command, env, log, self.say) as process:
            started = time.monotonic()
            self.say(
                f"{name}: started, log {log}; waits for {process.server.url}/health, at most {limit_s:g} s"
            )
            process.server.wait(limit_s, process, self.say)
            process.require_running()
            self.say(f"{name}: ready after {time.monotonic() - started:.0f} s; asked {', '.join(missing)}")
            try:
                for task, findings in evaluate(self.session.gate, process.server, results, arm.name, missing):
                    record.findings[task] = findings
                    record.write()
            except OverlayError:
                _require_running(process)
                raise

    def _report(self) -> Report:
        tasks = self.session.gate.answer_tasks()
        answers = {
            name: [one for one in accuracy.read_answers(record.answers) if one.task in tasks]
            for name, record in self.records.items()
        }
        first, *others = answers
        compared = {name: differences(answers[first], answers[name]) for name in others}
        findings = {name: self._findings(name) for name in answers}
        return Report(
            _markdown(self.session, findings, first, compared),
            tuple(
                f"{name}: {f.name}: {f.says}" for name, own in findings.items() for f in own if f.ok is False
            ),
            tuple(
                f"{name} against {first}: {one.task} {one.show()}"
                for name, own in compared.items()
                for one in own
                if one.call is Call.LOWER
            ),
        )

    def _findings(self, name: str) -> list[Finding]:
        return [one for task in self.session.gate.tasks for one in self.records[name].findings[task]]


def _require_running(process: OwnServer) -> None:
    """Refuse a server whose process ended: that, and not the request that it cut off, is the fault."""
    deadline = time.monotonic() + END_LIMIT_S
    while not process.server.alive() and time.monotonic() < deadline:
        process.require_running()
        time.sleep(POLL_S)


def _markdown(
    session: EvalSession,
    findings: Mapping[str, Sequence[Finding]],
    first: str,
    compared: Mapping[str, Sequence[Difference]],
) -> str:
    parts = [f"# {session.evidence['recipe']}: accuracy of {', '.join(compared)} against {first}"]
    for name, own in compared.items():
        parts += [f"## {name} against {first}", compare_markdown(own, (first, name))]
    parts += [accuracy.RULE, "## Gate"]
    rows = [[name, one.show(), one.name, one.says] for name, own in findings.items() for one in own]
    if rows:
        parts.append(markdown_table(["arm", "", "finding", "says"], rows))
    parts.append("## Arms")
    rows = []
    for arm in session.arms:
        own_evidence = session.evidence_of(arm)
        shown = [f"`{own_evidence[key]}`" if own_evidence[key] else "" for key in ("command", "env")]
        rows.append([arm.name, *shown, str(own_evidence.get("image_digest") or "not recorded")])
    parts.append(markdown_table(["arm", "command", "variables", "image digest"], rows))
    return "\n\n".join(parts) + "\n"
