# SPDX-License-Identifier: Apache-2.0
"""Loaded weights as a model's kernels read them: found by name, and kept where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch


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


def around_processing(module: Any, before: Callable[[Any], Any], after: Callable[[Any, Any], None]) -> None:
    """Have ``before`` and ``after`` run around vLLM's processing of a module's loaded weights.

    Args:
        module: holds the weights, and a ``quant_method`` that processes them. The method's other modules are
            left alone.
        before: gets the module with its weights as loaded.
        after: gets the module with its weights as processed, and what ``before`` gave.
    """
    method = module.quant_method
    process = method.process_weights_after_loading

    def process_between(processed: Any) -> Any:
        if processed is not module:
            return process(processed)
        seen = before(processed)
        result = process(processed)
        after(processed, seen)
        return result

    method.process_weights_after_loading = process_between


class KeptAtLoad:
    """Weights of a module that kernels read where they lie after loading.

    vLLM processes weights again when they are reloaded, and may leave the new ones elsewhere. Kernels and
    captured graphs hold the addresses of the first: a reload is written into those, and ``place`` has the
    module read them too, so that there is one copy. Memory that is kept here and that vLLM would free counts
    as model memory where vLLM sizes the KV cache.

    Args:
        module: holds the weights, and a ``quant_method`` that processes them.
        find: gives the tensors that the kernels read, of the module with its weights as processed and what
            ``loaded`` gave. It may clean them in place. What it raises is raised by ``taken``.
        loaded: what ``find`` wants of the module with its weights as loaded.
        place: has the module read these tensors.
    """

    def __init__(
        self,
        module: Any,
        find: Callable[[Any, Any], Mapping[str, torch.Tensor]],
        *,
        loaded: Callable[[Any], Any] = lambda module: None,
        place: Callable[[Any, Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        self._kept: Mapping[str, torch.Tensor] | None = None
        self._fault: Exception | None = None
        self._find = find
        self._place = place
        around_processing(module, loaded, self._keep)

    def taken(self, what: str) -> Mapping[str, torch.Tensor]:
        """The tensors by name.

        Args:
            what: the module, as an error names it.

        Raises:
            ValueError: they are not there, or not as the kernels read them.
        """
        if self._fault is not None:
            raise ValueError(f"{what}: {self._fault}") from self._fault
        if self._kept is None:
            raise ValueError(f"{what}: vLLM did not process its weights after loading")
        return self._kept

    def _keep(self, processed: Any, loaded: Any) -> None:
        if self._fault is not None:
            return
        try:
            fresh = self._find(processed, loaded)
        except (AttributeError, TypeError, ValueError) as error:
            if self._kept is not None:  # kernels run: to keep their weights would serve the old model
                raise
            self._fault = error
            return
        if self._kept is None:
            self._kept = fresh
            return
        if problems := _unlike(self._kept, fresh):
            raise ValueError(f"reloaded weights are not as the first: {'; '.join(problems)}")
        for name, kept in self._kept.items():
            if fresh[name].data_ptr() != kept.data_ptr():
                kept.copy_(fresh[name])
        if self._place is not None:
            self._place(processed, self._kept)


def _unlike(kept: Mapping[str, torch.Tensor], fresh: Mapping[str, torch.Tensor]) -> list[str]:
    """How the shapes and dtypes of ``fresh`` differ from those of ``kept``."""

    def form(tensors: Mapping[str, torch.Tensor], name: str) -> str:
        tensor = tensors.get(name)
        return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"

    return [
        f"{name} is {form(fresh, name)}, wanted {form(kept, name)}, whose address captured graphs read"
        for name in {**kept, **fresh}
        if form(fresh, name) != form(kept, name)
    ]
