# SPDX-License-Identifier: Apache-2.0
"""The interface between stages and an architecture.

Operand layouts of a 16 x 16 matrix instruction (l is the lane, g = l // 16, r = l % 16), as the stages use
them. A is the weight operand with 16 output columns, B the activation operand with 16 rows of the step:

- D: lane l holds outputs 4 g .. 4 g + 3 of step row r.
- 8-bit operand of 128 k: lane l holds two halves of 16 k of row r; half h begins at k ``group_stride`` g +
  ``half_stride`` h.
- 4-bit operand of 128 k: lane l holds k 32 g .. 32 g + 31 of row r, low nibble first.
- the scale of lane l belongs to k 32 g .. 32 g + 31 of row r, whatever bytes the lane holds.
- bf16 operand of 32 k: lane l holds 8 k of row r; which 8 is free, if A and B agree.

A 4 x 4 matrix instruction is 16 products of its own, of four neighbouring lanes each (c is the lane's place
among them): A and B hold 4 k of their row c, D four rows of A for row c of B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx


@dataclass(frozen=True)
class Code:
    """An E8M0 code: byte ``byte`` of this lane's ``word``."""

    word: Any
    byte: int = 0


class Isa(ABC):
    """One architecture's instructions. Vectors of 32-bit words are ``Int32`` vectors. 8-bit values are OCP
    e4m3, whatever format the instructions have.

    ``group_stride``, ``half_stride``: the 8-bit operand's layout. ``expert_layout``: the layout in which the
    serving engine keeps routed experts on this architecture, by name. ``weight_sets``: sets of 20 weight
    operands that a wave's registers hold beside the rows' operands and what a product needs.
    ``record_code_bias``: by how much the serving engine's codes of the sliding window's key records are above
    those of the same bytes as OCP values. Conversions read a byte as that power of two less than OCP does,
    and, where it is not 0, 0x80 as a NaN.
    ``column_read``: there is an LDS read that gives columns, ``column_bf16``.
    """

    name: str
    lds_bytes: int
    compute_units: int
    group_stride: int
    half_stride: int
    expert_layout: str
    weight_sets: int
    record_code_bias: int
    column_read: bool

    @abstractmethod
    def mfma_bf16(self, weights: Any, activations: Any, acc: Any) -> Any:
        """``acc`` (4 floats) plus 16 x 16 x 32 bf16; operands are 4 words (8 values) a lane."""

    @abstractmethod
    def mfma_bf16_half(self, weights: Any, activations: Any, acc: Any) -> Any:
        """``acc`` plus 16 x 16 x 16 bf16; operands are 2 words a lane: k 4 g .. 4 g + 3 of row r."""

    @abstractmethod
    def mfma_bf16_quads(self, a: Any, b: Any, acc: Any) -> Any:
        """``acc`` plus 16 x (4 x 4 x 4) bf16; operands are 2 words a lane."""

    def column_bf16(self, shared: Any, offset: Any) -> Any:
        """Two words: four bf16 of one column of LDS rows. Per 16 lanes, lane 4 k + c points to columns
        4 c .. 4 c + 3 of row k, and lane r gets column r of rows 0..3. All lanes take part. Only where
        ``column_read``."""
        raise NotImplementedError(f"{self.name} has no LDS read of columns; see ``column_read``")

    @abstractmethod
    def expand_fp8(self, word: fx.Int32, scale: fx.Float32) -> list[fx.Int32]:
        """Four 8-bit values, as the conversions read them (``record_code_bias``), times a power of two, as
        two bf16 pairs."""

    @abstractmethod
    def ready(self, words: Any, code: Code) -> Any:
        """MXFP8 activations (8 words) as the products take them, which take both: worth it where several
        products share them."""

    def ready_fp4(self, words: Any, code: Code) -> Any:
        """MXFP4 weights (4 words) as the products take them: worth it where several products share them."""
        return words

    @abstractmethod
    def mfma_fp4(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        """``acc`` plus 16 x 16 x 128: MXFP4 weights (4 words) times MXFP8 activations (8 words)."""

    @abstractmethod
    def mfma_fp8(
        self, weights: Any, weight_code: Code, activations: Any, activation_code: Code, acc: Any
    ) -> Any:
        """``acc`` plus 16 x 16 x 128: MXFP8 weights (8 words) times MXFP8 activations (8 words)."""

    @abstractmethod
    def pack_bf16(self, low: fx.Float32, high: fx.Float32) -> fx.Int32:
        """Two floats rounded to nearest even bf16."""

    @abstractmethod
    def dot_bf16(self, a: fx.Int32, b: fx.Int32, acc: fx.Float32) -> fx.Float32:
        """``acc`` plus the products of two bf16 pairs, in fp32."""

    @abstractmethod
    def scale_fp8(self, pairs: list[fx.Int32], code: fx.Int32) -> fx.Int32:
        """Two bf16 pairs divided by the power of two of an E8M0 code, within the format's range, rounded to
        nearest even e4m3, first in the low byte."""

    @abstractmethod
    def pack_fp8(self, values: list[fx.Float32]) -> fx.Int32:
        """Four floats within the format's range rounded to nearest even e4m3, first in the low byte."""
