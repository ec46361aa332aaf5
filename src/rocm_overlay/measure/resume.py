# SPDX-License-Identifier: Apache-2.0
"""Whether a session may go on in a result set: what is kept there has to be what it would measure itself.

A run is known by arm, point, round and run number. A set that was begun with another recipe, build, client or
workload under the same names would be taken for done, or become a mixture that no table can tell apart.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.masking import mask_value, mask_words
from rocm_overlay.measure.records import Record
from rocm_overlay.measure.workload import Pass, pass_of
from rocm_overlay.textio import write_text_atomically

if TYPE_CHECKING:
    from rocm_overlay.measure.session import Arm, Session

# Of an arm in a round of a set: its build, its server's recipe and command, and how it is measured.
ARM_EVIDENCE = (
    "model", "recipe", "recipe_hash", "image", "image_digest", "sku", "client", "repeats", "command", "env",
)  # fmt: skip


def command_evidence(command: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """A server's command and variables as a shell takes them, secrets masked; ``{port}`` is left as it is."""
    pairs = [f"{name}={mask_value(name, value)}" for name, value in sorted(env.items())]
    return {"command": shlex.join(mask_words(command)), "env": shlex.join(pairs)}


def evidence_of_arm(session: Session, arm: Arm, number: int) -> dict[str, Any]:
    """What each record of an arm in a round names; a server that somebody else started names no command."""
    half = session.half_of(arm, number)
    served = command_evidence(arm.command, {**half.env, **arm.env}) if arm.command else {}
    return {**session.evidence, **arm.evidence, "repeats": session.profile.repeats, **served}


@contextlib.contextmanager
def goes_on(kept: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """Have what ends the work inside say how it is gone on with, and how much of it is ``kept``."""
    try:
        yield
    except OverlayError as error:
        error.fix = f"{error.fix}; then run the same command again: {kept()}"
        raise
    except KeyboardInterrupt:
        say(f"interrupted; run the same command again to go on: {kept()}")
        raise


def attempts(mark: Path) -> int:
    """How often the pass with this mark was begun; a mark that is none counts as one."""
    if not mark.exists():
        return 0
    text = mark.read_text(errors="replace").strip()
    return int(text) if text.isdecimal() and text.isascii() else 1


def begin(mark: Path) -> int:
    """Mark a pass as begun, before its first request: the number of this attempt, from 1."""
    attempt = attempts(mark) + 1
    mark.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(mark, f"{attempt}\n")
    return attempt


def require_same(session: Session, kept: list[Record], where: object) -> None:
    """Refuse a set whose records of the session's arms were made otherwise.

    Raises:
        OverlayError: with the first such record, and each thing that differs.
    """
    arms = {arm.name: arm for arm in session.arms}
    passes = {(arm.name, own.point.name, own.round, own.run): own for arm, own in _passes(session)}
    for record in kept:
        arm = arms.get(record.arm)
        if arm is None:
            continue
        evidence = evidence_of_arm(session, arm, record.round)
        pairs = {name: (record.evidence.get(name), evidence.get(name)) for name in ARM_EVIDENCE}
        if own := passes.get(record.identity):
            pairs |= _workload(record, own, session.half_of(arm, own.round).name)
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if differing:
            raise _begun_otherwise(record, differing, where)


def _passes(session: Session) -> Iterator[tuple[Arm, Pass]]:
    for number in session.rounds():
        for point in session.profile.points:
            for run in range(1, session.profile.runs + 1):
                for arm in session.arms:
                    yield arm, pass_of(session.profile, point, number, run, arm.name)


def _workload(record: Record, own: Pass, half: str) -> dict[str, tuple[object, object]]:
    return {
        "seed": (record.seed, own.seed),
        "half": (record.half, half),
        "requests": (len(record.requests), own.point.prompts),
    }


def _begun_otherwise(
    record: Record, differing: Mapping[str, tuple[object, object]], where: object
) -> OverlayError:
    seen, wanted = (
        ", ".join(f"{name} {_shown(pair[side])}" for name, pair in differing.items()) for side in (0, 1)
    )
    run = f"{record.arm}, {record.point}, round {record.round}, run {record.run}"
    return OverlayError(
        f"{where} was begun otherwise",
        seen=f"{run}: {seen}",
        wanted=wanted,
        fix="give the options and files that it was begun with, or --out another folder",
    )


def _shown(value: object) -> str:
    return "not recorded" if value is None else str(value) or "none"
