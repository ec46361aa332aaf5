# SPDX-License-Identifier: Apache-2.0
"""Our FFN launch on the simulator: compiled once a build, run on every rank's memory side by side."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from base.ffn import HC, HIDDEN, INTER, FfnCase, errors, expert_memory

from cdnasim import Device, LaunchReport
from cdnasim.flydsl_front import rocm_path
from cdnasim.program import Kernel, load

from .compile_one import stub_packages

HERE = Path(__file__).parent
OVERLAY = HERE.parents[2] / "overlay" / "vllm"
SOURCES = (OVERLAY / "models/deepseek_v41/amd/mono", OVERLAY / "models/common/amd/persistent")
WORKGROUPS, THREADS = 256, 512
WAIT_LIMIT = 1_000_000


@dataclass
class Modules:
    """The kernel sources that need no GPU compiler: sizes and layouts."""

    geometry: Any
    regions: Any
    handoff: Any


def host_modules() -> Modules:
    """Our layouts, from the overlay, without the packages above them."""
    import types

    saved = {k: v for k, v in sys.modules.items() if k == "vllm" or k.startswith("vllm.")}
    for name in saved:
        del sys.modules[name]
    try:
        stub_packages(OVERLAY)
        mono = "vllm.models.deepseek_v41.amd.mono"
        return Modules(
            importlib.import_module(mono + ".geometry"),
            importlib.import_module(mono + ".regions"),
            importlib.import_module("vllm.models.common.amd.persistent.handoff"),
        )
    finally:
        for name in [k for k in sys.modules if k == "vllm" or k.startswith("vllm.")]:
            del sys.modules[name]
        sys.modules.update(saved)
        assert isinstance(types, object)


def source_hash() -> str:
    """Content of the kernel sources and of what compiles them here."""
    import flydsl

    digest = hashlib.sha256(flydsl.__version__.encode())
    for folder in (*SOURCES, HERE):
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def compiled(rows: int, tp: int, arch: str = "gfx950", experts: int = 384, picks: int = 6) -> Kernel:
    """The kernel of one build, from the cache if its sources are unchanged."""
    cache = Path(os.environ.get("CDNASIM_CACHE", Path.home() / ".cache" / "cdnasim"))
    stem = cache / f"mono-{source_hash()}" / f"ffn-{arch}-{rows}-{tp}-{experts}-{picks}"
    if not stem.with_suffix(".s").exists():
        stem.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, str(HERE / "compile_one.py"), str(OVERLAY), str(stem), arch]
            + [str(x) for x in (rows, tp, experts, picks)],
            env=os.environ | {"ROCM_PATH": str(rocm_path())},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"ffn {rows} rows TP{tp} {arch} does not compile:\n{done.stderr[-3000:]}")
    return load(stem.with_suffix(".s").read_text(), arch, str(stem.with_suffix(".s"))).kernel()


class FfnRun:
    """Device memory of every rank for one case; ``launch`` runs the launch once more on it."""

    def __init__(self, case: FfnCase, device: Device, kernel: Kernel | None = None) -> None:
        self.case, self.device = case, device
        self.kernel = kernel or compiled(case.rows, case.tp, case.arch)
        self.modules = host_modules()
        g = self.geometry = self.modules.geometry.FfnGeometry(case.rows, case.tp)
        self.workspace, self.symmetric = self.modules.regions.workspace(g), self.modules.regions.symmetric(g)
        m, d = case.rows, case.data
        self.peers = [
            device.zeros(self.symmetric.size, dtype=torch.uint8, name=f"peer {r}", rank=r, peer=True)
            for r in range(case.tp)
        ]
        for peer in self.peers:
            peer[:8].view(torch.int32)[:] = torch.tensor([1, WAIT_LIMIT], dtype=torch.int32)
        addresses = torch.tensor([p.data_ptr() for p in self.peers], dtype=torch.int64)
        memory = expert_memory(case, device)
        self.ranks: list[dict[str, Any]] = []
        for rank in range(case.tp):
            t = lambda x, name, rank=rank: device.tensor(x, name, rank)  # noqa: E731
            e = lambda *s, name, dtype=torch.float32, rank=rank: device.empty(  # noqa: E731
                *s, dtype=dtype, name=name, rank=rank
            )
            share = INTER // case.tp
            cut = slice(rank * share, (rank + 1) * share)
            blocks = slice(rank * share // 32, (rank + 1) * share // 32)
            sgu = d["sgu"].view(torch.uint8)
            experts = memory[rank]
            self.ranks.append(
                {
                    "partial": t(d["part"][rank], "partial"),
                    "residual_in": t(d["residual"], "residual_in"),
                    "post_in": t(d["post"], "post_in"),
                    "comb_in": t(d["comb"], "comb_in"),
                    "pre_in": t(d["pre"], "pre_in"),
                    "mix_projection": t(d["fn"], "mix_projection"),
                    "mix_scale": t(d["hc_scale"], "mix_scale"),
                    "mix_base": t(d["hc_base"], "mix_base"),
                    "norm_weight": t(d["norm"], "norm_weight"),
                    "gate_weight": t(d["gate"], "gate_weight"),
                    "gate_bias": t(d["bias"], "gate_bias"),
                    "w13": experts["w13"],
                    "w13_scale": experts["w13_s"],
                    "w2": experts["w2"],
                    "w2_scale": experts["w2_s"],
                    "shared_w13": t(torch.cat([sgu[:INTER][cut], sgu[INTER:][cut]]), "shared_w13"),
                    "shared_w13_scale": t(
                        torch.cat([d["sgu_s"][: INTER // 32][blocks], d["sgu_s"][INTER // 32 :][blocks]]),
                        "shared_w13_scale",
                    ),
                    "shared_w2": t(d["sw2"].view(torch.uint8)[:, cut].contiguous(), "shared_w2"),
                    "shared_w2_scale": t(d["sw2_s"][:, blocks].contiguous(), "shared_w2_scale"),
                    "residual_out": e(m, HC, HIDDEN, dtype=torch.bfloat16, name="residual_out"),
                    "post_out": e(m, HC, name="post_out"),
                    "comb_out": e(m, HC, HC, name="comb_out"),
                    "pre_out": e(m, HC, name="pre_out"),
                    "out": e(m, HIDDEN, dtype=torch.bfloat16, name="out"),
                    "workspace": device.zeros(
                        self.workspace.size, dtype=torch.uint8, name="workspace", rank=rank
                    ),
                    "peers": t(addresses, "peers"),
                    "rank": rank,
                }
            )

    def launch(self) -> list[LaunchReport]:
        """Every rank's launch, side by side."""
        return self.device.run(
            [
                self.device.prepare(
                    self.kernel, WORKGROUPS, THREADS, list(args.values()), rank=rank, persistent=True
                )
                for rank, args in enumerate(self.ranks)
            ]
        )

    def record(self, rank: int) -> Any:
        """The error record in a rank's control block, None if nothing failed."""
        code, tag = self.peers[rank][8:16].view(torch.int32).tolist()
        return self.modules.handoff.ErrorRecord.decode(code, tag)

    def collapsed(self, rank: int) -> torch.Tensor:
        """The launch's own collapsed rows, float64 [rows, hidden]."""
        region = self.workspace.collapsed
        words = self.ranks[rank]["workspace"][region.offset : region.offset + region.size]
        return words.view(torch.bfloat16).view(self.case.rows, HIDDEN).double()


def check_ranks(run: FfnRun) -> None:
    """Every output is the same on every rank, bit for bit."""
    for rank in run.ranks[1:]:
        for name in ("out", "residual_out", "post_out", "comb_out", "pre_out"):
            if not torch.equal(rank[name].view(torch.uint8), run.ranks[0][name].view(torch.uint8)):
                raise AssertionError(f"{name} differs between ranks")


__all__ = ["FfnRun", "check_ranks", "compiled", "errors"]
