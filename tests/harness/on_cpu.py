# SPDX-License-Identifier: Apache-2.0
"""Tensors that a program puts on "cuda", kept on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaOnCpu(TorchFunctionMode):
    """Inside the block ``device="cuda"`` means the CPU and ``Tensor.cuda()`` gives the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and kwargs["device"] is not None:
            device = torch.device(kwargs["device"])
            kwargs["device"] = "cpu" if device.type == "cuda" else device
        return func(*args, **kwargs)
