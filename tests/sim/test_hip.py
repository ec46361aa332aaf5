# SPDX-License-Identifier: Apache-2.0
"""HipDevice without a GPU: the same test bodies on the simulator, the calls that HIP would get, what is
refused."""

from __future__ import annotations

import ctypes as C
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_bodies import BODIES
from planted import HEAD, TAIL

from cdnasim import Device, HipDevice, load, open_device
from cdnasim.hip import SIMULATOR_ONLY, argument_bytes, code_object, unfit


class Hip:
    """Records what HipDevice asks of HIP; a call named in ``fails`` answers with its error code."""

    def __init__(self, **fails: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.segments: list[bytes] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            if name == "hipModuleLaunchKernel":
                config = args[-1]
                size = C.c_size_t.from_address(config[3]).value
                self.segments.append(C.string_at(config[1], size))
            return self.fails.get(name, 0)

        return call


def gpu(count: int = 1, arch: str = "gfx950:sramecc+") -> Any:
    """As torch.cuda looks, on the CPU."""
    out = types.ModuleType("cpu")
    out.is_available = lambda: count > 0  # type: ignore[attr-defined]
    out.device_count = lambda: count  # type: ignore[attr-defined]
    out.get_device_properties = lambda i: types.SimpleNamespace(gcnArchName=arch)  # type: ignore[attr-defined]
    return out


def kernel(arch: str = "gfx950") -> Any:
    body = "global_store_dword v1, v0, s[4:5]"
    return load(HEAD.format(arch=arch) + body + TAIL.format(lds=256), arch, "planted.s").kernel()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_body_on_the_simulator(name: str, arch: str) -> None:
    BODIES[name](Device(arch))


VALUES = torch.arange(24, dtype=torch.int32).view(3, 8)


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda dev: dev.zeros(3, 8, dtype=torch.int32, rank=1, peer=True), torch.zeros_like(VALUES)),
        (lambda dev: dev.empty(3, 8, dtype=torch.int32, rank=1, peer=True), None),
        (lambda dev: dev.tensor(VALUES, rank=1, peer=True), VALUES),
        (lambda dev: dev.register(VALUES, rank=1, peer=True), VALUES),
    ],
    ids=["zeros", "empty", "tensor", "register"],
)
def test_memory_of_peers_is_uncached(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[HipDevice], torch.Tensor], wanted: torch.Tensor | None
) -> None:
    """Cached memory would keep one rank's system-scope stores from another's loads."""
    hip, memory = Hip(), torch.full((96,), 7, dtype=torch.uint8)
    dev = HipDevice("gfx950", ranks=2, library=hip, gpu=gpu(2))
    monkeypatch.setattr(dev, "_at", lambda address, count, rank: memory[:count])
    out = make(dev)
    assert out.shape == (3, 8) and out.dtype == torch.int32 and out.data_ptr() == memory.data_ptr()
    assert torch.equal(out, torch.full((96,), 7, dtype=torch.uint8).view(torch.int32).view(3, 8)
                       if wanted is None else wanted)  # fmt: skip
    (name, args), before = hip.calls[-1], hip.calls[-2]
    assert (name, args[1].value, args[2]) == ("hipExtMallocWithFlags", 96, 3)
    assert before == ("hipSetDevice", (1,))
    failing = HipDevice("gfx950", ranks=2, library=Hip(hipExtMallocWithFlags=2), gpu=gpu(2))
    with pytest.raises(RuntimeError, match="hipExtMallocWithFlags failed with HIP error 2"):
        make(failing)


def test_no_elements_of_peers_are_no_allocation() -> None:
    hip = Hip()
    dev = HipDevice("gfx950", library=hip, gpu=gpu())
    dev._place = lambda rank: torch.device("cpu")  # type: ignore[method-assign]
    assert dev.zeros(0, 8, peer=True).shape == (0, 8)
    assert "hipExtMallocWithFlags" not in [name for name, _ in hip.calls]


@pytest.mark.parametrize("name", ["tensor", "register", "zeros", "empty", "prepare", "run", "launch"])
def test_calls_take_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(c, name)) for c in (Device, HipDevice))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_options_of_the_simulator_are_taken_and_others_refused() -> None:
    options = [p for p in inspect.signature(Device).parameters if p not in ("arch", "ranks")]
    assert sorted(options) == sorted(SIMULATOR_ONLY)
    HipDevice("gfx950", library=Hip(), gpu=gpu(), seed=3, memory="hostile")
    with pytest.raises(ValueError, match="wobble"):
        HipDevice("gfx950", library=Hip(), gpu=gpu(), wobble=1)


def test_a_launch_asks_hip_for_the_right_things() -> None:
    hip = Hip()
    dev = HipDevice("gfx950", ranks=2, library=hip, gpu=gpu(2))
    dev._place = lambda rank: torch.device("cpu")  # type: ignore[method-assign]
    buffers = [dev.zeros(64, dtype=torch.int32, rank=r) for r in range(2)]
    k = kernel()
    dev.run([dev.prepare(k, (3, 2), 128, [buffers[r]], rank=r, lds_bytes=1024) for r in range(2)])
    names = [name for name, _ in hip.calls]
    assert names.count("hipDeviceEnablePeerAccess") == 2 and names.count("hipModuleLoadData") == 2
    image = next(args[1] for name, args in hip.calls if name == "hipModuleLoadData")
    assert image[:4] == b"\x7fELF" and len(image) > 1000
    launches = [args for name, args in hip.calls if name == "hipModuleLaunchKernel"]
    assert [args[1:8] for args in launches] == [(3, 2, 1, 128, 1, 1, 1024 - 256)] * 2
    assert hip.segments == [b.data_ptr().to_bytes(8, "little") for b in buffers]
    # Both ranks are launched before either is waited for: they may need each other.
    asked = [name for name in names if name in ("hipDeviceSynchronize", "hipModuleLaunchKernel")]
    # And every rank has ended what it did before, as zeroing memory that the other reaches.
    before, launched, after = asked[:2], asked[2:4], asked[4:]
    assert (set(before), set(launched)) == ({"hipDeviceSynchronize"}, {"hipModuleLaunchKernel"})
    assert after == ["hipDeviceSynchronize"] * 2
    dev.launch(k, 1, 64, [buffers[0]])
    assert [n for n, _ in hip.calls].count("hipModuleLoadData") == 2  # loaded once a GPU


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_assembly_text_becomes_a_code_object(arch: str) -> None:
    assert code_object(kernel(arch))[:4] == b"\x7fELF"
    bare = kernel(arch)
    bare.assembly = ""
    with pytest.raises(ValueError, match="assembly text"):
        code_object(bare)


def test_what_does_not_fit_is_refused_with_every_reason() -> None:
    assert unfit("gfx950", 1, gpu(0)) == ["torch sees no GPU"]
    assert "gfx90a" in unfit("gfx90a", 1, gpu())[0]
    with pytest.raises(RuntimeError, match=r"4 ranks are wanted, 2 GPUs.*GPU 0 is gfx942.*GPU 1 is gfx942"):
        HipDevice("gfx950", 4, library=Hip(), gpu=gpu(2, "gfx942"))
    with pytest.raises(RuntimeError, match="hipModuleLaunchKernel failed with HIP error 719"):
        HipDevice("gfx950", library=Hip(hipModuleLaunchKernel=719), gpu=gpu()).launch(kernel(), 1, 64, [0])
    with pytest.raises(ValueError, match="is for gfx942"):
        HipDevice("gfx950", library=Hip(), gpu=gpu()).launch(kernel("gfx942"), 1, 64, [0])
    with pytest.raises(ValueError, match="takes 1 arguments, 2 given"):
        argument_bytes(kernel(), [1, 2])


def test_without_a_gpu_the_simulator_is_opened() -> None:
    if unfit("gfx950", 1):
        assert isinstance(open_device("gfx950", seed=4), Device)
