# SPDX-License-Identifier: Apache-2.0
"""A whole layer on the simulator: the attention front and the attention back on one case's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cdnasim import Device, LaunchReport
from cdnasim.program import Kernel

from .case import HIDDEN, STREAMS, Case
from .layer_case import HEAD_DIM, LayerCase, Shape
from .run import WAIT_LIMIT, Run, bits
from .sources import compiled_kind, modules

g = modules().geometry
# Outputs that are the same on every rank.
FRONT_OUTPUTS = ("residual_out", "post_out", "comb_out", "pre_out")


def front_kernel(shape: Shape, **overlay: Any) -> Kernel:
    return compiled_kind("front", shape.arch, **overlay, **shape.front)


def back_kernel(shape: Shape, **overlay: Any) -> Kernel:
    return compiled_kind("back", shape.arch, **overlay, **shape.back)


class FrontRun(Run):
    """The attention front; the window's cache is memory that it writes."""

    def __init__(
        self, case: LayerCase, device: Device, kernel: Kernel | None = None, **settings: Any
    ) -> None:
        self.layer = case
        self.build = g.FrontGeometry(**case.shape.front)
        super().__init__(case.ffn, device, kernel or front_kernel(case.shape), **settings)

    def argument_names(self) -> list[str]:
        return list(modules().front.FrontArguments.__annotations__)

    def layouts(self) -> tuple[Any, Any]:
        layouts = modules().regions
        return layouts.front_workspace(self.build), layouts.front_symmetric(self.build)

    def _arguments(self, rank: int, share: Run | None) -> dict[str, Any]:
        device, shape, case = self.device, self.layer.shape, self.layer
        rows, heads = shape.rows, g.HEADS // shape.tp
        args: dict[str, Any] = {
            name: device.tensor(value, name, rank, read_only=True)
            for name, value in case.front_arguments(rank).items()
        }
        outputs = {
            "residual_out": (torch.bfloat16, (rows, STREAMS, HIDDEN)),
            "post_out": (torch.float32, (rows, STREAMS)),
            "comb_out": (torch.float32, (rows, STREAMS, STREAMS)),
            "pre_out": (torch.float32, (rows, STREAMS)),
            "query": (torch.bfloat16, (rows, heads, HEAD_DIM)),
        }
        if shape.hands_out:
            outputs["normed_out"] = (torch.bfloat16, (rows, HIDDEN))
            outputs["query_rank_out"] = (torch.bfloat16, (rows, g.QUERY_RANK))
        else:
            args |= {"normed_out": 0, "query_rank_out": 0}
        for name, (dtype, size) in outputs.items():
            args[name] = device.empty(*size, dtype=dtype, name=name, rank=rank)
        args["window_cache"] = device.tensor(case.window.raw, "window_cache", rank)
        args["window_stride"], args["window_block"] = case.window.stride, case.window.block
        args["workspace"] = (
            share.ranks[rank]["workspace"] if share else self._bytes(self.workspace.size, "workspace", rank)
        )
        args["peers"] = device.register(self.addresses[rank], "peers", rank, read_only=True)
        args["fold"], args["rank"] = int(shape.fold), rank
        return args

    def outputs(self) -> dict[str, torch.Tensor]:
        """A copy of what the launch gives: what all ranks have alike, and each rank's queries."""
        alike = [*FRONT_OUTPUTS, "window_cache"]
        alike += ["normed_out", "query_rank_out"] if self.layer.shape.hands_out else []
        return _outputs(self, alike, ["query"])

    def feed_layer(self, case: LayerCase) -> None:
        """Another step of the same shape."""
        for rank, args in enumerate(self.ranks):
            for name, value in case.front_arguments(rank).items():
                if isinstance(args[name], torch.Tensor):
                    args[name].copy_(value)
            args["window_cache"].copy_(case.window.raw)
        self.layer, self.case = case, case.ffn

    def qkv(self, rank: int) -> torch.Tensor:
        """The published rows of the first projection, float64 [rows, 1792]."""
        return published(self, "qkv", rank)


class BackRun(Run):
    """The attention back on a front's outputs."""

    def __init__(self, front: FrontRun, kernel: Kernel | None = None, **settings: Any) -> None:
        self.front, self.layer = front, front.layer
        self.build = g.BackGeometry(**self.layer.shape.back)
        super().__init__(self.layer.ffn, front.device, kernel or back_kernel(self.layer.shape), **settings)

    def argument_names(self) -> list[str]:
        return list(modules().back.BackArguments.__annotations__)

    def layouts(self) -> tuple[Any, Any]:
        layouts = modules().regions
        return layouts.back_workspace(self.build), layouts.back_symmetric(self.build)

    def _arguments(self, rank: int, share: Run | None) -> dict[str, Any]:
        case, device, given = self.layer, self.device, self.front.ranks[rank]
        args = super()._arguments(rank, share)
        for name, value in case.back_arguments(rank).items():
            args[name] = device.tensor(value, name, rank, read_only=True)
        args["compressed_cache"] = device.tensor(
            case.compressed.raw, "compressed_cache", rank, read_only=True
        )
        return args | {
            **{f"{name}_in": given[f"{name}_out"] for name in ("residual", "post", "comb", "pre")},
            "query": given["query"],
            "window_cache": given["window_cache"],
            "window_stride": case.window.stride,
            "window_block": case.window.block,
            "window": case.shape.window,
            **self._compressed(args),
        }

    def _compressed(self, args: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the compressed keys; where there are none, as the host gives them."""
        case = self.layer
        if not case.shape.ratio:
            somewhere = dict.fromkeys(("selected", "block_table", "compressed_cache"), args["window_indices"])
            numbers = {"compressed_stride": 0, "compressed_block": 1, "table_stride": 0}
            return somewhere | numbers | {"selected_keys": 0, "ratio": 1}
        return {
            "compressed_stride": case.compressed.stride,
            "compressed_block": case.compressed.block,
            "table_stride": case.step["block_table"].shape[1],
            "ratio": case.shape.ratio,
            "selected_keys": g.SELECTED,
        }

    def feed_layer(self, case: LayerCase) -> None:
        """Another step of the same shape; the front's outputs are its own."""
        for rank, args in enumerate(self.ranks):
            given = case.back_arguments(rank) | case.ffn.router
            for name, value in given.items():
                if case.shape.ratio or name not in ("selected", "block_table"):
                    args[name].copy_(value)
        self.layer, self.case = case, case.ffn

    def ffn_case(self) -> Case:
        """The FFN half's case: its activations as this launch had them."""
        first = self.front.ranks[0]
        given = {f"{name}_in": first[f"{name}_out"].clone() for name in ("residual", "post", "comb", "pre")}
        own = [self.partials("attention", rank)[rank] for rank in range(self.case.tp)]
        given["partial"] = torch.stack(own).bfloat16()
        return replace(self.layer.ffn, activations=given)

    def attended(self, rank: int) -> Any:
        """The heads as handed over, MXFP8 [rows, heads x 512]."""
        region = self.workspace.attended
        raw = self.ranks[rank]["workspace"][region.offset : region.offset + region.size]
        raw = raw.view(self.build.rows, -1).clone()
        # The word of block 4 step + group of an output group is at [group, step].
        words = self.box("attended_ready", rank)[1].transpose(2, 3).flatten(1)
        self._check_tags("attended", words, rank)
        return modules().formats.MxRows(raw, (words & 0xFF).to(torch.uint8))

    def _check_tags(self, name: str, words: torch.Tensor, rank: int) -> None:
        last = self.tag(rank) - 1 or modules().epoch.LAST_TAG
        if not torch.equal(words >> 8 & 0xFFFFFF, torch.full_like(words, last)):
            raise AssertionError(f"rank {rank} has {name} that the last launch did not announce")

    def group_ranks(self, rank: int) -> torch.Tensor:
        """wo_a's published outputs, float64 [rows, groups x 1024]."""
        return published(self, "ranks", rank)


def published(run: Run, name: str, rank: int) -> torch.Tensor:
    """Rows that were published as bf16 pairs, float64."""
    words = run.words(getattr(run.workspace, name), run.ranks[rank]["workspace"])[..., 0].contiguous()
    return words.view(torch.bfloat16).view(words.shape[0], -1).double()


def _outputs(run: Run, alike: list[str], own: list[str]) -> dict[str, torch.Tensor]:
    """Copies of rank 0's ``alike``, and of every rank's ``own``. Raises ``AssertionError`` when another
    rank's differ in a bit, or a wait ended without its word."""
    for rank, args in enumerate(run.ranks):
        if (record := run.record(rank)) is not None:
            raise AssertionError(f"rank {rank} has {record}")
        for name in alike:
            if not torch.equal(bits(args[name]), bits(run.ranks[0][name])):
                raise AssertionError(f"{name} of rank {rank} is not rank 0's")
    out = {name: run.ranks[0][name].clone() for name in alike}
    return out | {f"{name} {r}": args[name].clone() for name in own for r, args in enumerate(run.ranks)}


class LayerRun:
    """The front, then the back, as a step runs them; or the front by itself, where ``back`` is None then."""

    def __init__(
        self,
        case: LayerCase,
        device: Device | None = None,
        *,
        front: Kernel | None = None,
        back: Kernel | None = None,
        tag: int = 1,
        limit: int = WAIT_LIMIT,
        share: LayerRun | None = None,
        only_front: bool = False,
    ) -> None:
        self.case = case
        self.device = device or Device(case.shape.arch, ranks=case.shape.tp)
        settings = {"tag": tag, "limit": limit}
        self.front = FrontRun(case, self.device, front, share=share and share.front, **settings)
        self.back = None
        if not only_front:
            self.back = BackRun(self.front, back, share=share and share.back, **settings)

    @property
    def launches(self) -> dict[str, FrontRun | BackRun]:
        """Those of a step, by name, in their order."""
        return {"front": self.front} | ({"back": self.back} if self.back else {})

    def launch(self) -> list[LaunchReport]:
        """The launches of every rank."""
        return [report for one in self.launches.values() for report in one.launch()]

    def feed(self, case: LayerCase) -> None:
        """Another step of the same shape."""
        for one in self.launches.values():
            one.feed_layer(case)
        self.case = case

    def outputs(self) -> dict[str, torch.Tensor]:
        """Copies of the launches' outputs."""
        return {
            f"{which} {name}": x for which, one in self.launches.items() for name, x in one.outputs().items()
        }
