# SPDX-License-Identifier: Apache-2.0
"""Builds the execution core at first use and calls it through ctypes.

The shared library is cached by a hash of the sources, the compiler and the host's instruction set in
``$CDNASIM_CACHE`` (default ``~/.cache/cdnasim``), never in the source tree. It is compiled for the host
(``$CDNASIM_MARCH``, default ``native``); where that has no AVX-512, portable code does the same more slowly.
"""

from __future__ import annotations

import ctypes as C
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORE = Path(__file__).parent / "core"
# No contraction: a fused multiply-add is an instruction of its own on the machine simulated here.
FLAGS = [
    "-std=c++20",
    "-O3",
    f"-march={os.environ.get('CDNASIM_MARCH', 'native')}",
    "-mprefer-vector-width=512",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
]
MAX_OPERANDS = 6
CHECKS = (
    "register-never-written",
    "memory-never-written",
    "lds-never-written",
    "misaligned",
    "lds-race",
    "barrier-divergence",
    "offset-wrap",
    "register-before-wait",
    "not-finite",
)
CLASSES = (
    "salu",
    "valu",
    "mfma",
    "smem",
    "vmem_load",
    "vmem_store",
    "vmem_atomic",
    "lds",
    "branch",
    "wait",
    "barrier",
    "sleep",
    "other",
)
LEVELS = {"off": 0, "warn": 1, "error": 2}


class Operand(C.Structure):
    """Mirrors ``Operand`` of core/state.h."""

    _fields_ = [
        ("kind", C.c_int8),
        ("flags", C.c_int8),
        ("width", C.c_int16),
        ("reg", C.c_int32),
        ("value", C.c_uint64),
    ]


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Inst(C.Structure):
    """Mirrors ``Inst`` of core/state.h."""

    _fields_ = [
        ("fn", C.c_void_p),
        *_fields(C.c_int32, "opcode index"),
        *_fields(C.c_int8, "cls num_ops plain clamp omod op_sel op_sel_hi neg_lo neg_hi"),
        *_fields(C.c_int8, "row_mask bank_mask bound_ctrl"),
        ("dpp_ctrl", C.c_int16),
        *_fields(C.c_int8, "sdwa dst_sel dst_unused src0_sel src1_sel"),
        *_fields(C.c_int8, "cpol offen idxen lds cbsz abid blgp"),
        *_fields(C.c_int32, "offset0 offset1 imm target line"),
        ("ops", Operand * MAX_OPERANDS),
    ]


def _cache_dir() -> Path:
    return Path(os.environ.get("CDNASIM_CACHE", Path.home() / ".cache" / "cdnasim"))


def _host_key() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    flags = ""
    if cpuinfo.exists():
        flags = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
    return platform.machine() + flags


def build() -> Path:
    """The core's shared library, compiled if this exact source and host were not seen before."""
    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    files = sorted(CORE.glob("*.cpp"))
    common = hashlib.sha256()
    for part in (version, _host_key(), " ".join(FLAGS)):
        common.update(part.encode())
    for header in sorted(CORE.glob("*.h")):
        common.update(header.name.encode() + b"\0" + header.read_bytes())
    cache = _cache_dir()
    objects = []
    for file in files:
        one = common.copy()
        one.update(file.read_bytes())
        objects.append(cache / f"{file.stem}-{one.hexdigest()[:20]}.o")
    out = cache / f"core-{hashlib.sha256(' '.join(o.name for o in objects).encode()).hexdigest()[:20]}.so"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)

    def compile_one(pair: tuple[Path, Path]) -> None:
        source, target = pair
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            made = Path(tmp) / target.name
            command = [compiler, *FLAGS, "-c", str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
            made.rename(target)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, zip(files, objects, strict=True)))
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        library = Path(tmp) / "core.so"
        subprocess.run([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)], check=True)
        library.rename(out)
    return out


@functools.cache
def core() -> C.CDLL:
    """The loaded core, with argument types declared."""
    lib = C.CDLL(str(build()))
    p, i32, u64, s = C.c_void_p, C.c_int32, C.c_uint64, C.c_char_p
    signatures = {
        "cdna_num_ops": (i32, []),
        "cdna_op_name": (s, [i32]),
        "cdna_op_operands": (s, [i32]),
        "cdna_op_mods": (s, [i32]),
        "cdna_op_class": (i32, [i32]),
        "cdna_sizeof_inst": (i32, []),
        "cdna_kernel": (p, [p, i32, i32, i32, i32, i32, i32]),
        "cdna_kernel_free": (None, [p]),
        "cdna_kernel_executed": (None, [p, p]),
        "cdna_machine": (p, [i32] * 5),
        "cdna_machine_free": (None, [p]),
        "cdna_configure": (None, [p, u64, i32, i32, i32, i32, i32, u64, i32, i32, p]),
        "cdna_allocate": (s, [p, u64, u64, i32, i32, i32, i32, s]),
        "cdna_release": (None, [p, u64]),
        "cdna_mark_written": (None, [p, u64, u64, u64]),
        "cdna_touched_bytes": (u64, [p, i32, s, i32]),
        "cdna_launch": (p, [p, p, p, i32, i32, i32, u64, u64, p]),
        "cdna_launch_free": (None, [p]),
        "cdna_launch_counters": (None, [p, p]),
        "cdna_counters_words": (i32, []),
        "cdna_launch_waves": (u64, [p, p]),
        "cdna_wave_words": (i32, []),
        "cdna_launch_executed": (None, [p, p]),
        "cdna_timeline": (None, [p, i32]),
        "cdna_spans": (u64, [p, i32, p]),
        "cdna_run": (s, [p, p, i32]),
        "cdna_clock": (u64, [p]),
        "cdna_watch": (None, [p, i32, i32, i32, i32, u64]),
        "cdna_watch_size": (u64, [p, i32]),
        "cdna_watch_data": (p, [p, i32]),
        "cdna_count_handoffs": (None, [p, i32]),
        "cdna_num_warnings": (i32, [p]),
        "cdna_warning": (s, [p, i32]),
        "cdna_clear_warnings": (None, [p]),
        "cdna_bench": (p, [p, i32]),
        "cdna_bench_free": (None, [p]),
        "cdna_bench_vgprs": (p, [p]),
        "cdna_bench_sgprs": (p, [p]),
        "cdna_bench_lds": (p, [p]),
        "cdna_bench_machine": (p, [p]),
        "cdna_bench_step": (s, [p, i32, p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    if lib.cdna_sizeof_inst() != C.sizeof(Inst):
        raise RuntimeError(
            f"Inst is {lib.cdna_sizeof_inst()} bytes in the core, {C.sizeof(Inst)} in native.py"
        )
    return lib
