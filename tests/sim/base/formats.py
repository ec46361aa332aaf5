# SPDX-License-Identifier: Apache-2.0
"""MX formats in float64 and the byte orders in which the base's kernels read weights.

Facts: docs of the layer (formats), the base's weights942 and mx modules (byte orders).
"""

from __future__ import annotations

import torch

FP4_VALUES = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16, kept in float64. float64 -> float32 -> bf16 would round twice; ties at 2^-25 of a
    value
    that came from float32 arithmetic do not occur in what is compared here."""
    return x.float().bfloat16().double()


def fp4(raw: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] bytes -> [..., K] values, low nibble first."""
    return torch.stack([FP4_VALUES[(raw & 15).long()], FP4_VALUES[(raw >> 4).long()]], -1).flatten(-2)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Scale codes -> powers of two."""
    return torch.exp2(codes.double() - 127)


def mxfp4_matrix(raw: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, K / 2] bytes and [N, K / 32] codes -> [N, K] float64."""
    n = raw.shape[0]
    return (fp4(raw).view(n, -1, 32) * e8m0(codes)[..., None]).reshape(n, -1)


def mxfp8_matrix(w: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, K] e4m3 and [N / 32, K / 32] codes -> [N, K] float64."""
    scale = e8m0(codes).repeat_interleave(32, 0).repeat_interleave(32, 1)
    return w.double() * scale


def mxfp8_rows(x: torch.Tensor, floor: float) -> torch.Tensor:
    """What a row keeps of its values when it is quantised to e4m3 with one power-of-two scale per 32, the
    scale
    ceil(log2(max(amax, floor) / 448))."""
    rows, k = x.shape
    blocks = x.view(rows, k // 32, 32)
    amax = blocks.abs().amax(-1).clamp_min(floor)
    code = torch.ceil(torch.log2(amax / 448)).clamp(-127, 127)
    scale = torch.exp2(code)[..., None]
    q = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    return (q * scale).reshape(rows, k)


# ---- gfx950: AITER's layouts
def shuffle_fp4(raw: torch.Tensor) -> torch.Tensor:
    """[N, Kb] bytes -> per 16 rows and 64 bytes (128 values): the four 16-byte blocks, each of all 16 rows."""  # noqa: E501
    n, kb = raw.shape
    return raw.view(n // 16, 16, kb // 64, 4, 16).permute(0, 2, 3, 1, 4).contiguous().view(n, kb)


def shuffle_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, C] scale codes (N a multiple of 32; C padded to 8) -> AITER's shuffle_scale order."""
    n, c = codes.shape
    pad = -c % 8
    if pad:
        codes = torch.nn.functional.pad(codes, (0, pad))
    c += pad
    return codes.view(n // 32, 2, 16, c // 8, 2, 4).permute(0, 3, 5, 2, 4, 1).contiguous().view(n, c)


def interleave_tiles(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 gate rows, 16 up rows, and so on."""
    n, k = gate.shape
    return torch.stack([gate.view(n // 16, 16, k), up.view(n // 16, 16, k)], 1).reshape(2 * n, k)


def interleave_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A gate row, an up row, and so on."""
    return torch.stack([gate, up], 1).reshape(2 * gate.shape[0], gate.shape[1])
