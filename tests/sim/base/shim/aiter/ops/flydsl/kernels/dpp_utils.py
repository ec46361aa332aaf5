# SPDX-License-Identifier: Apache-2.0
"""The one DPP helper that the base's kernels import from AITER."""

from typing import Any

from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl as raw
from flydsl.expr.typing import as_ir_value


def update_dpp_i32(
    old: Any, src: Any, ctrl: int, row_mask: int, bank_mask: int, bound_ctrl: bool
) -> ir.Value:
    """``llvm.amdgcn.update.dpp`` of 32-bit values: disabled lanes keep ``old``."""
    i32 = ir.IntegerType.get_signless(32)
    return raw.update_dpp(i32, as_ir_value(old), as_ir_value(src), ctrl, row_mask, bank_mask, bound_ctrl)
