# SPDX-License-Identifier: Apache-2.0
"""What ``--specialized-decode`` and ``--monokernel`` mean together. Imports nothing of vLLM."""

from __future__ import annotations

from typing import Protocol, TypeVar

AUTO = "auto"
MONOKERNEL = "monokernel"

# (--specialized-decode, --monokernel) as one source gives them: None where it gives none.
Choice = tuple[str | None, bool | None]


class Options(Protocol):
    """The fields of ``KernelConfig`` that hold the choice."""

    specialized_decode: str | None
    monokernel: bool | None


Config = TypeVar("Config", bound=Options)


def settle_options(config: Config, *beside: Choice) -> Config:
    """Bring a configuration's own options, and those given beside it, to one choice; gives the configuration.

    With options beside it the choice is the last one, and ``monokernel`` is True or False from then on.

    Raises:
        ValueError: the options contradict each other.
    """
    own = (config.specialized_decode, config.monokernel)
    config.specialized_decode, monokernel = settle(own, *beside)
    config.monokernel = bool(monokernel) if beside else monokernel
    return config


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
    wanted = {kind for kind, _ in choices} - {None}
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
