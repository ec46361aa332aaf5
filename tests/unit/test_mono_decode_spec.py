# SPDX-License-Identifier: Apache-2.0
"""What the mono kernels' spec says that they run alongside is there, and was reviewed."""

from __future__ import annotations

from tests.unit.test_specialized_decode_fields import ALONGSIDE
from tests.unit.test_specialized_decode_tree import deployment

from vllm.models.common.specialized_decode.features import SWITCHES, optional_configs  # isort: skip
from vllm.models.deepseek_v41.amd.mono_decode_spec import SPEC  # isort: skip


def test_the_mono_kernels_name_only_features_that_exist() -> None:
    assert SPEC.runs_alongside <= set(SWITCHES) | set(optional_configs(deployment()))


def test_the_fields_of_every_configuration_that_they_run_alongside_were_reviewed() -> None:
    assert SPEC.runs_alongside & set(optional_configs(deployment())) == ALONGSIDE
