# SPDX-License-Identifier: Apache-2.0
"""A CPU simulator that runs the final assembly text of gfx942 and gfx950 kernels."""

from .device import Device, LaunchReport
from .errors import AssemblyError, SimulationError
from .hip import HipDevice, open_device
from .program import Program, load

__all__ = [
    "AssemblyError",
    "Device",
    "HipDevice",
    "LaunchReport",
    "Program",
    "SimulationError",
    "load",
    "open_device",
]
