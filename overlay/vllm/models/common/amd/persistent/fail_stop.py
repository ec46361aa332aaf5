# SPDX-License-Identifier: Apache-2.0
"""Fail-stop on the host: no token is returned of a step in which a kernel's wait ended without its word.

A wait that ends so stores an error record in the control block of every rank (``handoff``), and the launch's
results are void. Behind the last launch of a step goes one copy of the control block to pinned memory, 16
bytes: in a captured graph it is a node of the graph, so that a replay makes it too. The host reads those
bytes when the step's output has arrived and before it returns a token. What was found stays: ranks may have
gone apart, so no later step is good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .epoch import LAST_TAG

# int32 words of a control block: the coming launch's tag, the wait limit, and the record's code and tag.
CONTROL_WORDS = 4


class KernelWaitError(RuntimeError):
    """A persistent kernel's wait ended without what it waited for; no result since is good."""


class FailStop:
    """The control blocks of one rank's kernels, one for each step width.

    Args:
        rank: this rank.
        kernels: what the error calls them.
        layers: the layers that a step launches, in order.
        stages: each stage number's name and what its waits await, such as "rank".
        record: ``handoff.ErrorRecord``.
    """

    def __init__(
        self,
        rank: int,
        kernels: str,
        layers: Sequence[str],
        stages: Mapping[int, tuple[str, str]],
        record: Any,
    ) -> None:
        self.rank, self.kernels, self.layers, self.stages = rank, kernels, tuple(layers), stages
        self._record = record
        self._device: dict[int, Tensor] = {}
        self._host: dict[int, Tensor] = {}
        self._error: KernelWaitError | None = None

    def add(self, width: int, control: Tensor) -> None:
        """Watch the steps of ``width`` rows. Allocates: never in a graph capture.

        Args:
            width: rows of the steps.
            control: int32 [4] on the device, the width's control block on this rank.
        """
        if control.dtype != torch.int32 or tuple(control.shape) != (CONTROL_WORDS,):
            raise ValueError(
                f"control block: {tuple(control.shape)} {control.dtype}, wanted (4,) torch.int32"
            )
        self._device[width] = control
        self._host[width] = torch.zeros(CONTROL_WORDS, dtype=torch.int32, pin_memory=control.is_cuda)

    def watch(self, width: int) -> None:
        """Copy the control block of ``width`` to the host behind what is launched; nothing waits for it."""
        self._host[width].copy_(self._device[width], non_blocking=True)

    def check(self) -> None:
        """Raise if a step whose output has arrived failed.

        Raises:
            KernelWaitError: names rank, layer, stage, workgroup and what was awaited; again at every call.
        """
        if self._error is None:
            found = []
            for width, words in self._host.items():
                coming, _, code, tag = words.tolist()
                if (record := self._record.decode(code, tag)) is not None:
                    found.append(self._sentence(record, width, coming))
            if not found:
                return
            self._error = KernelWaitError(
                f"{self.kernels}, rank {self.rank}: {'; '.join(found)}. The step's results are void and no "
                "later step can be trusted: restart the server. A rank that ended, hangs, or launched other "
                "kernels is the usual cause; its own log comes first"
            )
        raise self._error

    def _sentence(self, record: Any, width: int, coming: int) -> str:
        stage, awaited = self.stages.get(record.stage, (f"stage {record.stage}", "number"))
        return (
            f"step of {width} rows, {self._layer(record.tag, coming)}, {stage}: workgroup {record.workgroup} "
            f"waited for {awaited} {record.awaited}, which did not arrive within the bound"
        )

    def _layer(self, tag: int, coming: int) -> str:
        # The copy is behind the step's last launch, so the coming tag counts back to the failed one; tags run
        # from 1 to LAST_TAG and wrap.
        back = (coming - tag) % LAST_TAG
        if 1 <= back <= len(self.layers):
            return f"layer {self.layers[-back]}"
        return f"launch {tag} (not of the copied step, whose next launch is {coming})"
