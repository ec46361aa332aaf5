# SPDX-License-Identifier: Apache-2.0
"""What has to hold of the SWA gate, of ``build()`` behind it, and of the batches it takes.

``failed_checks`` runs every check on our two files, as they are or with texts replaced, and is called in a
worker process that has vLLM. A check fails by an assertion or by any other error.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_rocm

CDNA3_AND_4 = ("gfx942", "gfx950")
PLATFORMS = fake_rocm.PLATFORMS
Edits = Sequence[tuple[str, str]]


class Subject:
    """Our gate module and kernel module, loaded afresh from edited sources for each platform."""

    def __init__(self, gate_edits: Edits, kernel_edits: Edits) -> None:
        from vllm.models.deepseek_v41.amd import ops
        from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

        self._folder = tempfile.TemporaryDirectory(prefix="swa_gate_")
        self._gate_file = self._write(ops, gate_edits)
        self.kernel = _load(self._write(swa_decode_meta, kernel_edits))

    def _write(self, module: ModuleType, edits: Edits) -> Path:
        """The module's source with each text replaced; each must stand there exactly once."""
        source = Path(module.__file__).read_text()
        for old, new in edits:
            if source.count(old) != 1:
                raise ValueError(f"the text to replace stands {source.count(old)} times: {old!r}")
            source = source.replace(old, new)
        # The names differ between the two files and between the subjects of a process.
        file = Path(self._folder.name) / f"{Path(self._folder.name).name}_{module.__name__.split('.')[-1]}.py"
        file.write_text(source)
        return file

    def gate(self, flag: bool | None) -> ModuleType:
        """The gate module as this platform loads it, with the flag recorded unless it is None."""
        gate = _load(self._gate_file)
        self.kernel.ops = gate
        if flag is not None:
            record(gate, flag)
        return gate


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def record(gate: ModuleType, flag: bool) -> None:
    """Record the flag as the mono decode layer does when the model is built."""
    gate.record_monokernel(SimpleNamespace(kernel_config=SimpleNamespace(monokernel=flag)))


def on_with_the_flag_on_cdna3_and_cdna4_only(subject: Subject) -> None:
    for platform in PLATFORMS:
        with fake_rocm.fake_platform(platform):
            assert subject.gate(True).swa_decode_meta_enabled() is (platform in CDNA3_AND_4), platform


def off_without_the_flag(subject: Subject) -> None:
    for platform in PLATFORMS:
        with fake_rocm.fake_platform(platform):
            assert subject.gate(False).swa_decode_meta_enabled() is False, platform
            assert subject.gate(None).swa_decode_meta_enabled() is False, platform


def other_helpers_stay_on_cdna3(subject: Subject) -> None:
    for platform in PLATFORMS:
        with fake_rocm.fake_platform(platform):
            assert subject.gate(True).enabled() is (platform == "gfx942"), platform
            assert subject.gate(False).enabled() is False, platform


def a_later_generation_is_one_entry(subject: Subject) -> None:
    """The gate follows the CDNA version alone: a fifth one is off, and on once it is listed."""
    with fake_rocm.fake_platform("gfx950"):
        sys.modules["vllm.platforms.rocm"].get_cdna_version = lambda: 5
        gate = subject.gate(True)
        assert gate.swa_decode_meta_enabled() is False
        gate.SWA_DECODE_META_CDNA_VERSIONS = (*gate.SWA_DECODE_META_CDNA_VERSIONS, 5)
        record(gate, True)
        assert gate.swa_decode_meta_enabled() is True


def the_answer_is_kept(subject: Subject) -> None:
    with fake_rocm.fake_platform("gfx950"):
        gate, asked = subject.gate(True), []
        sys.modules["vllm.platforms.rocm"].get_cdna_version = lambda: asked.append(1) or 4
        assert [gate.swa_decode_meta_enabled() for _ in range(3)] == [True] * 3
        assert len(asked) == 1


def recording_the_flag_forgets_the_answer(subject: Subject) -> None:
    with fake_rocm.fake_platform("gfx942"):
        gate = subject.gate(None)
        for flag in (False, True, False, True):
            record(gate, flag)
            assert (gate.enabled(), gate.swa_decode_meta_enabled()) == (flag, flag)


def build_asks_its_own_gate(subject: Subject) -> None:
    """With the gate off, ``build`` is over before it looks at the batch, which here has nothing to see."""
    for platform in PLATFORMS:
        with fake_rocm.fake_platform(platform):
            for flag in (True, False):
                subject.gate(flag)
                try:
                    reached = build(subject.kernel, SimpleNamespace(), SimpleNamespace()) is not None
                except AttributeError:
                    reached = True
                assert reached is (flag and platform in CDNA3_AND_4), (platform, flag)


def build(kernel: ModuleType, builder: Any, batch: Any) -> Any:
    return kernel.build(builder, 0, batch, False, None, SimpleNamespace)


def decode_batch(rows: int, per_request: int = 1, **changes: Any) -> SimpleNamespace:
    """What ``take`` asks of a batch of ``rows`` rows, ``per_request`` a request."""
    import torch

    requests = rows // per_request
    fields = {
        "causal": True,
        "max_query_len": per_request,
        "num_reqs": requests,
        "num_actual_tokens": rows,
        "query_start_loc_cpu": torch.arange(requests + 1) * per_request,
        "slot_mapping": torch.zeros(rows, dtype=torch.int64),
    }
    return SimpleNamespace(**{**fields, **changes})


def builder_stub(*, is_dspark: bool = True) -> SimpleNamespace:
    import torch

    return SimpleNamespace(
        is_dspark=is_dspark,
        decode_threshold=6,
        decode_swa_indices=torch.zeros(64, 1, 128, dtype=torch.int32),
        decode_swa_indices_noncausal=None,
        decode_swa_lens=torch.zeros(64, dtype=torch.int32),
        noncausal_index_width=192,
    )


def _rows_taken(kernel: ModuleType, **changes: Any) -> list[int]:
    """Of batches of 1 to 60 rows, those that are taken."""
    return [rows for rows in range(1, 61) if kernel.take(builder_stub(), decode_batch(rows, **changes))]


def rows_up_to_the_mono_kernels_limit_are_taken(subject: Subject) -> None:
    from vllm.models.deepseek_v41.amd.mono_decode import MAX_ROWS, MAX_ROWS_GFX942

    assert (MAX_ROWS_GFX942, MAX_ROWS) == (42, 48)
    for platform, limit in (("gfx942", MAX_ROWS_GFX942), ("gfx950", MAX_ROWS)):
        with fake_rocm.fake_platform(platform):
            assert _rows_taken(subject.kernel) == list(range(1, limit + 1)), platform
            assert _rows_taken(subject.kernel, causal=False) == list(range(1, limit + 1)), platform


def prefill_and_mixed_batches_are_declined(subject: Subject) -> None:
    import torch

    mixed = decode_batch(6, max_query_len=40, num_actual_tokens=46)
    mixed.query_start_loc_cpu = torch.tensor([0, 1, 2, 3, 4, 5, 6, 46])
    mixed.slot_mapping = torch.zeros(6, dtype=torch.int64)
    mixed.num_reqs = 7
    prefill = decode_batch(40, per_request=40)
    with fake_rocm.fake_platform("gfx950"):
        for batch in (mixed, prefill):
            assert subject.kernel.take(builder_stub(), batch) is None


def noncausal_without_dspark_is_declined(subject: Subject) -> None:
    with fake_rocm.fake_platform("gfx950"):
        for batch, taken in ((decode_batch(6, causal=False), False), (decode_batch(6), True)):
            assert bool(subject.kernel.take(builder_stub(is_dspark=False), batch)) is taken


def other_slot_mappings_are_declined(subject: Subject) -> None:
    import torch

    with fake_rocm.fake_platform("gfx950"):
        for slots in (3, 5, 12):
            batch = decode_batch(6, slot_mapping=torch.zeros(slots, dtype=torch.int64))
            assert subject.kernel.take(builder_stub(), batch) is None, slots


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        on_with_the_flag_on_cdna3_and_cdna4_only,
        off_without_the_flag,
        other_helpers_stay_on_cdna3,
        a_later_generation_is_one_entry,
        the_answer_is_kept,
        recording_the_flag_forgets_the_answer,
        build_asks_its_own_gate,
        rows_up_to_the_mono_kernels_limit_are_taken,
        prefill_and_mixed_batches_are_declined,
        noncausal_without_dspark_is_declined,
        other_slot_mappings_are_declined,
    )
}


def failed_checks(gate_edits: Edits = (), kernel_edits: Edits = ()) -> dict[str, str]:
    """Every check that fails on our files with these texts replaced, and how."""
    subject = Subject(gate_edits, kernel_edits)
    failed = {}
    for name, check in CHECKS.items():
        try:
            check(subject)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed
