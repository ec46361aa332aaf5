# SPDX-License-Identifier: Apache-2.0
"""Our FFN launch on the simulator: every rank's memory for one case, and launches on it."""

from __future__ import annotations

from typing import Any

import torch

from cdnasim import Device, LaunchReport
from cdnasim.program import Kernel

from .case import HIDDEN, MIXES, STREAMS, Case
from .sources import compiled, modules

WORKGROUPS, THREADS = modules().geometry.WORKGROUPS, modules().geometry.THREADS
WAIT_LIMIT = 1_000_000
OUTPUTS = ("residual_out", "post_out", "comb_out", "pre_out", "out")
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


class Run:
    """``tag`` is the first launch's, ``limit`` the polls after which a wait ends. ``share`` gives another
    run whose workspaces and symmetric memory this one takes over (what must not be done)."""

    def __init__(
        self,
        case: Case,
        device: Device,
        kernel: Kernel | None = None,
        *,
        tag: int = 1,
        limit: int = WAIT_LIMIT,
        share: Run | None = None,
    ) -> None:
        self.case, self.device, self.geometry = case, device, case.geometry
        self.kernel = kernel or compiled(case.rows, case.tp, case.arch, case.experts, case.picks)
        self.workspace, self.symmetric = self.layouts()
        self.peers = (
            share.peers if share else [self._bytes(self.symmetric.size, "peer", r) for r in range(case.tp)]
        )
        self.addresses = [torch.tensor([p.data_ptr() for p in self.peers]) for _ in range(case.tp)]
        names = self.argument_names()
        self.ranks = []
        for rank in range(case.tp):
            args = self._arguments(rank, share)
            self.ranks.append({name: args[name] for name in names})
        self.reset(tag, limit)

    def argument_names(self) -> list[str]:
        """In the order of the kernel's argument struct."""
        return list(modules().ffn.FfnArguments.__annotations__)

    def layouts(self) -> tuple[Any, Any]:
        """Of the workspace and of symmetric memory."""
        layouts = modules().regions
        return layouts.workspace(self.geometry), layouts.symmetric(self.geometry)

    def _bytes(self, size: int, name: str, rank: int) -> torch.Tensor:
        return self.device.zeros(
            size, dtype=torch.uint8, name=f"{name} {rank}", rank=rank, peer=name == "peer"
        )

    def _arguments(self, rank: int, share: Run | None) -> dict[str, Any]:
        device, rows = self.device, self.case.rows
        args: dict[str, Any] = {}
        for name, value in self.case.arguments(rank).items():
            if name in WEIGHTS:
                args[name] = device.register(value, name, rank, read_only=True)
            else:
                args[name] = device.tensor(value, name, rank, read_only=True)
        shapes = {
            "residual_out": (rows, STREAMS, HIDDEN),
            "post_out": (rows, STREAMS),
            "comb_out": (rows, STREAMS, STREAMS),
            "pre_out": (rows, STREAMS),
            "out": (rows, HIDDEN),
        }
        assert STREAMS * (2 + STREAMS) == MIXES
        for name, shape in shapes.items():
            dtype = torch.bfloat16 if name in ("residual_out", "out") else torch.float32
            args[name] = device.empty(*shape, dtype=dtype, name=name, rank=rank)
        args["workspace"] = (
            share.ranks[rank]["workspace"] if share else self._bytes(self.workspace.size, "workspace", rank)
        )
        args["peers"] = device.register(self.addresses[rank], "peers", rank, read_only=True)
        args["rank"] = rank
        return args

    # ---- launches
    def launch(
        self, ranks: list[int] | None = None, kernels: dict[int, Kernel] | None = None
    ) -> list[LaunchReport]:
        """The launch of ``ranks`` (all), side by side; ``kernels``: another build on some ranks."""
        return self.device.run(
            [
                self.device.prepare(
                    (kernels or {}).get(rank, self.kernel),
                    WORKGROUPS,
                    THREADS,
                    list(self.ranks[rank].values()),
                    rank=rank,
                    persistent=True,
                )
                for rank in (range(self.case.tp) if ranks is None else ranks)
            ]
        )

    def feed(self, case: Case) -> None:
        """Other activations of the same width, as the next step brings them."""
        for rank, args in enumerate(self.ranks):
            for name in case.activations:
                args[name].copy_(case.arguments(rank)[name])
        self.case = case

    def outputs(self) -> dict[str, torch.Tensor]:
        """A copy of rank 0's outputs. Raises ``AssertionError`` when another rank's differ in a bit, or a
        wait ended without its word."""
        for rank in range(self.case.tp):
            if (record := self.record(rank)) is not None:
                raise AssertionError(f"rank {rank} has {record}")
        first = self.ranks[0]
        for number, rank in enumerate(self.ranks):
            for name in OUTPUTS:
                if not torch.equal(bits(rank[name]), bits(first[name])):
                    raise AssertionError(f"{name} of rank {number} is not rank 0's")
        return {name: first[name].clone() for name in OUTPUTS}

    # ---- the control blocks
    def reset(self, tag: int, limit: int = WAIT_LIMIT) -> None:
        """Every rank's control block as the host sets it: the coming launch's tag, the limit, no error."""
        for peer in self.peers:
            peer[:16].view(torch.int32)[:] = torch.tensor([tag, limit, 0, 0], dtype=torch.int32)

    def tag(self, rank: int) -> int:
        """The tag of a rank's coming launch."""
        return int(self.peers[rank][:4].view(torch.int32))

    def record(self, rank: int) -> Any:
        """The error record in a rank's control block, None if nothing failed."""
        code, tag = self.peers[rank][8:16].view(torch.int32).tolist()
        return modules().handoff.ErrorRecord.decode(code, tag)

    # ---- what the launch left behind
    def words(self, region: Any, memory: torch.Tensor) -> torch.Tensor:
        """A region's 32-bit words, int32 of the region's shape and the words of an item."""
        raw = memory[region.offset : region.offset + region.size].view(torch.int32)
        return raw.view(*region.shape, region.item_bytes // 4)

    def box(self, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(payload, tag word) of a mailbox, each int32 of its shape."""
        if name in ("attention", "moe"):
            words = self.words(getattr(self.symmetric, name), self.peers[rank])
        else:
            words = self.words(getattr(self.workspace, name), self.ranks[rank]["workspace"])
        return words[..., 0].contiguous(), words[..., 1].contiguous()

    def collapsed(self, rank: int) -> torch.Tensor:
        """The collapsed rows as handed over, float64 [rows, 5120]."""
        payload = self.words(self.workspace.collapsed, self.ranks[rank]["workspace"])[..., 0]
        return payload.contiguous().view(torch.bfloat16).view(self.case.rows, HIDDEN).double()

    def partials(self, name: str, rank: int) -> torch.Tensor:
        """The words of an all-reduce as a rank received them, float64 [TP, rows, 5120]."""
        g = self.geometry
        payload = self.box(name, rank)[0].view(g.tp, WORKGROUPS, g.rows, g.pairs)
        rows = payload.permute(0, 2, 1, 3).reshape(g.tp, g.rows, HIDDEN // 2).contiguous()
        return rows.view(torch.bfloat16).view(g.tp, g.rows, HIDDEN).double()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN and -0 compare as they are."""
    return x.contiguous().view(torch.uint8)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the outputs that differ in a bit."""
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]
