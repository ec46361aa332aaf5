# SPDX-License-Identifier: Apache-2.0
"""doctor on machines made of folders: a fit one, and one with each fault."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_overlay import cli_image, doctor
from rocm_overlay.doctor import FAIL, OK, UNKNOWN, WARN, Machine, Needs
from rocm_overlay.errors import CheckFailed
from rocm_overlay.pin import Pin
from tests.unit.test_machine import write_cpu, write_gpu

ROOT = Path(__file__).resolve().parents[2]
PIN = Pin.load(ROOT / "base.toml")
GIB = 1 << 30
GFX942, GFX950 = 90402, 90500
TP4 = Needs("mi355x-tp4", ("gfx950",), gpus=4, memory_gib=288)
MANIFEST = {"version": "0.1.0", "overlay_hash": "c" * 64}


def make_machine(folder, gpus=8, version=GFX950, units=256, memory=287 * GIB, mode="SPX", **environ):
    """A healthy MI355X x8 machine, but for what is given."""
    sysfs = folder / "sys"
    write_cpu(sysfs, 0)
    (sysfs / doctor.NODES / "0/gpu_id").write_text("0\n")
    for number in range(1, gpus + 1):
        node = write_gpu(sysfs, number, version, units, memory, drm_render_minor=127 + number)
        (node / "gpu_id").write_text(f"{1000 + number}\n")
        device = sysfs / f"class/drm/renderD{127 + number}/device"
        device.mkdir(parents=True)
        (device / "current_compute_partition").write_text(f"{mode}\n")
    (sysfs / doctor.KFD_PROCESSES).mkdir(parents=True, exist_ok=True)
    (folder / "proc").mkdir()
    (folder / "home").mkdir()
    environ = {"HOME": str(folder / "home"), **environ}
    return Machine(sysfs, folder / "proc", environ, PIN.packages.get, lambda: MANIFEST)


def hold(machine, process, gpu, size=GIB):
    """Process ``process`` holds memory of the GPU at position ``gpu``."""
    folder = machine.sysfs / doctor.KFD_PROCESSES / str(process)
    folder.mkdir(exist_ok=True)
    (folder / f"vram_{1001 + gpu}").write_text(f"{size}\n")


def examine(machine, needs=TP4):
    return {row.check: row for row in doctor.examine(PIN, machine, needs)}


def refuse():
    raise CheckFailed("2 of 9 laid files are not as laid\n\ntable", fix="pull the image again")


def test_a_fit_machine_passes_every_check(tmp_path):
    rows = examine(make_machine(tmp_path))
    assert {row.status for row in rows.values()} == {OK}
    assert set(rows) == {
        *("GPU count", "architecture", "compute units", "memory a GPU", "other processes", "overlay"),
        *PIN.packages,
        *("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLYDSL_RUNTIME_CACHE_DIR"),
    }


def test_every_row_that_fails_says_what_was_seen_what_is_wanted_and_what_to_do(tmp_path):
    machine = make_machine(
        tmp_path, gpus=2, version=GFX942, units=38, memory=24 * GIB, mode="CPX", VLLM_CACHE_ROOT="/proc/no"
    )
    hold(machine, 77, 0)
    machine = replace(machine, version=lambda name: None, verify=refuse)
    failed = [row for row in examine(machine).values() if row.status == FAIL]
    assert len(failed) == 11
    assert all(row.seen and row.wanted and row.fix for row in failed)


def test_a_partitioned_gpu_is_named_as_such(tmp_path):
    row = examine(make_machine(tmp_path, gpus=64, units=32, mode="CPX"))["compute units"]
    assert row.status == FAIL
    assert row.seen == "32 on GPU 0: partitioned, CPX mode"
    assert "256" in row.wanted and "SPX" in row.fix


def test_a_whole_card_with_too_few_compute_units_is_not_called_partitioned(tmp_path):
    row = examine(make_machine(tmp_path, version=GFX942, units=228), Needs(architectures=("gfx942",)))
    assert row["compute units"].status == FAIL
    assert row["compute units"].seen == "228 on GPU 0"


@pytest.mark.parametrize(("gpus", "status"), [(0, FAIL), (3, FAIL), (4, OK), (8, OK)])
def test_the_gpus_must_be_enough_for_tensor_parallelism(tmp_path, gpus, status):
    row = examine(make_machine(tmp_path, gpus=gpus))["GPU count"]
    assert (row.status, row.wanted) == (status, "4 or more (mi355x-tp4)")


def test_only_visible_gpus_count(tmp_path):
    rows = examine(make_machine(tmp_path, HIP_VISIBLE_DEVICES="0,1"))
    assert (rows["GPU count"].status, rows["GPU count"].seen) == (FAIL, "2")


def test_a_machine_without_gpus_is_told_how_a_container_gets_them(tmp_path):
    rows = examine(make_machine(tmp_path, gpus=0))
    assert "--device /dev/kfd" in rows["GPU count"].fix
    assert "architecture" not in rows
    assert rows["other processes"].status == OK


def test_another_architecture_than_the_recipes_fails(tmp_path):
    row = examine(make_machine(tmp_path, version=GFX942, units=304))["architecture"]
    assert (row.status, row.seen, row.wanted) == (FAIL, "gfx942", "gfx950")


def test_a_gpu_beyond_those_that_the_server_takes_concerns_nobody(tmp_path):
    """A server takes the first GPUs that it sees: an integrated one behind them is never used."""
    machine = make_machine(tmp_path)
    node = machine.sysfs / doctor.NODES / "9"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 4\nsimd_per_cu 2\ngfx_target_version 100306\n")
    rows = examine(machine)
    assert {rows[name].status for name in ("architecture", "compute units", "memory a GPU")} == {OK}


@pytest.mark.parametrize(("gib", "status"), [(192, FAIL), (281, FAIL), (283, OK), (288, OK)])
def test_a_gpus_memory_is_the_recipes_cards_within_what_the_driver_keeps(tmp_path, gib, status):
    assert examine(make_machine(tmp_path, memory=gib * GIB))["memory a GPU"].status == status


def test_a_driver_file_that_makes_no_sense_fails_the_gpus_and_nothing_else(tmp_path):
    machine = make_machine(tmp_path)
    (machine.sysfs / doctor.NODES / "1/properties").write_text("simd_count many\n")
    rows = examine(machine)
    assert rows["GPUs"].status == FAIL and rows["overlay"].status == OK


UNREADABLE = [
    PermissionError(13, "Permission denied", "/sys/class/kfd"),
    UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal not in range(128)"),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("reader", "checks"),
    [
        ("read_gpus", {"GPUs"}),
        ("held_memory", {"other processes"}),
        ("_package", set(PIN.packages)),
        ("_overlay", {"overlay"}),
        ("_cache", {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLYDSL_RUNTIME_CACHE_DIR"}),
    ],
)
def test_files_that_cannot_be_read_leave_their_checks_unknown_and_no_other(
    tmp_path, monkeypatch, error, reader, checks
):
    def fail(*_):
        raise error

    monkeypatch.setattr(doctor, reader, fail)
    rows = examine(make_machine(tmp_path))
    assert {name for name, row in rows.items() if row.status == UNKNOWN} == checks
    assert {row.status for name, row in rows.items() if name not in checks} == {OK}
    assert all(str(error) in rows[name].seen and rows[name].fix for name in checks)


def test_driver_files_that_are_no_text_do_not_end_the_report(tmp_path):
    machine = make_machine(tmp_path)
    (machine.sysfs / doctor.NODES / "1/properties").write_bytes(b"simd_count \xff\xfe\n")
    rows = examine(machine)
    assert rows["overlay"].status == OK and {row.status for row in rows.values()} != {OK}


def test_what_the_driver_lists_under_no_process_number_holds_nothing(tmp_path):
    machine = make_machine(tmp_path)
    (machine.sysfs / doctor.KFD_PROCESSES / "odd").mkdir()
    (machine.sysfs / doctor.KFD_PROCESSES / "odd/vram_1001").write_text("5\n")
    assert examine(machine)["other processes"].status == OK


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("flydsl", "0.2.0", FAIL),
        ("flydsl", PIN.compile_flydsl[-1], OK),
        ("triton", "3.0.0", WARN),
        ("torch", "2.13.0+rocm10", OK),
        ("torch", None, FAIL),
        ("amd-aiter", "0.1.25", WARN),
    ],
)
def test_package_versions_against_the_pin(tmp_path, package, version, status):
    machine = make_machine(tmp_path)
    machine = replace(machine, version={**PIN.packages, package: version}.get)
    row = examine(machine)[package]
    assert (row.status, row.seen) == (status, version or "not installed")
    assert bool(row.fix) is (status != OK)


def test_a_damaged_overlay_fails_with_its_first_line(tmp_path):
    row = examine(replace(make_machine(tmp_path), verify=refuse))["overlay"]
    assert (row.status, row.seen) == (FAIL, "2 of 9 laid files are not as laid")
    assert row.fix == "pull the image again"


def test_caches_are_looked_for_where_each_program_puts_them():
    folders = doctor.cache_folders({"HOME": "/h"})
    assert folders["VLLM_CACHE_ROOT"] == Path("/h/.cache/vllm")
    assert folders["TRITON_CACHE_DIR"] == Path("/h/.triton/cache")
    assert folders["FLYDSL_RUNTIME_CACHE_DIR"] == Path("/h/.flydsl/cache")
    moved = doctor.cache_folders({"HOME": "/h", "VLLM_CACHE_ROOT": "/share", "TRITON_HOME": "/t"})
    assert moved["VLLM_CACHE_ROOT"] == Path("/share")
    assert moved["TRITON_CACHE_DIR"] == Path("/t/.triton/cache")


def test_a_cache_that_cannot_be_written_fails_and_a_missing_one_that_can_be_made_does_not(tmp_path):
    # Not even root makes a file in /proc.
    machine = make_machine(
        tmp_path, FLYDSL_RUNTIME_CACHE_DIR="/proc/cache", TRITON_CACHE_DIR=f"{tmp_path}/a/b"
    )
    rows = examine(machine)
    assert rows["FLYDSL_RUNTIME_CACHE_DIR"].status == FAIL
    assert "set FLYDSL_RUNTIME_CACHE_DIR" in rows["FLYDSL_RUNTIME_CACHE_DIR"].fix
    assert rows["TRITON_CACHE_DIR"].status == OK and not (tmp_path / "a").exists()


def test_processes_on_gpus_that_are_not_needed_are_a_warning(tmp_path):
    machine = make_machine(tmp_path)
    hold(machine, 77, gpu=6)
    row = examine(machine)["other processes"]
    assert (row.status, row.seen) == (WARN, "GPU 6: process 77")


def test_a_process_on_the_first_gpus_fails_and_the_free_ones_are_named(tmp_path):
    machine = make_machine(tmp_path)
    for gpu in (0, 2):
        hold(machine, 77, gpu)
    row = examine(machine)["other processes"]
    assert (row.status, row.seen) == (FAIL, "GPU 0: process 77; GPU 2: process 77")
    assert row.fix.startswith("HIP_VISIBLE_DEVICES=1,3,4,5")


def test_processes_on_so_many_gpus_that_too_few_are_free_fail(tmp_path):
    machine = make_machine(tmp_path, gpus=4)
    hold(machine, 77, gpu=3)
    assert examine(machine)["other processes"].fix == "stop them, or serve on another machine"


def test_a_process_that_holds_no_memory_holds_no_gpu(tmp_path):
    machine = make_machine(tmp_path)
    hold(machine, 77, gpu=0, size=0)
    assert examine(machine)["other processes"].status == OK


def test_without_the_drivers_list_open_devices_are_looked_for_in_proc(tmp_path):
    machine = make_machine(tmp_path)
    (machine.sysfs / doctor.KFD_PROCESSES).rmdir()
    assert examine(machine)["other processes"].status == OK
    (machine.proc / "42/fd").mkdir(parents=True)
    (machine.proc / "42/fd/3").symlink_to("/dev/kfd")
    row = examine(machine)["other processes"]
    assert (row.status, row.seen) == (WARN, "the GPU device is open in 42")


def test_a_machine_that_tells_nothing_of_processes_or_gpus_is_unknown(tmp_path):
    machine = make_machine(tmp_path, gpus=0)
    (machine.sysfs / doctor.KFD_PROCESSES).rmdir()
    assert examine(machine)["other processes"].status == UNKNOWN


def test_a_recipe_says_what_is_needed():
    from rocm_overlay import recipe

    needs = Needs.of(recipe.load(ROOT / "recipes", "mi355x-tp4"))
    assert needs == Needs("mi355x-tp4", ("gfx950",), gpus=4, memory_gib=288)


def run_doctor(monkeypatch, machine, *arguments):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    cli_image.register(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", *arguments])
    return parsed.run(parsed)


def test_the_table_has_every_row_what_to_do_and_the_count(tmp_path, monkeypatch, capsys):
    assert run_doctor(monkeypatch, make_machine(tmp_path, gpus=2), "--recipe", "mi355x-tp4") == 1
    shown = capsys.readouterr().out
    assert "what to do\n  GPU count: use a recipe for fewer GPUs" in shown
    assert "12 ok, 0 warn, 1 fail, 0 unknown" in shown


def test_warnings_alone_pass_and_json_has_the_same_rows(tmp_path, monkeypatch, capsys):
    machine = make_machine(tmp_path)
    hold(machine, 77, gpu=6)
    assert run_doctor(monkeypatch, machine, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 13
    assert {"check": "other processes", "status": "warn"}.items() <= rows[4].items()
    assert set(rows[0]) == {"check", "status", "seen", "wanted", "fix"}
