# SPDX-License-Identifier: Apache-2.0
"""What ``--specialized-decode`` and ``--monokernel`` mean together. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, TypeVar

AUTO = "auto"
MONOKERNEL = "monokernel"
KINDS = (AUTO, MONOKERNEL)

# The models whose ROCm classes read the options. Any other model would ignore them.
ARCHITECTURES = frozenset(
    {
        "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
        "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    }
)  # fmt: skip

# (--specialized-decode, --monokernel) as one source gives them: None where it gives none.
Choice = tuple[str | None, bool | None]


class Options(Protocol):
    """The fields of ``KernelConfig`` that hold the choice."""

    # Not their own types: a field that takes fewer values is no such attribute to a type checker.
    specialized_decode: Any
    monokernel: Any
    specialized_decode_strict: Any


Config = TypeVar("Config", bound=Options)


def settle_options(config: Config, *beside: Choice) -> Config:
    """Bring a configuration's own options, and those given beside it, to one choice; gives the configuration.

    ``monokernel`` stays None as long as nobody chose, so that a copy of the configuration with a choice does
    not contradict itself.

    Raises:
        ValueError: the options contradict each other, or one of them is no choice at all, which a caller of
            Python's can give.
    """
    own = (config.specialized_decode, config.monokernel)
    for kind, switch in (own, *beside):
        if kind is not None and kind not in KINDS:
            raise ValueError(
                f"--specialized-decode: {kind!r}, wanted {' or '.join(KINDS)}, or None for vLLM's path"
            )
        if switch not in (None, True, False):
            raise ValueError(f"--monokernel: {switch!r}, wanted True, False or None for no choice")
    config.specialized_decode, config.monokernel = settle(own, *beside)
    return config


def require_kernels(config: Options, architectures: Collection[str], on_rocm: bool) -> None:
    """Raise where the options ask for kernels that the model does not have.

    Args:
        config: the options.
        architectures: those of the model that is served.
        on_rocm: whether vLLM runs on ROCm.

    Raises:
        ValueError: with every reason; or strict mode was asked for, and kernels neither chosen nor declined.
    """
    if config.specialized_decode is None:
        if config.specialized_decode_strict and config.monokernel is None:
            raise ValueError(
                "specialized_decode_strict in --kernel-config: true without kernels whose steps it is about, "
                "wanted --specialized-decode or --monokernel beside it. Give one, drop the key, or say "
                "with --no-monokernel that vLLM's path is meant."
            )
        return
    reasons = []
    if not ARCHITECTURES.intersection(architectures):
        wanted = ", ".join(sorted(ARCHITECTURES))
        reasons.append(f"model architecture: {', '.join(architectures)}, wanted one of {wanted}")
    if not on_rocm:
        reasons.append("platform: another one, wanted ROCm")
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(
            f"{_option(config.specialized_decode)}: the model has no decode kernels of its own here, for "
            f"{len(reasons)} reason(s):{listed}\nDrop the option to decode on vLLM's path."
        )


def settle(*choices: Choice) -> Choice:
    """The one choice behind the options of every source: the command line, and the JSON of --kernel-config.

    ``auto`` leaves the kind of kernels to the model and so agrees with any kind. ``monokernel`` is the kind
    that ``--monokernel`` names.

    Args:
        choices: what each source gives.

    Returns:
        The kind of kernels, None for vLLM's path; and whether the model decodes on mono kernels, which stays
        None as long as nobody chose, so that a later choice does not contradict this one.

    Raises:
        ValueError: the options contradict each other.
    """
    switches = {monokernel for _, monokernel in choices} - {None}
    wanted = {kind for kind, _ in choices if kind is not None}
    if (None, True) in choices:  # beside a kind, True is what an earlier call made of that kind
        wanted.add(MONOKERNEL)
    if False in switches and wanted:
        raise ValueError(
            f"--no-monokernel contradicts {' and '.join(map(_option, sorted(wanted)))}: the first keeps "
            "vLLM's decode path, the other asks for kernels in its place. Drop one of them. The JSON of "
            '--kernel-config counts as giving the options that it holds, "monokernel": false as '
            "--no-monokernel."
        )
    kinds = sorted(wanted - {AUTO})
    if len(kinds) > 1:
        raise ValueError(
            f"{' contradicts '.join(map(_option, kinds))}: one model decodes on one kind of kernels. Give "
            f"one of them, or --specialized-decode {AUTO}."
        )
    if not wanted:
        return None, False if switches else None
    return (kinds[0] if kinds else AUTO), True


def _option(kind: str) -> str:
    return f"--specialized-decode {kind}" + (" (--monokernel)" if kind == MONOKERNEL else "")
