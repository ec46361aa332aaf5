# SPDX-License-Identifier: Apache-2.0
"""A configuration of DeepSeek-V4.1-Flash with specialized decode on, and the forward context of its steps.

The other tests of this folder import this module before any of vLLM's that ask for the platform: where torch
is no ROCm build, it stands a ROCm platform in, so that they run on a CPU.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.models.specialized_decode import fake_rocm

if torch.version.hip is None:
    fake_rocm.install("gfx950")

config_module = importlib.import_module("vllm.config")
context_module = importlib.import_module("vllm.forward_context")
flags = importlib.import_module("vllm.models.common.specialized_decode.flags")
# The folder that holds vllm/: a checkout, or where it is installed.
TREE = Path(config_module.__file__).resolve().parents[2]

_modes = config_module.CUDAGraphMode
FULL, EAGER, PIECEWISE = _modes.FULL, _modes.NONE, _modes.PIECEWISE


def deployment(tensor_parallel_size: int = 4, **model: Any) -> Any:
    """A configuration with the kernels asked for, and nothing else that is not a default."""
    config = config_module.VllmConfig()
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
    flags.settle_options(config.kernel_config, ("monokernel", None))
    return config


def context(metadata: Any, mode: Any = EAGER) -> Any:
    """A step's forward context as the model runner makes it, new for every step."""
    return context_module.ForwardContext(
        no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, cudagraph_runtime_mode=mode
    )


def in_step(metadata: Any, mode: Any = EAGER) -> Any:
    """``with in_step(...)``: a step runs."""
    return context_module.override_forward_context(context(metadata, mode))
