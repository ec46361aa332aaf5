# SPDX-License-Identifier: Apache-2.0
"""The machine's GPUs as read from a sysfs folder made by each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_overlay.errors import OverlayError
from rocm_overlay.machine import Gpu, gfx_name, read_gpus, visible_gpus

GIB = 1 << 30


def write_node(sysfs: Path, number: int, *, banks: dict[int, int] | None = None, **fields: int) -> Path:
    node = sysfs / "class/kfd/kfd/topology/nodes" / str(number)
    node.mkdir(parents=True)
    (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in fields.items()))
    for index, (heap, size) in enumerate((banks or {}).items()):
        bank = node / "mem_banks" / str(index)
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n")
    return node


def write_cpu(sysfs: Path, number: int) -> None:
    write_node(sysfs, number, banks={0: 512 * GIB}, cpu_cores_count=64, simd_count=0, gfx_target_version=0)


def write_gpu(
    sysfs: Path, number: int, version: int, units: int, memory: int = 288 * GIB, **fields: int
) -> Path:
    return write_node(
        sysfs,
        number,
        banks={1: memory, 4: 64 << 10},
        simd_count=units * 4,
        simd_per_cu=4,
        gfx_target_version=version,
        **fields,
    )


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (120001, "gfx1201")]
)
def test_the_drivers_number_names_the_architecture(number: int, name: str) -> None:
    assert gfx_name(number) == name


def test_a_machine_without_the_driver_has_no_gpus(tmp_path: Path) -> None:
    assert read_gpus(tmp_path) == []


def test_gpus_are_listed_in_the_drivers_numeric_order_without_processors(tmp_path: Path) -> None:
    write_cpu(tmp_path, 0)
    write_gpu(tmp_path, 10, 90402, 304, memory=192 * GIB)
    write_gpu(tmp_path, 2, 90500, 256, memory=288 * GIB, unique_id=0xABC)
    assert read_gpus(tmp_path) == [
        Gpu(0, "gfx950", 256, 288 * GIB, unique_id="0000000000000abc"),
        Gpu(1, "gfx942", 304, 192 * GIB),
    ]


@pytest.mark.parametrize(
    ("version", "units", "partitioned"),
    [
        (90402, 304, False),
        (90402, 38, True),
        (90500, 256, False),
        (90500, 32, True),
        (110000, 48, False),
    ],
)
def test_fewer_compute_units_than_the_card_is_a_partition(
    tmp_path: Path, version: int, units: int, partitioned: bool
) -> None:
    write_gpu(tmp_path, 1, version, units)
    assert read_gpus(tmp_path)[0].partitioned is partitioned


@pytest.mark.parametrize(("mode", "partitioned"), [("SPX\n", False), ("CPX\n", True)])
def test_the_drivers_partition_mode_decides_where_it_is_readable(
    tmp_path: Path, mode: str, partitioned: bool
) -> None:
    # A gfx942 card with fewer units than MI300X is whole when the driver says so.
    write_gpu(tmp_path, 1, 90402, 228, drm_render_minor=128)
    device = tmp_path / "class/drm/renderD128/device"
    device.mkdir(parents=True)
    (device / "current_compute_partition").write_text(mode)
    gpu = read_gpus(tmp_path)[0]
    assert gpu.partition_mode == mode.strip()
    assert gpu.partitioned is partitioned


def test_both_kinds_of_card_memory_count_and_nothing_else(tmp_path: Path) -> None:
    write_node(
        tmp_path,
        1,
        banks={1: 16 * GIB, 2: 240 * GIB, 3: 7, 4: 9},
        simd_count=1216,
        simd_per_cu=4,
        gfx_target_version=90402,
    )
    assert read_gpus(tmp_path)[0].memory_bytes == 256 * GIB


def test_a_device_the_container_was_not_given_is_left_out(tmp_path: Path) -> None:
    write_gpu(tmp_path, 1, 90500, 256)
    hidden = write_gpu(tmp_path, 2, 90500, 256)
    # The driver answers a read of a withheld device with an error; a folder in the file's place
    # does the same for any user.
    (hidden / "properties").unlink()
    (hidden / "properties").mkdir()
    assert [gpu.index for gpu in read_gpus(tmp_path)] == [0]


def test_a_node_without_its_architecture_is_named(tmp_path: Path) -> None:
    write_node(tmp_path, 1, simd_count=1024, simd_per_cu=4)
    with pytest.raises(OverlayError, match=r"nodes/1 has no gfx_target_version"):
        read_gpus(tmp_path)


def test_a_field_that_is_no_number_is_named(tmp_path: Path) -> None:
    node = write_gpu(tmp_path, 1, 90500, 256)
    (node / "properties").write_text("simd_count many\n")
    with pytest.raises(OverlayError, match="simd_count many"):
        read_gpus(tmp_path)


def test_bytes_that_are_no_text_are_named_and_no_traceback(tmp_path: Path) -> None:
    node = write_gpu(tmp_path, 1, 90500, 256)
    (node / "properties").write_bytes(b"simd_count \xff\xfe\n")
    with pytest.raises(OverlayError, match=r"simd_count \\xff\\xfe"):
        read_gpus(tmp_path)


def test_a_partition_mode_that_is_no_text_is_no_whole_card(tmp_path: Path) -> None:
    write_gpu(tmp_path, 1, 90402, 304, drm_render_minor=128)
    device = tmp_path / "class/drm/renderD128/device"
    device.mkdir(parents=True)
    (device / "current_compute_partition").write_bytes(b"\xff\n")
    assert read_gpus(tmp_path)[0].partitioned


CARDS = [Gpu(i, "gfx950", 256, 288 * GIB, unique_id=f"{i + 10:016x}") for i in range(4)]


@pytest.mark.parametrize(
    ("environ", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, [2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000000b"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visibility_variables_narrow_as_the_runtime_does(environ: dict[str, str], indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(CARDS, environ)] == indices
