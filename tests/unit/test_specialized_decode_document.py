# SPDX-License-Identifier: Apache-2.0
"""docs/design/specialized_decode.md says what the code does: its examples, modules and metrics exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "design" / "specialized_decode.md").read_text(encoding="utf-8")
FOLDER = ROOT / "overlay" / "vllm" / "models" / "common" / "specialized_decode"


def test_the_examples_are_the_toy_model_s() -> None:
    toy = (ROOT / "tests" / "toy_model.py").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        assert example.rstrip() in toy, f"not in tests/toy_model.py:\n{example}"


def test_the_table_has_every_module() -> None:
    table = DOCUMENT.partition("| module | holds |")[2].partition("\n## ")[0]
    files = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", table)) == files


def test_the_metrics_are_those_that_are_counted() -> None:
    source = (FOLDER / "metrics.py").read_text(encoding="utf-8")
    counted = set(re.findall(r'"((?:taken|declined)_\w+)"', source))
    assert set(re.findall(r"`vllm:specialized_decode_(\w+)_total", DOCUMENT)) == counted
