# SPDX-License-Identifier: Apache-2.0
"""What a server of DeepSeek-V4.1-Flash holds on each GPU, and what is left for the KV cache.

Every size is in GiB. The constants are figures that others published for this model, and the plan
adds them up: it is a model, not a measurement, and leaves activations and graphs out. It is there
to refuse a server that cannot start, not to predict how many tokens fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rocm_overlay.kernel_arches import tp_sizes
from rocm_overlay.kernel_memory import step_bytes, weight_bytes

GIB = 1 << 30

# Published: resident weights a rank with the Engram tables on the host, "about 256 GiB / TP + 17.2
# GiB" (vLLM's recipe for the model in the pinned source: 81 at TP 4, 145 at TP 2).
SHARDED_WEIGHTS_GIB = 256.0
REPLICATED_WEIGHTS_GIB = 17.2

# Published: the Engram tables on the device, 47.2 GiB a rank at TP 4 and 94.4 at TP 2 (same source).
ENGRAM_GIB = 188.8

# Published: weights a rank on gfx942 at TP 4 without the kernels (vLLM pull request 60731, in the same
# source).
GFX942_TP4_GIB = 98.88

# Published: what TP 2 had left on a 192 GiB gfx942 card, Engram tables on the host, 4096 batched
# tokens, full context (same source). The source does not give the memory fraction; 0.9 is what its
# AMD commands pass.
GFX942_TP2_LEFT_GIB = -13.51
GFX942_TP2_CARD_GIB = 192.0
GFX942_TP2_UTILIZATION = 0.9
GFX942_TP2_BATCHED_TOKENS = 4096

# Published: the indexer's logits buffer, 16 GiB at 8192 batched tokens and 1M context, in proportion
# to both (same source): 2 bytes for each pair.
INDEXER_PUBLISHED_BYTES = 2
# The pinned base sizes the buffer on ROCm by the rows of a decode step, 4 bytes for each row and
# position (_max_decode_logits_rows in vllm/v1/attention/ops/rocm_aiter_mla_sparse.py).
INDEXER_BASE_BYTES = 4

# Published: 38.5 GiB of KV cache held about 20 million tokens (same source, H200).
KV_GIB_PER_TOKEN = 38.5 / 20e6

# The model's own context, tokens.
MODEL_CONTEXT = 1048576


@dataclass(frozen=True)
class ServerShape:
    """What decides a server's memory on one GPU.

    Attributes:
        architecture: ``gfx942`` or ``gfx950``.
        card_gib: memory of the card, GiB.
        utilization: the share of it that vLLM may take (``--gpu-memory-utilization``).
        drafts: draft tokens of a speculative step, 0 without.
        widened_at_load: whether vLLM widens dense MXFP8 weights at load where it has no instructions for them
            (``VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD``).
    """

    architecture: str
    card_gib: float
    utilization: float
    tensor_parallel: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    drafts: int
    engram_on_host: bool
    monokernel: bool
    widened_at_load: bool = True

    @property
    def decode_rows(self) -> int:
        """Rows of the largest decode step: every sequence with its drafts."""
        return self.max_num_seqs * (1 + self.drafts)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one GPU, GiB."""

    shape: ServerShape
    usable: float
    weights: float
    copies: float
    steps: float
    engram: float
    indexer: float
    kv_needed: float

    @property
    def kernels(self) -> float:
        """What the kernels hold beyond a server without them."""
        return self.copies + self.steps

    @property
    def kv_left(self) -> float:
        """What remains for the KV cache; below zero when the rest alone is too much."""
        return self.usable - self.weights - self.kernels - self.engram - self.indexer

    @property
    def fits(self) -> bool:
        """Whether one request of the full context can be held."""
        return self.kv_left >= self.kv_needed

    def rows(self) -> list[tuple[str, str, str]]:
        """What, GiB, and where the figure comes from, a row each."""
        shape = self.shape
        return [
            ("usable", _gib(self.usable), f"{shape.card_gib:g} GiB card x {shape.utilization:g}"),
            ("weights", _gib(-self.weights), f"published, TP {shape.tensor_parallel}"),
            ("weight copies of the kernels", _gib(-self.copies), copies_source(shape)),
            ("steps of the kernels", _gib(-self.steps), "from their layouts"),
            ("Engram tables", _gib(-self.engram), "on the host" if shape.engram_on_host else "published"),
            ("indexer buffer", _gib(-self.indexer), "modelled from the base's rule"),
            ("KV left", _gib(self.kv_left), "modelled; activations and graphs not counted"),
            ("KV needed", _gib(self.kv_needed), f"modelled, one request of {shape.max_model_len} tokens"),
        ]


def _gib(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 0.05 else "0.0"


def plan(shape: ServerShape) -> MemoryPlan:
    """The plan of ``shape``."""
    return MemoryPlan(
        shape=shape,
        usable=shape.card_gib * shape.utilization,
        weights=weights_gib(shape.architecture, shape.tensor_parallel),
        copies=copies_gib(shape),
        steps=steps_gib(shape),
        engram=0.0 if shape.engram_on_host else ENGRAM_GIB / shape.tensor_parallel,
        indexer=indexer_gib(shape),
        kv_needed=KV_GIB_PER_TOKEN * shape.max_model_len,
    )


def weights_gib(architecture: str, tensor_parallel: int) -> float:
    """Weights a rank, GiB, Engram tables and copies apart."""
    formula = SHARDED_WEIGHTS_GIB / tensor_parallel + REPLICATED_WEIGHTS_GIB
    return formula + gfx942_excess_gib(tensor_parallel) if architecture == "gfx942" else formula


def gfx942_excess_gib(tensor_parallel: int) -> float:
    """What gfx942 holds a rank beyond the published formula, GiB.

    At TP 4 the published weights say it. At TP 2 it is what the published run that did not start
    leaves unexplained, so it also contains that run's activations. The two agree in being nearly in
    proportion to 1 / TP (17.7 and 33.1), which is how other sizes are modelled.
    """
    if tensor_parallel == 2:
        usable = GFX942_TP2_CARD_GIB * GFX942_TP2_UTILIZATION
        formula = SHARDED_WEIGHTS_GIB / 2 + REPLICATED_WEIGHTS_GIB
        buffer = published_indexer_gib(GFX942_TP2_BATCHED_TOKENS, MODEL_CONTEXT)
        return usable - GFX942_TP2_LEFT_GIB - formula - buffer
    at_4 = GFX942_TP4_GIB - (SHARDED_WEIGHTS_GIB / 4 + REPLICATED_WEIGHTS_GIB)
    return at_4 * 4 / tensor_parallel


def _kernels_run(shape: ServerShape) -> bool:
    return shape.monokernel and shape.tensor_parallel in tp_sizes(shape.architecture)


def copies_gib(shape: ServerShape) -> float:
    """Weights that the kernels need beside vLLM's, dense ones that vLLM widens; below zero where vLLM holds
    less with them."""
    if not _kernels_run(shape):
        return 0.0
    arch, ranks, widened = shape.architecture, shape.tensor_parallel, shape.widened_at_load
    return weight_bytes(arch, ranks, shape.drafts, widened_at_load=widened) / GIB


def copies_source(shape: ServerShape) -> str:
    """Where the figure of ``copies_gib`` comes from."""
    if not copies_gib(shape):
        return "none"
    if shape.widened_at_load:
        return "dense weights alone, from the checkpoint's shapes"
    return "less than vLLM's bf16, from the checkpoint's shapes"


def steps_gib(shape: ServerShape) -> float:
    """Workspaces and symmetric memory of the kernels."""
    if not _kernels_run(shape):
        return 0.0
    return step_bytes(shape.architecture, shape.tensor_parallel, shape.drafts) / GIB


def published_indexer_gib(batched_tokens: int, context: int) -> float:
    """The indexer's buffer at the published rate, GiB."""
    return batched_tokens * context * INDEXER_PUBLISHED_BYTES / GIB


def indexer_gib(shape: ServerShape) -> float:
    """The indexer's logits buffer: the published rate, or the base's own bound where it is lower."""
    rows = min(shape.max_num_batched_tokens, shape.decode_rows)
    bound = rows * shape.max_model_len * INDEXER_BASE_BYTES / GIB
    return min(published_indexer_gib(shape.max_num_batched_tokens, shape.max_model_len), bound)


@dataclass(frozen=True)
class FlagChange:
    """A change of one flag: the flag, the words to add to the command, and the shape with it."""

    flag: str
    words: tuple[str, ...]
    shape: ServerShape


# No published AMD server goes above it, and the runtime's own allocations need the rest.
MOST_UTILIZATION = 0.97
# Assumed for activations and graphs, which the plan leaves out: a change is advised only where it
# leaves this much beside the KV cache. A server is refused without counting it.
HEAD_ROOM_GIB = 8.0


def changes_that_fit(shape: ServerShape) -> list[FlagChange]:
    """The changes of one flag that make the plan fit with head room, the least costly first.

    Order: what costs nothing but head room, then what costs speed, then what costs capacity, then
    more GPUs.
    """
    return [change for change in changes_that_help(shape) if _roomy(plan(change.shape))]


def _roomy(planned: MemoryPlan) -> bool:
    return planned.kv_left >= planned.kv_needed + HEAD_ROOM_GIB


def changes_that_help(shape: ServerShape) -> list[FlagChange]:
    """Every change of one flag that takes memory away or brings more, fitting or not, in that order."""
    found: list[FlagChange] = []

    def add(flag: str, value: object, changed: ServerShape) -> None:
        found.append(FlagChange(flag.partition(".")[0], (flag, str(value)), changed))

    for percent in range(int(shape.utilization * 100) + 1, int(MOST_UTILIZATION * 100) + 1):
        share = percent / 100
        add("--gpu-memory-utilization", f"{share:g}", replace(shape, utilization=share))
    if not shape.engram_on_host:
        add("--engram-config.cpu_offload", "true", replace(shape, engram_on_host=True))
    for tokens in _halves(shape.max_num_batched_tokens, least=max(2048, shape.decode_rows)):
        add("--max-num-batched-tokens", tokens, replace(shape, max_num_batched_tokens=tokens))
    if copies_gib(shape) > 0:
        changed = replace(shape, monokernel=False)
        found.append(FlagChange("--monokernel", ("--no-monokernel",), changed))
    for seqs in _halves(shape.max_num_seqs, least=1):
        add("--max-num-seqs", seqs, replace(shape, max_num_seqs=seqs))
    for length in _halves(shape.max_model_len, least=8192):
        add("--max-model-len", length, replace(shape, max_model_len=length))
    for ranks in (4, 8):
        if ranks > shape.tensor_parallel:
            add("--tensor-parallel-size", ranks, replace(shape, tensor_parallel=ranks))
    return found


def _halves(value: int, least: int) -> list[int]:
    """``value`` halved again and again, down to ``least``."""
    halves: list[int] = []
    while value // 2 >= least:
        value //= 2
        halves.append(value)
    return halves
