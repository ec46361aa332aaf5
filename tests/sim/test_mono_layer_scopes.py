# SPDX-License-Identifier: Apache-2.0
"""Scope bits and invalidations of the whole layer's launches in the compiled code.

In the simulator a word that is stored without its bits is only late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mono import scopes
from mono.layer_mutations import ATTENTION, HEADS_WORD, PROJECTION, PUBLISHED, STORE, WORD
from mono.sources import OVERLAY, Edit, assembly_of, mutated

full = pytest.mark.full
TARGET = {"experts": 384, "picks": 6}
BUILDS = [(1, 2), *(pytest.param(rows, 4, marks=full) for rows in (6, 17, 48))]


def text_of(kind: str, rows: int, tp: int, overlay: Path = OVERLAY) -> str:
    sizes = {"rows": rows, "tp": tp} | (TARGET if kind != "front" else {})
    return assembly_of(kind, overlay=overlay, **sizes).read_text()


def faults(rows: int, tp: int, front: str, back: str) -> list[str]:
    """What is wrong with the two launches' stores and invalidations, in words."""
    found = {
        "front": scopes.front_faults(front, tp),
        "back": scopes.back_faults(back, text_of("ffn", rows, tp), tp),
    }
    return [f"{name}: {fault}" for name, faults in found.items() for fault in faults]


@pytest.mark.parametrize("rows, tp", BUILDS)
def test_scopes(rows: int, tp: int) -> None:
    assert faults(rows, tp, text_of("front", rows, tp), text_of("back", rows, tp)) == []


def test_a_bit_that_one_store_lost_is_noticed() -> None:
    texts = {kind: text_of(kind, 1, 2) for kind in ("front", "back")}
    for kind, text in texts.items():
        line = re.search(r"^\s+buffer_store_dwordx2 .*[^0] sc1$", text, re.MULTILINE)
        assert line is not None
        lost = text.replace(line[0], line[0].removesuffix(" sc1"), 1)
        assert faults(1, 2, **(texts | {kind: lost}))


LOST = {
    "published rows": Edit(PUBLISHED, STORE, STORE.replace("DEVICE", "CACHED")),
    "words of published rows": Edit(PUBLISHED, WORD, WORD.replace("DEVICE", "CACHED")),
    "an acquire of rows": Edit(
        PUBLISHED, "        dev.barrier()\n        dev.acquire()\n", "        dev.barrier()\n"
    ),
    "an acquire of keys": Edit(
        PUBLISHED,
        "lambda *_: producer)\n        dev.acquire()\n\n    def wait(",
        "lambda *_: producer)\n\n    def wait(",
    ),
    "an acquire of heads": Edit(
        PROJECTION, "        dev.acquire()\n        for tile, (codes, at)", "        for tile, (codes, at)"
    ),
    "words of heads": Edit(ATTENTION, HEADS_WORD, HEADS_WORD.replace("DEVICE", "CACHED")),
}


def test_each_edit_still_finds_its_place() -> None:
    for edit in LOST.values():
        mutated((edit,))


@full
@pytest.mark.parametrize("name", LOST)
def test_a_scope_that_the_source_lost_is_noticed(name: str) -> None:
    overlay = mutated((LOST[name],))
    texts = {kind: text_of(kind, 1, 2, overlay) for kind in ("front", "back")}
    assert faults(1, 2, **texts)
