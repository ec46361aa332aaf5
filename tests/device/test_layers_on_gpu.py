# SPDX-License-Identifier: Apache-2.0
"""The layer test on real GPUs: five layers in vLLM's engine, kernels on against off, by ``layer-test``.

Needs the image, its GPUs and the model's configuration, by its name or as a folder in ``LAYER_TEST_MODEL``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rocm_overlay.cli import main
from rocm_overlay.project import Project
from rocm_overlay.recipe import load

RECIPES = {"gfx950": ["mi355x-tp2", "mi355x-tp4"], "gfx942": ["mi300x-tp4"]}


def gpu_architecture() -> str:
    if not (torch.cuda.is_available() and torch.version.hip):
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).partition(":")[0]


ARCH = gpu_architecture()


@pytest.mark.skipif(ARCH not in RECIPES, reason="no gfx942 or gfx950 GPU that torch can use")
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("name", RECIPES.get(ARCH, ["none"]))
def test_every_layers_outputs_match_at_every_decode_token(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < load(Project.find().recipes, name).gpus:
        pytest.skip(f"{name} needs more GPUs than are here")
    model = os.environ.get("LAYER_TEST_MODEL")
    words = ["--model", model] if model else []
    assert main(["layer-test", name, "--out", str(tmp_path), *words]) == 0
