# SPDX-License-Identifier: Apache-2.0
"""``eval``: the accuracy gate against one server. ``eval-compare``: arms' answers, question by question."""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_overlay import table
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import accuracy, lm_eval, options, tasks
from rocm_overlay.measure.accuracy import Answer, AnswerSet, Call, Difference
from rocm_overlay.measure.arms import arms_text
from rocm_overlay.measure.compare import markdown_table
from rocm_overlay.measure.metrics_page import Window
from rocm_overlay.measure.server import Server, check_url
from rocm_overlay.measure.tasks import Question
from rocm_overlay.processes import interruptible
from rocm_overlay.project import Project
from rocm_overlay.recipe import load
from rocm_overlay.textio import read_text, write_text_atomically
from rocm_overlay.transaction import exclusive

TWO_PASS, NEEDLES = "two-pass", "needles"
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


def two_pass(asker: Asker, results: AnswerSet, arm: str, questions: Sequence[Question]) -> list[Finding]:
    """Ask twice; the second pass must be prefix hits, and be answered as well as the first."""
    windows = []
    for task in ("two-pass-1", "two-pass-2"):
        before = asker.server.metrics()
        asked = asker.run(results, arm, task, questions, tasks.score_arithmetic)
        windows.append((asked, Window(before, asker.server.metrics())))
    found = by_arm(results.answers)[arm]
    first, second = (found[task] for task in ("two-pass-1", "two-pass-2"))
    own = accuracy.difference("two-pass", first, second)
    asked, window = windows[1]
    rate = window.prefix_hit_rate()
    if asked < len(questions):
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


def run(arguments: argparse.Namespace) -> int:
    """Ask, score, and judge one server; 1 where the gate found a fault."""
    recipe = load(arguments.recipes or Project.find().recipes, arguments.recipe)
    if arguments.arms:
        print(arms_text(recipe), end="")
        return EXIT_OK
    if arguments.url is None:
        raise OverlayError("eval needs a server", wanted="--url URL, or --arms", fix="give --url")
    check_url(arguments.url, "--url")
    ranges = _check_before_asking(arguments)
    server = Server(f"arm {arguments.arm}", arguments.url.rstrip("/"))
    server.wait(0.0)
    model = arguments.model or str(recipe.args.get("served-model-name", recipe.model))
    asker = Asker(server, model, arguments.timeout, arguments.parallel)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with exclusive(arguments.out, "evaluating"), interruptible():
        results = AnswerSet(arguments.out)
        findings = _tasks(arguments, asker, results, model, ranges)
    print(scores_table(results, arguments.arm))
    for finding in findings:
        print(
            f"{ {True: 'ok', False: 'FAULT', None: 'unknown'}[finding.ok] }: {finding.name}: {finding.says}"
        )
    return EXIT_FAILED_CHECK if any(finding.ok is False for finding in findings) else EXIT_OK


def _check_before_asking(arguments: argparse.Namespace) -> Ranges | None:
    """Refuse what would fail behind hours of answers; the stored range, where one is asked for.

    Raises:
        OverlayError: an unknown task, one whose program is missing, no stored range, or no folder for one.
    """
    for task in arguments.task or []:
        if task not in (TWO_PASS, NEEDLES):
            lm_eval.require(task)
    store: Path | None = arguments.store_acceptance
    if store is not None and not store.absolute().parent.is_dir():
        raise OverlayError(
            "--store-acceptance has no folder",
            seen=store,
            wanted="a file in a folder that is there",
            fix=f"make {store.parent}",
        )
    return None if arguments.acceptance is None else read_acceptance(arguments.acceptance)


def _tasks(
    arguments: argparse.Namespace, asker: Asker, results: AnswerSet, model: str, ranges: Ranges | None
) -> list[Finding]:
    findings: list[Finding] = []
    for task in arguments.task or [TWO_PASS, NEEDLES]:
        if task == TWO_PASS:
            findings += _two_pass(arguments, asker, results, ranges)
        elif task == NEEDLES:
            findings += needles(asker, results, arguments.arm, arguments.needle_tokens, tasks.NEEDLE_DEPTHS)
        else:
            _lm_eval(arguments, results, task, model)
    return findings


def _two_pass(
    arguments: argparse.Namespace, asker: Asker, results: AnswerSet, ranges: Ranges | None
) -> list[Finding]:
    made = tasks.MADE_QUESTIONS + arguments.shots
    problems = tasks.read_problems(arguments.data) if arguments.data else tasks.made_problems(made)
    questions = tasks.arithmetic(problems, arguments.shots, arguments.max_tokens)[: arguments.limit]
    # The first pass alone is measured: the acceptance moves on cached prompts by itself.
    fresh = not any(results.has((arguments.arm, "two-pass-1", one.name, 1)) for one in questions)
    before = asker.server.metrics()
    asker.run(results, arguments.arm, "two-pass-1", questions, tasks.score_arithmetic)
    first = Window(before, asker.server.metrics())
    findings = two_pass(asker, results, arguments.arm, questions)
    findings += _acceptance(first, arguments.store_acceptance, ranges, fresh)
    if arguments.least is not None:
        score = accuracy.score(by_arm(results.answers)[arguments.arm]["two-pass-1"])
        findings.append(
            Finding(score.mean >= arguments.least, "score", f"{score.show()}, wanted {arguments.least}")
        )
    return findings


def _acceptance(first: Window, store: Path | None, ranges: Ranges | None, fresh: bool) -> list[Finding]:
    """The first pass's acceptance, stored and held to a range where that is asked for."""
    if store is None and ranges is None:
        return []
    if not fresh:
        return [Finding(None, "acceptance", "resumed: of no whole first pass, neither stored nor judged")]
    positions, length = first.acceptance_by_position(), first.acceptance_length()
    if length is None:
        return [Finding(False, "acceptance", "no drafts were verified")]
    if store is not None:
        store_acceptance(positions, store)
    return [] if ranges is None else [acceptance(positions, length, ranges)]


def _lm_eval(arguments: argparse.Namespace, results: AnswerSet, task: str, model: str) -> None:
    kept = sum(1 for one in results.answers if (one.arm, one.task) == (arguments.arm, task))
    if kept >= min(arguments.limit or sys.maxsize, lm_eval.profiles()[task].questions):
        print(f"{arguments.arm}, {task}: {kept} kept", file=sys.stderr)
        return
    found = lm_eval.run_profile(task, arguments.arm, model, arguments.url, arguments.out, arguments.limit)
    for answer in found:
        if not results.has(answer.identity, answer.asked):
            results.append(answer)


def scores_table(results: AnswerSet, arm: str) -> str:
    """An arm's scores, a line a task."""
    rows = [(task, accuracy.score(own).show()) for task, own in by_arm(results.answers)[arm].items()]
    return table.render(("task", "score ± SE (questions)"), rows)


def compare_markdown(first: Sequence[Answer], second: Sequence[Answer], arms: tuple[str, str]) -> str:
    """Two arms' tasks as Markdown.

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
    rows = []
    for task in common:
        own = accuracy.difference(task, sides[0][task], sides[1][task])
        rows.append([task, own.first.show(), own.second.show(), own.show(), str(own.call)])
    text = markdown_table(["task", *arms, f"{arms[1]} less {arms[0]}, by question", "called"], rows)
    return f"{text}\n\n{accuracy.RULE}\n"


def run_compare(arguments: argparse.Namespace) -> int:
    """Print two arms' difference; 1 where the second is called lower on some task."""
    sides = [_side(word) for word in (arguments.first, arguments.second)]
    text = compare_markdown(sides[0][1], sides[1][1], (sides[0][0], sides[1][0]))
    print(text, end="")
    return EXIT_FAILED_CHECK if f"| {Call.LOWER} |" in text else EXIT_OK


def _side(word: str) -> tuple[str, list[Answer]]:
    place, _, arm = word.rpartition(":")
    if not place or Path(word).exists():
        place, arm = word, ""
    answers = accuracy.read_answers(Path(place))
    arms = list(dict.fromkeys(answer.arm for answer in answers))
    if (arm and arm not in arms) or (not arm and len(arms) != 1):
        raise OverlayError(
            f"{place} has no arm {arm}" if arm else f"{place} has several arms",
            seen=arm or ", ".join(arms),
            wanted=f"SET:ARM with one of {', '.join(arms)}",
            fix="name the arm",
        )
    chosen = arm or arms[0]
    return chosen, [answer for answer in answers if answer.arm == chosen]


def register(subparsers: Any) -> None:
    """Add the ``eval`` and ``eval-compare`` verbs."""
    parser = subparsers.add_parser("eval", help="the accuracy gate: two passes, needles, acceptance, lm-eval")
    parser.add_argument("recipe")
    parser.add_argument("--recipes", type=Path, help="a folder of recipes in place of the project's")
    parser.add_argument("--url")
    parser.add_argument("--arm", type=options.name, default="server")
    parser.add_argument("--arms", action="store_true", help="print the arms that the gate wants, and stop")
    names = f"{TWO_PASS}, {NEEDLES}, or an lm-eval profile: {', '.join(lm_eval.profiles())}"
    parser.add_argument("--task", action="append", help=f"{names}; repeatable (default: the first two)")
    parser.add_argument("--out", type=Path, default=Path("build/eval"))
    parser.add_argument("--model", help="the name that the server has for the model")
    parser.add_argument("--data", type=Path, help="problems in the form of GSM8K's test.jsonl")
    parser.add_argument("--shots", type=options.count, default=8)
    parser.add_argument("--max-tokens", type=options.count, default=512)
    parser.add_argument("--limit", type=options.count, help="the first questions only")
    parser.add_argument("--least", type=options.share, help="the least score of the first pass")
    parser.add_argument("--needle-tokens", type=options.count, nargs="+", default=list(tasks.NEEDLE_TOKENS))
    parser.add_argument("--acceptance", type=Path, help="the stored range that the first pass must be in")
    parser.add_argument("--store-acceptance", type=Path, help="write such a range from this run")
    parser.add_argument("--parallel", type=options.count, default=4, help="requests at once")
    parser.add_argument("--timeout", type=options.seconds, default=3600.0, help="seconds for one answer")
    parser.set_defaults(run=run)
    compare = subparsers.add_parser("eval-compare", help="two arms' answers, question by question")
    compare.add_argument("first", help="SET or SET:ARM")
    compare.add_argument("second", help="SET or SET:ARM")
    compare.set_defaults(run=run_compare)
