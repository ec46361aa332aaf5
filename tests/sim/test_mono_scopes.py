# SPDX-License-Identifier: Apache-2.0
"""Every access to a peer, and every look at what peers store, has both scope bits in the compiled code."""

from __future__ import annotations

import re

import pytest
from mono import scopes
from mono.mutations import HANDOFF, REDUCE
from mono.sources import Edit, assembly, mutated

full = pytest.mark.full
# Builds that other tests run too.
BUILDS = [(1, 2), (6, 4), *(pytest.param(rows, 4, marks=full) for rows in (17, 33, 48))]


@pytest.mark.parametrize("rows, tp", BUILDS)
def test_system_scope(rows: int, tp: int) -> None:
    assert scopes.faults(assembly(rows, tp).read_text(), tp) == []


@pytest.mark.parametrize("access", ["store_dwordx2", "load_dwordx2", "load_dword"])
@pytest.mark.parametrize("lost", ["sc0 ", "sc1"])
def test_a_bit_that_one_instruction_lost_is_noticed(access: str, lost: str) -> None:
    text = assembly(1, 2).read_text()
    line = re.search(rf"^\s+buffer_{access} .*sc0 sc1.*$", text, re.MULTILINE)
    assert line is not None
    assert scopes.faults(text.replace(line[0], line[0].replace(lost, ""), 1), 2)


LOST = {
    "a push to a peer": Edit(
        REDUCE, "tag_word(launch.tag), dev.SYSTEM)", "tag_word(launch.tag), dev.DEVICE)"
    ),
    "a look at a peer's word": Edit(REDUCE, "source, dev.SYSTEM)", "source, dev.DEVICE)"),
    "a record for a peer": Edit(HANDOFF, "launch.tag]), dev.SYSTEM)", "launch.tag]), dev.DEVICE)"),
    "a look at the record": Edit(HANDOFF, "CONTROL_ERROR, 1, dev.SYSTEM)", "CONTROL_ERROR, 1, dev.DEVICE)"),
}


@full
@pytest.mark.parametrize("name", LOST)
def test_a_policy_that_the_source_lost_is_noticed(name: str) -> None:
    assert scopes.faults(assembly(1, 2, overlay=mutated((LOST[name],))).read_text(), 2)
