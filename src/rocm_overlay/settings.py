# SPDX-License-Identifier: Apache-2.0
"""The settings of a server that preflight judges, read from its command and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocm_overlay.errors import OverlayError
from rocm_overlay.machine import Gpu
from rocm_overlay.memory import GIB, MODEL_CONTEXT, ServerShape
from rocm_overlay.recipe import Recipe, Value
from rocm_overlay.render import ServeCommand, build_command
from rocm_overlay.values import as_count, as_flag, as_map, as_share, unreadable

A4W4_VARIABLE = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
AITER_VARIABLES = {"VLLM_ROCM_USE_AITER": "False", "VLLM_ROCM_USE_AITER_MOE": "True"}
WIDENING_VARIABLE = "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"
BREAKABLE_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"

GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
# What the base takes where no mode is written, by its optimization level.
LEVEL_GRAPH_MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
DEFAULT_LEVEL = 2

# Parallelism beside TP, and how many GPUs a rank of it multiplies: decode context ranks share TP's.
OTHER_PARALLELISM = (
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "decode-context-parallel-size",
    "data-parallel-size",
)
_WITHOUT_GPUS = ("decode-context-parallel-size",)
# Switches that spread the experts over ranks.
EXPERT_PARALLELISM = ("enable-expert-parallel", "enable-eplb")


@dataclass(frozen=True)
class Settings:
    """What preflight judges.

    Attributes:
        recipe: the recipe, and with ``command`` and ``environ`` what was asked for, so that a change
            can be applied to it as a user would.
        environ: the container's own environment, which stands over the recipe's variables.
        a4w4: the value of the variable where it turns the mode on, None where it does not.
        aiter_off: variables with which AITER or its experts are off.
        other_parallelism: flags of more than one rank beside TP, with their values; ``None`` for a
            switch.
        gpus: GPUs that the server takes on this machine.
    """

    recipe: Recipe
    command: ServeCommand
    environ: Mapping[str, str]
    shape: ServerShape
    adaptive_verification: bool
    graph_mode: str
    breakable_graphs: str | None
    a4w4: str | None
    aiter_off: Mapping[str, str]
    moe_backend: str
    kernels_in_config: tuple[str, ...]
    gpus: int
    other_parallelism: Mapping[str, int | None] = field(default_factory=dict)


def read_settings(recipe: Recipe, command: ServeCommand, environ: Mapping[str, str]) -> Settings:
    """The settings of ``command``, started in a container with ``environ``.

    Raises:
        OverlayError: a load-bearing flag is missing or holds what cannot be read.
    """
    values = command.values
    environment = {**command.env, **environ}
    speculative = as_map(values, "speculative-config")
    kernel = as_map(values, "kernel-config")
    adaptive = as_flag(speculative, "enable_adaptive_verification", root="speculative-config")
    return Settings(
        recipe=recipe,
        command=command,
        environ=dict(environ),
        shape=_shape(recipe, values, speculative, kernel, environment),
        adaptive_verification=adaptive,
        graph_mode=_graph_mode(values),
        breakable_graphs=environment.get(BREAKABLE_VARIABLE),
        a4w4=_a4w4(environment.get(A4W4_VARIABLE)),
        aiter_off=_aiter_off(environment),
        moe_backend=_moe_backend(values, kernel),
        kernels_in_config=_kernels_in_config(kernel),
        gpus=_gpus(values),
        other_parallelism=_other_parallelism(values),
    )


def _shape(
    recipe: Recipe,
    values: Mapping[str, Value],
    speculative: Mapping[str, Any],
    kernel: Mapping[str, Any],
    environment: Mapping[str, str],
) -> ServerShape:
    engram = as_map(values, "engram-config")
    # One flag, its longer name, or the JSON argument of both: any of them turns the kernels on.
    on = as_flag(values, "monokernel") or values.get("specialized-decode", False) is not False
    return ServerShape(
        architecture=recipe.hardware.architecture,
        card_gib=recipe.hardware.memory_gib,
        utilization=as_share(values, "gpu-memory-utilization"),
        tensor_parallel=as_count(values, "tensor-parallel-size"),
        max_model_len=_context(values),
        max_num_batched_tokens=as_count(values, "max-num-batched-tokens"),
        max_num_seqs=as_count(values, "max-num-seqs"),
        drafts=_drafts(values, speculative),
        # The base's default is the host.
        engram_on_host=as_flag(engram, "cpu_offload", default=True, root="engram-config"),
        monokernel=on or bool(_kernels_in_config(kernel)),
        # The base's default is to widen, and it reads anything but these as no.
        widened_at_load=environment.get(WIDENING_VARIABLE, "True").lower() in ("true", "1"),
    )


def _kernels_in_config(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of --kernel-config that turn the persistent kernels on."""
    named = ("specialized_decode",) if kernel.get("specialized_decode") is not None else ()
    return (*named, "monokernel") if as_flag(kernel, "monokernel", root="kernel-config") else named


def _drafts(values: Mapping[str, Value], speculative: Mapping[str, Any]) -> int:
    # The short flag is the same setting; the base takes one of the two.
    if "spec-tokens" in values:
        return as_count(values, "spec-tokens")
    key = "num_speculative_tokens"
    named = {f"speculative-config.{key}": speculative.get(key)}
    return as_count(named, f"speculative-config.{key}", default=0, least=0)


def _context(values: Mapping[str, Value]) -> int:
    automatic = str(values.get("max-model-len")).strip().lower() in ("auto", "-1")
    return MODEL_CONTEXT if automatic else as_count(values, "max-model-len")


def _graph_mode(values: Mapping[str, Value]) -> str:
    if as_flag(values, "enforce-eager"):
        return "NONE"
    mode = as_map(values, "compilation-config").get("cudagraph_mode")
    if mode is None:
        level = as_count(values, "optimization-level", default=DEFAULT_LEVEL, least=0)
        if level not in LEVEL_GRAPH_MODES:
            raise unreadable("optimization-level", level, "0 to 3")
        return LEVEL_GRAPH_MODES[level]
    if not isinstance(mode, str) or mode.upper() not in GRAPH_MODES:
        raise unreadable("compilation-config.cudagraph_mode", mode, f"one of {', '.join(GRAPH_MODES)}")
    return mode.upper()


def _a4w4(value: str | None) -> str | None:
    """The value where it is not a zero: the base reads a whole number, and stops at anything else."""
    try:
        return value if value is not None and int(value) else None
    except ValueError:
        return value or "an empty text"


def _aiter_off(environment: Mapping[str, str]) -> dict[str, str]:
    held = {name: environment.get(name, default) for name, default in AITER_VARIABLES.items()}
    return {
        name: environment.get(name, "unset")
        for name, value in held.items()
        if value.lower() not in ("true", "1")
    }


def _moe_backend(values: Mapping[str, Value], kernel: Mapping[str, Any]) -> str:
    own = str(values.get("moe-backend", "auto"))
    chosen = own if own != "auto" else str(kernel.get("moe_backend", "auto"))
    return chosen.lower().replace("-", "_")


def _gpus(values: Mapping[str, Value]) -> int:
    """GPUs on this machine: ranks of all kinds, over the nodes that share them."""
    ranks = as_count(values, "tensor-parallel-size")
    for flag in OTHER_PARALLELISM:
        if flag not in (*_WITHOUT_GPUS, "data-parallel-size"):
            ranks *= as_count(values, flag, default=1)
    nodes = as_count(values, "nnodes", default=1)
    data = as_count(values, "data-parallel-size", default=1)
    local = as_count(values, "data-parallel-size-local", default=data, least=0)
    return max(1, -(-ranks // nodes) * local)


def _other_parallelism(values: Mapping[str, Value]) -> dict[str, int | None]:
    sizes = {flag: as_count(values, flag, default=1) for flag in OTHER_PARALLELISM}
    found: dict[str, int | None] = {flag: size for flag, size in sizes.items() if size > 1}
    found.update({flag: None for flag in EXPERT_PARALLELISM if as_flag(values, flag)})
    return found


def with_card(settings: Settings, gpus: Sequence[Gpu]) -> Settings:
    """``settings`` with the memory of the smallest of ``gpus`` in place of the recipe's.

    GPUs of another architecture and partitions are refused for what they are; advice on flags from
    their memory would mislead.
    """
    sizes = [
        gpu.memory_bytes
        for gpu in gpus
        if gpu.gfx == settings.shape.architecture and not gpu.partitioned and gpu.memory_bytes
    ]
    if not sizes:
        return settings
    return replace(settings, shape=replace(settings.shape, card_gib=round(min(sizes) / GIB, 2)))


@dataclass(frozen=True)
class Change:
    """What to change in how a server is started.

    Attributes:
        recipe: another recipe's name, "" for the same.
        words: arguments to add behind the others.
        env: variables of the container to set.
        unset: variables of the container to drop.
    """

    recipe: str = ""
    words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"--recipe {self.recipe}"] if self.recipe else []
        parts += [" ".join(self.words)] if self.words else []
        parts += [f"{name}={value}" for name, value in self.env]
        parts += [f"unset {', '.join(self.unset)}"] if self.unset else []
        return " and ".join(parts)

    def then(self, other: Change) -> Change:
        """Both changes at once."""
        return Change(
            other.recipe or self.recipe,
            self.words + other.words,
            self.env + other.env,
            self.unset + other.unset,
        )


def changed(settings: Settings, change: Change, recipes: Sequence[Recipe]) -> Settings | None:
    """The settings after ``change``, applied as a user would; None where it cannot be applied.

    Args:
        recipes: those that a change can name.
    """
    recipe = next((one for one in recipes if one.name == change.recipe), settings.recipe)
    if change.recipe and recipe.name != change.recipe:
        return None
    environ = {name: value for name, value in settings.environ.items() if name not in change.unset}
    try:
        command = build_command(recipe, [*settings.command.given, *change.words])
        return read_settings(recipe, command, {**environ, **dict(change.env)})
    except OverlayError:
        return None
