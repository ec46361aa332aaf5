# SPDX-License-Identifier: Apache-2.0
"""Scope bits of compiled launches. The simulator has peer memory uncached, as it is allocated, so a lost
system-scope bit changes nothing there; here the instructions are counted."""

from __future__ import annotations

import re
from collections import Counter

_ACCESS = re.compile(r"^\s+(?:buffer|global|flat)_(load|store|atomic)_(\w+)(.*)$", re.MULTILINE)
SYSTEM = "sc0 sc1"
# Of the attention front. Stores of two words past the L2: the words of the seam's sums, of collapsed and of
# published rows, and those rows; the compiler may unroll the three turns of the seam's sums. Invalidations
# before published bytes are read: collapsed rows, the query rank, the key.
FRONT_STORES, FRONT_READS = (4, 6), 3
# Of the attention back, beside those of an FFN launch: rows and words of the heads and of wo_a, and their
# invalidations. Words of its all-reduces to every rank.
MORE_STORES, MORE_READS, REDUCES = 4, 2, 2


def accesses(text: str) -> Counter[tuple[str, str, str]]:
    """(load or store, width, scope bits) -> instructions of an assembly text."""
    found: Counter[tuple[str, str, str]] = Counter()
    for kind, width, rest in _ACCESS.findall(text):
        found[kind, width, " ".join(bit for bit in ("sc0", "sc1") if bit in rest.split())] += 1
    return found


def stores(text: str, bits: str) -> int:
    """Stores of two words with these scope bits."""
    return accesses(text)["store", "dwordx2", bits]


def invalidations(text: str) -> int:
    """Of a wave's caches at device scope."""
    return len(re.findall(r"^\s+buffer_inv sc1$", text, re.MULTILINE))


def layer_faults(text: str, tp: int, device: tuple[int, ...], reads: int, words: int = 0) -> list[str]:
    """What is wrong with the stores and invalidations of a launch of a whole layer, in words. Wanted: one of
    the numbers ``device`` of stores of two words past the L2, ``reads`` invalidations, and to every rank
    ``words`` of two words and a record of each wait that fails."""
    out = []
    if (here := invalidations(text)) != reads:
        out.append(f"{here} invalidations, wanted {reads}")
    waits = len(re.findall(r"^\s+s_sleep\b", text, re.MULTILINE))
    for bits, wanted in (("sc1", device), (SYSTEM, (tp * (waits + words),))):
        if (here := stores(text, bits)) not in wanted:
            out.append(f"{here} stores of two words have {bits}, wanted {' or '.join(map(str, wanted))}")
    return out


def front_faults(text: str, tp: int) -> list[str]:
    """``layer_faults`` of an attention front."""
    return layer_faults(text, tp, FRONT_STORES, FRONT_READS)


def back_faults(text: str, ffn: str, tp: int) -> list[str]:
    """``layer_faults`` of an attention back with the FFN half, beside the FFN launch ``ffn`` of its sizes."""
    device, reads = stores(ffn, "sc1") + MORE_STORES, invalidations(ffn) + MORE_READS
    return layer_faults(text, tp, (device,), reads, REDUCES)


def faults(text: str, tp: int) -> list[str]:
    """What is missing of an FFN launch's system-scope accesses, in words.

    Each wait has one ``s_sleep``. The first and the last wait are the all-reduces': each sends a word to
    every rank and loads one of every rank, twice where the compiler has the first poll before the loop. Each
    wait loads the control block's error between its polls; when it fails it sends a record to every rank and,
    in the all-reduces, looks at each rank's tag again."""
    found, waits = accesses(text), [m.start() for m in re.finditer(r"^\s+s_sleep\b", text, re.MULTILINE)]
    if len(waits) < 2:
        return [f"{len(waits)} waits sleep"]
    out = []
    for kind, width, wanted in (
        ("store", "dwordx2", {2 * tp + len(waits) * tp}),
        ("load", "dwordx2", {2 * tp, 3 * tp, 4 * tp}),
        ("load", "dword", {len(waits) + 2 * tp}),
    ):
        if (here := found[kind, width, SYSTEM]) not in wanted:
            out.append(f"{here} {kind}s of {width} have {SYSTEM}, wanted {sorted(wanted)}")
    for at in (waits[0], waits[-1]):
        polled = [line for line in text[:at].splitlines() if "buffer_load_dwordx2" in line][-tp:]
        out += [f"an all-reduce polls by {line.strip()}" for line in polled if not line.endswith(SYSTEM)]
    for (kind, width, bits), number in found.items():
        if bits == "sc0":
            out.append(f"{number} {kind}s of {width} have sc0 without sc1")
    return out
