# SPDX-License-Identifier: Apache-2.0
"""The arms that an accuracy gate wants of a recipe: each graph mode that it uses, kernels on and off.

A recipe whose mode is made of two (FULL_AND_PIECEWISE) uses both: whole graphs for decode steps, piecewise
ones for the rest. Each is served by itself too, and so is no graph at all. Kernels run in whole graphs and in
steps without graphs, so that the piecewise arm has them off by nature and is made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from rocm_overlay.recipe import Recipe

MODES = {
    "FULL_AND_PIECEWISE": ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"),
    "FULL_DECODE_ONLY": ("FULL_DECODE_ONLY", "NONE"),
    "FULL": ("FULL", "NONE"),
    "PIECEWISE": ("PIECEWISE", "NONE"),
    "NONE": ("NONE",),
}
WITHOUT_KERNELS = "PIECEWISE"


def eval_arms(recipe: Recipe) -> Iterator[tuple[str, list[str]]]:
    """Name and command of each arm; ``{port}`` stands for the port."""
    compilation: Any = recipe.args.get("compilation-config")
    own = compilation.get("cudagraph_mode", "NONE") if isinstance(compilation, dict) else "NONE"
    for mode in MODES.get(own, (own, "NONE")):
        has_kernels = recipe.args.get("monokernel") is True and mode != WITHOUT_KERNELS
        for kernels in (True, False) if has_kernels else (False,):
            words = ["rocm-overlay-entrypoint", "--recipe", recipe.name, "--", "--port", "{port}"]
            words += ["--compilation-config.cudagraph_mode", mode]
            words += [] if kernels == (recipe.args.get("monokernel") is True) else ["--no-monokernel"]
            yield f"{mode.lower()}-{'kernels' if kernels else 'without'}", words


def arms_text(recipe: Recipe) -> str:
    """The arms as the ``arms`` of a session file."""
    arms = {name: {"command": words} for name, words in eval_arms(recipe)}
    text: str = yaml.safe_dump({"arms": arms}, sort_keys=False, width=1000)
    return text
