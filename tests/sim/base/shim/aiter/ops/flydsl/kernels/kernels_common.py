# SPDX-License-Identifier: Apache-2.0
"""Kernel symbol suffixes, for the base's kernels."""


def kernel_signature(**params: object) -> str:
    """A symbol-safe spelling of build parameters, in the caller's order."""
    return "_".join(f"{name}{int(v) if isinstance(v, bool) else v}" for name, v in params.items())
