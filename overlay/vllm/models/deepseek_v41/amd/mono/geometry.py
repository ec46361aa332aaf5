# SPDX-License-Identifier: Apache-2.0
"""Sizes of the FFN half of a decode layer, on one rank, and how the launch divides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

HIDDEN = 5120
STREAMS = 4
MIXES = STREAMS * (2 + STREAMS)
SINKHORN_ROUNDS = 20
INTERMEDIATE = 2304
MX_BLOCK = 32
NORM_EPSILON = 1e-20
MIX_EPSILON = 1e-6
ROUTED_SCALING = 1.5
SWIGLU_LIMIT = 10.0
MAX_ROWS = 48
# A workgroup of gfx942 has 64 KB of LDS: an FFN launch of 42 rows needs 64,768 bytes (``regions.lds``). vLLM
# captures graphs of 36 and 42 rows with five drafts, so that no captured size but 48 is lost.
MAX_ROWS_GFX942 = 42

QUERY_RANK = 1280
HEADS = 64
HEAD_DIM = 512
ROTARY = 64
POSITION_FREE = HEAD_DIM - ROTARY
QKV = QUERY_RANK + HEAD_DIM
# Output projection: the heads of a group go to its rank, all groups' ranks to the hidden size.
OUTPUT_GROUPS = 8
OUTPUT_RANK = 1024
GROUP_K = HEADS // OUTPUT_GROUPS * HEAD_DIM
# Compressed keys of a row at most, and keys of the target's causal window.
SELECTED = 512
WINDOW = 128
# An fp8_ds_mla record: 448 e4m3 and 64 bf16 in a block's data rows, 7 codes and a pad in its scale rows.
RECORD_DATA = POSITION_FREE + 2 * ROTARY
RECORD_CODES = 8
RECORD_BLOCK = 64  # values of one code

WORKGROUPS = 256
XCDS = 8
THREADS = 512
WAVES = THREADS // 64

# Waves that share a row's norm.
ROW_PARTS = 2

# A matrix instruction has 16 weight outputs, 16 step rows and 128 k.
TILE = 16
K_STEP = 128

# Experts of one router workgroup.
ROUTER_EXPERTS = 8

# Layouts of routed experts (stages/routed_weights.py), and the multiple of columns to which the loader pads a
# rank's intermediate share in each.
EXPERT_LAYOUTS = {"aiter_shuffle": 128, "row_major": 256}

SUPPORTED_TP = (2, 4)
# (experts, picks): the backbone's layers, the draft's.
SUPPORTED_EXPERTS = ((384, 6), (128, 3))


@dataclass(frozen=True)
class FfnGeometry:
    """One build: rows of the step, TP size, experts and picks a token, and whether every workgroup keeps the
    clock of each of ``stamps`` in the workspace.

    Raises ``ValueError`` with every reason when the launch does not do the combination."""

    rows: int
    tp: int
    experts: int = 384
    picks: int = 6
    timeline: bool = False

    # What a workgroup's first wave begins, in order; names are the stages' where it is one.
    stamps: ClassVar[tuple[str, ...]] = (
        "loads",
        "attention all-reduce",
        "seam fold",
        "normalised rows",
        "router logits",
        "seam sums",
        "shared gate/up",
        "mixes",
        "choose",
        "routed gate/up",
        "down",
        "MoE all-reduce",
        "output",
        "end",
    )

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.rows <= MAX_ROWS:
            faults.append(f"rows is {self.rows}, the launch does 1..{MAX_ROWS}")
        if self.tp not in SUPPORTED_TP:
            faults.append(f"TP size is {self.tp}, the launch does {' and '.join(map(str, SUPPORTED_TP))}")
        if (self.experts, self.picks) not in SUPPORTED_EXPERTS:
            known = " and ".join(f"{e} with top {p}" for e, p in SUPPORTED_EXPERTS)
            faults.append(f"{self.experts} experts with top {self.picks}, the launch does {known}")
        if faults:
            raise ValueError("no FFN launch: " + "; ".join(faults))

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 step rows."""
        return -(-self.rows // TILE)

    @property
    def columns(self) -> int:
        """Hidden columns of one workgroup's slice."""
        return HIDDEN // WORKGROUPS

    @property
    def pairs(self) -> int:
        """bf16 pairs of one row of a slice: what one mailbox word carries."""
        return self.columns // 2

    @property
    def wave_k(self) -> int:
        """Hidden values of one wave's share of a dot product over the hidden size."""
        return HIDDEN // WAVES

    @property
    def share(self) -> int:
        """Intermediate columns of this rank, of a routed and of the shared expert."""
        return INTERMEDIATE // self.tp

    @property
    def padded_share(self) -> int:
        """Intermediate columns of a routed expert's memory in AITER's shuffle."""
        return padded_share(self.share, "aiter_shuffle")

    @property
    def blocks(self) -> int:
        """MX blocks of 32 intermediate columns: one gate/up task each."""
        return self.share // MX_BLOCK

    @property
    def down_steps(self) -> int:
        """K steps of the down projection."""
        return -(-self.share // K_STEP)

    @property
    def router_tiles(self) -> int:
        """Workgroups of the router."""
        return self.experts // ROUTER_EXPERTS

    @property
    def router_fold(self) -> int:
        """Parts of the hidden size that one matrix instruction of the router takes side by side: with at most
        eight rows and eight experts, the other half of its rows and columns does another part."""
        return 2 if self.rows <= TILE // 2 else 1

    @property
    def slots(self) -> int:
        """Intermediate rows of a token: its picks, then the shared expert."""
        return self.picks + 1

    @property
    def max_active(self) -> int:
        """The most experts that a step can pick."""
        return min(self.experts, self.rows * self.picks)

    # ---- first workgroup of each stage that some workgroups do beside the others
    @property
    def shared_first(self) -> int:
        """The shared expert's gate/up tasks come after the router's tiles."""
        return self.router_tiles

    @property
    def mixes_first(self) -> int:
        """One workgroup a row finishes the mixes."""
        return self.shared_first + self.blocks

    @property
    def roles_end(self) -> int:
        """Workgroups from here on have no stage's work beside what every workgroup does."""
        return self.mixes_first + self.rows


class FrontGeometry(FfnGeometry):
    """One build of the attention front; the routing has no part in it."""

    stamps: ClassVar[tuple[str, ...]] = (
        "seam fold",
        "normalised rows",
        "query rank and key",
        "seam sums",
        "query",
        "key record",
        "mixes",
        "end",
    )

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return HEADS // self.tp

    @property
    def qkv_outputs(self) -> int:
        """Outputs of the first projection that one workgroup does."""
        return 8

    @property
    def qkv_workgroups(self) -> int:
        """Workgroups of the first projection, those of the query rank first."""
        return QKV // self.qkv_outputs

    @property
    def query_workgroups(self) -> int:
        """Workgroups of the query rank."""
        return QUERY_RANK // self.qkv_outputs

    @property
    def query_tiles(self) -> int:
        """Tiles of 16 outputs of the query projection that one workgroup does."""
        return self.heads * HEAD_DIM // WORKGROUPS // TILE

    @property
    def query_parts(self) -> int:
        """Waves that share the K steps of a tile of the query projection."""
        return WAVES // self.query_tiles

    @property
    def query_steps(self) -> int:
        """K steps of one wave in the query projection; some waves have one less."""
        return -(-QUERY_RANK // K_STEP // self.query_parts)

    @property
    def mixes_first(self) -> int:
        """The last workgroups finish the mixes: the first projection leaves some of them idle."""
        return WORKGROUPS - self.rows


class BackGeometry(FfnGeometry):
    """One build of the attention back with the FFN half. Windows and compressed keys are arguments."""

    stamps: ClassVar[tuple[str, ...]] = (
        "sparse attention",
        "wo_a",
        FfnGeometry.stamps[0],
        "wo_b",
        *FfnGeometry.stamps[1:],
    )

    @property
    def heads(self) -> int:
        """Heads of this rank."""
        return HEADS // self.tp

    @property
    def groups(self) -> int:
        """Groups of the output projection of this rank."""
        return OUTPUT_GROUPS // self.tp

    @property
    def task_heads(self) -> int:
        """Heads of one attention task: the fewest with which every XCD has a workgroup for each task of its
        rows. A task reads all keys of its row, so fewer heads a task are more reads and more workgroups."""
        rows_a_xcd, at_once = -(-self.rows // XCDS), 1
        while rows_a_xcd * (self.heads // at_once) > WORKGROUPS // XCDS:
            at_once *= 2
        return at_once

    @property
    def rank_outputs(self) -> int:
        """Outputs of wo_a that one workgroup does."""
        return self.groups * OUTPUT_RANK // WORKGROUPS

    @property
    def rank_columns(self) -> int:
        """Outputs of wo_a of this rank, the K of wo_b."""
        return self.groups * OUTPUT_RANK


def padded_share(share: int, layout: str) -> int:
    """Intermediate columns of a routed expert's memory, of ``share`` columns of a rank."""
    multiple = EXPERT_LAYOUTS[layout]
    return -(-share // multiple) * multiple


def slice_of(workgroup: int) -> int:
    """The slice of hidden columns of a workgroup. Workgroups are dealt to the XCDs in turn, so those of one
    XCD get neighbouring slices and share the cache lines between them. Works on traced integers."""
    return (workgroup % XCDS) * (WORKGROUPS // XCDS) + workgroup // XCDS


def workgroup_of(slice_idx: int) -> int:
    """The workgroup of a slice of hidden columns, the inverse of ``slice_of``. Works on traced integers."""
    return (slice_idx % (WORKGROUPS // XCDS)) * XCDS + slice_idx // (WORKGROUPS // XCDS)
