# SPDX-License-Identifier: Apache-2.0
"""The laid tree's vLLM in the test process, as an AMD one; and that the files we patch and add import there.

The other specialised-decode tests import this module first, for what it does when it is imported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_overlay.project import Project
from tests.harness import fake_rocm

TREE = Project.find().tree
if "vllm" not in sys.modules:
    if not (TREE / "vllm").is_dir():
        raise RuntimeError(f"no vLLM in {TREE}: lay it with `make tree`")
    sys.path.insert(0, str(TREE))
    fake_rocm.install("gfx950")

import torch  # noqa: E402
from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.forward_context import ForwardContext, override_forward_context  # noqa: E402
from vllm.models.common.specialized_decode.flags import settle_options  # noqa: E402

FULL, EAGER, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE


def deployment(tensor_parallel_size: int = 4, **model: Any) -> VllmConfig:
    """A configuration of DeepSeek-V4.1-Flash with the mono kernels on, and nothing else that is not a
    default."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        architectures=["DeepseekV41ForCausalLM"],
        dtype=torch.bfloat16,
        enable_sleep_mode=False,
        disable_sliding_window=False,
        enable_cumem_allocator=False,
        enable_prompt_embeds=False,
        hf_config=SimpleNamespace(
            num_hidden_layers=40,
            sliding_window=128,
            dspark_n_routed_experts=128,
            dspark_num_experts_per_tok=3,
        ),
        **model,
    )
    config.parallel_config.tensor_parallel_size = tensor_parallel_size
    settle_options(config.kernel_config, ("monokernel", None))
    return config


def context(metadata: Any, mode: CUDAGraphMode = EAGER) -> ForwardContext:
    """A step's forward context as the model runner makes it, new for every step."""
    return ForwardContext(
        no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, cudagraph_runtime_mode=mode
    )


def in_step(metadata: Any, mode: CUDAGraphMode = EAGER) -> Any:
    """``with in_step(...)``: a step runs."""
    return override_forward_context(context(metadata, mode))


@pytest.mark.parametrize(
    "module",
    [
        "vllm.config.kernel",
        "vllm.engine.arg_utils",
        "vllm.models.deepseek_v41.amd.mono_decode",
        "vllm.models.deepseek_v41.amd.model",
        "vllm.models.deepseek_v41.amd.dspark",
        "vllm.models.deepseek_v41.amd.rocm",
        "vllm.models.deepseek_v41.amd.vl_model",
    ],
)
def test_files_of_ours_and_around_them_import(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__file__ is not None and found.__file__.startswith(str(TREE))


def test_serve_help_shows_both_options() -> None:
    main = "from vllm.entrypoints.cli.main import main; main()"
    code = f"import sys; sys.argv = ['vllm', 'serve', '--help=all']; {main}"
    environment = {**os.environ, "PYTHONPATH": str(TREE), "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert "--specialized-decode [{auto,monokernel" in shown.stdout
    assert "--monokernel, --no-monokernel" in shown.stdout
    assert "before the name of the model write --specialized-decode=auto" in " ".join(
        shown.stdout.split()
    ).replace("- ", "-")
