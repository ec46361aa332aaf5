# SPDX-License-Identifier: Apache-2.0
"""The SWA metadata kernel as compiled for gfx942 and gfx950, run on the simulator, against the definition.

``launch`` starts the kernel as in a server, with the arguments and the grid of one. Triton compiles it for
the architecture and the simulator runs the assembly. A process of its own does both: vLLM's modules are
loaded there from the tree, and Triton must not take the kernel for one to interpret.
"""

import functools
import importlib
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from unittest import mock

import pytest
import torch

from cdnasim import Device, SimulationError, load
from rocm_overlay import bench_swa, table
from rocm_overlay.bench_swa import Group
from rocm_overlay.project import Project
from tests import swa_cases, swa_ragged
from tests.harness.interpreter import HARNESS

# One process serves the module, so that no kernel is compiled twice.
pytestmark = pytest.mark.xdist_group("swa_sim")

PROJECT = Project.find()
ROWS = {"gfx942": (1, 6, 42), "gfx950": (1, 6, 42, 48)}
MEMORY = ("exact", "hostile")
DRAFTS = 5
SEED = 11
OUTPUTS = ("is_valid_ptr", "indices_ptr", "lens_ptr", "ragged_ptr", "indptr_ptr")
# Found in the fast suite, under both memory modes. The others of swa_cases are each compiled twice more.
FAULT = "first row left out of the sum"
TRAITS = {
    "a padded row between", "a padded row at the end", "a window cut short by position 0",
    "a null block in a window", "a negative block in a window", "a replay start in a window",
    "a replay start above its row",
}  # fmt: skip
CONTEXT = 32 << 10

arches = pytest.mark.parametrize("arch", ROWS)
memories = pytest.mark.parametrize("memory", MEMORY)
kinds = pytest.mark.parametrize("noncausal", [False, True], ids=["causal", "draft"])


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Call a function of this module in the process that has vLLM's modules and Triton's compiler."""
    with ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start,
        initargs=(PROJECT.tree, str(HARNESS), str(tmp_path_factory.mktemp("triton"))),
    ) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def start(tree, harness, cache):
    """Make the process ready, as its first act."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    sys.path.insert(0, harness)
    importlib.import_module("bare_vllm").install(tree, "gfx950")


class SimulatedKernel:
    """Stands in the kernel's place in its module: what ``launch`` starts there, ``device`` runs."""

    def __init__(self, compiled, device):
        self.device, self.compiled = device, compiled
        self.kernel = load(compiled.asm["amdgcn"], device.arch, f"{compiled.name}.amdgcn").kernel()
        self.report = None

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, num_warps, **constants):
        source, metadata = self.compiled.src, self.compiled.metadata
        names = source.fn.arg_names
        assert constants == {names[place]: value for (place,), value in source.constants.items()}
        assert num_warps == metadata.num_warps
        for name, value in zip(names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                self.device.register(value, name, read_only=name not in OUTPUTS)
        # Triton appends pointers to scratch memory, which this kernel has none of.
        scratch = [0] * (len(self.kernel.arguments) - len(arguments))
        self.report = self.device.launch(
            self.kernel,
            grid,
            num_warps * metadata.target.warp_size,
            [*arguments, *scratch],
            lds_bytes=metadata.shared,
        )


@functools.cache
def compiled_for(arch, noncausal, block_size, fault=None):
    """The kernel as ``launch`` has it compiled, or with one of ``swa_cases.FAULTS`` in its source."""
    from compile_swa import compile_kernel
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    module = swa_cases.mutant(*swa_cases.FAULTS[fault][:2]) if fault else swa_decode_meta
    return compile_kernel(module, arch, noncausal=noncausal, block_size=block_size)


def simulate(batch, group, device, fault=None):
    """Fill ``group`` with one simulated launch: what a reader reads of it, and the launch's report."""
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    kernel = SimulatedKernel(compiled_for(device.arch, group.noncausal, batch.block_size, fault), device)
    with mock.patch.object(swa_decode_meta, "swa_decode_meta_kernel", kernel):
        return bench_swa.readable(batch, group, bench_swa.build_with_ours), kernel.report


def width_of(noncausal):
    from compile_swa import DRAFT_WIDTH, WINDOW

    return DRAFT_WIDTH if noncausal else WINDOW


@functools.cache
def batches(arch, noncausal):
    """A random batch of every number of rows in every block size."""
    rng = random.Random(f"{SEED} {arch} {noncausal}")
    found = {}
    for count, rows in enumerate(ROWS[arch], start=1):
        while len(found) < count * len(swa_cases.BLOCK_SIZES):
            batch = swa_cases.random_batch(rng, max_rows=rows, drafts=DRAFTS, noncausal=noncausal)
            if batch.num_rows == rows:
                found.setdefault((rows, batch.block_size), batch)
    return list(found.values())


def defined(batch, noncausal):
    """The batch as the definition takes it."""
    starts = batch.query_start_loc.tolist()
    fields = (batch.seq_lens.tolist(), batch.replay_start.tolist(), batch.block_table.tolist())
    owned = batch.slot_mapping[: starts[-1]].tolist()
    return swa_ragged.Batch(
        window=batch.window,
        width=width_of(noncausal),
        block_size=batch.block_size,
        noncausal=noncausal,
        requests=[
            swa_ragged.Request(end - first, *of_request)
            for (first, end), *of_request in zip(pairwise(starts), *fields, strict=True)
        ],
        padded=[row for row, slot in enumerate(owned) if slot < 0],
        tail=batch.num_rows - len(owned),
    )


def differences(batch, group, device, fault):
    """What differs from the definition, what was written past its end, and the simulator's warnings."""
    rows = batch.num_rows
    expected = swa_ragged.expected(defined(batch, group.noncausal))
    expected["lens"] += [0] * (len(group.lens) - len(expected["lens"]))
    # ``readable`` turns each validity into its opposite, so that one which is not written shows.
    group.is_valid[:] = False
    group.is_valid[:rows] = torch.tensor(expected["is_valid"])
    found, _ = simulate(batch, group, device, fault)
    found["indices"] = found["indices"][:, 0]
    untouched = {
        "is_valid": group.is_valid[rows:],
        "indices": group.indices[rows:] == swa_cases.RUBBISH,
        "indptr": group.indptr[rows + 1 :] == swa_cases.RUBBISH,
        "ragged": group.ragged[len(found["ragged"]) :] == swa_cases.RUBBISH,
    }
    wrong = [name for name in expected if found[name].tolist() != expected[name]]
    wrong += [f"{name} past its end" for name, rest in untouched.items() if not bool(rest.all())]
    return wrong + device.warnings


def failures(arch, noncausal, memory, fault=None):
    """A line for each batch that differs from the definition, or that the simulator refuses."""
    group = Group.allocate("cpu", width_of(noncausal), noncausal, swa_cases.SMALL_BUFFER)
    for index, batch in enumerate(batches(arch, noncausal)):
        device = Device(arch, memory=memory, seed=SEED + index)
        try:
            wrong = differences(batch, group, device, fault)
        except SimulationError as error:
            wrong = [str(error)]
        if wrong:
            yield f"{batch.num_rows} rows, block size {batch.block_size}: {', '.join(wrong)}"


def every_failure(*case):
    return list(failures(*case))


def first_failure(*case):
    return next(failures(*case), None)


def traits(arch, noncausal):
    """Which of ``TRAITS`` the batches of an architecture have."""
    found = set()
    for batch in (defined(one, noncausal) for one in batches(arch, noncausal)):
        expected = swa_ragged.expected(batch)
        for row, (request, place) in enumerate(batch.rows):
            position = request.length - request.rows + place
            first = max(position - batch.window + 1, 0)
            slots = expected["indices"][row][: max(expected["lens"][row], 0)]
            valid = expected["is_valid"][row]
            of_row = {
                "a padded row between": row in batch.padded,
                "a padded row at the end": row >= batch.num_rows - batch.tail,
                "a window cut short by position 0": valid and position + 1 < batch.window,
                "a null block in a window": any(0 <= slot < batch.block_size for slot in slots),
                "a negative block in a window": any(slot < 0 for slot in slots),
                "a replay start in a window": valid and first < request.replay_start <= position,
                "a replay start above its row": valid and position < request.replay_start,
            }
            found |= {name for name, holds in of_row.items() if holds}
    return found


def counts(arch, noncausal):
    """Simulated counts of launches on full windows, of the programs of the rows alone."""
    found = []
    for rows in ROWS[arch]:
        batch = bench_swa.serving_batch("cpu", rows, CONTEXT)
        _, report = simulate(batch, Group.allocate("cpu", width_of(noncausal), noncausal, rows), Device(arch))
        found.append((rows, report.waves, report.longest_wave, report.total, report.distinct_bytes))
    return found


@kinds
@arches
def test_the_batches_hold_all_that_a_serving_batch_can(process, arch, noncausal):
    assert process(traits, arch, noncausal) == TRAITS


@kinds
@memories
@arches
def test_the_compiled_kernel_writes_what_the_definition_says(process, arch, memory, noncausal):
    assert process(every_failure, arch, noncausal, memory) == []


@memories
@arches
def test_a_planted_fault_is_found(process, arch, memory):
    assert process(first_failure, arch, swa_cases.FAULTS[FAULT][2], memory, FAULT)


@pytest.mark.full
@pytest.mark.parametrize("fault", [name for name in swa_cases.FAULTS if name != FAULT])
@arches
def test_every_other_planted_fault_is_found(process, arch, fault):
    assert process(first_failure, arch, swa_cases.FAULTS[fault][2], "exact", fault)


@kinds
@arches
def test_a_row_costs_as_much_in_every_batch(process, arch, noncausal, capsys):
    """Programs share nothing: one wave a row, of as many instructions whatever the number of rows."""
    found = process(counts, arch, noncausal)
    headers = ("rows", "instructions of a wave", "instructions a row", "distinct bytes a row")
    lines = [(rows, longest, f"{total / rows:.0f}", f"{size / rows:.0f}")
             for rows, _, longest, total, size in found]  # fmt: skip
    with capsys.disabled():
        print(f"\nsimulated {arch}, {'draft' if noncausal else 'causal'}\n{table.render(headers, lines)}")
    assert all(waves == rows for rows, waves, *_ in found)
    assert len({longest for _, _, longest, *_ in found}) == 1
