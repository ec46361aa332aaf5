# SPDX-License-Identifier: Apache-2.0
"""Random decode batches for the SWA metadata, and what has to hold of each.

The functions take and return plain values, so that a worker process (``tests.harness.interpreter``)
or a GPU machine can run the same ones.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from rocm_overlay import bench_swa
from rocm_overlay.bench_swa import WINDOW, Batch, Group

BLOCK_SIZES = (32, 64, 128)
DRAFTS = (1, 5, 6)
BATCHES = 300
LONG = 128 << 10
MAX_BLOCK = 200_000
PADDED_SLOT = -1
# More than a batch's rows, less than a server's, so that interpreted programs for the unused lengths are few.
SMALL_BUFFER = 1200
RUBBISH = -7
# Triton reads a kernel's source from its file, which must outlive the call that wrote it.
_MUTANTS = tempfile.TemporaryDirectory(prefix="swa_mutants_")


def random_batch(
    rng: random.Random, *, max_rows: int, drafts: int, noncausal: bool, device: str = "cpu"
) -> Batch:
    """A decode batch of 1 to ``max_rows`` rows whose requests have up to 1 + ``drafts`` rows each.

    It draws what a serving batch can hold: sequences shorter than the window, of thousands and of 128k
    tokens; equal and unequal rows a request; padded rows at the end and between; a replay start inside,
    below and above the window; null blocks (block 0) and negative table entries inside windows.
    """
    block_size = rng.choice(BLOCK_SIZES)
    lengths = _rows_of_requests(rng, max_rows, drafts + (0 if noncausal else 1))
    num_padded = rng.choice((0, 0, rng.randint(0, max_rows - sum(lengths))))
    seq_lens = [rng.choice((rng.randint(rows, 140), rng.randint(140, 5000), LONG + rng.randint(0, 63)))
                for rows in lengths]  # fmt: skip
    replay = [rng.choice((0, 0, 0, length + rng.randint(0, 3), max(0, length - rng.randint(0, WINDOW + 30))))
              for length in seq_lens]  # fmt: skip
    requests = [request for request, rows in enumerate(lengths) for _ in range(rows)]
    slots = [rng.choices((PADDED_SLOT, 0, rng.randrange(1 << 30)), (15, 5, 80))[0] for _ in requests]
    starts = [0]
    for rows in lengths:
        starts.append(starts[-1] + rows)
    table = torch.randint(
        1,
        MAX_BLOCK,
        (len(lengths), max(seq_lens) // block_size + 2),
        generator=torch.Generator().manual_seed(rng.getrandbits(48)),
        dtype=torch.int32,
    )
    _strike(rng, table, share=0.05, value=0)
    _strike(rng, table, share=rng.choice((0.0, 0.0, 0.3)), value=-1)

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        slot_mapping=torch.tensor(slots + [PADDED_SLOT] * num_padded, dtype=torch.int64, device=device),
        query_start_loc=int32(starts),
        seq_lens=int32(seq_lens),
        token_to_req=int32(requests + [0] * num_padded),
        block_table=table.to(device),
        replay_start=int32(replay),
        block_size=block_size,
    )


def _rows_of_requests(rng: random.Random, max_rows: int, most: int) -> list[int]:
    """Rows of each request, 1 to ``most``, ``max_rows`` in all at most."""
    total = rng.randint(1, max_rows)
    if rng.random() < 0.5:
        return [min(most, total)] * max(1, total // most)
    lengths = []
    while total:
        lengths.append(rng.randint(1, min(most, total)))
        total -= lengths[-1]
    return lengths


def _strike(rng: random.Random, table: torch.Tensor, share: float, value: int) -> None:
    """Set a share of the table's entries to ``value``."""
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    table[torch.rand(table.shape, generator=generator) < share] = value


def width_of(drafts: int, noncausal: bool) -> int:
    """Dense slots a row, as vLLM's builder chooses them."""
    from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width

    return get_dspark_swa_index_width(WINDOW, drafts) if noncausal else WINDOW


def differences(batch: Batch, group: Group, launch: ModuleType | None = None) -> list[str]:
    """What differs between vLLM's operations and ours, and what ours wrote that it must not.

    ``launch`` is a module to use in place of the overlay's ``swa_decode_meta``.
    """
    expected = bench_swa.readable(batch, group, bench_swa.build_with_vllm)
    actual = bench_swa.readable(batch, group, _builder(launch))
    wrong = [name for name in expected if not expected[name].equal(actual[name])]
    rows = batch.num_rows
    beyond = {
        "indices": group.indices[rows:],
        "indptr": group.indptr[rows + 1 :],
        "ragged": group.ragged[int(group.indptr[rows]) :],
    }
    return wrong + [
        f"{name} past its end" for name, rest in beyond.items() if not bool((rest == RUBBISH).all())
    ]


def _builder(launch: ModuleType | None):
    if launch is None:
        return bench_swa.build_with_ours

    def build(batch: Batch, group: Group) -> None:
        rows = batch.num_rows
        launch.launch(
            batch.slot_mapping, group.is_valid[:rows], group.indices, group.lens, group.ragged, group.indptr,
            batch.query_start_loc, batch.seq_lens, batch.token_to_req, batch.block_table, batch.replay_start,
            rows, batch.window, batch.block_size, noncausal=group.noncausal,
        )  # fmt: skip

    return build


def compare(
    seed: int,
    *,
    drafts: int,
    noncausal: bool,
    count: int = BATCHES,
    max_rows: int | None = None,
    device: str = "cpu",
    max_tokens: int = SMALL_BUFFER,
    launch: ModuleType | None = None,
    stop_at_first: bool = False,
) -> list[str]:
    """Run ``count`` random batches of up to ``max_rows`` rows (the kernel's limit) both ways.

    Returns:
        A line for each batch that differs, or for the first one alone.
    """
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    rng = random.Random(f"{seed} {drafts} {noncausal}")
    group = Group.allocate(device, width_of(drafts, noncausal), noncausal, max_tokens)
    failed = []
    for index in range(count):
        batch = random_batch(
            rng,
            max_rows=max_rows or swa_decode_meta.MAX_ROWS,
            drafts=drafts,
            noncausal=noncausal,
            device=device,
        )
        wrong = differences(batch, group, launch)
        if wrong:
            failed.append(
                f"batch {index}: {batch.num_rows} rows, block size {batch.block_size}: {', '.join(wrong)}"
            )
            if stop_at_first:
                break
    return failed


def mutant(old: str, new: str) -> ModuleType:
    """The overlay's ``swa_decode_meta`` with one text replaced, as a module of its own.

    Raises:
        ValueError: the text is not there exactly once.
    """
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    source = Path(swa_decode_meta.__file__).read_text()
    if source.count(old) != 1:
        raise ValueError(f"the text to replace stands {source.count(old)} times in the kernel file: {old!r}")
    file = Path(_MUTANTS.name) / f"swa_mutant_{len(list(Path(_MUTANTS.name).iterdir()))}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compare_mutant(old: str, new: str, seed: int, **case: object) -> list[str]:
    """``compare`` with a planted fault in our kernel."""
    return compare(seed, launch=mutant(old, new), **case)


# Faults planted in the kernel file, each with the kind of batch that has to show it: text, replacement,
# whether the batch is a draft block.
FAULTS = {
    "own row counted before itself": ("lane, lane < row,", "lane, lane <= row,", False),
    "first row left out of the sum": ("lane, lane < row,", "lane, (lane < row) & (lane > 0),", False),
    "window one position short": ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW + 1, 0)", False),
    "position 0 left out": ("tl.maximum(end - WINDOW, 0)", "tl.maximum(end - WINDOW, 1)", False),
    "replay start ignored": ("tl.maximum(tl.maximum(end - WINDOW, 0), replay_start)",
                             "tl.maximum(end - WINDOW, 0)", False),
    "slot 0 counts as padding": ("is_valid = slot >= 0", "is_valid = slot > 0", False),
    "null block dropped from the counts": ("tl.where(number >= 0, overlap, 0)",
                                           "tl.where(number > 0, overlap, 0)", False),
    "negative entries counted": ("tl.where(number >= 0, overlap, 0)", "tl.maximum(overlap, 0)", False),
    "negative slots kept": ("is_kept = slot >= 0", "is_kept = is_key", False),
    "last block not counted": ("tl.static_range(NUM_BLOCKS)", "tl.static_range(NUM_BLOCKS - 1)", False),
    "length clamped at zero": ("tl.where(is_valid, end - start, 0)",
                               "tl.where(is_valid & (end > start), end - start, 0)", False),
    "tail not cleared to the end": ("mask=unused < num_lens", "mask=unused < num_lens - 1", False),
    "indptr without its first entry": ("if row == 0:", "if row == num_rows:", False),
    "draft window starts at the row": ("start = tl.maximum(context_len - WINDOW, 0)",
                                       "start = tl.maximum(context_len - WINDOW + row - first_row, 0)", True),
    "draft rows see no later row": ("end = seq_len", "end = context_len + row - first_row + 1", True),
    "draft bounded by replay start": (
        "start = tl.maximum(context_len - WINDOW, 0)",
        "start = tl.maximum(tl.maximum(context_len - WINDOW, 0), "
        "tl.load(replay_start_ptr + req, mask=is_valid, other=0))", True),
}  # fmt: skip
