# SPDX-License-Identifier: Apache-2.0
"""What is asked before a step's tokens are returned: did a kernel of the model's own fail?

vLLM's output of a step calls ``raise_if_kernels_failed`` once the step's copies have arrived and before it
reads a token. Imports nothing, so that vLLM's worker can import it wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable

_checks: list[Callable[[], None]] = []


def before_tokens(check: Callable[[], None]) -> None:
    """Have ``check`` called before every step's tokens are returned. It raises where they are not good; it
    may read host memory, and must not wait for the GPU."""
    _checks.append(check)


def raise_if_kernels_failed() -> None:
    """Raise what a check found. Without kernels of a model's own there is nothing to call."""
    for check in _checks:
        check()
