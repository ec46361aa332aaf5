# SPDX-License-Identifier: Apache-2.0
"""Workloads: the points of a profile, and the promises that a recipe makes of their runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.kernel_arches import most_rows
from rocm_overlay.measure.options import MOST_SECONDS
from rocm_overlay.recipe import Recipe, check_plain, parse_yaml
from rocm_overlay.textio import read_text
from rocm_overlay.values import as_count

PROFILES_NAME = "profiles.yaml"
REPEATS = ("fresh", "salted", "same")


@dataclass(frozen=True)
class Point:
    """One workload: random prompts of ``input_tokens``, each answered with ``output_tokens``.

    Attributes:
        name: ``32k/1k c1``.
        seed: of the client's prompts in round 1, run 1.
    """

    name: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    prompts: int
    seed: int


@dataclass(frozen=True)
class Profile:
    """A set of points and how they are run.

    Attributes:
        repeats: ``fresh``, another seed each round and run, so that every pass is a first one; ``salted``,
            one seed and a cache salt a run; ``same``, one seed and a salt a round, whose repeats meet the
            prefix cache: of those the acceptance length is not compared.
        prefix_hit_rate: least and greatest share that proves a run.
        run_timeout_s: what one run of the client may take.
    """

    name: str
    points: tuple[Point, ...]
    rounds: int
    runs: int
    warmup: Point
    repeats: str
    prefix_hit_rate: tuple[float, float]
    run_timeout_s: float


def short(tokens: int) -> str:
    """``1k`` for 1024 and its multiples, the number itself otherwise."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "points": list, "rounds": int, "runs": int, "warmup": dict, "repeats": str,
    "prefix_hit_rate": list, "run_timeout_s": (int, float),
}  # fmt: skip
POINT_FIELDS = ("input_tokens", "output_tokens", "concurrency", "prompts", "seed")


def load_profile(name: str, file: Path | None = None) -> Profile:
    """The profile ``name`` of ``file``, or of those that the tool brings.

    Raises:
        OverlayError: no such profile, or a field that is missing, unknown or of the wrong form.
    """
    if file is None:
        text, where = (
            resources.files("rocm_overlay.measure").joinpath(PROFILES_NAME).read_text(),
            PROFILES_NAME,
        )
    else:
        text, where = read_text(file, str(file)), str(file)
    document = parse_yaml(text, where)
    check_plain(document, where)
    if name not in document:
        raise OverlayError(
            f"{where} has no profile {name}",
            seen=name,
            wanted=f"one of {', '.join(document)}",
            fix="correct --profile",
        )
    fields = document[name]
    for key, kind in FIELDS.items():
        own = fields.get(key) if isinstance(fields, dict) else None
        # YAML's true is an int of Python's.
        if not isinstance(own, kind) or isinstance(own, bool):
            raise _bad(where, name, key, fields.get(key) if isinstance(fields, dict) else fields)
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise _bad(where, name, unknown[0], "a field that profiles do not have")
    if fields["repeats"] not in REPEATS:
        raise _bad(where, name, "repeats", fields["repeats"])
    for key in ("rounds", "runs"):
        if fields[key] < 1:
            raise _bad(where, name, key, fields[key])
    if not 0 < fields["run_timeout_s"] <= MOST_SECONDS:
        raise _bad(
            where, name, "run_timeout_s", fields["run_timeout_s"], "seconds above zero, a week at most"
        )
    points = [_point(where, name, one, index) for index, one in enumerate(fields["points"])]
    if not points:
        raise _bad(where, name, "points", "none")
    if fields["runs"] > MOST_RUNS:
        raise _bad(where, name, "runs", fields["runs"], f"at most {MOST_RUNS}")
    _require_own_seeds(where, name, points)
    return Profile(
        name=name,
        points=tuple(points),
        rounds=fields["rounds"],
        runs=fields["runs"],
        warmup=_point(where, name, fields["warmup"], "warmup"),
        repeats=fields["repeats"],
        prefix_hit_rate=_hit_rate(where, name, fields["prefix_hit_rate"]),
        run_timeout_s=float(fields["run_timeout_s"]),
    )


def _hit_rate(where: str, profile: str, value: list[Any]) -> tuple[float, float]:
    numbers = [float(one) for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(value) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1] <= 1:
        raise _bad(where, profile, "prefix_hit_rate", value, "a least and a greatest share, from 0 to 1")
    return numbers[0], numbers[1]


def _require_own_seeds(where: str, profile: str, points: Sequence[Point]) -> None:
    """Prompts of one length and seed are the same prompts: a second point's would all be prefix hits."""
    own: dict[tuple[int, int], Point] = {}
    for point in points:
        twin = own.setdefault((point.input_tokens, point.seed % SEED_STRIDE), point)
        if twin is not point:
            seen = f"{twin.name} and {point.name} both have {point.seed}"
            raise _bad(where, profile, "points", seen, "another seed for each point of one input length")


def _point(where: str, profile: str, value: object, place: object) -> Point:
    if not isinstance(value, dict) or sorted(value) != sorted(POINT_FIELDS):
        raise _bad(where, profile, f"points.{place}", value, f"a map of {', '.join(POINT_FIELDS)}")
    for key in POINT_FIELDS:
        if type(value[key]) is not int or value[key] < (0 if key == "seed" else 1):
            raise _bad(where, profile, f"points.{place}.{key}", value[key], "a whole number above zero")
    name = f"{short(value['input_tokens'])}/{short(value['output_tokens'])} c{value['concurrency']}"
    return Point(name, **value)


def _bad(where: str, profile: str, key: str, seen: object, wanted: str = "") -> OverlayError:
    kinds = FIELDS.get(key)
    names = [one.__name__ for one in (kinds if isinstance(kinds, tuple) else (kinds,)) if one]
    return OverlayError(
        f"{where}: {profile}.{key} is not as a profile has it",
        seen=repr(seen),
        wanted=wanted or (" or ".join(names) if names else f"one of {', '.join(FIELDS)}"),
        fix="docs/measuring.md documents the fields",
    )


@dataclass(frozen=True)
class Promise:
    """What a recipe says of a run at some concurrency.

    Attributes:
        acceptance: least and greatest acceptance length; None without drafts.
        kernels: the whole decode runs on our kernels; None where the recipe has them and the batch is too
            large for a promise.
    """

    acceptance: tuple[float, float] | None
    kernels: bool | None


# How far a synthetic acceptance length may be from its setting: it is drawn at random each step.
SYNTHETIC_TOLERANCE = 0.05


def promise(recipe: Recipe, concurrency: int) -> Promise:
    """What ``recipe`` promises of ``concurrency`` requests at once."""
    speculative: Any = recipe.args.get("speculative-config")
    drafts = speculative.get("num_speculative_tokens", 0) if isinstance(speculative, dict) else 0
    acceptance = None
    if drafts:
        length = speculative.get("synthetic_acceptance_length")
        acceptance = (1.0, 1.0 + drafts)
        if length is not None:
            acceptance = (length * (1 - SYNTHETIC_TOLERANCE), length * (1 + SYNTHETIC_TOLERANCE))
    kernels: bool | None = recipe.args.get("monokernel") is True
    ranks = as_count(recipe.args, "tensor-parallel-size", 1)
    rows = most_rows(recipe.hardware.architecture, ranks)
    if kernels and concurrency * (1 + drafts) > rows:
        kernels = None
    return Promise(acceptance, kernels)


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of what the recipe's server gets: model, arguments and environment."""
    text = json.dumps([recipe.model, dict(recipe.args), dict(recipe.env)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Pass:
    """One run's place in a session, and the seed that its prompts have in every arm."""

    point: Point
    round: int
    run: int
    seed: int
    first: bool
    extra: Mapping[str, object] = field(default_factory=dict)


# The seeds of runs are this far apart, so that points with seeds of their own never meet another's.
SEED_STRIDE = 1_000_000
MOST_RUNS = 20


# vLLM takes cache salts of at most 128 characters, without "@", "/", "\\" and NUL.
_NOT_IN_SALTS = re.compile(r"[^A-Za-z0-9.-]")


def _salt(parts: Sequence[str]) -> str:
    """Readable, in characters that vLLM takes, and another for other parts."""
    digest = hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:12]
    return _NOT_IN_SALTS.sub("-", "-".join(parts))[-100:] + f"-{digest}"


def pass_of(profile: Profile, point: Point, round_: int, run: int, session: str, attempt: int = 1) -> Pass:
    """The seed and salt of a run. Arms get the same seed, so that their request sequences match.

    Args:
        session: names the arm in the salt.
        attempt: a pass that was begun before has left prompts in its server's prefix cache, where the same
            server still runs: from the second on, a salt keeps it a first pass with the same requests.
    """
    fresh = profile.repeats == "fresh"
    place = MOST_RUNS * (round_ - 1) + run - 1
    seed = point.seed + SEED_STRIDE * place if fresh else point.seed
    first = profile.repeats != "same" or run == 1
    parts = [session, point.name, str(round_)]
    # The repeats of ``same`` have to meet what the round's first run left.
    parts += [] if profile.repeats == "same" else [str(run)]
    parts += [f"attempt-{attempt}"] if attempt > 1 else []
    extra = {} if fresh and attempt == 1 else {"cache_salt": _salt(parts)}
    return Pass(point, round_, run, seed, first, extra)
