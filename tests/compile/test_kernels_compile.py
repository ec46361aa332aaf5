# SPDX-License-Identifier: Apache-2.0
"""The mono kernels through the real compiler: ahead of time, found by another process, as the table says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_overlay import kernel_builds as kernels
from rocm_overlay import kernel_set
from rocm_overlay.code_object import function_code, instruction_starts, unescape
from rocm_overlay.kernel_arches import BACK, FRONT
from rocm_overlay.kernel_set import NO_ROUTING, TARGET, Wanted
from rocm_overlay.pin import Pin
from rocm_overlay.project import Project
from tests.harness.interpreter import HARNESS

PROJECT = Project.find()
DOCUMENT = PROJECT.root / kernels.DOCUMENT
SIX, TWELVE = (Wanted("gfx950", FRONT, 4, *NO_ROUTING, rows) for rows in (6, 12))
LAYER = [SIX, TWELVE, Wanted("gfx950", BACK, 4, *TARGET, 6)]
EXTREMES = [one for one in kernel_set.every("gfx950") if one.rows in (1, 48)]
# A server's process: the laid package, with all of vLLM, and not the sources that were compiled.
SERVER = """
import importlib, json, os, sys, types
sys.path[:0] = [sys.argv[1], sys.argv[3]]
import fake_rocm
fake_rocm.install("gfx950")
mono, persistent = "vllm.models.deepseek_v41.amd.mono", "vllm.models.common.amd.persistent"
builds = importlib.import_module(mono + ".builds")
cache = importlib.import_module(persistent + ".kernel_cache").KernelCache.of_process()
launchers = []
for name, rows in (one.split(":") for one in sys.argv[2].split(",")):
    kind = builds.KINDS[name]
    struct = getattr(importlib.import_module(kind.module), kind.struct)
    built = builds.kernel_build(name, kind.geometry(int(rows), 4), "gfx950")
    launchers.append((struct, cache.launcher(built)))
# A launch as the runner makes it, short of the GPU: FlyDSL raises now if it would have to compile.
os.environ.update(COMPILE_ONLY="1", FLYDSL_RUNTIME_RUN_ONLY="1", FLYDSL_RUNTIME_CACHE_DIR="/nonexistent")
os.environ["ARCH"] = "gfx950"  # the GPU that is not here
for struct, launcher in launchers:
    for first in (1 << 40, 7):
        numbers = {name: first + i for i, name in enumerate(struct.__annotations__)}
        launcher(struct(**{**numbers, "rank": first % 4}), stream=types.SimpleNamespace(cuda_stream=first))
print(json.dumps([cache.counters.compiled, cache.counters.loaded]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def built(folder):
    return kernels.compile_all(LAYER, PROJECT.overlay, folder, 1, print)


def server(folder, rows, **environ):
    command = [sys.executable, "-c", SERVER, str(PROJECT.tree), rows, str(HARNESS)]
    environment = kernels.compiler_environment(folder, None) | environ
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_server_start_compiles_nothing(built, folder, tmp_path):
    nowhere = tmp_path / "unused"
    given = {"VLLM_MONO_KERNELS_SHIPPED": str(folder), "VLLM_MONO_KERNEL_CACHE": str(nowhere)}
    reached = "attention_front:6,attention_front:12,attention_back_ffn:6"
    assert server(folder, reached, **given) == [0, 3] and not nowhere.exists()


def test_two_widths_are_two_kernels(built):
    """FlyDSL's own key does not see the geometry that a kernel captures."""
    six, twelve, _ = built
    assert six.name != twelve.name and six.resources != twelve.resources
    assert six.compiled and twelve.compiled


def test_compiling_again_compiles_nothing(built, folder):
    again = kernels.compile_all(LAYER, PROJECT.overlay, folder, 1, print)
    assert [one.compiled for one in again] == [False] * len(LAYER)
    assert [one.resources for one in again] == [one.resources for one in built]


def test_no_kernel_has_scratch(built):
    kernels.check(built)
    assert all(one.resources.vgprs > 0 and one.resources.lds_bytes > 0 for one in built)


def in_the_document():
    return {
        Wanted(*(one[name] for name in ("arch", "kernel", "tp", "experts", "picks", "rows"))): one
        for one in json.loads(DOCUMENT.with_suffix(".json").read_text())
    }


def differs(found):
    stored = in_the_document()
    return [
        str(one.wanted)
        for one in found
        if {**vars(one.wanted), **one.resources.as_dict()} != stored.get(one.wanted)
    ]


def test_the_document_says_what_they_use(built):
    assert differs(built) == [], "make kernels WRITE=1"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_document_says_what_every_kernel_uses(folder):
    wanted = kernel_set.of_recipes(kernels.recipe.load_all(PROJECT.recipes), "gfx950")
    found = kernels.compile_all(wanted, PROJECT.overlay, folder, kernels.default_jobs(len(wanted)), print)
    kernels.check(found)
    assert differs(found) == [] and set(in_the_document()) == set(wanted), "make kernels WRITE=1"


def read_code(folder, one):
    """The machine code of a compiled kernel; FlyDSL's files need FlyDSL to be read."""
    program = "import pickle, sys; sys.stdout.write(pickle.load(open(sys.argv[1], 'rb')).ir)"
    (file,) = (folder / one.name).rglob("*.pkl")
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], text=True, capture_output=True, check=True
    )
    code = re.search(r'bin = "((?:[^"\\]|\\.)*)"', done.stdout)
    return function_code(unescape(code[1]), one.name)


def test_the_count_of_instructions_is_the_assemblys(built, folder, tmp_path):
    """What aligns loops is in the machine code alone."""
    command = [sys.executable, str(PROJECT.root / "tests/sim/mono/compile_one.py")]
    command += [str(PROJECT.overlay / "vllm"), str(tmp_path / "front"), "gfx950", "front", "rows=6", "tp=4"]
    subprocess.run(command, env=kernels.compiler_environment(folder, None), capture_output=True, check=True)
    text = (tmp_path / "front.s").read_text()
    body = text[re.search(r"^attention_front:", text, re.MULTILINE).start() : text.index(".Lfunc_end")]
    assembly = [line.split()[0] for line in re.findall(r"^\t([a-z]\w*_\w+.*)$", body, re.MULTILINE)]
    machine = list(instruction_starts(read_code(folder, built[0])))
    nops = sum(word >> 16 == 0xBF80 for word in machine)
    assert len(machine) - nops == sum(name != "s_nop" for name in assembly)
    assert len(machine) == built[0].resources.instructions


def release(version):
    """A folder with a published FlyDSL; fetched once."""
    target = PROJECT.build / "flydsl" / version
    if not (target / "flydsl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*command, f"flydsl=={version}"], check=True, timeout=600)
    return target


RELEASES = Pin.load(PROJECT.pin_file).compile_flydsl


def test_the_installed_release_is_one_of_those_that_must_compile():
    import flydsl

    assert (
        flydsl.__version__ in RELEASES and flydsl.__version__ == Pin.load(PROJECT.pin_file).packages["flydsl"]
    )


@pytest.mark.full
@pytest.mark.parametrize("version", RELEASES)
def test_the_kernels_compile_with_every_release(version, tmp_path):
    found = kernels.compile_all(EXTREMES, PROJECT.overlay, tmp_path, 2, print, flydsl=release(version))
    kernels.check(found)
    entries = [json.loads(Path(tmp_path, one.name, "entry.json").read_text()) for one in found]
    assert {one["flydsl"] for one in entries} == {version}


@pytest.mark.full
def test_another_release_never_runs_this_ones_kernels(built, folder, tmp_path):
    other = next(version for version in RELEASES if version != RELEASES[0])
    found = kernels.compile_all([SIX], PROJECT.overlay, folder, 1, print, flydsl=release(other))
    assert found[0].compiled and found[0].name != built[0].name
