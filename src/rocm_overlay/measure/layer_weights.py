# SPDX-License-Identifier: Apache-2.0
"""Random weights of a checkpoint's size for the layer test, over vLLM's dummy ones.

Dummy weights are up to 0.001, norms among them, so that a layer's output is next to nothing. Larger ones than
these would make a random stack chaotic: the order of atomic sums alone would then move its outputs.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Standard deviations: of a norm's weight around 1, and of biases, sinks and the mixes' scales and bases.
NORM_SPREAD = 0.1
VECTOR_SPREAD = 0.05
QUANTISATION = ("weight_scale", "weight_scale_inv", "input_scale")


def fill_floats(model: torch.nn.Module) -> None:
    """Fill each unquantised parameter by its name's seed: norms about 1, matrices with a gain of about 1.

    Quantised weights and their scales stay vLLM's: codes of all values, whose scale is 1/128.
    """
    import torch

    for prefix, module in model.named_modules():
        for name, own in module.named_parameters(prefix=prefix, recurse=False):
            if own.dtype not in (torch.bfloat16, torch.float16, torch.float32) or name.endswith(QUANTISATION):
                continue
            generator = torch.Generator(own.device).manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(own.shape, generator=generator, device=own.device)
            if own.dim() > 1:
                values *= 1 / math.sqrt(own.shape[-1])
            elif "Norm" in type(module).__name__:
                values = 1 + NORM_SPREAD * values
            else:
                values *= VECTOR_SPREAD
            with torch.no_grad():
                own.copy_(values)


def clear_padding(model: torch.nn.Module) -> None:
    """Zero the padding of every routed expert's MXFP4 weights, before they are processed.

    w13_weight u8 [experts, shards x padded, hidden / 2]; w2_weight u8 [experts, hidden, padded / 2].
    """
    import torch

    for module in model.modules():
        config = getattr(module, "moe_config", None)
        width = getattr(config, "intermediate_size_per_partition_unpadded", None)
        up, down = (getattr(module, name, None) for name in ("w13_weight", "w2_weight"))
        if width is None or up is None or down is None or up.dtype != torch.uint8:
            continue
        padded = 2 * down.shape[2]
        with torch.no_grad():
            up.unflatten(1, (-1, padded))[:, :, width:] = 0
            down[:, :, width // 2 :] = 0
