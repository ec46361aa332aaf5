# SPDX-License-Identifier: Apache-2.0
"""The life of a model's specialised decode: layers, weights, resources, and one decision a step.

A model subclasses ``SpecializedDecode`` with what only it knows: how to read a step from its attention
metadata, where its weights are, and how to open its kernels. Everything else is here.

Every rank of a TP group must decide alike, because its kernels wait for the other ranks': a decision reads
the forward context and metadata that all ranks hold alike, and nothing that a rank may see differently.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.common.specialized_decode.metrics import NO_KERNELS_IN_GRAPH, StepCounters
from vllm.models.common.specialized_decode.report import launch_table, layers_by_reason, reports
from vllm.models.common.specialized_decode.spec import DecodeSpec, asked, refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext

logger = init_logger(__name__)

# Roles: the model that the user asked for, and the one that drafts for it.
TARGET, DRAFT = "target", "draft"


class Launch(enum.Enum):
    """How much of a layer the kernels run."""

    WHOLE = "whole layer"
    PART = "part of the layer"


@dataclass(frozen=True)
class Decline:
    """Why a step takes vLLM's path.

    Args:
        reason: one of a few fixed texts, since it is a label of the metrics.
        detail: what was seen and wanted.
        expected: whether such a step belongs on vLLM's path. One that does not is a silent fallback, which
            strict mode turns into an error.
    """

    reason: str
    detail: str = ""
    expected: bool = True


@dataclass(frozen=True)
class Step:
    """A step that the kernels take.

    Args:
        rows: tokens of the step, padding included.
        metadata: the attention metadata, by layer name.
    """

    rows: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """What one step runs: a step for each launch that takes it, None for each that does not.

    Args:
        rows: tokens of the step, padding included.
        whole: the whole-layer launch's step.
        part: the step of the launch that runs part of a layer.
        records: whether a FULL graph keeps what the step runs.
        odd: why single layers of the step were declined, each reason once.
    """

    rows: int
    whole: Step | None
    part: Step | None
    records: bool = False
    odd: set[str] = field(default_factory=set)


NO_STEP = Decision(0, None, None)


@dataclass(frozen=True)
class LayerPlan:
    """What the kernels run of a layer, settled at start-up.

    Args:
        name: the layer, as vLLM names it.
        index: its number.
        launch: what they run of it, None for nothing.
        why: why they do not run the whole layer; empty where they do.
    """

    name: str
    index: int
    launch: Launch | None
    why: str = ""


class TakesWeights(Protocol):
    """A layer of which the kernels run something."""

    plan: LayerPlan

    def take_weights(self) -> None:
        """Take the loaded weights as the kernels read them. What it raises says which of them they cannot
        read; the layer's name is put before it."""


Kernels = TypeVar("Kernels")


class SpecializedDecode(ABC, Generic[Kernels]):
    """What the layers of one model share.

    Args:
        spec: what the kernels can run.
        role: which of a deployment's models this is, such as ``target`` or ``draft``.
        vllm_config: the deployment, which ``spec`` does not refuse.
    """

    def __init__(self, spec: DecodeSpec, role: str, vllm_config: VllmConfig) -> None:
        self.spec = spec
        self.role = role
        self.vllm_config = weakref.ref(vllm_config)
        self.option = asked(vllm_config)
        self.max_rows = spec.row_limit(vllm_config)
        self.strict = vllm_config.kernel_config.specialized_decode_strict
        self.plans: list[LayerPlan] = []
        # The model owns its layers: freeing it must free them.
        self._layers: list[weakref.ref[TakesWeights]] = []
        self.counters = StepCounters(spec.name, role)
        self._kernels: Kernels | None = None
        self._widths: set[int] = set()
        self._launches: tuple[Launch, ...] | None = None
        # The decision of a step lives in its forward context, so it cannot outlive the step.
        self._key = f"specialized_decode.{role}.{id(self)}"
        _current[role] = self

    @abstractmethod
    def open_kernels(self) -> Kernels:
        """Make what the kernels hold for as long as the process: peer memory, scratch. Collective over the TP
        group, and never called in a graph capture."""

    @abstractmethod
    def prepare_width(self, kernels: Kernels, rows: int) -> None:
        """Make what steps of ``rows`` rows need. Never called in a graph capture."""

    @abstractmethod
    def read_step(self, metadata: Mapping[str, Any], rows: int) -> tuple[Decline | None, Decline | None]:
        """Why the step's metadata is outside the kernels: for the whole-layer launch, and for the part."""

    def widths_ahead(self) -> Iterable[int]:
        """Rows of the steps that are known to come when the model's state is made, the same on every rank.
        Other widths are prepared at their first, eager step."""
        return ()

    @property
    def opened(self) -> Kernels | None:
        """The kernels, None before the first taken step."""
        return self._kernels

    @property
    def kernels(self) -> Kernels:
        """The open kernels; only a taken step may ask."""
        assert self._kernels is not None, f"{self.spec.name}: no step was taken yet"
        return self._kernels

    def add_layer(self, plan: LayerPlan, layer: TakesWeights | None) -> None:
        """Count a layer in. Every layer is in before the first step.

        Args:
            plan: what the kernels run of it.
            layer: the layer's side of that, None where the plan has no launch.

        Raises:
            RuntimeError: what the layers run was settled before.
        """
        if self._launches is not None:
            raise RuntimeError(
                f"{self.spec.name} ({self.role}): layer {plan.name} was added after the launches were "
                "settled. Wanted: every layer before the model's state and the first step."
            )
        self.plans.append(plan)
        if layer is not None:
            self._layers.append(weakref.ref(layer))
        if plan.launch is not Launch.WHOLE:
            launch = plan.launch.value if plan.launch else "vLLM's path"
            logger.info_once("%s (%s): %s for layers with %s", self.spec.name, self.role, launch, plan.why)

    def settle(self) -> None:
        """Log which layers run which launch, once all are in. vLLM's model state calls it at start-up.

        Raises:
            SpecializedDecodeError: none of the target's layers runs any; with every layer's reason.
        """
        if self._launches is not None:
            return
        launches = tuple(launch for launch in Launch if any(plan.launch is launch for plan in self.plans))
        if self.plans and not launches and self.role == TARGET:
            raise refusal(f"{self.option}: {self.spec.name}", layers_by_reason(self.plans))
        self._launches = launches
        if reports():
            logger.info("%s", launch_table(self))

    def prepare_ahead(self) -> None:
        """Take the weights, open the kernels and make the memory of ``widths_ahead``, before vLLM measures
        what is left for the KV cache. Collective over the TP group; vLLM's model state calls it at start-up.

        Raises:
            SpecializedDecodeError: weights are not as the kernels read them; with every fault.
        """
        for rows in self.widths_ahead() if self._launches else ():
            self._prepare(rows)

    def whole_step(self, rows: int) -> Step | None:
        """The step of the whole-layer launch, or None when this step takes vLLM's path."""
        return self.decision(rows).whole

    def part_step(self, rows: int) -> Step | None:
        """The step of the launch that runs part of a layer, or None when this step takes vLLM's path."""
        return self.decision(rows).part

    def decline(self, why: Decline) -> None:
        """Put one layer of a taken step on vLLM's path, which is None to its caller. However many layers of
        the step are declined for a reason, it counts once; a step that a graph records counts at its replays.

        Raises:
            RuntimeError: in strict mode, when the layer should have been taken, or a graph would keep it on
                vLLM's path.
        """
        decision = get_forward_context().additional_kwargs[self._key]
        if why.reason not in decision.odd:
            decision.odd.add(why.reason)
            if decision.records:
                self.counters.declined_in_graph(decision.rows, why.reason)
            else:
                self.counters.declined(why.reason)
        self._reject_if_strict(replace(why, expected=False) if decision.records else why)

    def replayed(self, width: int, rows: int) -> None:
        """Count the replay of a FULL graph, which runs none of the model's Python, before it is launched.

        Args:
            width: rows of the graph.
            rows: rows of the step in it.

        Raises:
            RuntimeError: in strict mode, when the graph runs vLLM's path at a width that the kernels take.
        """
        if self._launches == ():  # no layer runs any kernel, so its steps are no kernels' to take
            return
        if not self.counters.replayed(width, rows):
            detail = f"a FULL graph of {width} rows"
            self._reject_if_strict(Decline(NO_KERNELS_IN_GRAPH, detail, expected=width > self.max_rows))

    def decision(self, rows: int) -> Decision:
        """The step's decision, from the step's forward context once it is made there.

        Every layer of every eager step asks, so this calls nothing that it can do without.
        """
        try:
            context = get_forward_context()
        except AssertionError:  # outside a step
            return NO_STEP
        if context is None:  # the same, without assertions
            return NO_STEP
        decision = context.additional_kwargs.get(self._key)
        if decision is None or decision.rows != rows:
            decision = context.additional_kwargs[self._key] = self._decide(context, rows)
        return decision

    def _decide(self, context: ForwardContext, rows: int) -> Decision:
        self.settle()
        records = _capturing() and context.cudagraph_runtime_mode.name in self.spec.graph_modes
        found = self._declines(context, rows)
        # Launches that decline alike decline one step. vLLM captures FULL graphs of decode steps alone, so
        # what is declined while one is recorded, within the row limit, falls back at every replay.
        declines = [why for why in dict.fromkeys(found[launch] for launch in self._launches or ()) if why]
        for why in declines:
            if not records:
                self.counters.declined(why.reason)
            self._reject_if_strict(replace(why, expected=False) if records and rows <= self.max_rows else why)
        taken = [launch for launch in self._launches or () if found[launch] is None]
        if taken:
            self._prepare(rows)
        if records:
            self.counters.recorded(rows, bool(taken), [why.reason for why in declines])
        elif taken:
            self.counters.taken(rows)
        metadata: Any = context.attn_metadata
        step = Step(rows, metadata)
        whole, part = (step if launch in taken else None for launch in (Launch.WHOLE, Launch.PART))
        return Decision(rows, whole, part, records)

    def _declines(self, context: ForwardContext, rows: int) -> dict[Launch, Decline | None]:
        why = self._outside(context, rows)
        metadata: Any = context.attn_metadata  # a dict of layers, which _outside asks first
        whole, part = (why, why) if why else self.read_step(metadata, rows)
        return {Launch.WHOLE: whole, Launch.PART: part}

    def _outside(self, context: ForwardContext, rows: int) -> Decline | None:
        """Why no launch of any model takes such a step."""
        if not 1 <= rows <= self.max_rows:
            return Decline("rows", f"{rows} rows, wanted 1 to {self.max_rows}")
        mode = context.cudagraph_runtime_mode.name
        if mode not in self.spec.graph_modes:
            # What a PIECEWISE graph records is replayed for batches that hold prefills too.
            return Decline("graph mode", f"{mode}, wanted {' or '.join(sorted(self.spec.graph_modes))}")
        if not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
            seen = "a profile run, a dummy run or microbatches"
            return Decline("no attention metadata", seen, expected=mode != "FULL")
        return None

    def _prepare(self, rows: int) -> None:
        if rows in self._widths:
            return
        if _capturing():
            raise RuntimeError(
                f"{self.spec.name} ({self.role}): a step of {rows} rows was first reached inside a CUDA "
                "graph capture, where nothing can be allocated. Wanted: an eager step of as many rows before "
                "it, which vLLM's warm-up makes for every size that it captures."
            )
        if self._kernels is None:
            self._take_weights()
            self._kernels = self.open_kernels()
        self.prepare_width(self._kernels, rows)
        self._widths.add(rows)

    def _take_weights(self) -> None:
        problems = []
        for layer in [layer for reference in self._layers if (layer := reference()) is not None]:
            try:
                layer.take_weights()
            except Exception as error:  # every layer's faults go into one error
                problems.append(f"{layer.plan.name}: {error}")
        if problems:
            raise refusal(f"{self.spec.name} ({self.role}) on the loaded weights", tuple(problems))

    def _reject_if_strict(self, why: Decline) -> None:
        if self.strict and not why.expected:
            raise RuntimeError(
                f"{self.spec.name} ({self.role}): a decode step that the kernels should have taken would "
                f"fall back to vLLM's path: {why.reason}{': ' if why.detail else ''}{why.detail}. "
                "kernel_config.specialized_decode_strict makes that an error; without it the step only "
                "runs slower."
            )


def not_decode_only(metadata: Any, rows: int) -> Decline | None:
    """Why metadata that splits its batch into decodes and prefills is not that of a decode-only step."""
    if metadata.num_prefills != 0 or metadata.num_decodes == 0:
        return Decline("not decode only", f"{metadata.num_prefills} prefills, {metadata.num_decodes} decodes")
    if metadata.num_decode_tokens > rows:
        seen = f"{metadata.num_decode_tokens} tokens, wanted {rows} at most"
        return Decline("rows of metadata", seen, expected=False)
    return None


def _capturing() -> bool:
    """Whether a CUDA graph records what is launched. vLLM captures FULL graphs in graph mode NONE."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# The decode of each role in this process: what vLLM's own hooks, which know no model, ask.
_current: dict[str, SpecializedDecode[Any]] = {}


def current(role: str) -> SpecializedDecode[Any] | None:
    """The decode of the process's ``role``, None where it runs on vLLM's path."""
    return _current.get(role)


def forget(role: str) -> None:
    """Have ``role`` run on vLLM's path: a model without the option follows one with it."""
    _current.pop(role, None)
