# SPDX-License-Identifier: Apache-2.0
"""The real overlay and series over the real pinned base, through the console script."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from rocm_overlay import cli, install
from rocm_overlay.pin import Pin
from rocm_overlay.plan import Sources, find_drift, make_lock, make_plan
from rocm_overlay.project import Project
from rocm_overlay.series import load_series

PROJECT = Project.find()

CALL_SITE = """
import sys
from types import SimpleNamespace
from tests.harness import fake_rocm

fake_rocm.install(sys.argv[1])
from vllm.models.deepseek_v41.amd import ops, rocm

ops.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=sys.argv[2] == "on")))
builder = object.__new__(rocm.DeepseekV41ROCMAiterSparseSWAMetadataBuilder)
kernel = "vllm.models.deepseek_v41.amd.ops.swa_decode_meta"
seen = []

class Reached(Exception):
    pass

def stop(*args, **kwargs):
    raise Reached

# Either path ends at the first thing it asks of its batch.
rocm.DeepseekV41ROCMAiterSparseSWAMetadataBuilder.__mro__[1].build = stop
try:
    builder.build(0, SimpleNamespace())
except Reached:
    print("vllm's build, kernel imported:", kernel in sys.modules)
except AttributeError:
    print("our build, kernel imported:", kernel in sys.modules)
"""


@pytest.fixture(scope="module")
def sources():
    return Sources.load(PROJECT)


@pytest.fixture
def touched_base(tmp_path, sources):
    """Only those files of the pinned base that we touch, so that a test may change them."""
    for entry in sources.pin.files:
        (tmp_path / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT.base / entry.path, tmp_path / entry.path)
    (tmp_path / "vllm/__init__.py").touch()
    return tmp_path


def test_the_pinned_base_has_no_drift(sources):
    assert find_drift(sources, PROJECT.base) == []


def test_the_lock_is_what_the_lock_verb_would_write(sources):
    assert tuple(make_lock(sources, PROJECT.base)) == sources.pin.files


def test_the_laid_tree_is_current_and_intact(sources):
    manifest = install.verify(PROJECT.tree)
    stamp = sources.stamp()
    assert {key: manifest[key] for key in ("overlay_hash", "series_hash")} == {
        key: stamp[key] for key in ("overlay_hash", "series_hash")
    }, "run make setup: build/tree is older than overlay/ or patches/"


def test_every_laid_python_file_compiles(sources):
    for change in make_plan(sources, PROJECT.base).changes:
        if change.path.endswith(".py") and change.content is not None:
            ast.parse(change.content, change.path)


def test_the_series_applies_one_patch_after_another(sources):
    """Each prefix of the series must stand alone, so that a patch can be sent upstream by itself."""
    for count in range(len(sources.series.patches) + 1):
        prefix = type(sources.series)(sources.series.patches[:count], "")
        paths = {diff.path for patch in prefix.patches for diff in patch.diffs}
        kept = tuple(one for one in sources.pin.files if one.action != "patch" or one.path in paths)
        pin = Pin(**{**vars(sources.pin), "files": kept})
        for change in make_plan(Sources(pin, sources.overlay, prefix), PROJECT.base).changes:
            if change.path.endswith(".py") and change.content is not None:
                compile(change.content, change.path, "exec")


def test_every_patch_names_a_test_that_exists(sources):
    for patch in sources.series.patches:
        file, _, name = patch.header["Test"].partition("::")
        text = (PROJECT.root / file).read_text()
        assert not name or re.search(rf"def {re.escape(name)}\b", text), (
            f"{patch.name}: {patch.header['Test']}"
        )


def test_the_readme_of_the_patches_holds_the_series_table():
    text = (PROJECT.patches / "README.md").read_text()
    table = text.split("<!-- series -->\n")[1].split("\n<!-- /series -->")[0]
    assert table == load_series(PROJECT.patches).markdown()


@pytest.mark.parametrize(
    ("arch", "flag", "path"),
    [
        ("gfx950", "on", "our build, kernel imported: True"),
        ("gfx950", "off", "vllm's build, kernel imported: False"),
    ],
)
def test_the_builder_asks_the_gate_before_it_imports_the_kernel(arch, flag, path):
    command = [sys.executable, "-c", CALL_SITE, arch, flag]
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT.tree}{os.pathsep}{PROJECT.root}"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.stdout.strip().split("\n")[-1] == path, done.stdout + done.stderr


def test_drift_is_shown_for_a_changed_a_missing_and_an_extra_file(touched_base, sources, capsys):
    changed, missing = (entry.path for entry in sources.pin.files[:2])
    (touched_base / changed).write_text("changed = True\n")
    (touched_base / missing).unlink()
    new = next((file.path for file in sources.overlay.files if file.kind == "new"), None)
    states = {changed: "changed", missing: "missing"}
    if new:
        (touched_base / new).parent.mkdir(parents=True, exist_ok=True)
        (touched_base / new).write_text("extra = True\n")
        states[new] = "new there"
    assert cli.main(["drift", "--base", str(touched_base)]) == 1
    printed = capsys.readouterr()
    for path, state in states.items():
        assert re.search(rf"{re.escape(path)} +{state} ", printed.out), printed.out
    assert f"{len(states)} files drifted" in printed.err and "make rebase" in printed.err


def run(capsys, *argv):
    status = cli.main([str(one) for one in argv])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_lay_verify_and_lay_again_through_the_console_script(touched_base, capsys):
    site = ("--site", touched_base)
    status, text = run(capsys, "verify", *site)
    assert status == 1 and "not laid" in text
    status, text = run(capsys, "lay", "--installed", *site, "--base-reference", "image:tag")
    assert status == 0 and "replaced" in text and "accepted" in text
    status, text = run(capsys, "lay", "--installed", *site)
    assert status == 0 and "already laid" in text
    status, text = run(capsys, "verify", *site)
    assert status == 0 and "image:tag" in text
    status, text = run(capsys, "verify", "--json", *site)
    assert json.loads(text)["base"]["reference"] == "image:tag"
    status, text = run(capsys, "verify", "--site", touched_base / "vllm")
    assert status == 2 and "holds no vllm" in text


def test_allowed_drift_is_loud(touched_base, sources, capsys):
    path = next(entry.path for entry in sources.pin.files if entry.action == "replace")
    with (touched_base / path).open("a") as stream:
        stream.write("# upstream changed this\n")
    status, text = run(capsys, "lay", "--installed", "--site", touched_base)
    assert status == 1 and path in text and "make rebase" in text
    status, text = run(capsys, "lay", "--installed", "--site", touched_base, "--allow-drift", path)
    assert status == 0 and "DRIFT ALLOWED" in text
    status, text = run(capsys, "verify", "--site", touched_base)
    assert status == 0 and re.search(rf"drift allowed +{re.escape(path)}", text)


def test_the_stamp_is_what_the_manifest_holds(capsys, sources):
    status, text = run(capsys, "stamp")
    assert status == 0 and dict(line.split("=", 1) for line in text.splitlines()) == sources.stamp()


def test_an_unknown_verb_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-m", "rocm_overlay.cli", "lya"], text=True, capture_output=True, check=False
    )
    assert done.returncode == 2 and "lya" in done.stderr


def names_bound_by(tree):
    """The names a module binds at its top level, conditional ones included."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return bound


def test_what_other_files_import_from_ours_is_there(sources):
    """A base file that imports a name which our replacement dropped would fail on a server only."""
    modules = {}
    for file in sources.overlay.files:
        if file.path.endswith(".py"):
            name = file.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            modules[name] = names_bound_by(ast.parse(file.content))
    missing = set()
    named = re.compile("|".join(map(re.escape, modules)).encode())
    for path in (PROJECT.tree / "vllm").rglob("*.py"):
        content = path.read_bytes()
        for node in ast.walk(ast.parse(content)) if named.search(content) else ():
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                folder = PROJECT.tree / node.module.replace(".", "/")
                for alias in node.names:
                    submodule = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                    if alias.name not in modules[node.module] and not submodule:
                        missing.add(f"{path.name}: from {node.module} import {alias.name}")
    assert modules and not missing
