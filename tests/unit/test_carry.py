# SPDX-License-Identifier: Apache-2.0
"""Each kind of change that upstream can make to a file that we touch, and how each of ours ends on it."""

import pytest

from rocm_overlay.carry import ByHand, hash_text
from rocm_overlay.carry_files import End
from rocm_overlay.gittool import has_markers
from rocm_overlay.patching import apply_diff
from rocm_overlay.series import load_patch
from tests.tiny import BASE, DIFF, HEADER, OVERLAY, make_base
from tests.tiny_rebase import carry_to, make_checkout, make_target

ROCM = "vllm/amd/rocm.py"
OPS, KERNEL, OLD = "vllm/amd/ops/__init__.py", "vllm/amd/ours/kernel.py", "vllm/amd/old.py"
PATCH = "0001-amd-gate.patch"
TEXT = BASE[ROCM]
GATED = TEXT.replace("    # two\n", "    # two\n    if gate():\n        return None\n")
NEVER = HEADER.replace("base vllm/amd/rocm.py calls gate in build", "never: ROCm only")
LONG = TEXT + "".join(f"\n\ndef helper_{n}(x):\n    return x * {n}\n" for n in range(12))


def carried(tmp_path, changes=None, patch=HEADER + DIFF, base=None, **options):
    pinned = make_base(tmp_path / "pinned", base)
    project = make_checkout(tmp_path / "p", patch, pinned)
    return project, carry_to(
        project, make_target(tmp_path / "new", {**(base or {}), **(changes or {})}), **options
    )


def row_of(found, path=ROCM):
    (row,) = [row for row in found.files if row.path == path]
    return row


def test_on_an_unchanged_base_everything_applies_and_every_patch_keeps_its_bytes(tmp_path):
    project, found = carried(tmp_path)
    assert {(row.upstream, row.end) for row in found.files} == {("unchanged", End.APPLIED)}
    assert found.patches[PATCH].encode() == (project.patches / PATCH).read_bytes()
    assert not found.conflicts and not found.dropped


@pytest.mark.parametrize(
    ("text", "upstream", "end"),
    [
        ("# new\n" + TEXT, "changed outside our hunks", End.APPLIED),
        (TEXT.replace("import os\n", "import os\nimport sys\n"), "changed outside our hunks", End.APPLIED),
        (
            TEXT.replace("def build(cam)", "def build(cam, extra=None)"),
            "changed outside our hunks",
            End.APPLIED,
        ),
        (TEXT.replace("    # one\n", "    # 1\n"), "changed inside", End.APPLIED),
        (TEXT.replace("# two", "# 2"), "changed inside", End.CONFLICTING),
        (None, "gone", End.CONFLICTING),
        (GATED, "changed inside", End.LANDED),
        ("# new\n" + GATED, "changed inside", End.LANDED),
        (GATED.replace("if gate()", "if ops.gate()"), "changed inside", End.LANDED_CHANGED),
    ],
)
def test_each_change_of_a_patched_file(tmp_path, text, upstream, end):
    _, found = carried(tmp_path, {ROCM: text})
    row = row_of(found)
    (patch,) = found.rows
    assert (row.upstream, row.end, patch.end) == (upstream, end, end)
    assert (found.patches[PATCH] is None) == (end in (End.LANDED, End.LANDED_CHANGED))
    assert bool(found.conflicts) == (end is End.CONFLICTING)


def test_a_merged_patch_is_rewritten_against_the_new_base_and_applies_there_exactly(tmp_path):
    text = "# new\n# lines\n" + TEXT.replace("def build(cam)", "def build(cam, extra=None)")
    project, found = carried(tmp_path, {ROCM: text})
    (project.patches / PATCH).write_text(found.patches[PATCH])
    patch = load_patch(project.patches / PATCH)
    applied = apply_diff(text, patch.diffs[0])
    assert applied.offset == 0 and patch.probe.holds(applied.text)
    assert "extra=None" in applied.text and "if gate():" in applied.text
    assert patch.header == load_patch(project.patches / PATCH).header


def test_a_moved_file_takes_its_patch_with_it_header_and_all(tmp_path):
    moved = "vllm/amd/plan/rocm.py"
    project, found = carried(
        tmp_path, {ROCM: None, moved: LONG + "\n# end\n"}, base={ROCM: LONG}, patch=NEVER + DIFF
    )
    row = row_of(found)
    assert (row.upstream, row.moved_to, row.end) == ("moved", moved, End.APPLIED)
    (project.patches / PATCH).write_text(found.patches[PATCH])
    patch = load_patch(project.patches / PATCH)
    assert patch.diffs[0].path == patch.probe.path == moved
    assert patch.probe.holds(apply_diff(LONG, patch.diffs[0]).text)


def test_a_file_that_is_only_like_ours_and_was_there_before_is_not_taken_for_the_moved_one(tmp_path):
    twin = {"vllm/amd/twin.py": LONG}
    old = make_base(tmp_path / "old", {ROCM: LONG, **twin})
    _, found = carried(tmp_path, {ROCM: None}, base={ROCM: LONG, **twin}, patch=NEVER + DIFF, old_root=old)
    assert row_of(found).upstream == "gone"


def test_an_effect_that_upstream_took_in_another_form_is_found_by_the_probe(tmp_path):
    """No Drop-when names it: the probe that fails on the pinned file holds on the new one."""
    other = TEXT.replace("    # one\n    # two\n", "    if off():\n        gate()\n")
    _, found = carried(tmp_path, {ROCM: other}, patch=NEVER + DIFF)
    assert found.rows[0].end is End.LANDED_CHANGED and "effect" in found.rows[0].detail


def test_a_probe_that_the_pinned_file_met_already_says_nothing(tmp_path):
    always = NEVER.replace("calls gate in build", "defines build")
    _, found = carried(tmp_path, {ROCM: "# new\n" + TEXT}, patch=always + DIFF)
    assert found.rows[0].end is End.APPLIED


def test_a_clean_merge_without_effect_is_a_conflict(tmp_path):
    """Upstream took build() apart: the lines still merge, and what they are in is not called build."""
    text = TEXT.replace("def build(cam):\n", "def build(cam):\n    return made(cam)\n\n\ndef made(cam):\n")
    _, found = carried(tmp_path, {ROCM: text}, patch=NEVER + DIFF)
    (conflict,) = found.conflicts
    assert "without effect" in conflict.reason and "if gate():" in conflict.merged
    assert not has_markers(conflict.merged)


def test_a_conflict_has_markers_our_intent_and_upstreams_diff(tmp_path):
    _, found = carried(tmp_path, {ROCM: TEXT.replace("# two", "# 2")})
    (conflict,) = found.conflicts
    assert has_markers(conflict.merged) and "|||||||" in conflict.merged
    assert "Why: the call site is upstream's" in conflict.intent
    assert "-    # two\n+    # 2\n" in conflict.upstream


def test_what_a_person_merged_is_taken_and_becomes_the_patch(tmp_path):
    text = TEXT.replace("# two", "# 2")
    mine = text.replace("    # 2\n", "    # 2\n    if gate():\n        return None\n")
    by_hand = {(PATCH, ROCM): ByHand(mine, hash_text(text))}
    project, found = carried(tmp_path, {ROCM: text}, resolved=by_hand)
    assert found.rows[0].end is End.APPLIED and "+    if gate():" in found.patches[PATCH]
    merged_into_another_text = ByHand(mine, hash_text("other"))
    with_a_marker_left = ByHand("<<<<<<< ours\n" + mine, hash_text(text))
    for wrong in (merged_into_another_text, with_a_marker_left):
        again = carry_to(
            project, make_target(tmp_path / "new", {ROCM: text}), resolved={(PATCH, ROCM): wrong}
        )
        assert again.rows[0].end is End.CONFLICTING


TWO_FILES = (
    DIFF
    + """\
--- a/vllm/other.py
+++ b/vllm/other.py
@@ -1 +1,2 @@
 untouched = True
+touched = True
"""
)


def test_the_part_of_a_patch_that_landed_leaves_it_and_the_rest_stays(tmp_path):
    changes = {"vllm/other.py": "untouched = True\ntouched = True\n"}
    base = {"vllm/other.py": BASE["vllm/other.py"]}
    _, found = carried(tmp_path, changes, patch=NEVER + TWO_FILES, base=base)
    assert {row.path: row.end for row in found.rows} == {ROCM: End.APPLIED, "vllm/other.py": End.LANDED}
    assert "vllm/other.py" not in found.patches[PATCH] and ROCM in found.patches[PATCH]


@pytest.mark.parametrize(
    ("path", "text", "upstream", "end"),
    [
        (OPS, BASE[OPS] + "\n\ndef more():\n    return 1\n", "changed inside", End.CONFLICTING),
        (OPS, None, "gone", End.CONFLICTING),
        (OPS, OVERLAY[OPS], "changed inside", End.LANDED),
        (KERNEL, OVERLAY[KERNEL], "new there", End.LANDED),
        (KERNEL, "def launch():\n    return 2\n", "new there", End.CONFLICTING),
        (KERNEL, "other = 1\n", "new there", End.CONFLICTING),
        (OLD, None, "gone", End.LANDED),
        (OLD, "used = True\n", "changed inside", End.APPLIED),
    ],
)
def test_each_change_at_the_place_of_an_overlay_file_or_a_removal(tmp_path, path, text, upstream, end):
    _, found = carried(tmp_path, {path: text})
    row = row_of(found, path)
    assert (row.upstream, row.end) == (upstream, end)
    assert (path in found.dropped) == (end is End.LANDED)
    assert [one.path for one in found.conflicts] == ([path] if end is End.CONFLICTING else [])


@pytest.mark.parametrize(
    ("path", "text", "end"),
    [
        (OPS, BASE[OPS] + "# more\n", End.APPLIED),
        (KERNEL, "def launch():\n    return 2\n", End.LANDED_CHANGED),
    ],
)
def test_accepting_a_row_settles_it(tmp_path, path, text, end):
    _, found = carried(tmp_path, {path: text}, accepted=[path])
    assert row_of(found, path).end is end and not found.conflicts


def test_a_moved_replaced_file_and_a_moved_removed_one_say_where_they_went(tmp_path):
    functions = "".join(f"def f{n}():\n    return {n}\n\n\n" for n in range(9))
    base = {OPS: functions, OLD: functions.replace("f", "g")}
    changes = {OPS: None, OLD: None, "vllm/amd/gate.py": base[OPS], "vllm/amd/older.py": base[OLD]}
    _, found = carried(tmp_path, changes, base=base)
    assert {path: row_of(found, path).moved_to for path in (OPS, OLD)} == {
        OPS: "vllm/amd/gate.py",
        OLD: "vllm/amd/older.py",
    }
    assert {row_of(found, path).end for path in (OPS, OLD)} == {End.CONFLICTING}
