# SPDX-License-Identifier: Apache-2.0
"""vLLM's sliding-window metadata code on a machine that has torch and Triton and none of vLLM's other needs.

``install(tree, arch)`` puts a finder in front of Python's own. The modules of ``REAL`` are read from the tree
and run unedited: every kernel that the tests and the benchmark launch, with the host code around it, is
vLLM's. Every other ``vllm`` module, and ``transformers``, is an empty stand-in whose names can be imported,
subclassed, called and used as decorators, and compute nothing. A test or benchmark that came to depend on
one would get that stand-in back as its value, which no tensor comparison accepts.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_rocm

REAL = frozenset(
    {
        "vllm.envs",
        "vllm.model_executor.warmup.jit_warmup",
        "vllm.model_executor.warmup.jit_warmup_triton_helper",
        "vllm.models.deepseek_v41.amd.mono.builds",
        "vllm.models.deepseek_v41.amd.mono.geometry",
        "vllm.models.deepseek_v41.amd.mono_decode",
        "vllm.models.deepseek_v41.amd.mono_decode_spec",
        "vllm.models.deepseek_v41.amd.mono_decode_weights",
        "vllm.models.deepseek_v41.amd.ops",
        "vllm.models.deepseek_v41.amd.ops.swa_decode_meta",
        "vllm.models.deepseek_v41.amd.ops.topk_pack",
        "vllm.models.deepseek_v41.amd.rocm",
        "vllm.platforms.interface",
        "vllm.platforms.rocm",
        "vllm.utils.math_utils",
        "vllm.v1.attention.backends.mla.compressor_utils",
        "vllm.v1.attention.backends.mla.sparse_swa",
        "vllm.v1.attention.ops.metadata",
        "vllm.v1.attention.ops.rocm_aiter_mla_sparse",
    }
)
STAND_INS = ("vllm", "transformers")


class _AnythingMeta(ABCMeta):
    """A class whose attributes, items and calls are the stand-in again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        """Of nothing: by its items alone it would go on for ever."""
        return iter(())

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Anything:
            return super().__call__(*args, **kwargs)
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated else Anything


class Anything(metaclass=_AnythingMeta):
    """What a name of a stand-in module is."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = f"{self.__name__}.{name}"
        return importlib.import_module(module) if module in REAL else Anything


class BareFinder(MetaPathFinder, Loader):
    """Finds the real modules in ``tree``, a folder that holds ``vllm/``, and stand-ins for the others."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        if fullname in REAL:
            return self._real_spec(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def _real_spec(self, fullname: str) -> ModuleSpec | None:
        place = self.tree.joinpath(*fullname.split("."))
        if place.is_dir():
            # Its folder is no search path: modules below it come through this finder too.
            return importlib.util.spec_from_file_location(
                fullname, place / "__init__.py", submodule_search_locations=[]
            )
        return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code."""


def install(tree: str | Path, arch: str) -> None:
    """Have this process import vLLM from ``tree`` through the finder, on the platform ``arch``.

    Raises:
        FileNotFoundError: ``tree`` holds no ``vllm`` folder.
        RuntimeError: vLLM is imported already.
        ValueError: ``arch`` is not one of ``fake_rocm.DEVICES``.
    """
    root = Path(tree).resolve()
    if not (root / "vllm").is_dir():
        raise FileNotFoundError(f"no vllm folder in {root}")
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already: install the finder before importing it")
    sys.modules["amdsmi"] = fake_rocm.amdsmi_module(arch)
    sys.modules.setdefault("regex", re)
    sys.meta_path.insert(0, BareFinder(root))

    import triton
    import triton.language as tl

    triton_utils: Any = importlib.import_module("vllm.triton_utils")
    triton_utils.HAS_TRITON, triton_utils.triton, triton_utils.tl = True, triton, tl
    platforms: Any = importlib.import_module("vllm.platforms")
    interface = importlib.import_module("vllm.platforms.interface")
    platforms.Platform, platforms.PlatformEnum = interface.Platform, interface.PlatformEnum
    platforms.current_platform = importlib.import_module("vllm.platforms.rocm").RocmPlatform()
