# SPDX-License-Identifier: Apache-2.0
"""What vLLM says of the platform under the stand-in of ``tests/harness``; called in a worker process."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import Any

import fake_rocm

QUESTIONS = ("on_gfx9", "on_mi3xx", "on_gfx90a", "on_gfx942", "on_gfx950", "on_gfx1250", "on_rdna4")
BLOCK_MODULES = ("amdsmi", "vllm.platforms.rocm")


def answers(platform: str) -> dict[str, Any]:
    """vLLM's own answers inside the block."""
    with fake_rocm.fake_platform(platform) as current:
        import vllm.platforms
        from vllm.platforms import current_platform

        assert current_platform is current is vllm.platforms.current_platform
        found = {"is_rocm": current.is_rocm(), "is_cuda": current.is_cuda()}
        if current.is_rocm():
            rocm = importlib.import_module("vllm.platforms.rocm")
            found["cdna"] = rocm.get_cdna_version()
            found["true"] = [question for question in QUESTIONS if getattr(rocm, question)()]
            found["memory"] = current.get_device_total_memory()
        return found


def _state() -> tuple[Any, ...]:

    package = sys.modules["vllm.platforms"]
    modules = [sys.modules.get(name) for name in BLOCK_MODULES]
    return (package._current_platform, getattr(package, "rocm", None), *modules)


def state_returns(platform: str, *, fail: bool) -> dict[str, bool]:
    """Whether the block changes the platform and modules, and whether the earlier ones are back after it."""
    from vllm.platforms import current_platform

    assert current_platform.is_rocm()
    before = _state()
    changed = False
    try:
        with fake_rocm.fake_platform(platform):
            changed = _state()[0] is not before[0]
            if fail:
                raise KeyError("planted")
    except KeyError:
        pass
    return {"changed": changed, "back": all(one is two for one, two in zip(before, _state(), strict=True))}


def install_again(arch: str) -> None:
    """Install the stand-in where vLLM's platform is resolved already."""
    from vllm.platforms import current_platform

    assert current_platform.is_rocm()
    fake_rocm.install(arch)


def reloaded_constant(platform: str) -> tuple[bool, bool]:
    """A constant that a module bound when it was imported: inside the block with ``reload``, and after it."""
    name = "vllm.platforms.rocm_user"
    package = importlib.import_module("vllm.platforms")
    source = "from vllm.platforms.rocm import on_gfx942\nANSWER = on_gfx942()\n"
    finder = _OneModule(name, source)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(name)
        with fake_rocm.fake_platform(platform, reload=[name]):
            inside = importlib.import_module(name).ANSWER
        return inside, importlib.import_module(name).ANSWER
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop(name, None)
        vars(package).pop("rocm_user", None)


class _OneModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module whose source is a text."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: Any) -> None:
        exec(self.source, vars(module))
