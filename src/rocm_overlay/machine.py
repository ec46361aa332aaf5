# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, read from the kernel driver's files in sysfs.

Nothing here needs ROCm, torch or a working device: an entry point may ask before a server starts,
and a test may hand it a folder of its own. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_overlay.errors import OverlayError

NODES = Path("class/kfd/kfd/topology/nodes")

# Compute units of an unpartitioned card (SPX mode) by architecture: MI300X and MI325X; MI350X and
# MI355X.
FULL_COMPUTE_UNITS: Mapping[str, int] = {"gfx942": 304, "gfx950": 256}

# Heap types of the driver's memory banks that are the card's own memory: visible to the host
# through the bus window (1) or not (2).
CARD_MEMORY_HEAPS = frozenset({1, 2})

# The mode in which a card is one device.
WHOLE_CARD_MODE = "SPX"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver shows it; a partition of a card is a GPU of its own.

    Attributes:
        index: position among the machine's GPUs, in the driver's order.
        gfx: architecture, for example ``gfx942``.
        compute_units: compute units of this device.
        memory_bytes: device memory in bytes.
        unique_id: the card's serial as the runtime writes it (16 hex digits), or "".
        partition_mode: the driver's compute partition mode (``SPX``, ``CPX``, ...), or "" where
            the driver does not tell.
    """

    index: int
    gfx: str
    compute_units: int
    memory_bytes: int
    unique_id: str = ""
    partition_mode: str = ""

    @property
    def full_compute_units(self) -> int | None:
        """Compute units of an unpartitioned card of this architecture, None where not known."""
        return FULL_COMPUTE_UNITS.get(self.gfx)

    @property
    def partitioned(self) -> bool:
        """Whether this device is only a part of its card.

        The driver's mode decides where it is readable; else fewer compute units than the full card.
        """
        if self.partition_mode:
            return self.partition_mode != WHOLE_CARD_MODE
        return self.full_compute_units is not None and self.compute_units < self.full_compute_units


def gfx_name(target_version: int) -> str:
    """The architecture's name for the driver's number: 90402 is gfx942, 90010 is gfx90a."""
    major, rest = divmod(target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def read_gpus(sysfs: Path = Path("/sys")) -> list[Gpu]:
    """The machine's GPUs in the driver's order; empty where there is no AMD GPU driver.

    A container sees every node's folder but may read only the devices it was given: a node that
    cannot be read is left out, as the runtime leaves it out.

    Args:
        sysfs: the folder mounted at /sys.

    Raises:
        OverlayError: a readable GPU node lacks a field or holds one that is not a number.
    """
    gpus: list[Gpu] = []
    for node in _nodes(sysfs):
        properties = _properties(node / "properties")
        # A node of processor cores has no SIMDs.
        if properties is None or not properties.get("simd_count"):
            continue
        gpus.append(_gpu(len(gpus), node, properties, sysfs))
    return gpus


# In the order in which they narrow.
VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that a HIP program sees under the visibility variables of ``environ``.

    ROCR_VISIBLE_DEVICES (positions or ``GPU-<serial>``) narrows first; HIP_VISIBLE_DEVICES, or
    CUDA_VISIBLE_DEVICES where that is unset, counts within the rest. As in the runtime, the list
    ends at the first entry that names no device.
    """
    seen = list(gpus)
    runtime, *programs = VISIBILITY
    if runtime in environ:
        seen = _selected(seen, environ[runtime])
    for name in programs:
        if name in environ:
            return _selected(seen, environ[name])
    return seen


def _selected(gpus: Sequence[Gpu], choice: str) -> list[Gpu]:
    by_serial = {f"GPU-{gpu.unique_id}": gpu for gpu in gpus if gpu.unique_id}
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in choice.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)])
        elif entry in by_serial:
            chosen.append(by_serial[entry])
        else:
            break
    return chosen


def _nodes(sysfs: Path) -> list[Path]:
    folder = sysfs / NODES
    if not folder.is_dir():
        return []
    return sorted((node for node in folder.iterdir() if node.name.isdecimal()), key=lambda n: int(n.name))


def _gpu(index: int, node: Path, properties: Mapping[str, int], sysfs: Path) -> Gpu:
    def field(name: str) -> int:
        if name not in properties:
            raise OverlayError(
                f"GPU node {node} has no {name}",
                seen=f"fields {', '.join(sorted(properties)) or 'none'}",
                wanted="the driver's properties file",
                fix="check the amdgpu driver's version",
            )
        return properties[name]

    serial = properties.get("unique_id", 0)
    return Gpu(
        index=index,
        gfx=gfx_name(field("gfx_target_version")),
        compute_units=field("simd_count") // max(1, field("simd_per_cu")),
        memory_bytes=_memory_bytes(node),
        unique_id=f"{serial:016x}" if serial else "",
        partition_mode=_partition_mode(sysfs, properties.get("drm_render_minor", 0)),
    )


def _memory_bytes(node: Path) -> int:
    total = 0
    for bank in sorted((node / "mem_banks").glob("*/properties")):
        properties = _properties(bank) or {}
        if properties.get("heap_type") in CARD_MEMORY_HEAPS:
            total += properties.get("size_in_bytes", 0)
    return total


def _partition_mode(sysfs: Path, render_minor: int) -> str:
    mode = sysfs / f"class/drm/renderD{render_minor}/device/current_compute_partition"
    try:
        return mode.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _properties(file: Path) -> dict[str, int] | None:
    """The ``name number`` lines of a driver file, None where it may not be read."""
    try:
        # A byte that is no text makes its line one that holds no number, which is named below.
        text = file.read_text(encoding="ascii", errors="backslashreplace")
    except OSError:
        return None
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not name:
            continue
        try:
            values[name] = int(value)
        except ValueError:
            raise OverlayError(
                f"{file} holds a field that is not a number",
                seen=line,
                wanted=f"{name} NUMBER",
                fix="check the amdgpu driver's version",
            ) from None
    return values
