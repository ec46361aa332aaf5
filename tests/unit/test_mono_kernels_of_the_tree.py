# SPDX-License-Identifier: Apache-2.0
"""The mono kernels' document holds the stage tables, and the tests run the laid tree's kernels."""

from __future__ import annotations

import pytest

from tests.unit.test_specialized_decode_tree import TREE
from tests.unit.test_stage_table import LAUNCHES

from vllm.models.common.amd.persistent import build as keys  # isort: skip
from vllm.models.deepseek_v41.amd.mono.stage_table import markdown  # isort: skip

README = TREE / "vllm/models/deepseek_v41/amd/mono/README.md"


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_readme_holds_the_table(name: str) -> None:
    launch = LAUNCHES[name]
    begin, end = (f"<!-- {name} stages: {what} -->" for what in ("begin", "end"))
    text = README.read_text(encoding="utf-8")
    table = markdown(launch.stages(), launch.geometry(6, 4))
    assert text.split(f"{begin}\n")[1].split(f"\n{end}")[0] == table


def test_the_laid_tree_is_what_was_tested() -> None:
    assert keys.ROOT == TREE
