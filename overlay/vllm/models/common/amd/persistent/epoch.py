# SPDX-License-Identifier: Apache-2.0
"""The launch epoch: the tag that tells this launch's hand-offs from the last one's.

Each workspace counts its own launches, and every word of its mailboxes is written exactly once in each of
them. So a reader can only meet the tag of this launch or of the one before (or zero, before the first), and a
tag needs no more bits than tell those apart. Tags still take all their bits, so that a word that no launch
wrote is noticed; zero is never a tag, since fresh workspaces are zero-filled.
"""

from __future__ import annotations

TAG_BITS = 24
LAST_TAG = (1 << TAG_BITS) - 1
FIRST_TAG = 1


def next_tag(tag: int) -> int:
    """The tag of the launch after the one that had ``tag``; wraps past zero.

    Raises ``ValueError`` for a value that no launch has."""
    if not FIRST_TAG <= tag <= LAST_TAG:
        raise ValueError(f"{tag} is not a launch tag, which is in {FIRST_TAG}..{LAST_TAG}")
    return FIRST_TAG if tag == LAST_TAG else tag + 1
