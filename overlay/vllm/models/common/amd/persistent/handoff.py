# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between workgroups: tagged words in mailboxes, and waits that end.

A mailbox is a region of 8-byte words ``{payload: 32 bits, aux: 8 bits, tag: 24 bits}``. The producer stores a
word in one 8-byte access past the caches that its readers do not share (``DEVICE`` scope inside a rank,
``SYSTEM`` scope to a peer); the reader polls the word itself past its own caches. Payload and tag travel in
one single-copy atomic access, so no drain, flag or fence is needed and a word is either this launch's or not.
The document memory_model.md has the argument and its source.

Every wait is bounded. A wait that has polled ``limit`` times looks once more, and if a word is still missing
it stores an error record in the control block of every rank and goes on; every other wait of the launch,
here and on the peers, sees the record and goes on too. So the launch ends, its results are void, and the host
finds the record before it returns a token (``fail_stop``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from . import device as dev
from .epoch import LAST_TAG
from .regions import Region

WORD_BYTES = 8

# The control block, at the start of a rank's symmetric memory. The tag of the coming launch is never 0.
CONTROL_TAG, CONTROL_LIMIT, CONTROL_ERROR, CONTROL_BYTES = 0, 4, 8, 16

# An error record: stage in bits 24..31, workgroup in 12..23, what was awaited in 0..11 (the stage says what
# that is: a rank, a workgroup), and the launch's tag in its second word. A record is never 0, since stage
# numbers begin at 1.
STAGE_SHIFT, WORKGROUP_SHIFT, AWAITED_MASK = 24, 12, 0xFFF


@dataclass(frozen=True)
class ErrorRecord:
    """What a wait that ended without its word stored."""

    stage: int
    workgroup: int
    awaited: int
    tag: int

    @classmethod
    def decode(cls, code: int, tag: int) -> ErrorRecord | None:
        """The record of two 32-bit words of a control block, None if nothing failed."""
        if code & 0xFFFFFFFF == 0:
            return None
        code &= 0xFFFFFFFF
        return cls(
            code >> STAGE_SHIFT, code >> WORKGROUP_SHIFT & AWAITED_MASK, code & AWAITED_MASK, tag & 0xFFFFFFFF
        )


def tag_word(tag: Any, aux: Any = 0) -> Any:
    """The second word of a mailbox word."""
    return (tag << 8) | aux


class Launch:
    """What every stage knows of this launch: its tag, its place, its control blocks."""

    def __init__(
        self,
        tag: fx.Int32,
        limit: fx.Int32,
        workgroup: fx.Int32,
        control: dev.Buffer,
        peers: Sequence[dev.Buffer],
    ) -> None:
        self.tag, self.limit, self.workgroup = tag, limit, workgroup
        self.control, self.peers = control, tuple(peers)

    @classmethod
    def begin(cls, control: dev.Buffer, peers: Sequence[dev.Buffer], workgroup: fx.Int32) -> Launch:
        """Read this launch's tag and wait limit. Device scope: the last launch's store of the tag."""
        words = control.load(CONTROL_TAG, 2, dev.DEVICE)
        return cls(dev.uniform(words[0]), dev.uniform(words[1]), workgroup, control, peers)

    def finish(self) -> None:
        """Set the next launch's tag. Called by one lane of one workgroup, after that workgroup has seen words
        of this launch from every workgroup: all of them have read the tag then."""
        last = self.tag == LAST_TAG
        self.control.store(CONTROL_TAG, last.select(fx.Int32(1), self.tag + 1), dev.DEVICE)


def send(buffer: dev.Buffer, offset: Any, payload: Any, tag_and_aux: Any, policy: int) -> None:
    """Store one mailbox word."""
    buffer.store(offset, dev.vector_i32([payload, tag_and_aux]), policy)


class Receiver:
    """Waits for mailbox words of this launch."""

    def __init__(self, launch: Launch, stage: int) -> None:
        self.launch, self.stage = launch, stage

    def _report(self, gone: Callable[[int, int], Any], words: list[tuple[int, int]], awaited: Any) -> None:
        """Record the first of ``words`` (index of the load, of the word in it) that is ``gone``, if any."""
        launch = self.launch
        looked = [gone(load, word) for load, word in words]
        missing = looked[0]
        for one in looked[1:]:
            missing = missing | one

        @dev.when(missing)
        def _() -> None:
            name = dev.i32(awaited(*words[-1]) if callable(awaited) else awaited)
            if callable(awaited):
                for one, (load, word) in reversed(list(zip(looked[:-1], words[:-1], strict=True))):
                    name = one.select(dev.i32(awaited(load, word)), name)
            code = (launch.workgroup << WORKGROUP_SHIFT) | name | (self.stage << STAGE_SHIFT)
            for peer in launch.peers:
                peer.store(CONTROL_ERROR, dev.vector_i32([code, launch.tag]), dev.SYSTEM)
            dev.drain()

    def pairs(
        self, buffer: dev.Buffer, offsets: Sequence[Any], active: Any, awaited: Any, policy: int = dev.DEVICE
    ) -> list[Any]:
        """Two neighbouring words at each of ``offsets`` (16-byte aligned), as vectors of four: payload, tag
        word, payload, tag word. ``active`` is one condition for all offsets or one for each; where it
        does not hold nothing is waited for, and the offset must be one that is harmless to read.
        ``awaited`` names the producer in an error record: a value, or a function of (index of the offset,
        word of the pair) that is computed once a wait has failed."""
        return self._poll(buffer, offsets, 4, active, awaited, policy)

    def words(
        self, buffer: dev.Buffer, offsets: Sequence[Any], active: Any, awaited: Any, policy: int = dev.DEVICE
    ) -> list[Any]:
        """One word at each of ``offsets``, as vectors of two: payload, tag word."""
        return self._poll(buffer, offsets, 2, active, awaited, policy)

    def _poll(
        self, buffer: dev.Buffer, offsets: Sequence[Any], count: int, active: Any, awaited: Any, policy: int
    ) -> list[Any]:
        launch = self.launch
        want = launch.tag << 8
        conditions = list(active) if isinstance(active, Sequence) else [active] * len(offsets)

        def load() -> list[Any]:
            return [buffer.load(offset, count, policy) for offset in offsets]

        def missing(vectors: list[Any]) -> Any:
            # A word of this launch differs from its tag in the aux bits at most.
            by_condition: dict[int, tuple[Any, Any]] = {}
            for condition, vector in zip(conditions, vectors, strict=True):
                differs = by_condition.get(id(condition), (condition, fx.Int32(0)))[1]
                for i in range(1, count, 2):
                    differs = differs | (vector[i] ^ want)
                by_condition[id(condition)] = (condition, differs)
            out = None
            for condition, differs in by_condition.values():
                here = condition & (dev.shift_right(differs, 8) != 0)
                out = here if out is None else out | here
            return out

        def gone(load: int, word: int) -> Any:
            # Looked at again: the tags of the last poll would take registers of launches that never fail.
            now = buffer.load(offsets[load] + (8 * word + 4), 1, policy)
            return conditions[load] & (dev.shift_right(now ^ want, 8) != 0)

        def attempt(carried: list[Any]) -> tuple[Any, list[Any]]:
            vectors = load()
            return missing(vectors) & (carried[1] == 0), vectors

        def again(carried: list[Any]) -> list[Any]:
            dev.sleep()
            polls = carried[0] - 1
            error = launch.control.load(CONTROL_ERROR, 1, dev.SYSTEM)

            # The record ends the wait at its next look, which also takes a word that came in meanwhile.
            # Where a record stands, this wait has no say.
            @dev.when(dev.both(polls == 0, error == 0))
            def _() -> None:
                words = [(load, word) for load in range(len(offsets)) for word in range(count // 2)]
                self._report(gone, words, awaited)

            return [polls, error]

        return dev.repeat([launch.limit, fx.Int32(0)], attempt, again)


def mailbox(name: str, *shape: int) -> Region:
    """A region of mailbox words."""
    return Region(name, shape, WORD_BYTES)
