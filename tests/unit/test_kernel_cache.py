# SPDX-License-Identifier: Apache-2.0
"""Build keys and the kernel cache, with a compiler that writes what FlyDSL writes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_specialized_decode_tree import TREE  # noqa: F401

from vllm.models.common.amd.persistent import build as keys  # isort: skip
from vllm.models.common.amd.persistent import kernel_cache  # isort: skip
from vllm.models.common.amd.persistent.build import Build, KernelBuildError  # isort: skip
from vllm.models.common.amd.persistent.kernel_cache import KernelCache  # isort: skip
from vllm.models.deepseek_v41.amd.mono import builds, geometry  # isort: skip

FFN = ("vllm.models.deepseek_v41.amd.mono.kernels.ffn",)
TOOLCHAIN = keys.Toolchain("1.0", "20", "a" * 64)


@pytest.fixture(autouse=True)
def toolchain(monkeypatch):
    monkeypatch.setattr(keys, "toolchain", lambda: TOOLCHAIN)
    monkeypatch.setattr(kernel_cache, "toolchain", lambda: TOOLCHAIN)


class Compiler:
    """Stands for FlyDSL: takes what its cache folder holds, and otherwise compiles and writes it there."""

    def __init__(self):
        self.compiled, self.launched, self.seen = [], 0, []
        self.ignores_cache = self.fails = self.keeps_nothing = False

    def build(self, rows=6, **changes):
        made = Build("ffn", FFN, "gfx950", (("rows", rows),), self.make)
        return replace(made, **changes) if changes else made

    def make(self, name):
        def launch(*arguments):
            folder = Path(os.environ["FLYDSL_RUNTIME_CACHE_DIR"]) / "launch_0123"
            self.seen.append({name: os.environ.get(name) for name in ("ARCH", "FLYDSL_DUMP_IR")})
            if os.environ.get("COMPILE_ONLY") != "1":
                self.launched += 1
            if self.fails:
                raise RuntimeError("out of registers")
            # As with FlyDSL, the file's name does not tell one width from another.
            file = folder / "0.pkl"
            if file.exists() and not self.ignores_cache:
                assert file.read_text() == name, "another kernel's file"
                return
            self.compiled.append(name)
            if not self.keeps_nothing:
                folder.mkdir(parents=True, exist_ok=True)
                file.unlink(missing_ok=True)
                file.write_text(name)
            (folder if folder.exists() else folder.parent).joinpath("0.lock").touch()

        return launch, ()


@pytest.fixture
def compiler():
    return Compiler()


def test_what_is_missing_is_compiled_once_said_and_found_by_the_next_process(tmp_path, compiler, caplog):
    first = KernelCache(tmp_path / "kernels")
    with caplog.at_level(logging.WARNING):
        first.launcher(compiler.build())
        first.launcher(compiler.build())
    assert (first.counters.compiled, first.counters.loaded) == (1, 0)
    assert first.counters.compiled_names == compiler.compiled == [compiler.build().name]
    assert f"compiling the kernel {compiler.build().name}: no entry" in caplog.text
    second = KernelCache(tmp_path / "kernels")
    second.launcher(compiler.build())
    assert (second.counters.compiled, second.counters.loaded) == (0, 1)
    assert compiler.launched == 0, "preparing a kernel must not launch it"


def test_kernels_never_meet_each_others_files(tmp_path, compiler):
    cache = KernelCache(tmp_path)
    for rows in (6, 12, 6):
        KernelCache(tmp_path).launcher(compiler.build(rows))
    cache.launcher(compiler.build(12))
    assert len(compiler.compiled) == 2 and cache.counters.loaded == 1


def test_a_start_over_shipped_kernels_compiles_and_writes_nothing(tmp_path, compiler):
    shipped, folder = tmp_path / "shipped", tmp_path / "cache"
    KernelCache(shipped).launcher(compiler.build())
    before = sorted(shipped.rglob("*"))
    cache = KernelCache(folder, (shipped,))
    cache.launcher(compiler.build())
    assert (cache.counters.compiled, cache.counters.loaded) == (0, 1)
    assert not folder.exists() and sorted(shipped.rglob("*")) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "gfx942"},
        {"parameters": (("rows", 7),)},
        {"kernel": "attention_front"},
        {"modules": (*FFN, "vllm.models.common.amd.persistent.isa.gfx950")},
    ],
)
def test_a_kernel_of_something_else_has_another_name(compiler, changes):
    assert compiler.build(**changes).name != compiler.build().name
    assert compiler.build(**changes).digest != compiler.build().digest


def test_another_toolchain_and_another_optimisation_level_are_other_kernels(compiler, monkeypatch):
    plain = compiler.build().digest
    monkeypatch.setenv("FLYDSL_COMPILE_OPT_LEVEL", "3")
    levelled = compiler.build().digest
    monkeypatch.delenv("FLYDSL_COMPILE_OPT_LEVEL")
    monkeypatch.setattr(keys, "toolchain", lambda: replace(TOOLCHAIN, digest="b" * 64))
    assert len({plain, levelled, compiler.build().digest}) == 3


def copied(tmp_path):
    """A copy of the kernels' sources."""
    root = tmp_path / "sources"
    for _, file in keys.sources(FFN[0]):
        copy = root / file.relative_to(keys.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    return root


SOURCES = [name for name, _ in keys.sources(FFN[0])]


@pytest.mark.parametrize("module", SOURCES)
def test_every_source_of_a_kernel_is_in_its_key(tmp_path, module):
    root = copied(tmp_path)
    assert keys.source_digest(FFN, root) == keys.source_digest(FFN), "a copy elsewhere is the same kernel"
    file = dict(keys.sources(FFN[0], root))[module]
    file.write_text(file.read_text() + "\n# changed\n")
    keys.source_digest.cache_clear()
    assert keys.source_digest(FFN, root) != keys.source_digest(FFN)


def test_the_sources_are_the_kernels_stages_and_library_and_no_host_code():
    assert {
        "vllm.models.deepseek_v41.amd.mono.stages.down",
        "vllm.models.common.amd.persistent.device",
        "vllm.models.deepseek_v41.amd.mono.geometry",
    } <= set(SOURCES)
    assert not [name for name in SOURCES if name.endswith(("kernel_cache", "build", "mono_decode", "runner"))]


def test_the_instructions_of_the_architecture_are_in_the_key_too():
    made = builds.ffn_build(geometry.FfnGeometry(6, 4), "gfx950")
    assert "vllm.models.common.amd.persistent.isa.gfx950" in made.modules
    assert made.name.startswith("ffn_gfx950_tp4_rows6_experts384_picks6_") and made.name.endswith(made.digest)


def test_every_geometry_has_a_name_of_its_own():
    names = {builds.ffn_build(one, "gfx950").title for one in builds.every_geometry()}
    assert len(names) == len(builds.every_geometry()) == 48 * 2 * 2


def test_an_architecture_without_kernels_is_named():
    with pytest.raises(
        KernelBuildError, match=r"no mono kernels for gfx90a, there are some for gfx942, gfx9"
    ):
        builds.ffn_build(geometry.FfnGeometry(6, 4), "gfx90a")


def test_a_kernel_that_an_architecture_lacks_is_named_with_those_that_it_has():
    there = r"for gfx942, there are some of up to 32 rows at TP 2 and up to 42 rows at TP 4"
    with pytest.raises(KernelBuildError, match=f"kernel ffn of 43 rows at TP 4 {there}"):
        builds.ffn_build(geometry.FfnGeometry(43, 4), "gfx942")
    with pytest.raises(KernelBuildError, match=f"kernel attention_back_ffn of 33 rows at TP 2 {there}"):
        builds.kernel_build("attention_back_ffn", geometry.BackGeometry(33, 2), "gfx942")
    assert builds.ffn_build(geometry.FfnGeometry(32, 2), "gfx942")


def test_a_module_that_is_not_there_is_named(tmp_path):
    with pytest.raises(KernelBuildError, match=r"no kernel source vllm\.models\.nowhere"):
        keys.sources("vllm.models.nowhere", tmp_path)


def test_an_old_kernel_is_left_alone_and_said(tmp_path, compiler, caplog, monkeypatch):
    KernelCache(tmp_path).launcher(compiler.build())
    old = compiler.build()
    assert old.name.endswith(old.digest)
    monkeypatch.setattr(keys, "toolchain", lambda: replace(TOOLCHAIN, digest="b" * 64))
    cache = KernelCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.launcher(compiler.build())
    assert cache.counters.compiled == 1 and f"stale entries of {old.digest}" in caplog.text
    assert (tmp_path / old.name).is_dir()


def damage(entry, how):
    (file,) = entry.rglob("*.pkl")
    if how == "changed":
        file.write_text("something else")
    elif how == "gone":
        file.unlink()
    elif how == "half-written":
        (entry / "entry.json").write_text('{"files":')
    else:
        (entry / "entry.json").write_text(json.dumps({"files": {}}))


@pytest.mark.parametrize("how", ["changed", "gone", "half-written", "empty"])
def test_a_damaged_entry_is_compiled_again_and_replaced(tmp_path, compiler, caplog, how):
    KernelCache(tmp_path).launcher(compiler.build())
    damage(tmp_path / compiler.build().name, how)
    cache = KernelCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.launcher(compiler.build())
    assert cache.counters.compiled == 1 and "is not used" in caplog.text
    after = KernelCache(tmp_path)
    after.launcher(compiler.build())
    assert after.counters.compiled == 0


def test_a_damaged_shipped_entry_is_compiled_into_the_writable_folder(tmp_path, compiler):
    KernelCache(tmp_path / "shipped").launcher(compiler.build())
    damage(tmp_path / "shipped" / compiler.build().name, "changed")
    cache = KernelCache(tmp_path / "own", (tmp_path / "shipped",))
    cache.launcher(compiler.build())
    assert cache.counters.compiled == 1 and (tmp_path / "own" / compiler.build().name).is_dir()


def test_an_entry_that_flydsl_does_not_take_is_counted_as_compiled(tmp_path, compiler, caplog):
    KernelCache(tmp_path).launcher(compiler.build())
    compiler.ignores_cache = True
    cache = KernelCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.launcher(compiler.build())
    assert cache.counters.compiled == 1 and "did not take the entry" in caplog.text


def test_a_kernel_that_does_not_compile_is_named(tmp_path, compiler):
    compiler.fails = True
    with pytest.raises(KernelBuildError, match=r"ffn_gfx950_rows6_\w+ does not compile: out of registers"):
        KernelCache(tmp_path).launcher(compiler.build())
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]


def test_a_compiler_that_keeps_nothing_is_an_error(tmp_path, compiler):
    compiler.keeps_nothing = True
    with pytest.raises(KernelBuildError, match="wrote nothing to its cache"):
        KernelCache(tmp_path).launcher(compiler.build())


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path, compiler):
    (tmp_path / "file").touch()
    with pytest.raises(KernelBuildError) as caught:
        KernelCache(tmp_path / "file" / "kernels").launcher(compiler.build())
    message = str(caught.value)
    assert str(tmp_path / "file" / "kernels") in message and "VLLM_MONO_KERNEL_CACHE" in message
    assert not compiler.compiled, "found before minutes of compiling"


def test_a_kernel_is_compiled_for_its_gpu_whatever_the_environment_which_stays(
    tmp_path, compiler, monkeypatch
):
    monkeypatch.setenv("ARCH", "gfx942")
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", "aiter's")
    monkeypatch.setenv("FLYDSL_DUMP_IR", "1")
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    before = dict(os.environ)
    KernelCache(tmp_path).launcher(compiler.build())
    assert dict(os.environ) == before
    assert compiler.seen == [{"ARCH": "gfx950", "FLYDSL_DUMP_IR": None}], "a dump would keep it from caching"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"VLLM_MONO_KERNEL_CACHE": "/a", "VLLM_CACHE_ROOT": "/b"}, "/a"),
        ({"VLLM_CACHE_ROOT": "/b"}, "/b/mono_kernels"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/vllm/mono_kernels"),
        ({}, str(Path.home() / ".cache/vllm/mono_kernels")),
    ],
)
def test_the_writable_folder(environ, folder):
    assert kernel_cache.kernel_folder(environ) == Path(folder)


def test_the_shipped_folders():
    assert kernel_cache.shipped_folders({"VLLM_MONO_KERNELS_SHIPPED": "/a:/b"}) == (Path("/a"), Path("/b"))
    assert kernel_cache.shipped_folders({}) == ()


def test_a_rank_does_not_wait_for_ever_for_another(tmp_path, compiler, caplog):
    build = compiler.build()
    with (tmp_path / f".{build.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        started = time.monotonic()
        cache = KernelCache(tmp_path, lock_seconds=0.2)
        with caplog.at_level(logging.WARNING):
            cache.launcher(build)
        assert 0.2 <= time.monotonic() - started < 30
    assert cache.counters.compiled == 1 and "going on without it" in caplog.text


def test_a_rank_takes_what_another_compiled_while_it_waited(tmp_path, compiler):
    build = compiler.build()
    other = KernelCache(tmp_path)
    cache = KernelCache(tmp_path, lock_seconds=60)
    with (tmp_path / f".{build.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=cache.launcher, args=(build,))
        waiting.start()
        time.sleep(0.2)
        other._open(build, None)
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.join(60)
    assert (cache.counters.compiled, cache.counters.loaded) == (0, 1)


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, compiler, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(kernel_cache.fcntl, "flock", refuse)
    cache = KernelCache(tmp_path)
    cache.launcher(compiler.build())
    assert cache.counters.compiled == 1


def test_two_ranks_that_compile_at_once_leave_one_whole_entry(tmp_path, compiler):
    build = compiler.build()
    caches = [KernelCache(tmp_path) for _ in range(2)]
    for cache in caches:
        cache._open(build, None)
    assert [cache.counters.compiled for cache in caches] == [1, 1]
    assert kernel_cache.entry_fault(tmp_path / build.name) is None
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [build.name]


def test_other_users_can_read_an_entry(tmp_path, compiler):
    KernelCache(tmp_path).launcher(compiler.build())
    entry = tmp_path / compiler.build().name
    modes = {path.stat().st_mode & 0o777 for path in entry.rglob("*") if path.is_file()}
    assert modes == {0o644} and entry.stat().st_mode & 0o777 == 0o755
