# SPDX-License-Identifier: Apache-2.0
"""A patch applies exactly or not at all, and what it meets instead is named."""

import pytest

from rocm_overlay.patching import DiffSyntaxError, Outcome, apply_diff, parse_diff
from tests.tiny import BASE, DIFF

TEXT = BASE["vllm/amd/rocm.py"]
PATCHED = TEXT.replace("    # two\n", "    # two\n    if gate():\n        return None\n")
(DIFF_OF_FILE,) = parse_diff(DIFF)


def test_exact_text_applies():
    result = apply_diff(TEXT, DIFF_OF_FILE)
    assert (result.outcome, result.text, result.offset) == (Outcome.CLEAN, PATCHED, 0)


def test_lines_added_elsewhere_shift_the_hunk_and_are_counted():
    result = apply_diff("# new\n# head\n" + TEXT, DIFF_OF_FILE)
    assert (result.outcome, result.text, result.offset) == (Outcome.CLEAN, "# new\n# head\n" + PATCHED, 2)


def test_a_shifted_hunk_that_fits_two_places_is_a_conflict():
    assert apply_diff("#\n" + TEXT + TEXT, DIFF_OF_FILE).outcome is Outcome.CONFLICT


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        (PATCHED, Outcome.ALREADY, "every hunk"),
        (TEXT.replace("def build(cam)", "def build(cam, more)"), Outcome.FUZZ, "fuzz 1"),
        (TEXT.replace("def build(cam)", "def build(c)").replace("# one", "# ONE"), Outcome.FUZZ, "fuzz 2"),
        (TEXT.replace("# two", "# 2"), Outcome.CONFLICT, "hunk 1 (line 4)"),
        ("", Outcome.CONFLICT, "hunk 1"),
    ],
    ids=["already", "fuzz-1", "fuzz-2", "conflict", "empty"],
)
def test_other_outcomes_are_told_apart(text, outcome, detail):
    result = apply_diff(text, DIFF_OF_FILE)
    assert result.outcome is outcome and detail in result.detail and not result.text


def test_hunks_apply_in_order_and_a_later_one_never_lands_above_an_earlier():
    two = DIFF.replace("@@ -4,5 +4,7 @@", "@@ -4,5 +4,7 @@") + "@@ -1,1 +1,2 @@\n import os\n+import re\n"
    (diff,) = parse_diff(two)
    assert apply_diff(TEXT, diff).outcome is Outcome.CONFLICT


def test_a_hunk_that_grows_the_file_moves_the_hunks_after_it():
    """The second hunk fits two places; only the one shifted by the first hunk's two lines is right."""
    text = "".join(f"line {i}\n" for i in range(6)) + "same\n" * 6
    diff = (
        "--- a/x\n+++ b/x\n@@ -1,2 +1,4 @@\n line 0\n+new\n+new\n line 1\n"
        "@@ -9,2 +11,3 @@\n same\n+here\n same\n"
    )
    (parsed,) = parse_diff(diff)
    result = apply_diff(text, parsed)
    lines = result.text.split("\n")
    assert (result.outcome, result.offset) == (Outcome.CLEAN, 0)
    assert lines[11] == "here" and lines.count("here") == 1


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("--- a/x\n", "without '\\+\\+\\+'"),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "existing files only"),
        ("--- a/x\n+++ b/x\n", "no hunk"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-a\n+b\n", "ends before"),
        ("--- a/x\n+++ b/x\n@@ bad @@\n", "not a hunk header"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", "final newline"),
    ],
)
def test_a_malformed_diff_is_named_by_line(diff, message):
    with pytest.raises(DiffSyntaxError, match=message):
        parse_diff(diff)


def test_form_feeds_inside_a_line_do_not_split_it():
    (diff,) = parse_diff("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\x0cb\n-c\n+d\n")
    assert apply_diff("a\x0cb\nc\n", diff).text == "a\x0cb\nd\n"
