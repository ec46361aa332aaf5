# SPDX-License-Identifier: Apache-2.0
"""Transpositions between four neighbouring lanes, without LDS.

Lane 4 q + c holds four values of one key; afterwards it holds value c of four keys, those of lanes 4 q ..
4 q + 3 in their order.
"""

from __future__ import annotations

from typing import Any

import flydsl.expr as fx

from . import device as dev

# Byte selectors (``device.permute_bytes``) of the neighbour's word and the lane's own, in even lanes and in
# odd ones, or in the lower two and the upper two.
_BYTES = (0x06020400, 0x03070105)
_HALVES = (0x05040100, 0x03020706)


class Quads:
    """The selectors of this lane, found once. ``lane``: its number."""

    def __init__(self, lane: Any) -> None:
        odd, self._upper = (lane & 1) != 0, (lane & 2) != 0
        self._bytes = odd.select(fx.Int32(_BYTES[1]), fx.Int32(_BYTES[0]))
        self._halves = odd.select(fx.Int32(_HALVES[1]), fx.Int32(_HALVES[0]))
        self._upper_halves = self._upper.select(fx.Int32(_HALVES[1]), fx.Int32(_HALVES[0]))

    def bytes(self, word: fx.Int32) -> fx.Int32:
        """Four bytes a lane."""
        word = dev.permute_bytes(dev.quad_xor(word, 1), word, self._bytes)
        return dev.permute_bytes(dev.quad_xor(word, 2), word, self._upper_halves)

    def halves(self, low: fx.Int32, high: fx.Int32) -> list[fx.Int32]:
        """Four 16-bit values a lane, two a word."""
        low, high = (dev.permute_bytes(dev.quad_xor(x, 1), x, self._halves) for x in (low, high))
        return [
            self._upper.select(dev.quad_xor(high, 2), low),
            self._upper.select(high, dev.quad_xor(low, 2)),
        ]
