# SPDX-License-Identifier: Apache-2.0
"""Number formats and weight layouts in float64. Values are float64 tensors, bytes and codes uint8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MX_BLOCK = 32
E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded once, to nearest even, to bf16's eight significant bits; overflow becomes infinity."""
    bits = x.double().view(torch.int64)
    half = (1 << 44) - 1 + (bits >> 45 & 1)
    normal = (bits + half >> 45 << 45).view(torch.float64)
    step = 2.0**-133  # of bf16's denormals
    out = torch.where(x.abs() < 2.0**-126, torch.round(x / step) * step, normal)
    return torch.where(torch.isfinite(x), out.float(), x.float()).double()


def _nibble_pairs() -> torch.Tensor:
    """[256]: the two e2m1 values of a byte, low nibble first, as one item (complex64: a real and an imaginary
    float32), which is looked up at once."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    byte = torch.arange(256)
    return torch.complex(values[byte & 15], values[byte >> 4])


_PAIRS = _nibble_pairs()


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """2^(code - 127)."""
    return torch.exp2(codes.double() - 127)


def mxfp4(raw: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, K / 2] bytes and [N, K / 32] codes -> [N, K]."""
    n, half_k = raw.shape
    pairs = _PAIRS.index_select(0, raw.reshape(-1).int())
    values = torch.view_as_real(pairs).view(n, 2 * half_k // MX_BLOCK, MX_BLOCK)
    return (values.double() * e8m0(codes)[..., None]).view(n, 2 * half_k)


def mxfp8(raw: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, K] e4m3 bytes and [N / 32, K / 32] codes -> [N, K]."""
    n, k = raw.shape
    values = raw.view(torch.float8_e4m3fn).double().view(n // MX_BLOCK, MX_BLOCK, k // MX_BLOCK, MX_BLOCK)
    return values.mul_(e8m0(codes)[:, None, :, None]).view(n, k)


@dataclass(frozen=True)
class MxRows:
    """Rows in MXFP8: ``raw`` e4m3 bytes [rows, K], ``codes`` [rows, K / 32]."""

    raw: torch.Tensor
    codes: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """What the bytes and codes stand for, [rows, K]."""
        rows, k = self.raw.shape
        blocks = self.raw.view(torch.float8_e4m3fn).double().view(rows, k // MX_BLOCK, MX_BLOCK)
        return (blocks * e8m0(self.codes)[..., None]).view(rows, k)


def quantise(x: torch.Tensor, floor: float = 0.0) -> MxRows:
    """bf16 values to MXFP8, one code per 32: ceil(log2(max(amax, floor) / 448)) + 127 within 0..254."""
    rows, k = x.shape
    blocks = x.view(rows, k // MX_BLOCK, MX_BLOCK)
    amax = blocks.abs().amax(-1).clamp_min(floor)
    # amax = m 2^e with m in [0.5, 1), and 448 = 0.875 x 2^9: no logarithm that could round.
    mantissa, exponent = torch.frexp(amax)
    codes = exponent - 9 + (mantissa > 0.875) + 127
    codes = torch.where(amax == 0, 0, codes).clamp(0, 254).to(torch.uint8)
    scaled = (blocks / e8m0(codes)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    raw = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return MxRows(raw.view(rows, k), codes)


# ---- AITER's shuffle of a routed expert
def unshuffle_bytes(raw: torch.Tensor) -> torch.Tensor:
    """[N, K / 2] in tiles of 16 rows by 4 runs of 16 bytes, runs outermost -> row-major."""
    n, k = raw.shape
    return raw.view(n // 16, k // 64, 4, 16, 16).permute(0, 3, 1, 2, 4).reshape(n, k)


def unshuffle_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, C] in words of two columns four apart by two rows sixteen apart -> row-major."""
    n, c = codes.shape
    return codes.view(n // 32, c // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2).reshape(n, c)


def split_gate_up(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[2 N, K] with 16 gate rows, 16 up rows and so on -> gate [N, K], up [N, K]."""
    tiles = x.view(-1, 2, 16, x.shape[1])
    return tiles[:, 0].reshape(-1, x.shape[1]), tiles[:, 1].reshape(-1, x.shape[1])


# ---- layouts of a routed expert, by name (geometry.EXPERT_LAYOUTS)
@dataclass(frozen=True)
class ExpertFormat:
    """What gives row-major bytes [N, K / 2] and codes [N, K / 32] of an expert's matrix, and gate [N, K] and
    up [N, K] of a row-major [2 N, K]."""

    unpack_bytes: Callable[[torch.Tensor], torch.Tensor]
    unpack_codes: Callable[[torch.Tensor], torch.Tensor]
    split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


EXPERT_FORMATS = {
    "aiter_shuffle": ExpertFormat(unshuffle_bytes, unshuffle_codes, split_gate_up),
    "row_major": ExpertFormat(lambda raw: raw, lambda codes: codes.T, lambda x: (x[0::2], x[1::2])),
}
