# SPDX-License-Identifier: Apache-2.0
"""The mono kernels' document holds the stage table, and the tests run the laid tree's kernels."""

from __future__ import annotations

from tests.unit.test_specialized_decode_tree import TREE

from vllm.models.common.amd.persistent import build as keys  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import FfnGeometry  # isort: skip
from vllm.models.deepseek_v41.amd.mono.stage_table import markdown  # isort: skip

README = TREE / "vllm/models/deepseek_v41/amd/mono/README.md"
BEGIN, END = "<!-- stages: begin -->\n", "\n<!-- stages: end -->"


def test_the_readme_holds_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == markdown(FfnGeometry(6, 4))


def test_the_laid_tree_is_what_was_tested() -> None:
    assert keys.ROOT == TREE
