# SPDX-License-Identifier: Apache-2.0
"""The questions of the gate that ships with the image: a two-pass arithmetic task and needles.

Two-pass: GSM8K-style questions behind a shared few-shot prefix, asked twice in the same order. The second
pass is all prefix hits, so that a fault of cached prefixes shows as a difference between passes. Questions
come from a file in GSM8K's own form (a JSON line each with ``question`` and ``answer``, whose last line is
``#### N``); without one, from a small set that is made here.

Needles: a sentence with a number somewhere in a text of a wanted length, asked for at its end.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.lines import read_lines

ANSWER_MARK = "####"
MADE_QUESTIONS = 20
NEEDLE_TOKENS = (2048, 6144, 10240, 32768, 87040, 131072)
NEEDLE_DEPTHS = (0.1, 0.35, 0.6, 0.85)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """One question: its prompt, the answer that scores, and the most tokens for it."""

    name: str
    prompt: str
    answer: str
    max_tokens: int

    @property
    def asked(self) -> str:
        """What tells it from another question of its name: a hash of the prompt and the answer's limit."""
        return hashlib.sha256(json.dumps([self.prompt, self.max_tokens]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Problem:
    """A GSM8K-style problem: a question and its worked answer, which ends with ``#### N``."""

    question: str
    answer: str

    @property
    def number(self) -> str:
        """What follows the mark."""
        return self.answer.rpartition(ANSWER_MARK)[2].strip().replace(",", "")


def read_problems(file: Path) -> list[Problem]:
    """The problems of a file in GSM8K's form.

    Raises:
        OverlayError: no such file, or a line that is no problem.
    """
    found = []
    for where, value in read_lines(file):
        text = value if isinstance(value, Mapping) else {}
        problem = Problem(str(text.get("question", "")), str(text.get("answer", "")))
        if not problem.question or ANSWER_MARK not in problem.answer or not NUMBER.fullmatch(problem.number):
            raise OverlayError(
                f"{where} is no problem",
                seen=str(value)[:120],
                wanted=f"question, and an answer that ends with {ANSWER_MARK} and a number",
                fix="give a file in the form of GSM8K's test.jsonl",
            )
        found.append(problem)
    return found


def made_problems(count: int, seed: int = 0) -> list[Problem]:
    """Small sums in words."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        boxes, each, eaten = source.randint(2, 9), source.randint(2, 9), source.randint(1, 3)
        left = boxes * each - eaten
        question = (
            f"A shelf holds {boxes} boxes with {each} pears each. {eaten} pears are eaten. How many are left?"
        )
        answer = f"{boxes} boxes of {each} are {boxes * each} pears. {boxes * each} - {eaten} = {left}."
        found.append(Problem(question, f"{answer}\n{ANSWER_MARK} {left}"))
    return found


def arithmetic(problems: Sequence[Problem], shots: int, max_tokens: int = 512) -> list[Question]:
    """Questions behind a prefix of the first ``shots`` problems, which are not asked.

    Raises:
        OverlayError: fewer than two problems are left to ask.
    """
    if len(problems) < shots + 2:
        raise OverlayError(
            "too few problems",
            seen=f"{len(problems)} with {shots} shots",
            wanted=f"at least {shots + 2}",
            fix="give a larger file, or fewer --shots",
        )
    prefix = "".join(f"Question: {one.question}\nAnswer: {one.answer}\n\n" for one in problems[:shots])
    return [
        Question(str(index), f"{prefix}Question: {one.question}\nAnswer:", one.number, max_tokens)
        for index, one in enumerate(problems[shots:])
    ]


def score_arithmetic(question: Question, text: str) -> float:
    """1 where the number behind the mark, or the last number where there is no mark, is the answer."""
    own = text.partition("\nQuestion:")[0]
    marked = own.partition(ANSWER_MARK)[2]
    numbers = NUMBER.findall(marked) or NUMBER.findall(own)
    if not numbers:
        return 0.0
    chosen = numbers[0] if marked and NUMBER.search(marked) else numbers[-1]
    return float(float(chosen.replace(",", "")) == float(question.answer))


FILLER = (
    "The river bends twice before the mill.",
    "A cart stands under the oak in the yard.",
    "Each morning the baker counts his loaves.",
    "Snow lay on the roof until the end of March.",
    "Two boats wait for the tide at the pier.",
)


def needle(words_a_token: float, tokens: int, depth: float, seed: int) -> Question:
    """One needle.

    Args:
        words_a_token: of the server's tokenizer on ``FILLER``.
        tokens: the prompt's wanted length.
        depth: where the needle stands, from 0 (front) to 1 (end).
        seed: of the number and of the filler, so that no two needles share a prefix.
    """
    source = random.Random(seed)
    code = str(source.randrange(10**6, 10**7))
    hidden = f"The code of the cellar is {code}."
    asked = "\nQuestion: What is the code of the cellar?\nAnswer: The code of the cellar is"
    wanted = int(tokens * words_a_token) - len(f"{hidden} {asked}".split())
    lines = [f"These are the notes of day {source.randrange(10**6)}."]
    length = len(lines[0].split())
    while length < wanted:
        lines.append(source.choice(FILLER))
        length += len(lines[-1].split())
    lines.insert(max(1, int(depth * len(lines))), hidden)
    prompt = " ".join(lines) + asked

    return Question(f"{tokens}-{depth}", prompt, code, 32)


def score_needle(question: Question, text: str) -> float:
    """1 where the code is in the answer."""
    return float(question.answer in text)
