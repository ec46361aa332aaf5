# SPDX-License-Identifier: Apache-2.0
"""What a model's specialised decode can run, as data, and why a deployment is outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.models.common.specialized_decode.features import reported_features

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SpecializedDecodeError(ValueError):
    """Specialised decode was asked for and cannot run. The message holds every reason."""


@dataclass(frozen=True)
class Check:
    """One requirement of a model's own.

    Args:
        what: the thing that is checked, as it stands in "cannot check ...".
        reason: gives why the deployment does not meet the requirement, or None. It may raise: then the check
            could not be made, which is a reason too.
    """

    what: str
    reason: Callable[[VllmConfig], str | None]

    def attempt(self, vllm_config: VllmConfig) -> str | None:
        """The reason, be it that the check could not be made."""
        try:
            return self.reason(vllm_config)
        except Exception as error:  # a check that cannot be made must not pass
            return f"cannot check {self.what}: {error!r}"


@dataclass(frozen=True)
class Device:
    """The GPU as the requirements see it."""

    cdna_version: int | None
    compute_units: int


@dataclass(frozen=True)
class DecodeSpec:
    """The deployments that a model's kernels can decode.

    Args:
        name: the kernels, as error messages and the start-up table call them.
        architectures: entries of ``ModelConfig.architectures``.
        dtypes: activation dtypes.
        kv_cache_dtypes: values of ``CacheConfig.cache_dtype``; None where each layer decides for its own
        cache.
        max_rows: rows of the largest step, by CDNA version and tensor parallel size. A generation without an
            entry is refused, and so is a size without one in its generation.
        resident_workgroups: workgroups of a launch that wait on each other. A compute unit holds one, so a
            GPU, or a partition of one, with fewer compute units would wait for ever.
        graph_modes: names of the ``CUDAGraphMode`` that a step may run in.
        runs_alongside: features, as ``features.reported_features`` names them, that the kernels were made to
            run with. Every other one refuses.
        checks: the model's own requirements.
        device: reads the GPU. It may raise, as a check may.
    """

    name: str
    architectures: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_cache_dtypes: frozenset[str] | None
    max_rows: Mapping[int, Mapping[int, int]]
    resident_workgroups: int
    graph_modes: frozenset[str]
    runs_alongside: frozenset[str]
    checks: tuple[Check, ...]
    device: Callable[[], Device]

    def __post_init__(self) -> None:
        rows = {cdna: MappingProxyType(dict(by_size)) for cdna, by_size in self.max_rows.items()}
        object.__setattr__(self, "max_rows", MappingProxyType(rows))

    def row_limit(self, vllm_config: VllmConfig) -> int:
        """Rows of the largest step of a deployment that is not refused."""
        by_size = self.max_rows[self.device().cdna_version or 0]
        return by_size[vllm_config.parallel_config.tensor_parallel_size]

    def refuse(self, vllm_config: VllmConfig) -> tuple[str, ...]:
        """Every reason for which this deployment cannot run the kernels; empty when it can."""
        on, unreadable = reported_features(vllm_config)
        reasons = [reason for check in self._own_checks() if (reason := check.attempt(vllm_config))]
        reasons += [
            f"{feature} is {state}, and the kernels run without it or not at all: turn it off"
            for feature, state in sorted(on.items())
            if feature not in self.runs_alongside
        ]
        reasons += unreadable
        reasons += [reason for check in self.checks if (reason := check.attempt(vllm_config))]
        return tuple(reasons)

    def require(self, vllm_config: VllmConfig, option: str) -> None:
        """Raise unless the deployment can run the kernels.

        Args:
            vllm_config: the deployment.
            option: what asked for the kernels, as the user wrote it.

        Raises:
            SpecializedDecodeError: with every reason at once.
        """
        if reasons := self.refuse(vllm_config):
            raise refusal(f"{option}: {self.name}", reasons)

    def _own_checks(self) -> tuple[Check, ...]:
        return (
            Check("the model architecture", self._architecture),
            Check("the activation dtype", self._dtype),
            Check("the KV cache dtype", self._kv_cache_dtype),
            Check("the GPU", self._device),
            Check("the tensor parallel size", self._tp_size),
            Check("the CUDA graph mode", self._graph_mode),
        )

    def _architecture(self, config: VllmConfig) -> str | None:
        seen = config.model_config.architectures
        return _outside(
            "model architecture", ", ".join(seen), self.architectures, met=self.architectures & set(seen)
        )

    def _dtype(self, config: VllmConfig) -> str | None:
        seen = config.model_config.dtype
        return _outside("activation dtype", seen, self.dtypes, met=seen in self.dtypes)

    def _kv_cache_dtype(self, config: VllmConfig) -> str | None:
        if self.kv_cache_dtypes is None:
            return None
        seen = config.cache_config.cache_dtype
        return _outside("KV cache dtype", seen, self.kv_cache_dtypes, met=seen in self.kv_cache_dtypes)

    def _device(self, config: VllmConfig) -> str | None:
        device = self.device()
        if device.cdna_version not in self.max_rows:
            seen = "another GPU" if device.cdna_version is None else f"CDNA{device.cdna_version}"
            return f"GPU: {seen}, wanted CDNA{' or CDNA'.join(map(str, sorted(self.max_rows)))}"
        if device.compute_units < self.resident_workgroups:
            return (
                f"GPU: {device.compute_units} compute units, wanted at least {self.resident_workgroups}, one "
                "for each workgroup that others wait for: use an unpartitioned GPU"
            )
        return None

    def _tp_size(self, config: VllmConfig) -> str | None:
        seen, cdna = config.parallel_config.tensor_parallel_size, self.device().cdna_version
        if (by_size := self.max_rows.get(cdna or 0)) is None:  # refused for its GPU
            every = {size for sizes in self.max_rows.values() for size in sizes}
            return _outside("tensor parallel size", seen, every, met=seen in every)
        reason = _outside("tensor parallel size", seen, by_size, met=seen in by_size)
        return reason and f"{reason} on CDNA{cdna}"

    def _graph_mode(self, config: VllmConfig) -> str | None:
        # None until vLLM has chosen one; its choice gives decode steps FULL graphs or none.
        chosen = config.compilation_config.cudagraph_mode
        if chosen is not None and chosen.mixed_mode().name == "FULL":
            # vLLM captures such a graph on a batch that looks like decodes, and replays it for prefills.
            return (
                f"CUDA graph mode: {chosen.name}, which replays what a decode step recorded for batches with "
                "prefills too, wanted FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
            )
        seen = None if chosen is None else chosen.decode_mode().name
        return _outside(
            "CUDA graph mode of decode steps", seen, self.graph_modes, met=seen in self.graph_modes | {None}
        )


def rocm_device() -> Device:
    """This process's GPU, as vLLM's ROCm platform reads it."""
    from vllm.platforms import current_platform
    from vllm.platforms.rocm import get_cdna_version

    units = current_platform.num_compute_units(torch.accelerator.current_device_index())
    return Device(get_cdna_version() or None, units)


def asked(vllm_config: VllmConfig) -> str:
    """What asked for the kernels, as the user can write it."""
    return f"--specialized-decode {vllm_config.kernel_config.specialized_decode}"


def refusal(what: str, reasons: tuple[str, ...]) -> SpecializedDecodeError:
    """The error for reasons why ``what`` cannot run."""
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return SpecializedDecodeError(
        f"{what} cannot run here, for {len(reasons)} reason(s):{listed}\nChange what they name, or drop the "
        "option to decode on vLLM's path."
    )


def _outside(what: str, seen: Any, wanted: Iterable[Any], met: Any) -> str | None:
    if met:
        return None
    return f"{what}: {seen}, wanted {' or '.join(sorted(map(str, wanted)))}"
