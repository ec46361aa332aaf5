# SPDX-License-Identifier: Apache-2.0
"""Every planted fault in the whole layer's launches is noticed by the check that is named for it."""

from __future__ import annotations

import pytest
from mono.layer_mutations import CHECKS, MUTATIONS, Check, Mutation, outcome
from mono.sources import OVERLAY, mutated

full = pytest.mark.full


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "mutation", [pytest.param(m, id=m.name, marks=[] if m.fast else full) for m in MUTATIONS]
)
def test_fault_is_noticed(mutation: Mutation) -> None:
    assert outcome(mutation) is not None


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.name)
def test_the_kernels_as_they_are_pass(check: Check) -> None:
    check.run(check.shape, None, None)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_edit_still_finds_its_place(mutation: Mutation) -> None:
    """``mutated`` raises when a source changed under an edit; a copy differs from the sources in it alone."""
    folder = mutated(mutation.edits)
    for edit in mutation.edits:
        changed = (OVERLAY / edit.file).read_text().replace(edit.old, edit.new)
        assert (folder / edit.file).read_text() == changed
