# SPDX-License-Identifier: Apache-2.0
"""Result sets: a JSON line for each finished run, appended and never rewritten.

A set is a folder with ``runs.jsonl``, or such a file itself. A line is written whole and synced
before the next run starts, so that a stopped session loses the run it was in and no other. What a
kill left behind of a last line is set aside as ``runs.jsonl.torn`` before the next line is written.
Launches, which come from a trace that is taken beside the runs, stand in ``launches.json`` by arm and point.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.measure.lines import append_line, read_lines, set_torn_line_aside
from rocm_overlay.textio import read_text, write_text_atomically

RUNS_NAME = "runs.jsonl"
LAUNCHES_NAME = "launches.json"
FORMAT = 1


@dataclass(frozen=True)
class Request:
    """One request of a run, in the order of the client's dataset.

    ``input_tokens`` and ``output_tokens`` count; ``itl_ms`` is the mean inter-token latency, None for
    an answer of one token; ``ttft_ms`` is None where no token came.
    """

    input_tokens: int
    output_tokens: int
    ttft_ms: float | None
    itl_ms: float | None
    error: str = ""


@dataclass(frozen=True)
class Record:
    """One run of the client against one server.

    Attributes:
        arm: which of the compared builds.
        point: the workload, such as ``32k/1k c1``.
        round: from 1; the halves are swapped between rounds.
        half: the part of the node that served, such as ``0-3``; empty where there are no halves.
        run: from 1, within a round on the same server.
        figures: by a key of ``quantities``.
        requests: in the client's order, empty where it kept none.
        launches: launches a decode step by kernel name, from a trace; empty where none was taken.
        proofs: the self-proof's lines, by name.
        evidence: image digest, SKU, recipe and its hash, command.
    """

    arm: str
    point: str
    round: int
    half: str
    run: int
    figures: Mapping[str, float]
    seed: int | None = None
    requests: tuple[Request, ...] = ()
    launches: Mapping[str, float] = field(default_factory=dict)
    proofs: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, str, int, int]:
        """What a session runs once: arm, point, round, run."""
        return (self.arm, self.point, self.round, self.run)

    def line(self) -> str:
        """The record as its JSON line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, allow_nan=False)


REQUIRED = {"arm": str, "point": str, "round": int, "half": str, "run": int, "figures": dict}


def from_json(value: object, where: str) -> Record:
    """A record from a parsed line; ``where`` names it in errors.

    Raises:
        OverlayError: another format, a missing or unknown field, or a figure that is no finite number.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        seen = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise _bad(where, f"format {seen}", f"a map with format {FORMAT}")
    fields = {name: inner for name, inner in value.items() if name != "format"}
    for name, kind in REQUIRED.items():
        if not isinstance(fields.get(name), kind) or isinstance(fields.get(name), bool):
            raise _bad(where, f"{name}: {fields.get(name)!r}", f"{name}, of type {kind.__name__}")
    if unknown := sorted(set(fields) - set(Record.__dataclass_fields__)):
        raise _bad(where, ", ".join(unknown), f"only {', '.join(Record.__dataclass_fields__)}")
    for name, figure in fields["figures"].items():
        if not _is_number(figure):
            raise _bad(where, f"figures.{name}: {figure!r}", "a finite number")
    for name in ("round", "run"):
        if fields[name] < 1:
            raise _bad(where, f"{name}: {fields[name]}", f"{name} from 1")
    _check_optional(fields, where)
    requests = tuple(_request(one, where) for one in fields.pop("requests", ()))
    return Record(**fields, requests=requests)


OPTIONAL = {"requests": list, "launches": dict, "proofs": dict, "evidence": dict}
# Far beyond any figure of a run: sums of such numbers are still numbers.
MOST_FIGURE = 1e15


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MOST_FIGURE


def _check_optional(fields: Mapping[str, Any], where: str) -> None:
    for name, kind in OPTIONAL.items():
        if not isinstance(fields.get(name, kind()), kind):
            raise _bad(where, f"{name}: {fields[name]!r:.120}", f"{name}, of type {kind.__name__}")
    if fields.get("seed") is not None and type(fields["seed"]) is not int:
        raise _bad(where, f"seed: {fields['seed']!r}", "a whole number, or none")
    for name, count in fields.get("launches", {}).items():
        if not _is_number(count):
            raise _bad(where, f"launches.{name}: {count!r}", "a finite number")
    for name, proof in fields.get("proofs", {}).items():
        right = isinstance(proof, dict) and proof.get("ok", 0) in (True, False, None)
        if not right or type(proof["ok"]) is int or not isinstance(proof.get("says"), str):
            raise _bad(where, f"proofs.{name}: {proof!r:.120}", "ok: true, false or null, and says: a text")


def _request(value: object, where: str) -> Request:
    kinds = {"input_tokens": int, "output_tokens": int, "error": str}
    times = ("ttft_ms", "itl_ms")
    right = isinstance(value, dict) and {*kinds, *times} - {"error"} <= value.keys() <= {*kinds, *times}
    if isinstance(value, dict) and right:
        right = all(type(value.get(name, "")) is kind for name, kind in kinds.items())
        right = right and all(value[name] is None or _is_number(value[name]) for name in times)
    if not isinstance(value, dict) or not right:
        raise _bad(
            where, f"requests: {value!r:.120}", f"{', '.join(Request.__dataclass_fields__)}, as numbers"
        )
    return Request(**value)


def _bad(where: str, seen: str, wanted: str) -> OverlayError:
    return OverlayError(
        f"{where} is no record of a run", seen=seen, wanted=wanted, fix="leave the line out, or run it again"
    )


def runs_file(place: Path) -> Path:
    """The file of a result set that is named by its folder or by the file itself."""
    return place / RUNS_NAME if place.is_dir() or not place.suffix else place


def read(place: Path) -> list[Record]:
    """Every record of a result set. A torn last line is none.

    Raises:
        OverlayError: no such set, an empty one, or a line that is no record.
    """
    file = runs_file(place)
    found = list(_records(file))
    _require_once(found, file)
    if not found:
        raise OverlayError(
            f"{file} holds no run", wanted="at least one", fix="finish a run of rocm-overlay bench first"
        )
    launches = _launches(file.with_name(LAUNCHES_NAME))
    given: set[tuple[str, str]] = set()
    for index, record in enumerate(found):
        key = (record.arm, record.point)
        if key not in given and (own := launches.get(record.arm, {}).get(record.point)):
            found[index] = replace(record, launches=own)
            given.add(key)
    return found


def _require_once(found: Sequence[Record], file: Path) -> None:
    twice = [one for one, times in Counter(record.identity for record in found).items() if times > 1]
    if twice:
        raise OverlayError(
            f"{file} holds a run twice",
            seen=", ".join(map(str, twice[0])),
            wanted="each arm, point, round and run once",
            fix="leave one of the lines out",
        )


def _launches(file: Path) -> dict[str, dict[str, dict[str, float]]]:
    if not file.exists():
        return {}
    try:
        found: dict[str, dict[str, dict[str, float]]] = json.loads(read_text(file, str(file)))
        counts = [count for points in found.values() for own in points.values() for count in own.values()]
        if not all(map(_is_number, counts)):
            raise ValueError(f"{next(count for count in counts if not _is_number(count))!r}")
        return {arm: {point: dict(own) for point, own in points.items()} for arm, points in found.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise OverlayError(
            f"{file} holds no launches",
            seen=error,
            wanted="numbers by arm, point and kernel",
            fix="take the trace anew",
        ) from None


def kept_launches(place: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Launches a step by arm, point and kernel name; empty where no trace was taken."""
    return _launches(runs_file(place).with_name(LAUNCHES_NAME))


def keep_launches(place: Path, arm: str, point: str, launches: Mapping[str, float]) -> Path:
    """Keep a trace's launches a step beside the runs of its arm and point; earlier ones are replaced.

    Raises:
        OverlayError: the set has no run of that arm and point.
    """
    known = {(record.arm, record.point) for record in read(place)}
    if (arm, point) not in known:
        raise OverlayError(
            f"{place} has no run of {arm} at {point}",
            seen=f"{arm}, {point}",
            wanted=f"one of {'; '.join(', '.join(pair) for pair in sorted(known))}",
            fix="correct --arm and --point",
        )
    file = runs_file(place).with_name(LAUNCHES_NAME)
    kept = _launches(file)
    kept.setdefault(arm, {})[point] = dict(launches)
    write_text_atomically(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return file


def _records(file: Path) -> Iterator[Record]:
    for where, value in read_lines(file):
        yield from_json(value, where)


class ResultSet:
    """A result set that is being written.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / RUNS_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self.torn = set_torn_line_aside(self.file)
        self.records = list(_records(self.file)) if self.file.exists() else []
        _require_once(self.records, self.file)

    def done(self) -> set[tuple[str, str, int, int]]:
        """Identities of the runs that are kept."""
        return {record.identity for record in self.records}

    def append(self, record: Record) -> None:
        """Keep a record, on disk when this returns.

        Raises:
            OverlayError: the run is kept already.
        """
        if record.identity in self.done():
            raise OverlayError(
                f"{self.file} holds this run already",
                seen=record.identity,
                wanted="each arm, point, round and run once",
                fix="give --out another folder",
            )
        append_line(self.file, record.line())
        self.records.append(record)


def arms_of(records: Sequence[Record]) -> list[str]:
    """The arms in order of appearance."""
    return list(dict.fromkeys(record.arm for record in records))
