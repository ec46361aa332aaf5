# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the simulator: compile for an architecture without a GPU, launch with a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .device import Device, LaunchReport
from .program import Kernel, load


class TritonKernel:
    """A compiled Triton kernel: its assembly, parsed, and what its launch needs beside the arguments.

    fn: a ``triton.jit`` function. signature: argument name -> Triton type ("*fp32", "i32", ...), constexprs left
    out. constexprs: name -> value.
    """  # noqa: E501

    def __init__(
        self,
        fn: Any,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any],
        arch: str,
        *,
        num_warps: int = 4,
        **options: Any,
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = {fn.arg_names.index(k): v for k, v in constexprs.items()}
        full = dict(signature) | dict.fromkeys(constexprs, "constexpr")
        source = ASTSource(fn, full, {(i,): v for i, v in names.items()})
        compiled = triton.compile(
            source, target=GPUTarget("hip", arch, 64), options={"num_warps": num_warps, **options}
        )
        self.text: str = compiled.asm["amdgcn"]
        self.metadata = compiled.metadata
        self.kernel: Kernel = load(self.text, arch, f"{fn.__name__}.amdgcn").kernel()
        self.block = (64 * num_warps, 1, 1)

    def run(
        self, device: Device, grid: Sequence[int] | int, args: Sequence[Any], **options: Any
    ) -> LaunchReport:
        """Launch on ``device``. The scratch pointers that Triton appends are passed as null."""
        missing = len(self.kernel.arguments) - len(args)
        return device.launch(
            self.kernel,
            grid,
            self.block,
            [*args, *([0] * missing)],
            lds_bytes=self.metadata.shared,
            **options,
        )
