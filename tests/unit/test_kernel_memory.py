# SPDX-License-Identifier: Apache-2.0
"""The kernels' own memory: the planned bytes are those of the tensors and layouts that the kernels have."""

from __future__ import annotations

from math import prod

import pytest

from rocm_overlay import kernel_arches, kernel_memory
from tests.unit import test_specialized_decode_tree as tree  # noqa: F401
from tests.unit.test_ffn_launch import alone
from tests.unit.test_peers import CPU, Heap

from vllm.models.common.amd.persistent.handoff import ErrorRecord  # isort: skip
from vllm.models.deepseek_v41.amd.mono import ffn_launch, layer_launch  # isort: skip
from vllm.models.deepseek_v41.amd.mono.geometry import SUPPORTED_EXPERTS, FfnGeometry  # isort: skip

GIB = 1 << 30
LAYERS = 40 + 3
DRAFTS = 5


def dense(tp: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's dense e4m3 weights and their codes, as the kernels check them."""
    ffn = {k: v for k, v in ffn_launch.expected(FfnGeometry(1, tp)).items() if k.startswith("shared")}
    linears = {k: v for k, v in layer_launch.expected(tp).items() if k.startswith("w")}
    return {name: shape for name, (shape, _) in (linears | ffn).items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_the_values_of_dense_weights_are_those_of_the_kernels(tp: int) -> None:
    weights = {name: prod(shape) for name, shape in dense(tp).items() if not name.endswith("scale")}
    assert kernel_memory.dense_values(tp) == weights


@pytest.mark.parametrize(("tp", "published_mb"), [(4, 47.4), (2, 85.6)])
def test_extra_weights_are_the_dense_bytes_and_codes_of_every_layer(tp: int, published_mb: float) -> None:
    every = LAYERS * sum(prod(shape) for shape in dense(tp).values())  # a byte a value, a byte a code
    extra = kernel_memory.weight_bytes("gfx942", tp, DRAFTS)
    assert extra == every and extra / LAYERS / 1e6 == pytest.approx(published_mb, abs=0.1)
    assert kernel_memory.weight_bytes("gfx942", tp, 0) == every * 40 // LAYERS
    assert kernel_memory.weight_bytes("gfx950", tp, DRAFTS) == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_that_stay_bytes_save_what_vllm_s_bf16_was_but_for_wo_a(tp: int) -> None:
    """Without the kernels two bytes a value; with them one, a byte a code, and vLLM's own bf16 of wo_a."""
    shapes = dense(tp)
    values = {name: prod(shape) for name, shape in shapes.items() if not name.endswith("scale")}
    codes = sum(prod(shape) for name, shape in shapes.items() if name.endswith("scale"))
    without = 2 * sum(values.values())
    with_them = sum(values.values()) + codes + 2 * values["wo_a"]
    extra = kernel_memory.weight_bytes("gfx942", tp, DRAFTS, widened_at_load=False)
    assert extra == LAYERS * (with_them - without) < 0


def held(rows: int, tp: int, experts: int, picks: int) -> int:
    """Bytes that whole layers of one step width hold, counted from what they made."""
    place = layer_launch.Deployment(alone(0, tp), CPU, "gfx942", experts, picks, ("layers.3",))
    makers = layer_launch.Makers(lambda g: lambda *_: None, lambda g: lambda *_: None)
    launch = layer_launch.LayerLaunch(place, 128, makers, Heap(0), ErrorRecord)
    launch.prepare(rows)
    width = launch._widths[rows]
    tensors = [width.front.workspace, width.back.workspace, *width.middle.values(), *width.handed_out]
    tensors += [width.front.symmetric.local, width.back.symmetric.local, launch.first_pre_mix(rows)]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    "rows, tp", [(rows, tp) for tp in (2, 4) for rows in (1, 6, 17, kernel_arches.most_rows("gfx942", tp))]
)
def test_a_row_of_a_step_width_takes_no_more_than_planned_and_little_less(tp: int, rows: int) -> None:
    target, draft = (held(rows, tp, *routing) for routing in SUPPORTED_EXPERTS)
    for seen, planned in (
        (target, kernel_memory.TARGET_BYTES_A_ROW[tp]),
        (target + draft, kernel_memory.STEP_BYTES_A_ROW[tp]),
    ):
        assert 0.96 * planned * rows <= seen <= planned * rows


@pytest.mark.parametrize(("tp", "most", "some"), [(4, 42, {36, 40, 42}), (2, 32, {24, 25, 30, 32})])
def test_every_width_of_the_default_graph_sizes_is_counted(tp: int, most: int, some: set[int]) -> None:
    widths = kernel_arches.reachable_widths(most, DRAFTS, 1024)
    assert {1, 2, 4, 5, 6, 8} | some <= widths and max(widths) == most
    planned = kernel_memory.step_bytes("gfx942", tp, DRAFTS)
    assert planned == sum(widths) * kernel_memory.STEP_BYTES_A_ROW[tp]


@pytest.mark.parametrize(("tp", "most"), [(4, 2.2), (2, 3.6)])
def test_a_rank_takes_at_most_four_gib_more_than_without_the_kernels(tp: int, most: float) -> None:
    """The base's kernels take 71.23 (published: 170.11 in place of 98.88)."""
    extra = kernel_memory.weight_bytes("gfx942", tp, DRAFTS) + kernel_memory.step_bytes("gfx942", tp, DRAFTS)
    assert most - 0.1 < extra / GIB < most <= 4
