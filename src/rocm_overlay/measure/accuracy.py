# SPDX-License-Identifier: Apache-2.0
"""Scores with their standard errors, and differences by question: what may be called one and what may not.

A question's score is the mean over its samples. A task's score is the mean over questions, its standard error
their sample deviation over the root of their number, as lm-eval's. A difference between two arms is taken
question by question, so that what makes a question hard cancels, and its error likewise.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.lines import append_line, read_lines, set_torn_line_aside

ANSWERS_NAME = "answers.jsonl"
# A difference is called one above this many standard errors, the usual 5 percent.
ERRORS_A_DIFFERENCE = 1.96
RULE = (
    "A difference is called one when it is larger than 1.96 of its standard errors, over the questions that "
    "both arms answered. Any smaller one is inside the error, and nothing is said of it."
)


@dataclass(frozen=True)
class Answer:
    """One answer to one question.

    Attributes:
        arm: the build and, where several are run, its graph mode and kernels.
        task: such as ``gsm8k``, ``needle-32768``; a second pass is a task of its own.
        question: its name in the task.
        sample: from 1.
        score: 0 to 1.
        text: what the server wrote, at most its last part.
        prompt_tokens: by the server's count; 0 where it gave none.
        asked: a hash of what was asked; empty where that is not known.
    """

    arm: str
    task: str
    question: str
    sample: int
    score: float
    text: str = ""
    prompt_tokens: int = 0
    asked: str = ""

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """What is asked once."""
        return (self.arm, self.task, self.question, self.sample)


class AnswerSet:
    """The answers of a folder, and the place for more."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / ANSWERS_NAME
        self.torn = set_torn_line_aside(self.file)
        self.answers = read_answers(self.file) if self.file.exists() else []
        self._done = {answer.identity: answer.asked for answer in self.answers}

    def has(self, identity: tuple[str, str, str, int], asked: str | None = None) -> bool:
        """Whether that answer is kept.

        Args:
            asked: the hash of what would be asked; None where any will do.

        Raises:
            OverlayError: an answer to something else is kept under its name.
        """
        kept = self._done.get(identity)
        if kept is not None and asked is not None and kept != asked:
            arm, task, question, _ = identity
            raise OverlayError(
                f"{self.file} was begun otherwise",
                seen=f"{arm}, {task}, question {question} was another one",
                wanted="the same data, shots and limits under one arm's name",
                fix="give the options that it was begun with, another --arm, or --out another folder",
            )
        return kept is not None

    def append(self, answer: Answer) -> None:
        """Keep an answer, on disk when this returns."""
        append_line(self.file, json.dumps(asdict(answer)))
        self.answers.append(answer)
        self._done[answer.identity] = answer.asked


def read_answers(place: Path) -> list[Answer]:
    """The answers of a folder or file.

    Raises:
        OverlayError: no such file, or a line that is no answer.
    """
    file = place / ANSWERS_NAME if place.is_dir() else place
    found = []
    for where, value in read_lines(file):
        try:
            answer = Answer(**value)  # type: ignore[arg-type]
            words = (answer.arm, answer.task, answer.question, answer.text, answer.asked)
            valid = all(isinstance(word, str) for word in words) and 0 <= answer.score <= 1
            valid = valid and type(answer.sample) is int and answer.sample >= 1
        except TypeError:
            valid = False
        if not valid:
            raise OverlayError(
                f"{where} is no answer",
                seen=str(value)[:120],
                wanted=f"{', '.join(Answer.__dataclass_fields__)}, with a score of 0 to 1",
                fix="leave the line out",
            )
        found.append(answer)
    if twice := [one for one, times in Counter(answer.identity for answer in found).items() if times > 1]:
        raise OverlayError(
            f"{file} holds an answer twice",
            seen=", ".join(map(str, twice[0])),
            wanted="each arm, task, question and sample once",
            fix="leave one of the lines out",
        )
    return found


@dataclass(frozen=True)
class Score:
    """A task's score; ``error`` is None of a single question."""

    mean: float
    error: float | None
    questions: int
    samples: int

    def show(self) -> str:
        """``0.9249 ± 0.0073 (1319)``."""
        error = "N/A" if self.error is None else f"{self.error:.4f}"
        each = f" x {self.samples}" if self.samples > 1 else ""
        return f"{self.mean:.4f} ± {error} ({self.questions}{each})"


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of a mean, None of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def by_question(answers: Iterable[Answer]) -> dict[str, float]:
    """Each question's mean over its samples."""
    found: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        found[answer.question].append(answer.score)
    return {question: statistics.fmean(scores) for question, scores in found.items()}


def score(answers: Sequence[Answer]) -> Score:
    """The score of one arm's answers to one task."""
    scores = list(by_question(answers).values())
    return Score(
        statistics.fmean(scores),
        standard_error(scores),
        len(scores),
        max(answer.sample for answer in answers),
    )


class Call(StrEnum):
    """What may be said of a difference."""

    INSIDE = "inside the error"
    HIGHER = "higher"
    LOWER = "lower"
    NOT_CALLED = "not called"


@dataclass(frozen=True)
class Difference:
    """The second arm's score less the first's, question by question."""

    task: str
    first: Score
    second: Score
    mean: float
    error: float | None
    call: Call

    def show(self) -> str:
        """``-0.0020 ± 0.0060``."""
        return f"{self.mean:+.4f} ± {'N/A' if self.error is None else f'{self.error:.4f}'}"


def call_difference(mean: float, error: float | None) -> Call:
    """What ``RULE`` says of a difference and its standard error."""
    if error is None:
        return Call.NOT_CALLED
    if abs(mean) <= ERRORS_A_DIFFERENCE * error:
        return Call.INSIDE
    return Call.HIGHER if mean > 0 else Call.LOWER


def difference(task: str, first: Sequence[Answer], second: Sequence[Answer]) -> Difference:
    """Two arms' answers to one task.

    Raises:
        OverlayError: the arms answered other questions, or with another number of samples.
    """
    sides = [by_question(side) for side in (first, second)]
    if sides[0].keys() != sides[1].keys():
        odd = sorted(sides[0].keys() ^ sides[1].keys())
        raise OverlayError(
            f"{task}: the arms answered other questions",
            seen=f"{len(odd)} in one arm only, such as {odd[0]}",
            wanted="the same questions in both",
            fix="resume the evaluation that stopped early",
        )
    hashes = [{(one.question, one.sample): one.asked for one in side} for side in (first, second)]
    for place, asked in hashes[0].items():
        other = hashes[1].get(place, "")
        if asked and other and asked != other:
            raise OverlayError(
                f"{task}: the arms were asked other things",
                seen=f"question {place[0]} has another prompt or another limit in each",
                wanted="the same data, shots and limits in both",
                fix="run eval with the same options for both arms",
            )
    scores = (score(first), score(second))
    if scores[0].samples != scores[1].samples:
        raise OverlayError(
            f"{task}: the arms have another number of samples",
            seen=f"{scores[0].samples} and {scores[1].samples}",
            wanted="the same in both",
            fix="resume the evaluation that stopped early",
        )
    differences = [sides[1][question] - sides[0][question] for question in sides[0]]
    mean, error = statistics.fmean(differences), standard_error(differences)
    return Difference(task, *scores, mean, error, call_difference(mean, error))


def by_task(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers by task, in order of appearance."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.task, []).append(answer)
    return found


def read_samples(file: Path, arm: str, task: str, filter_name: str) -> list[Answer]:
    """Answers from the samples file of lm-eval (``--log_samples``), those of one filter.

    Raises:
        OverlayError: a file of another form, or one without that filter.
    """
    found = []
    counts: dict[str, int] = defaultdict(int)
    for where, value in read_lines(file):
        try:
            sample: Mapping[str, Any] = value  # type: ignore[assignment]
            if sample["filter"] != filter_name:
                continue
            question, points = str(sample["doc_id"]), float(_points(sample))
        except (KeyError, TypeError, StopIteration, ValueError):
            raise OverlayError(
                f"{where} is no sample of lm-eval",
                seen=str(value)[:120],
                wanted="a map with doc_id, filter and a score",
                fix="give the samples_*.jsonl that --log_samples writes",
            ) from None
        counts[question] += 1
        asked = str(sample.get("prompt_hash") or "")[:16]
        found.append(Answer(arm, task, question, counts[question], points, asked=asked))
    if not found:
        raise OverlayError(
            f"{file} has no sample of filter {filter_name}",
            wanted="a filter of the task",
            fix="correct the profile's filter",
        )
    return found


def _points(sample: Mapping[str, Any]) -> float:
    """``exact_match``, or of a task scored by length the one length that was asked (the others are -1)."""
    if "exact_match" in sample:
        return float(sample["exact_match"])
    return next(float(value) for name, value in sample.items() if name.isdecimal() and float(value) >= 0)
