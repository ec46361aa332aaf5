# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate against one server, and two arms' answers question by question."""

from __future__ import annotations

import http.client
import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocm_overlay import table
from rocm_overlay.errors import OverlayError
from rocm_overlay.measure import accuracy, lm_eval, tasks
from rocm_overlay.measure.accuracy import Answer, AnswerSet, Call, Difference
from rocm_overlay.measure.compare import markdown_table
from rocm_overlay.measure.metrics_page import Window
from rocm_overlay.measure.server import Server
from rocm_overlay.measure.tasks import Question
from rocm_overlay.textio import read_text, write_text_atomically

TWO_PASS, NEEDLES = "two-pass", "needles"
PASSES = ("two-pass-1", "two-pass-2")
# Of the second pass's prompt tokens. vLLM caches whole blocks: a prompt's last block is always computed.
LEAST_SECOND_PASS_HITS = 0.9
LENGTH_TOLERANCE = 0.1
KEPT_TEXT = 400
# Of the acceptance at each position, between a stored run and a later one on other prompts.
STORED_TOLERANCE = 0.05


@dataclass(frozen=True)
class Asker:
    """Asks one server at temperature 0 through /v1/completions."""

    server: Server
    model: str
    timeout_s: float
    parallel: int

    def ask(self, question: Question) -> tuple[str, int]:
        """The answer's text and the prompt's tokens by the server's count.

        Raises:
            OverlayError: no answer, a late one, or one of another form.
        """
        body = {
            "model": self.model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        answer = self._post("/v1/completions", body)
        try:
            text, tokens = answer["choices"][0]["text"], (answer.get("usage") or {}).get("prompt_tokens") or 0
        except (KeyError, IndexError, TypeError, AttributeError):
            text, tokens = None, 0
        if not isinstance(text, str) or type(tokens) is not int:
            raise self._failed("/v1/completions", str(answer)[:120], "a completion with a text and a count")
        return text, tokens

    def count_tokens(self, text: str) -> int:
        """The tokens of a text by the server's tokenizer.

        Raises:
            OverlayError: as ``ask``.
        """
        answer = self._post("/tokenize", {"model": self.model, "prompt": text})
        if not isinstance(answer, dict) or type(answer.get("count")) is not int or answer["count"] < 1:
            raise self._failed("/tokenize", str(answer)[:120], "a count above zero")
        return int(answer["count"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                place, content = answer.geturl(), answer.read()
        except urllib.error.HTTPError as error:
            seen = f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
            raise self._failed(path, seen, "HTTP 200") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(path, f"{type(error).__name__}: {error}", "an answer") from None
        # A request that is sent on elsewhere loses its body there.
        if place != self.server.url + path:
            raise self._failed(path, f"a redirect to {place}", "an answer at this address")
        try:
            return json.loads(content)
        except ValueError:
            raise self._failed(path, content[:120].decode(errors="replace"), "JSON") from None

    def _failed(self, path: str, seen: str, wanted: str) -> OverlayError:
        return OverlayError(
            f"{self.server.name} did not answer {path}",
            seen=seen,
            wanted=wanted,
            fix="look at the server; the answers so far are kept, and the same command goes on from there",
        )

    def run(
        self,
        results: AnswerSet,
        arm: str,
        task: str,
        questions: Sequence[Question],
        score: Callable[[Question, str], float],
    ) -> int:
        """Ask what the set lacks, ``parallel`` at once; each answer is kept when it comes.

        Returns:
            How many were asked.

        Raises:
            OverlayError: the first request that failed, the answers before it are kept; or the set holds
                answers to other questions under these names.
        """
        missing = [one for one in questions if not results.has((arm, task, one.name, 1), one.asked)]
        for question, text, tokens in self._answers(missing):
            points = score(question, text)
            kept = Answer(arm, task, question.name, 1, points, text[-KEPT_TEXT:], tokens, question.asked)
            results.append(kept)
        print(f"{arm}, {task}: {len(missing)} asked, {len(questions) - len(missing)} kept", file=sys.stderr)
        return len(missing)

    def _answers(self, questions: Sequence[Question]) -> Iterator[tuple[Question, str, int]]:
        """Each answer when it comes.

        The threads are daemons: an interrupt ends the process at once, with answers still to come.
        """
        todo: queue.SimpleQueue[Question] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Question, tuple[str, int] | Exception]] = queue.SimpleQueue()
        ended = threading.Event()
        for question in questions:
            todo.put(question)

        def work() -> None:
            while not ended.is_set():
                try:
                    own = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((own, self.ask(own)))
                except Exception as error:  # raised where the answers are taken
                    done.put((own, error))

        for _ in range(min(self.parallel, len(questions))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in questions:
                question, answer = done.get()
                if isinstance(answer, Exception):
                    raise answer
                yield question, *answer
        finally:
            ended.set()


@dataclass(frozen=True)
class Finding:
    """One line of the gate: None is no fault, and no proof either."""

    ok: bool | None
    name: str
    says: str

    def show(self) -> str:
        """``ok``, ``FAULT`` or ``unknown``."""
        return {True: "ok", False: "FAULT", None: "unknown"}[self.ok]


@dataclass(frozen=True)
class Pass:
    """A pass's growth of the metrics; ``whole`` where every question was asked in it."""

    whole: bool
    window: Window


def ask_pass(asker: Asker, results: AnswerSet, arm: str, task: str, questions: Sequence[Question]) -> Pass:
    """Ask what the set lacks of a pass."""
    before = asker.server.metrics()
    asked = asker.run(results, arm, task, questions, tasks.score_arithmetic)
    return Pass(asked == len(questions), Window(before, asker.server.metrics()))


def second_pass(results: AnswerSet, arm: str, passes: Sequence[Pass]) -> list[Finding]:
    """The second pass must be prefix hits, and be answered as well as the first.

    Where the first was resumed, a part of its prompts may have met another server, whose cache is gone.
    """
    found = by_arm(results.answers)[arm]
    first, second = (found[task] for task in PASSES)
    own = accuracy.difference(TWO_PASS, first, second)
    rate = passes[1].window.prefix_hit_rate()
    if not all(one.whole for one in passes):
        hits = Finding(None, "second pass", "resumed, so that its hits are not those of a whole pass")
    elif rate is None:
        hits = Finding(None, "second pass", "the server looks no prefix up")
    else:
        wanted = f"{rate:.1%} prefix hits, wanted {LEAST_SECOND_PASS_HITS:.0%}"
        hits = Finding(rate >= LEAST_SECOND_PASS_HITS, "second pass", wanted)
    return [_text([*first, *second]), hits, _passes(own)]


def _text(answers: Sequence[Answer]) -> Finding:
    empty = sum(1 for answer in answers if not answer.text.strip())
    return Finding(not empty, "text", f"{empty} of {len(answers)} answers are empty")


def _passes(own: Difference) -> Finding:
    says = f"second less first pass {own.show()}: {own.call}"
    if own.call in (Call.LOWER, Call.HIGHER):
        return Finding(False, "passes", says)
    if not own.first.mean:
        return Finding(None, "passes", f"{says}; nothing was right in the first pass to be lost")
    return Finding(True if own.call is Call.INSIDE else None, "passes", says)


def needles(
    asker: Asker, results: AnswerSet, arm: str, lengths: Sequence[int], depths: Sequence[float]
) -> list[Finding]:
    """Needles of each length; a length is found where all its depths are, in prompts as long as meant."""
    sample = " ".join(tasks.FILLER)
    words_a_token = len(sample.split()) / asker.count_tokens(sample)
    findings = []
    for length in lengths:
        questions = [
            tasks.needle(words_a_token, length, depth, seed=length + round(1000 * depth)) for depth in depths
        ]
        task = f"needle-{length}"
        asker.run(results, arm, task, questions, tasks.score_needle)
        answers = by_arm(results.answers)[arm][task]
        right = sum(answer.score for answer in answers)
        off = [a.prompt_tokens for a in answers if abs(a.prompt_tokens / length - 1) > LENGTH_TOLERANCE]
        says = f"{right:.0f} of {len(answers)} found" + (f"; prompts of {off} tokens" if off else "")
        findings.append(Finding(right == len(answers) and not off, task, says))
    return findings


Ranges = Sequence[tuple[float, float]]


def read_acceptance(stored: Path) -> Ranges:
    """The stored range of each draft position.

    Raises:
        OverlayError: no such file, or one that holds no range.
    """
    try:
        value = json.loads(read_text(stored, str(stored)))
        ranges = [(float(low), float(high)) for low, high in value["positions"]]
        if not ranges or not all(0 <= low <= high <= 1 for low, high in ranges):
            raise ValueError(f"{ranges}")
    except (ValueError, KeyError, TypeError) as error:
        raise OverlayError(
            f"{stored} holds no acceptance range",
            seen=f"{type(error).__name__}: {error}",
            wanted='{"positions": [[low, high], ...]}, each from 0 to 1',
            fix="store one with --store-acceptance, from a server that is trusted",
        ) from None
    return ranges


def acceptance(positions: Sequence[float], length: float | None, ranges: Ranges) -> Finding:
    """The acceptance of the first pass against a stored range."""
    if length is None or len(positions) != len(ranges):
        return Finding(False, "acceptance", f"{len(positions)} positions, the range has {len(ranges)}")
    outside = [
        f"position {index} {value:.3f}, wanted {low:.3f} to {high:.3f}"
        for index, (value, (low, high)) in enumerate(zip(positions, ranges, strict=True))
        if not low <= value <= high
    ]
    return Finding(
        not outside, "acceptance", "; ".join(outside) or f"length {length:.3f}, every position inside"
    )


def store_acceptance(positions: Sequence[float], file: Path) -> None:
    """Write a range around a run's acceptance by position."""
    ranges = [
        [round(max(0.0, value - STORED_TOLERANCE), 4), round(min(1.0, value + STORED_TOLERANCE), 4)]
        for value in positions
    ]
    write_text_atomically(file, json.dumps({"positions": ranges}) + "\n")


def by_arm(answers: Iterable[Answer]) -> dict[str, dict[str, list[Answer]]]:
    """Answers by arm and task."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.arm, []).append(answer)
    return {arm: accuracy.by_task(own) for arm, own in found.items()}


@dataclass(frozen=True)
class Gate:
    """What a server is asked and held to, all of it checked before one is.

    Attributes:
        model: the name that the server has for its model.
        tasks: ``two-pass``, ``needles`` or an lm-eval profile, in their order.
        questions: of the two passes.
        needle_tokens: lengths of the needles' prompts.
        limit: the first questions only, of an lm-eval profile.
        least: the least score of the first pass.
        ranges: the stored range that the first pass's acceptance is held to.
        store: where to write such a range.
        options: of each task, what tells it from one that is asked otherwise.
    """

    model: str
    tasks: tuple[str, ...]
    questions: Sequence[Question]
    needle_tokens: Sequence[int]
    parallel: int
    timeout_s: float
    limit: int | None = None
    least: float | None = None
    ranges: Ranges | None = None
    store: Path | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def answer_tasks(self) -> set[str]:
        """The tasks that its answers are kept under."""
        needles = {f"needle-{length}" for length in self.needle_tokens}
        parts = {TWO_PASS: set(PASSES), NEEDLES: needles}
        return {name for task in self.tasks for name in parts.get(task, {task})}


def evaluate(
    gate: Gate, server: Server, results: AnswerSet, arm: str, wanted: Sequence[str]
) -> Iterator[tuple[str, list[Finding]]]:
    """Ask a server the ``wanted`` tasks; each with its findings when it is finished.

    Raises:
        OverlayError: as ``Asker.run``, ``Server.metrics`` and ``lm_eval.run_profile``.
    """
    asker = Asker(server, gate.model, gate.timeout_s, gate.parallel)
    for task in wanted:
        if task == TWO_PASS:
            yield task, _two_pass(gate, asker, results, arm)
        elif task == NEEDLES:
            yield task, needles(asker, results, arm, gate.needle_tokens, tasks.NEEDLE_DEPTHS)
        else:
            _lm_eval(gate, server, results, task, arm)
            yield task, []


def _two_pass(gate: Gate, asker: Asker, results: AnswerSet, arm: str) -> list[Finding]:
    passes = [ask_pass(asker, results, arm, task, gate.questions) for task in PASSES]
    findings = second_pass(results, arm, passes)
    # The first pass alone is measured: the acceptance moves on cached prompts by itself.
    findings += _acceptance(passes[0], gate)
    if gate.least is not None:
        score = accuracy.score(by_arm(results.answers)[arm][PASSES[0]])
        findings.append(Finding(score.mean >= gate.least, "score", f"{score.show()}, wanted {gate.least}"))
    return findings


def _acceptance(first: Pass, gate: Gate) -> list[Finding]:
    """The first pass's acceptance, stored and held to a range where that is asked for."""
    if gate.store is None and gate.ranges is None:
        return []
    if not first.whole:
        return [Finding(None, "acceptance", "resumed: of no whole first pass, neither stored nor judged")]
    positions, length = first.window.acceptance_by_position(), first.window.acceptance_length()
    if length is None:
        return [Finding(False, "acceptance", "no drafts were verified")]
    if gate.store is not None:
        store_acceptance(positions, gate.store)
    return [] if gate.ranges is None else [acceptance(positions, length, gate.ranges)]


def _lm_eval(gate: Gate, server: Server, results: AnswerSet, task: str, arm: str) -> None:
    profile = lm_eval.profiles()[task]
    for sample in range(1, profile.samples + 1):
        kept = sum(1 for one in results.answers if (one.arm, one.task, one.sample) == (arm, task, sample))
        where = f"{arm}, {task}" + (f", sample {sample} of {profile.samples}" if profile.samples > 1 else "")
        if kept >= min(gate.limit or sys.maxsize, profile.questions):
            print(f"{where}: {kept} kept", file=sys.stderr)
            continue
        folder = results.file.parent
        found = lm_eval.run_profile(task, arm, gate.model, server.url, folder, gate.limit, sample)
        for answer in found:
            if not results.has(answer.identity, answer.asked):
                results.append(answer)
        print(f"{where}: {len(found)} answers", file=sys.stderr)


def scores_table(results: AnswerSet, arm: str) -> str:
    """An arm's scores, a line a task."""
    rows = [(task, accuracy.score(own).show()) for task, own in by_arm(results.answers)[arm].items()]
    return table.render(("task", "score ± SE (questions)"), rows)


def differences(first: Sequence[Answer], second: Sequence[Answer]) -> list[Difference]:
    """The second arm's score less the first's, of each task that both have.

    Raises:
        OverlayError: no task in common, or as ``accuracy.difference``.
    """
    sides = [accuracy.by_task(side) for side in (first, second)]
    common = [task for task in sides[0] if task in sides[1]]
    if not common:
        raise OverlayError(
            "the arms have no task in common",
            seen=f"{', '.join(sides[0])} and {', '.join(sides[1])}",
            wanted="one at least",
            fix="run eval with the same --task for both",
        )
    return [accuracy.difference(task, sides[0][task], sides[1][task]) for task in common]


def compare_markdown(found: Sequence[Difference], arms: tuple[str, str]) -> str:
    """Two arms' differences as a Markdown table."""
    rows = [[one.task, one.first.show(), one.second.show(), one.show(), str(one.call)] for one in found]
    return markdown_table(["task", *arms, f"{arms[1]} less {arms[0]}, by question", "called"], rows)
