# SPDX-License-Identifier: Apache-2.0
"""Loaded weights as a model's kernels read them: found by name, or copied when vLLM processes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


def gather(root: Any, places: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors at ``places`` below ``root``.

    Args:
        root: a module.
        places: for each tensor its dotted path from ``root``.

    Raises:
        AttributeError: names every path where no tensor is.
    """
    found, missing = {}, []
    for name, path in places.items():
        try:
            found[name] = attrgetter(path)(root)
        except AttributeError:
            found[name] = None
        if not isinstance(found[name], torch.Tensor):
            missing.append(path)
    if missing:
        raise AttributeError(f"no tensor at {', '.join(missing)}")
    return found


def as_bytes(scale: torch.Tensor) -> torch.Tensor:
    """A tensor of one-byte codes as uint8, in place."""
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def loaded(
    root: Any, path: str, names: Iterable[str], copies: Mapping[str, CopyAtLoad]
) -> Sequence[torch.Tensor]:
    """The tensors of the module at ``path`` below ``root``: its copies where there are some, else itself.

    Args:
        root: a module.
        path: the dotted path of a module below it.
        names: the tensors' names there. Those of a scale are given as bytes.
        copies: the copies of a layer, by path; empty where the kernels read every weight in place.

    Raises:
        AttributeError: a tensor is not there.
        ValueError: the copies were not made.
    """
    if not copies:
        found = gather(root, {name: f"{path}.{name}" for name in names})
        return [as_bytes(tensor) if "scale" in name else tensor for name, tensor in found.items()]
    if (tensors := copies[path].tensors) is None:
        raise ValueError(f"{path} was not copied: vLLM did not process its weights after loading")
    return tensors


class CopyAtLoad:
    """Copies of a module's weights, made when vLLM processes them after loading.

    Made then, they count as model memory where vLLM sizes the KV cache. vLLM processes weights again when
    they are reloaded: kernels and captured graphs hold the addresses of the first copies, so a reload writes
    into those.

    Args:
        module: holds the weights, and a ``quant_method`` that processes them.
        make: copies the weights of the module that it gets.
        name: the module's attribute that holds its copies.
        before: whether the copies need the weights as loaded rather than as processed.
    """

    def __init__(
        self, module: Any, make: Callable[[Any], Tensors], *, name: str, before: bool = False
    ) -> None:
        self.tensors: Tensors | None = None
        self._module = module
        self._make = make
        self._name = name
        method = module.quant_method
        process = method.process_weights_after_loading

        def process_and_copy(processed: Any) -> Any:
            if before:
                self._copy(processed)
            result = process(processed)
            if not before:
                self._copy(processed)
            return result

        method.process_weights_after_loading = process_and_copy

    def _copy(self, processed: Any) -> None:
        if processed is not self._module:
            return
        fresh = self._make(processed)
        if self.tensors is None:
            self.tensors = fresh
            setattr(processed, self._name, fresh)
            return
        for kept, new in zip(self.tensors, fresh, strict=True):
            kept.copy_(new)
