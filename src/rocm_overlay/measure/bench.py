# SPDX-License-Identifier: Apache-2.0
"""``bench``: a recipe's matrix against servers, into a result set. ``bench-trace``: a trace's launches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocm_overlay import table
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.measure import options
from rocm_overlay.measure.client import DEFAULT_CLIENT, Client
from rocm_overlay.measure.records import ResultSet, keep_launches
from rocm_overlay.measure.server import check_url
from rocm_overlay.measure.session import Arm, Bench, Half, Session
from rocm_overlay.measure.trace import read_trace
from rocm_overlay.measure.workload import load_profile, recipe_hash
from rocm_overlay.processes import interruptible
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, check_plain, load, parse_yaml
from rocm_overlay.textio import read_text
from rocm_overlay.transaction import exclusive

DEFAULT_PROFILE = "published"
DEFAULT_OUT = Path("build/bench/results")
SERVED_NAME = "served-model-name"


def evidence_of(recipe: Recipe, image: str | None, digest: str | None, sku: str | None) -> dict[str, Any]:
    """What every record of a session names; a SKU only where the recipe leaves no choice."""
    skus = recipe.hardware.skus
    return {
        "model": recipe.model,
        "recipe": recipe.name,
        "recipe_hash": recipe_hash(recipe),
        "image": image,
        "image_digest": digest,
        "sku": sku or (skus[0] if len(skus) == 1 else None),
    }


SESSION_FIELDS = {"arms", "halves", "ready_timeout_s"}
ARM_FIELDS = {"command", "urls", "env", "image", "image_digest", "traces"}
HALF_FIELDS = {"port", "env"}
MOST_PORT = 65535
# Where arms are served one at a time and the file has no halves: vLLM's own.
WHOLE_NODE = Half("", 8000)


def read_arms(file: Path, in_turn: bool = False) -> tuple[tuple[Arm, ...], tuple[Half, ...], float]:
    """Arms, halves and the limit for a server's start, from a session file.

    Args:
        in_turn: the arms are served one at a time, so that one half is enough and none is the whole node.

    Raises:
        OverlayError: a field that is unknown, missing or of the wrong form.
    """
    where = str(file)
    document = parse_yaml(read_text(file, where), where)
    check_plain(document, where)
    _known(document, SESSION_FIELDS, where, "the session")
    whole = in_turn and "halves" not in document
    halves = (
        (WHOLE_NODE,)
        if whole
        else tuple(
            Half(name, _port(one, where, name), _words(one.get("env", {}), where, f"halves.{name}.env"))
            for name, one in _maps(document, "halves", HALF_FIELDS, where)
        )
    )
    arms = tuple(_arm(name, one, where, halves) for name, one in _maps(document, "arms", ARM_FIELDS, where))
    ports = [half.port for half in halves if half.port]
    if len(set(ports)) < len(ports):
        raise _bad(where, "halves", f"ports {', '.join(map(str, ports))}", "a port of its own for each half")
    if len(arms) > len(halves) and not in_turn:
        raise _bad(where, "halves", f"{len(halves)} for {len(arms)} arms", "a half for each arm")
    ready = document.get("ready_timeout_s", 3600)
    if isinstance(ready, bool) or not isinstance(ready, int | float) or ready <= 0:
        raise _bad(where, "ready_timeout_s", ready, "seconds above zero")
    return arms, halves, float(ready)


def _arm(name: str, one: Mapping[str, Any], where: str, halves: tuple[Half, ...]) -> Arm:
    command, urls = one.get("command", []), one.get("urls", {})
    if bool(command) == bool(urls):
        raise _bad(where, f"arms.{name}", "both" if command else "neither", "either command or urls")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise _bad(where, f"arms.{name}.command", command, "a list of words")
    if command and not all(half.port for half in halves):
        raise _bad(where, "halves", "no port", "a port for each half, which arms with a command serve on")
    for half, url in _words(urls, where, f"arms.{name}.urls").items():
        check_url(url, f"{where}: arms.{name}.urls.{half}")
    return Arm(
        name=name,
        command=tuple(command),
        urls=_words(urls, where, f"arms.{name}.urls"),
        env=_words(one.get("env", {}), where, f"arms.{name}.env"),
        evidence={key: one[key] for key in ("image", "image_digest") if key in one},
        traces=_traces(one, where, name),
    )


def _port(one: Mapping[str, Any], where: str, name: str) -> int:
    port = one.get("port", 0)
    if "port" in one and (type(port) is not int or not 1 <= port <= MOST_PORT):
        raise _bad(where, f"halves.{name}.port", port, f"a whole number from 1 to {MOST_PORT}")
    return int(port)


def _traces(one: Mapping[str, Any], where: str, name: str) -> Path | None:
    if "traces" not in one:
        return None
    if not isinstance(one["traces"], str) or not one["traces"]:
        raise _bad(where, f"arms.{name}.traces", one["traces"], "a folder's path")
    return Path(one["traces"])


def _maps(
    document: Mapping[str, Any], field: str, known: set[str], where: str
) -> list[tuple[str, Mapping[str, Any]]]:
    found = document.get(field)
    if not isinstance(found, dict) or not found:
        raise _bad(where, field, found, "a map with one entry at least")
    for name, one in found.items():
        if not options.NAME.fullmatch(name):
            raise _bad(where, field, name, f"a name of {options.NAME_WANTED}")
        if not isinstance(one, dict):
            raise _bad(where, f"{field}.{name}", one, "a map")
        _known(one, known, where, f"{field}.{name}")
    return list(found.items())


def _words(value: object, where: str, place: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
        raise _bad(where, place, value, "a map of texts; quote numbers")
    return dict(value)


def _known(value: Mapping[str, Any], known: set[str], where: str, place: str) -> None:
    if unknown := sorted(set(value) - known):
        raise _bad(where, place, ", ".join(unknown), f"only {', '.join(sorted(known))}")


def _bad(where: str, place: str, seen: object, wanted: str) -> OverlayError:
    return OverlayError(
        f"{where}: {place} is not as a session has it",
        seen=seen,
        wanted=wanted,
        fix="docs/measuring.md documents the file",
    )


def make_session(arguments: argparse.Namespace) -> Session:
    """The session of a command line.

    Raises:
        OverlayError: anything in it that is not right, before a server is asked.
    """
    recipe = load(arguments.recipes or Project.find().recipes, arguments.recipe)
    profile = load_profile(arguments.profile, arguments.profiles)
    ready, first_round = 3600.0, 1
    if (arguments.session is None) == (arguments.url is None):
        raise OverlayError(
            "bench needs servers",
            seen="both" if arguments.url else "neither --session nor --url",
            wanted="--session FILE for several arms, or --url URL for one server",
            fix="docs/measuring.md has an example of each",
        )
    if arguments.session is not None:
        arms, halves, ready = read_arms(arguments.session)
    else:
        check_url(arguments.url, "--url")
        half = Half(arguments.half)
        arms, halves = (
            (Arm(arguments.arm, urls={half.name: arguments.url}, traces=arguments.traces),),
            (half,),
        )
        first_round = arguments.round
        profile = _one_round(profile) if arguments.half else profile
    served = recipe.args.get(SERVED_NAME, recipe.model)
    client = Client(
        program=arguments.client,
        model=arguments.model or str(served),
        tokenizer=arguments.tokenizer,
        flags=arguments.client_flags,
    )
    evidence = evidence_of(recipe, arguments.image, arguments.image_digest, arguments.sku)
    evidence["client"] = " ".join([*client.program, *client.flags])
    return Session(recipe, profile, client, arms, halves, evidence, ready, first_round)


def _one_round(profile: Any) -> Any:
    """A named half is one round's: the next one is another call, after the halves were swapped."""
    from dataclasses import replace

    return replace(profile, rounds=1)


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that the result set lacks; 1 where a run did not prove itself."""
    session = make_session(arguments)
    if arguments.plan:
        print(plan_table(session))
        return EXIT_OK
    arguments.out.mkdir(parents=True, exist_ok=True)
    with exclusive(arguments.out, "measuring"), interruptible():
        results = ResultSet(arguments.out)
        failed = Bench(session, results, lambda line: print(line, file=sys.stderr, flush=True)).run()
    print(summary(results, session))
    if not failed:
        return EXIT_OK
    print("not proved:", *(f"  {line}" for line in failed), sep="\n", file=sys.stderr)
    return EXIT_FAILED_CHECK


def plan_table(session: Session) -> str:
    """Every run that the session is made of, with the client's command of the first."""
    rows = [
        (number, point.name, arm.name, session.half_of(arm, number).name, session.profile.runs, point.prompts)
        for number in session.rounds()
        for point in session.profile.points
        for arm in session.arms
    ]
    return table.render(("round", "point", "arm", "half", "runs", "requests a run"), rows)


def summary(results: ResultSet, session: Session) -> str:
    """The session's records, a line each."""
    wanted = set(session.identities())
    rows = []
    for record in results.records:
        if record.identity in wanted:
            figures = [
                f"{record.figures[key]:.3f}" if key in record.figures else "-"
                for key in ("itl_p50_ms", "tpot_p50_ms", "ttft_p50_ms", "output_tok_s", "acceptance_length")
            ]
            rows.append((record.arm, record.point, record.round, record.half, record.run, *figures))
    headers = ("arm", "point", "round", "half", "run", "ITL p50", "TPOT p50", "TTFT p50", "tok/s", "AL")
    return table.render(headers, rows)


def run_trace(arguments: argparse.Namespace) -> int:
    """Print a trace's launches, and keep them in a result set where one is given."""
    launches = read_trace(arguments.trace)
    rows = [
        (name, count, f"{launches.gpu_us[name]:.1f}")
        for name, count in sorted(launches.by_kernel.items(), key=lambda item: (-item[1], item[0]))
    ]
    print(table.render(("kernel", "launches a step", "GPU us a step"), rows))
    totals = ", ".join(f"{total} in {steps}" for total, steps in launches.totals.items())
    print(f"{launches.steps} decode steps; launches: {totals}")
    if arguments.out is not None:
        file = keep_launches(arguments.out, arguments.arm, arguments.point, launches.by_kernel)
        print(f"kept in {file}")
    return EXIT_OK


def register(subparsers: Any) -> None:
    """Add the ``bench`` and ``bench-trace`` verbs."""
    parser = subparsers.add_parser("bench", help="drive vllm bench serve over a recipe's matrix, resumable")
    parser.add_argument("recipe", help="whose server this is: its promises are what a run must prove")
    parser.add_argument("--recipes", type=Path, help="a folder of recipes in place of the project's")
    parser.add_argument("--session", type=Path, help="YAML file of arms and halves")
    parser.add_argument("--url", help="one server that runs already")
    parser.add_argument("--arm", type=options.name, default="server", help="the name of that server's build")
    parser.add_argument(
        "--half",
        type=options.name_or_none,
        default="",
        help="the half that it serves on; the call is then one round",
    )
    parser.add_argument("--round", type=options.count, default=1, help="which round that is")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--profiles", type=Path, help="a file of profiles in place of the tool's own")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the result set")
    parser.add_argument(
        "--client",
        type=options.program,
        default=" ".join(DEFAULT_CLIENT),
        help="the words before 'bench serve'",
    )
    parser.add_argument(
        "--client-flags", type=options.shell_words, default="--trust-remote-code", help="further words for it"
    )
    parser.add_argument("--model", help="the name that the server has for the model")
    parser.add_argument("--tokenizer", help="a tokenizer's name or folder (default: the model's)")
    parser.add_argument("--image", help="evidence: the image that serves")
    parser.add_argument("--image-digest", help="evidence: its digest")
    parser.add_argument("--sku", help="evidence: the card, where the recipe names several")
    parser.add_argument("--traces", type=Path, help="the folder of that server's profiler: count launches")
    parser.add_argument("--plan", action="store_true", help="list the runs and stop")
    parser.set_defaults(run=run)

    trace = subparsers.add_parser("bench-trace", help="launches a decode step, from a torch-profiler trace")
    trace.add_argument("trace", type=Path)
    trace.add_argument("--out", type=Path, help="the result set whose run they belong to")
    trace.add_argument("--arm", default="server")
    trace.add_argument("--point", default="32k/1k c1")
    trace.set_defaults(run=run_trace)
