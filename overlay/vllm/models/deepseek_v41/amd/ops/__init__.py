# SPDX-License-Identifier: Apache-2.0
"""Decode helpers of DeepSeek-V4.1 on ROCm, and the gates that say where each of them runs.

Every helper gives the values of the vLLM operation that it stands for, and declines a call that it cannot
take, which vLLM's own operation then serves. A gate therefore decides speed, never results:

========================== ======== ==============================================================
gate                       CDNA     helpers
========================== ======== ==============================================================
``enabled``                3        top-k, candidate logits, sparse indexer, top-k packing,
                                    Markov sampling, draft LM head
``swa_decode_meta_enabled`` 3, 4    sliding-window decode metadata
========================== ======== ==============================================================
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GFX942_HELPERS_CDNA_VERSIONS = (3,)
# The metadata kernel is integer Triton without architecture intrinsics: a generation whose mono decode
# kernels exist is one more entry.
SWA_DECODE_META_CDNA_VERSIONS = (3, 4)

# The helpers run inside forward passes, where vLLM holds no current configuration to ask for the flag.
_monokernel = False


def record_monokernel(vllm_config: VllmConfig) -> None:
    """Keep ``--monokernel`` of this process's model for the gates.

    The mono decode layer calls it while the model is built, before a helper can run. A gate that was asked
    earlier forgets its answer.
    """
    global _monokernel
    _monokernel = bool(vllm_config.kernel_config.monokernel)
    for gate in (enabled, swa_decode_meta_enabled):
        gate.cache_clear()


def _mono_decode_on(cdna_versions: tuple[int, ...]) -> bool:
    """Whether the model decodes on mono kernels and the GPU is of one of these CDNA generations."""
    if not (_monokernel and current_platform.is_rocm()):
        return False
    # Importing this module asks the driver for the architecture, which only a ROCm machine can answer.
    from vllm.platforms.rocm import get_cdna_version

    return get_cdna_version() in cdna_versions


@functools.cache
def enabled() -> bool:
    """Whether the gfx942 helpers run: ``--monokernel`` on CDNA3."""
    return _mono_decode_on(GFX942_HELPERS_CDNA_VERSIONS)


@functools.cache
def swa_decode_meta_enabled() -> bool:
    """Whether decode batches take their sliding-window metadata from one launch."""
    return _mono_decode_on(SWA_DECODE_META_CDNA_VERSIONS)


def build_swa_decode_meta(*arguments: Any) -> Any:
    """``swa_decode_meta.build`` where its gate is on, and None where it is off.

    The SWA metadata builder calls this for every batch. The kernel's module is imported only where it runs.
    """
    if not swa_decode_meta_enabled():
        return None
    from vllm.models.deepseek_v41.amd.ops import swa_decode_meta

    return swa_decode_meta.build(*arguments)
