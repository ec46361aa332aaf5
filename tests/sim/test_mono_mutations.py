# SPDX-License-Identifier: Apache-2.0
"""Every planted fault in the FFN launch is noticed by the check that is named for it."""

from __future__ import annotations

import pytest
from mono.mutations import (
    HOSTILE,
    MORE_ROWS,
    MUTATIONS,
    NO_RECORD,
    RANKS,
    STAGES,
    TIES,
    Check,
    Mutation,
    outcome,
)
from mono.sources import OVERLAY, compiled, mutated

full = pytest.mark.full


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "mutation", [pytest.param(m, id=m.name, marks=[] if m.fast else full) for m in MUTATIONS]
)
def test_fault_is_noticed(mutation: Mutation) -> None:
    assert outcome(mutation) is not None


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", [STAGES, TIES, RANKS, HOSTILE, MORE_ROWS, NO_RECORD], ids=lambda c: c.name)
def test_the_kernel_as_it_is_passes(check: Check) -> None:
    check.run(compiled(check.rows, check.tp))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_edit_still_finds_its_place(mutation: Mutation) -> None:
    """``mutated`` raises when a source changed under an edit; a copy differs from the sources in it alone."""
    folder = mutated(mutation.edits)
    for edit in mutation.edits:
        changed = (OVERLAY / edit.file).read_text()
        for one in mutation.edits:
            changed = changed.replace(one.old, one.new) if one.file == edit.file else changed
        assert (folder / edit.file).read_text() == changed
