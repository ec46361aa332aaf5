# SPDX-License-Identifier: Apache-2.0
"""``eval``: the accuracy gate, against one server or arms in turn. ``eval-compare``: two arms' answers."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import accuracy, lm_eval, options, tasks
from rocm_overlay.measure.accuracy import Answer, AnswerSet, Call
from rocm_overlay.measure.arms import arms_text
from rocm_overlay.measure.bench import evidence_of
from rocm_overlay.measure.eval_session import ArmsGate, make_session
from rocm_overlay.measure.evaluate import (
    NEEDLES,
    TWO_PASS,
    Gate,
    compare_markdown,
    differences,
    evaluate,
    read_acceptance,
    scores_table,
)
from rocm_overlay.measure.server import Server, check_url
from rocm_overlay.measure.tasks import Question
from rocm_overlay.processes import interruptible
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load
from rocm_overlay.textio import read_text
from rocm_overlay.transaction import exclusive

DEFAULT_ARM = "server"


def run(arguments: argparse.Namespace) -> int:
    """Print a recipe's arms, or ask and judge one server or several arms; 1 where a fault was found."""
    recipe = load(arguments.recipes or Project.find().recipes, arguments.recipe)
    _check_servers(arguments)
    if arguments.arms:
        print(arms_text(recipe), end="")
        return EXIT_OK
    if arguments.url is not None:
        check_url(arguments.url, "--url")
    gate = make_gate(arguments, recipe)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise OverlayError(
            "--out is no folder",
            seen=arguments.out,
            wanted="a folder, which is made if need be",
            fix="correct --out",
        )
    if arguments.session is not None:
        return _run_session(arguments, gate, recipe)
    return _run_server(arguments, gate)


def _check_servers(arguments: argparse.Namespace) -> None:
    """Refuse a call that names no server, or that names them twice.

    Raises:
        OverlayError: as said.
    """
    given = [name for name in ("arms", "url", "session") if getattr(arguments, name)]
    if len(given) != 1:
        raise OverlayError(
            "eval needs a server" if not given else "eval takes one of its ways to a server",
            seen=" and ".join(f"--{name}" for name in given) or "neither --url nor --session",
            wanted="--url URL for one server, --session FILE for arms in turn, or --arms to print them",
            fix="docs/measuring.md has an example of each",
        )
    own = {"--arm": arguments.arm, "--store-acceptance": arguments.store_acceptance}
    if arguments.session is not None and (
        alone := [name for name, value in own.items() if value is not None]
    ):
        raise OverlayError(
            f"{alone[0]} is for one server",
            seen=f"{alone[0]} {own[alone[0]]} and --session",
            wanted="--session alone, whose file names the arms",
            fix="leave it out, or ask one server with --url",
        )


def make_gate(arguments: argparse.Namespace, recipe: Recipe) -> Gate:
    """The gate of a command line: what would fail behind hours of answers is refused here.

    Raises:
        OverlayError: an unknown task, one whose program is missing, problems or a stored range that are none,
            or no folder for one.
    """
    wanted = tuple(dict.fromkeys(arguments.task or [TWO_PASS, NEEDLES]))
    for task in wanted:
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
    ranges = None if arguments.acceptance is None else read_acceptance(arguments.acceptance)
    model = arguments.model or str(recipe.args.get("served-model-name", recipe.model))
    return Gate(
        model=model,
        tasks=wanted,
        questions=_questions(arguments) if TWO_PASS in wanted else (),
        needle_tokens=arguments.needle_tokens,
        parallel=arguments.parallel,
        timeout_s=arguments.timeout,
        limit=arguments.limit,
        least=arguments.least,
        ranges=ranges,
        store=store,
        options={task: {"model": model, **_options(task, arguments, ranges)} for task in wanted},
    )


def _questions(arguments: argparse.Namespace) -> Sequence[Question]:
    made = tasks.MADE_QUESTIONS + arguments.shots
    problems = tasks.read_problems(arguments.data) if arguments.data else tasks.made_problems(made)
    return tasks.arithmetic(problems, arguments.shots, arguments.max_tokens)[: arguments.limit]


def _options(task: str, arguments: argparse.Namespace, ranges: Any) -> dict[str, Any]:
    """What tells a task from one that is asked or judged otherwise, as JSON has it."""
    if task == NEEDLES:
        return {"needle-tokens": list(arguments.needle_tokens)}
    if task != TWO_PASS:
        return {"limit": arguments.limit or "none"}
    data = "made"
    if arguments.data:
        data = hashlib.sha256(read_text(arguments.data, str(arguments.data)).encode()).hexdigest()[:16]
    own = {"shots": arguments.shots, "max-tokens": arguments.max_tokens, "data": data}
    held = "none" if ranges is None else [list(one) for one in ranges]
    least = "none" if arguments.least is None else arguments.least
    return {**own, "limit": arguments.limit or "none", "least": least, "acceptance": held}


def _run_server(arguments: argparse.Namespace, gate: Gate) -> int:
    arm = arguments.arm or DEFAULT_ARM
    server = Server(f"arm {arm}", arguments.url.rstrip("/"))
    server.wait(0.0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with exclusive(arguments.out, "evaluating"), interruptible():
        results = AnswerSet(arguments.out)
        findings = [one for _, own in evaluate(gate, server, results, arm, gate.tasks) for one in own]
    print(scores_table(results, arm))
    for finding in findings:
        print(f"{finding.show()}: {finding.name}: {finding.says}")
    return EXIT_FAILED_CHECK if any(finding.ok is False for finding in findings) else EXIT_OK


def _run_session(arguments: argparse.Namespace, gate: Gate, recipe: Recipe) -> int:
    session = make_session(arguments.session, gate, evidence_of(recipe, None, None, None))
    arguments.out.mkdir(parents=True, exist_ok=True)
    with exclusive(arguments.out, "evaluating"), interruptible():
        report = ArmsGate(session, arguments.out, lambda line: print(line, file=sys.stderr, flush=True)).run()
    print(report.markdown, end="")
    for title, lines in (("called lower", report.lower), ("faults", report.faults)):
        if lines:
            print(f"{title}:", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
    return EXIT_FAILED_CHECK if report.lower or report.faults else EXIT_OK


def run_compare(arguments: argparse.Namespace) -> int:
    """Print two arms' difference; 1 where the second is called lower on some task."""
    (first, one), (second, other) = (_side(word) for word in (arguments.first, arguments.second))
    found = differences(one, other)
    print(f"{compare_markdown(found, (first, second))}\n\n{accuracy.RULE}")
    return EXIT_FAILED_CHECK if any(one.call is Call.LOWER for one in found) else EXIT_OK


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
    parser.add_argument("--url", help="one server that runs already")
    parser.add_argument("--arm", type=options.name, help=f"the name of its answers (default: {DEFAULT_ARM})")
    parser.add_argument(
        "--session", type=Path, help="YAML file of arms, which are served in turn and compared"
    )
    parser.add_argument("--arms", action="store_true", help="print the arms that the gate wants, and stop")
    names = f"{TWO_PASS}, {NEEDLES}, or an lm-eval profile: {', '.join(lm_eval.profiles())}"
    parser.add_argument("--task", action="append", help=f"{names}; repeatable (default: the first two)")
    parser.add_argument("--out", type=Path, default=Path("build/eval"), help="the set")
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
