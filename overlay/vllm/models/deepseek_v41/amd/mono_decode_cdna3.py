# SPDX-License-Identifier: Apache-2.0
"""CDNA3's weights as the mono kernels read them, without a second copy of the routed experts.

Routed experts lie as vLLM's AITER_TRITON_MXFP4_BF16 backend leaves them for prefill (layout ``row_major``).
Dense MXFP8 linears are OCP e4m3 bytes, in which -0 (0x80) is set to 0 once: FNUZ instructions read it as a
NaN, and no product changes. vLLM has no MXFP8 instructions here and widens those bytes to bf16, which
``VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD`` times:

- 1, the default, at load: the bytes that vLLM would free are kept beside its bf16;
- 0, at each call: the bytes stay in the linear, and the kernels read them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from vllm.models.common.specialized_decode.weights import KeptAtLoad, as_bytes

E4M3 = torch.float8_e4m3fn
NEGATIVE_ZERO = 0x80
BLOCK = 32  # rows and columns of one E8M0 code
# FNUZ reads a byte as half of its OCP value, and the kernels raise the code by one instead: what is raised
# must still be a power of two, which 255 is not.
LARGEST_CODE = 253
# Where vLLM's bf16 wo_a is kept once its own attention ran: rocm_aiter_mla_sparse._get_cached_wo_a_bf16.
WIDENED_WO_A = "_dsv4_wo_a_bf16"


def keep_at_load(layer: Any, linears: Iterable[str], experts: str) -> dict[str, KeptAtLoad]:
    """What the kernels read of a layer, kept from when vLLM processes it after loading.

    Args:
        layer: a decoder layer.
        linears: paths of dense MXFP8 linears below it, each kept as ``weight`` e4m3 [rows, k] without -0 and
            ``weight_scale`` uint8 [rows / 32, k / 32].
        experts: the path of the routed experts, kept as ``routed_experts`` gives them.
    """
    kept = {
        path: KeptAtLoad(attrgetter(path)(layer), dense_linear, loaded=as_loaded, place=widen_again)
        for path in linears
    }
    return kept | {experts: KeptAtLoad(attrgetter(experts)(layer), routed_experts, place=place_experts)}


# ---- dense linears
def as_loaded(linear: Any) -> Tensor:
    """The weight before vLLM processes it."""
    return linear.weight.data


def dense_linear(linear: Any, loaded: Tensor) -> dict[str, Tensor]:
    """A processed linear's e4m3 bytes, rid of -0 in place, and its codes.

    Args:
        linear: has ``weight`` and ``weight_scale``.
        loaded: its weight before it was processed.

    Raises:
        ValueError: there are no e4m3 bytes, or the codes are not of blocks of 32 x 32.
    """
    weight = linear.weight.data if linear.weight.dtype == E4M3 else loaded
    if weight.dtype != E4M3:
        raise ValueError(
            f"weight is {weight.dtype} as loaded and {linear.weight.dtype} as processed, wanted {E4M3} as "
            "published: load the published checkpoint, or have weights processed with "
            "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=0"
        )
    codes = block_codes(as_bytes(linear.weight_scale.data), *weight.shape)
    clear_negative_zero_(weight)
    return {"weight": weight, "weight_scale": codes}


def clear_negative_zero_(weight: Tensor) -> None:
    """Set every e4m3 -0 of ``weight`` to 0, in place."""
    as_uint8 = weight.view(torch.uint8)
    as_uint8.masked_fill_(as_uint8 == NEGATIVE_ZERO, 0)


def block_codes(codes: Tensor, rows: int, k: int) -> Tensor:
    """One E8M0 code for each 32 x 32 block: uint8 [rows / 32, k / 32].

    Args:
        codes: uint8, of that shape, or [rows, k / 32] with a block's code in each of its 32 rows, as vLLM
            keeps them for weights that it widens.

    Raises:
        ValueError: another shape, rows of a block that differ, or a code above ``LARGEST_CODE``.
    """
    blocks = (rows // BLOCK, k // BLOCK)
    if tuple(codes.shape) == (rows, blocks[1]) and rows % BLOCK == 0:
        repeated = codes.view(blocks[0], BLOCK, blocks[1])
        if not torch.equal(repeated, repeated[:, :1].expand_as(repeated)):
            raise ValueError(f"weight_scale differs within blocks of {BLOCK} rows, wanted one code a block")
        codes = repeated[:, 0].contiguous()
    if tuple(codes.shape) != blocks:
        wanted = f"{blocks}, or {(rows, blocks[1])} with a block's code in each of its rows"
        raise ValueError(f"weight_scale has shape {tuple(codes.shape)}, wanted {wanted}")
    if (largest := int(codes.max())) > LARGEST_CODE:
        raise ValueError(f"weight_scale has a code of {largest}, wanted at most {LARGEST_CODE}")
    return codes


def widen_again(linear: Any, _: Mapping[str, Tensor]) -> None:
    """Have the bf16 wo_a that vLLM made of one-byte weights, once, follow a reload, at its address."""
    widened = getattr(linear, WIDENED_WO_A, None)
    if widened is None or linear.weight.dtype != E4M3:
        return
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

    scale = as_bytes(linear.weight_scale.data)
    if scale.shape[0] != linear.weight.shape[0]:
        scale = scale.repeat_interleave(BLOCK, dim=0)
    widened.copy_(dequant_mxfp8_to_bf16(linear.weight.data, scale).view_as(widened))


# ---- routed experts
def routed_experts(experts: Any, _: Any = None) -> dict[str, Tensor]:
    """The memory of processed experts, as triton_kernels' tensors hold it.

    Returns:
        w13_weight uint8 [experts, 2 x columns, hidden / 2], gate and up rows in turn; w13_weight_scale uint8
        [experts, hidden / 32, 2 x columns]; w2_weight uint8 [experts, hidden, columns / 2]; w2_weight_scale
        uint8 [experts, columns / 32, hidden]. All are views.

    Raises:
        ValueError: another backend processed the experts.
    """
    return {name: _view(name, wrapped) for name, wrapped in _wrapped(experts).items()}


def place_experts(experts: Any, kept: Mapping[str, Tensor]) -> None:
    """Have vLLM's tensors of the experts hold ``kept``, and free what they held."""
    for name, wrapped in _wrapped(experts).items():
        wrapped.storage.data = _turned(name, kept[name])


def _wrapped(experts: Any) -> dict[str, Any]:
    """vLLM's four triton_kernels tensors; it keeps the scales in the method's precision configurations."""
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import weight_mx_scale

    found = {}
    for name in ("w13", "w2"):
        precision = getattr(experts.quant_method, f"{name}_precision_config", None)
        found[f"{name}_weight"] = getattr(experts, f"{name}_weight", None)
        found[f"{name}_weight_scale"] = None if precision is None else weight_mx_scale(precision)
    # A torch tensor has a method of this name.
    if missing := [name for name, one in found.items() if not hasattr(getattr(one, "storage", None), "data")]:
        seen = ", ".join(f"{name} is a {type(found[name]).__name__}" for name in missing)
        raise ValueError(
            f"{seen}, wanted triton_kernels' tensors, as AITER_TRITON_MXFP4_BF16 leaves them: start with "
            "--moe-backend aiter"
        )
    return found


def _view(name: str, wrapped: Any) -> Tensor:
    return _turned(name, wrapped.storage.data)


def _turned(name: str, data: Tensor) -> Tensor:
    """triton_kernels' shapes put k before rows, and bytes have k innermost in memory: the kernels' shape of
    them, and back. Codes have rows innermost, as their shape says."""
    return data if name.endswith("scale") or data.dim() < 2 else data.transpose(-2, -1)
