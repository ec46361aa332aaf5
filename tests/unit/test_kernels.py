# SPDX-License-Identifier: Apache-2.0
"""`rocm-overlay kernels`: which kernels recipes reach, and what is said of those that fail or spill."""

import argparse
import ast
import json
import sys
from dataclasses import replace

import pytest

from rocm_overlay import kernel_arches, kernel_set, recipe
from rocm_overlay import kernel_builds as kernels
from rocm_overlay.code_object import (
    Resources,
    UnreadableCodeObject,
    function_code,
    instruction_starts,
    read_module,
)
from rocm_overlay.errors import CheckFailed, OverlayError
from rocm_overlay.kernel_arches import BACK, FFN, FRONT, graph_widths, reachable_widths
from rocm_overlay.kernel_set import DRAFT, NO_ROUTING, TARGET, Wanted
from rocm_overlay.project import Project

PROJECT = Project.find()
RECIPES = {one.name: one for one in recipe.load_all(PROJECT.recipes)}
GOOD = Resources(
    vgprs=230, agprs=0, sgprs=100, lds_bytes=55296, scratch_bytes=0, vgpr_spills=0, sgpr_spills=0,
    instructions=5800,
)  # fmt: skip
SIX = Wanted("gfx950", FFN, 4, *TARGET, 6)


def rows(name):
    return {one.rows for one in kernel_set.of_recipe(RECIPES[name])}


@pytest.mark.parametrize("name", ["mi355x-tp4", "mi355x-tp2", "agentx-mi355x-tp4", "bench-gfx950-32k"])
def test_every_whole_decode_batch_of_a_recipe_has_a_kernel(name):
    drafts = {"bench-gfx950-32k": 6}.get(name, 5)
    assert set(range(drafts + 1, 49, drafts + 1)) <= rows(name), "FULL graphs of whole requests"
    assert set(range(drafts, 49, drafts)) <= rows(name), "the draft's steps"
    assert {1, 2, 4, 8, 16, 24, 32, 40, 48} <= rows(name), "captured sizes, which are warmed up eagerly"
    found = kernel_set.of_recipe(RECIPES[name])
    routings = {(one.kernel, one.experts, one.picks) for one in found}
    assert routings == {(FRONT, *NO_ROUTING), (BACK, *TARGET), (BACK, *DRAFT)}, "whole layers alone"
    assert {one.tp for one in found} == {2 if "tp2" in name else 4}


def without_kernels(recipe):
    return replace(recipe, args={**recipe.args, "monokernel": False})


def test_every_whole_decode_batch_on_gfx942_has_a_kernel():
    one = RECIPES["mi325x-tp4"]
    found = kernel_set.of_recipe(one)
    assert {wanted.tp for wanted in found} == {4} and {wanted.arch for wanted in found} == {"gfx942"}
    assert kernel_set.of_recipe(replace(one, args={**one.args, "tensor-parallel-size": 8})) == set()
    for kind, routing in ((FRONT, NO_ROUTING), (BACK, TARGET), (BACK, DRAFT)):
        rows = {w.rows for w in found if (w.kernel, w.experts, w.picks) == (kind, *routing)}
        assert {1, 2, 4, 8, 16, 24, 32, 40} | set(range(6, 43, 6)) | set(range(5, 41, 5)) <= rows
        assert max(rows) == 42


def test_a_server_at_tp_2_on_gfx942_reaches_its_own_row_limit():
    found = kernel_set.of_recipe(RECIPES["mi325x-tp2"])
    assert {wanted.tp for wanted in found} == {2} and {wanted.arch for wanted in found} == {"gfx942"}
    for kind, routing in ((FRONT, NO_ROUTING), (BACK, TARGET), (BACK, DRAFT)):
        rows = {w.rows for w in found if (w.kernel, w.experts, w.picks) == (kind, *routing)}
        assert rows == {1, 2, 4, 8, 16, 24, 32} | set(range(6, 33, 6)) | set(range(5, 33, 5))
    eager = replace(RECIPES["mi325x-tp2"], args={**RECIPES["mi325x-tp2"].args, "enforce-eager": True})
    assert {w.rows for w in kernel_set.of_recipe(eager)} == set(range(1, 33))


def test_a_recipe_without_the_kernels_reaches_none():
    for name in ("mi325x-tp4", "mi355x-tp4"):
        assert kernel_set.of_recipe(without_kernels(RECIPES[name])) == set()


def test_captured_sizes_that_a_server_names_are_the_ones():
    assert reachable_widths(48, 0, 512, [3, 11]) >= {3, 11}
    assert max(reachable_widths(48, 5, 1024)) == 48 and max(reachable_widths(42, 5, 1024)) == 42
    assert 40 not in graph_widths([8, 16], 6) and {8, 12, 16, 18} == graph_widths([8, 16], 6)


def test_the_set_of_all_recipes_holds_each_of_them_once():
    whole = [one for arch in kernel_arches.MOST_ROWS for one in kernel_set.of_recipes(RECIPES.values(), arch)]
    assert len(whole) == len(set(whole))
    assert set(whole) == set().union(*map(kernel_set.of_recipe, RECIPES.values()))


def test_every_kernel_is_what_the_launch_says_it_does():
    from tests.unit import test_specialized_decode_tree  # noqa: F401

    from vllm.models.deepseek_v41.amd.mono import builds  # isort: skip

    assert {kind: what.routed for kind, what in builds.KINDS.items()} == kernel_arches.KINDS
    there = builds.ARCHITECTURES
    assert {arch: one.max_rows for arch, one in there.items()} == kernel_arches.MOST_ROWS
    assert kernel_arches.MOST_ROWS["gfx942"] == {2: 32, 4: 42}
    for arch, one in there.items():
        every = kernel_set.every(arch)
        geometries = [g for g in builds.every_geometry() if g.rows <= one.max_rows.get(g.tp, 0)]
        for kind in {BACK, FFN}:
            ours = {(w.tp, w.experts, w.picks, w.rows) for w in every if w.kernel == kind}
            assert ours == {(g.tp, g.experts, g.picks, g.rows) for g in geometries}
        fronts = [(w.tp, w.rows) for w in every if w.kernel == FRONT]
        assert sorted(fronts) == sorted({(g.tp, g.rows) for g in geometries})


@pytest.mark.parametrize("name", ["test_mono_gfx942.py", "test_mono_gfx942_back.py"])
def test_the_simulator_s_tests_compile_the_widest_step_of_every_size_on_gfx942(name):
    """What the row limits rest on: up to them no launch has scratch."""
    tree = ast.parse((PROJECT.root / "tests/sim" / name).read_text())
    (compiled,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS"
    )
    assert {tp: max(widths) for tp, widths in compiled.items()} == kernel_arches.MOST_ROWS["gfx942"]


def test_the_host_s_table_says_how_each_instruction_set_reads_the_experts():
    from tests.unit import test_specialized_decode_tree  # noqa: F401

    from vllm.models.deepseek_v41.amd.mono import builds, geometry  # isort: skip

    for arch, there in builds.ARCHITECTURES.items():
        for tp, rows in there.max_rows.items():
            built = builds.ffn_build(geometry.FfnGeometry(rows, tp), arch)
            assert built.name.startswith(f"ffn_{arch}_tp{tp}_rows{rows}_")
        isa = builds.isa_of(arch)
        assert (isa.name, isa.expert_layout) == (arch, there.expert_layout)


def answer(**changes):
    good = {"name": "k", "compiled": True, "seconds": 1.0, "resources": GOOD.as_dict()}
    return good | changes


def built(**changes):
    return kernels.Built(SIX, "k", True, 1.0, Resources(**{**GOOD.as_dict(), **changes}))


def test_a_kernel_with_scratch_fails():
    kernels.check([built(), built(sgpr_spills=5)])
    with pytest.raises(CheckFailed) as caught:
        kernels.check([built(), built(scratch_bytes=16)])
    assert caught.value.exit_code == 1 and "6 rows: 16 bytes of scratch" in str(caught.value)


def test_all_kernels_that_do_not_compile_are_named_at_once():
    others = [SIX, Wanted("gfx950", FFN, 2, *DRAFT, 48)]
    with pytest.raises(OverlayError) as caught:
        kernels._built(others, {one: {"error": f"no {one.rows}"} for one in others})
    assert "2 of 2" in str(caught.value) and "no 6" in str(caught.value) and "no 48" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "6",
        "4:384:6:48",
        "ffn:4:384:6",
        "ffn:4:384:6:x",
        "ffn:4:384:6:-1",
        "",
        "other:4:384:6:1",
        "attention_front:4:384:6:1",
    ],
)
def test_an_unreadable_kernel_is_refused(text):
    with pytest.raises(OverlayError, match="KERNEL:TP:EXPERTS:PICKS:ROWS"):
        kernel_set.parse(text, "gfx950")


def test_a_kernel_is_named_as_a_user_writes_it():
    assert kernel_set.parse("ffn:4:384:6:6", "gfx950") == SIX
    assert kernel_set.parse("attention_front:2:48", "gfx950") == Wanted("gfx950", FRONT, 2, *NO_ROUTING, 48)
    assert str(kernel_set.parse("attention_front:2:48", "gfx950")) == "attention_front gfx950 TP2 48 rows"


def test_a_recipe_whose_cache_whole_layers_do_not_read_reaches_the_ffn_launch():
    one = RECIPES["mi355x-tp4"]
    other = replace(one, args={**one.args, "kv-cache-dtype": "nvfp4_ds_mla"})
    assert {kernel.kernel for kernel in kernel_set.of_recipe(other)} == {FFN}


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("gfx90a", "no mono kernels for gfx90a (there are some for gfx950, gfx942)"),
        ("gfx942", "no recipe for gfx942 decodes on the mono kernels"),
    ],
)
def test_why_there_is_nothing_to_compile_is_said(capsys, monkeypatch, arch, said):
    monkeypatch.setattr(recipe, "load_all", lambda folder: list(map(without_kernels, RECIPES.values())))
    parser = argparse.ArgumentParser()
    kernels.register(parser.add_subparsers())
    given = parser.parse_args(["kernels", "--arch", arch])
    assert given.run(given) == 0
    assert said in capsys.readouterr().out


def worker(tmp_path, monkeypatch, program):
    script = tmp_path / "worker.py"
    script.write_text(program)
    made = kernels.Worker(tmp_path, tmp_path, {})
    monkeypatch.setattr(made, "_command", [sys.executable, str(script)])
    return made


def test_a_compiler_that_dies_is_an_error_of_its_kernel_and_the_next_one_gets_another(tmp_path, monkeypatch):
    one = worker(
        tmp_path,
        monkeypatch,
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    if json.loads(line)['rows'] == 6:\n"
        "        print('LLVM ERROR: boom', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    print(json.dumps({'fine': os.getpid()}), flush=True)\n",
    )
    seven = Wanted("gfx950", FFN, 4, *TARGET, 7)
    assert "fine" in one.ask(seven)
    died = one.ask(SIX)
    assert "LLVM ERROR: boom" in died["error"] and "status -6" in died["error"]
    assert "fine" in one.ask(seven)
    one.close()


def test_a_compiler_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "ANSWER_SECONDS", 0.5)
    one = worker(tmp_path, monkeypatch, "import time\ntime.sleep(600)\n")
    assert "status -9" in one.ask(SIX)["error"]


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OverlayError, match="cannot be made"):
        kernels.compile_all([SIX], PROJECT.overlay, tmp_path / "file/out", 1, print)


def test_a_folder_without_flydsl_is_named(tmp_path):
    with pytest.raises(OverlayError, match="no flydsl in"):
        kernels.compiler_environment(tmp_path, tmp_path)


def test_no_linker_is_said_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    with pytest.raises(OverlayError, match="cannot link"):
        kernels.linker_environment(tmp_path)


def test_progress_says_how_much_is_left():
    assert kernels.progress(1, 4, SIX, answer(), 10.0).startswith("1/4 ffn gfx950 TP4 384/6 6 rows: compiled")
    assert "about 30 s left" in kernels.progress(1, 4, SIX, answer(), 10.0)
    assert "was there" in kernels.progress(1, 4, SIX, answer(compiled=False), 1.0)
    assert "failed" in kernels.progress(1, 4, SIX, {"error": "x"}, 1.0)


def test_the_documents_table_is_its_json():
    text = (PROJECT.root / kernels.DOCUMENT).read_text()
    stored = json.loads((PROJECT.root / kernels.DOCUMENT).with_suffix(".json").read_text())
    fields = set(GOOD.as_dict())
    made = [
        kernels.Built(
            Wanted(**{k: v for k, v in one.items() if k not in fields}), "", False, 0.0,
            Resources(**{k: v for k, v in one.items() if k in fields}),
        )
        for one in stored
    ]  # fmt: skip
    assert kernels.with_table(text, made) == text
    kernels.check(made)


def test_a_document_without_marks_is_refused():
    with pytest.raises(OverlayError, match="no marks"):
        kernels.with_table("nothing", [])


# Machine code by encoding, little-endian 32-bit words; llvm-mc's for gfx950.
INSTRUCTIONS = [
    (0xBF810000,),  # s_endpgm
    (0xBF800000,),  # s_nop 0
    (0x80040302,),  # s_add_u32 s4, s2, s3
    (0x8004FF02, 0x12345678),  # with a literal
    (0xBE8400FF, 0x12345678),  # s_mov_b32 s4, literal
    (0xB0041234,),  # s_movk_i32
    (0xBF06FF02, 0x12345678),  # s_cmp_eq_u32 s2, literal
    (0x7E020302,),  # v_mov_b32 v1, v2
    (0x7E0202FF, 0x12345678),  # v_mov_b32 v1, literal
    (0x020204F9, 0x06060603),  # v_add_f32 with sub-dword selection
    (0x020204FA, 0xFF00E403),  # v_add_f32 with data-parallel primitives
    (0x2E020503, 0x3F800000),  # v_madmk_f32
    (0xC0060082, 0x00000000),  # s_load_dwordx2
    (0xD1CB0001, 0x040E0702),  # v_fma_f32
    (0xD3AC1000, 0x00020501, 0xD3AD0004, 0x04121108),  # scaled matrix instruction
    (0xD8EC0000, 0x01000002),  # ds_read
    (0xE05C1000, 0x80010200),  # buffer_load_dwordx4
    (0xDC508000, 0x007F0001),  # global_load_dword
]


def test_instructions_are_told_apart_by_length():
    import struct

    words = [word for one in INSTRUCTIONS for word in one]
    code = struct.pack(f"<{len(words)}I", *words)
    assert list(instruction_starts(code)) == [one[0] for one in INSTRUCTIONS]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x02\x01" + bytes(10)])
def test_what_is_no_code_object_is_refused(data):
    with pytest.raises(UnreadableCodeObject):
        function_code(data, "k")


@pytest.mark.parametrize("text", ["", 'bin = "\\7FELF"', '#gpu.kernel_metadata<"other", metadata = {}'])
def test_a_module_without_the_kernel_is_refused(text):
    with pytest.raises(UnreadableCodeObject, match="no kernel k"):
        read_module(text, "k")
