# SPDX-License-Identifier: Apache-2.0
"""The image's entry point.

Three forms, told apart by the arguments:

``--recipe NAME [--dry-run] [--] [vllm serve arguments]``
    The recipe's server. The arguments win over the recipe's. Preflight runs first; ``--dry-run``
    prints what would be started and starts nothing.
``doctor ...``, ``verify ...``, ``recipes ...``
    The tool. A model folder of one of these names is served as ``./doctor``.
anything else
    ``vllm serve`` with the same arguments, as the base image's own entry point.

The server replaces this process: signals reach it, and its exit status is the container's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TextIO

from rocm_overlay import __version__, preflight, table
from rocm_overlay.errors import EXIT_FAILED_CHECK, EXIT_OK, OverlayError
from rocm_overlay.machine import Gpu, read_gpus, visible_gpus
from rocm_overlay.memory import GIB, plan
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load, load_all
from rocm_overlay.render import ServeCommand, build_command
from rocm_overlay.settings import Settings, read_settings, with_card
from rocm_overlay.values import shown

RECIPE_FLAG = "--recipe"
DRY_RUN_FLAG = "--dry-run"
TOOL_VERBS = ("doctor", "verify", "recipes")

Execute = Callable[[str, Sequence[str], Mapping[str, str]], NoReturn]


def _become(program: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.execvpe(program, list(argv), environment)


def _identity() -> str:
    """The line that says what this server is built from."""
    # Passed-through commands need none of it.
    from rocm_overlay.identity import identity_line
    from rocm_overlay.install import find_site

    try:
        return identity_line(find_site())[1]
    except (OverlayError, OSError, UnicodeError) as error:
        why = error.what if isinstance(error, OverlayError) else str(error)
        return f"vllm-openai-rocm {__version__}: {why.splitlines()[0]}"


@dataclass(frozen=True)
class World:
    """What the entry point touches, so that a test can hand it another one.

    Attributes:
        recipes: the folder of recipes; None: the project's.
        identity: what is installed here, in one line.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sysfs: Path = Path("/sys")
    recipes: Path | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    execute: Execute = _become
    identity: Callable[[], str] = _identity

    def recipe_folder(self) -> Path:
        """The folder that recipes are read from."""
        return self.recipes if self.recipes is not None else Project.find().recipes


@dataclass(frozen=True)
class Request:
    """A recipe start as asked for."""

    recipe: str
    dry_run: bool
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Everything that is known before the server starts.

    Attributes:
        environment: the server's whole environment.
        variables: the recipe's variables: name, recipe's value, value in effect.
        refusals: why the settings or the machine cannot do; without GPUs, of the settings alone.
    """

    recipe: Recipe
    command: ServeCommand
    settings: Settings
    gpus: tuple[Gpu, ...]
    environment: Mapping[str, str]
    variables: tuple[tuple[str, str, str], ...]
    refusals: tuple[preflight.Refusal, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the entry point; returns only where no server starts.

    Returns:
        The exit status: 0 after a dry run, else that of the error or of the tool.
    """
    try:
        return run(sys.argv[1:] if argv is None else argv, World())
    except OverlayError as error:
        refusal = error
    except (OSError, UnicodeError) as error:
        refusal = OverlayError(
            "something that the entry point needs cannot be read or written",
            seen=str(error),
            wanted="readable recipes and driver files, and an open output",
            fix="correct what is named, or start vllm serve without --recipe",
        )
    print(refusal.render(), file=sys.stderr)
    return refusal.exit_code


def run(argv: Sequence[str], world: World) -> int:
    """As ``main``, in ``world``.

    Raises:
        OverlayError: a recipe start that is not understood or is refused.
    """
    # A verb comes first: its own --recipe, as of doctor, starts no server.
    if argv and argv[0] in TOOL_VERBS:
        # The tool's other parts are not needed to serve.
        from rocm_overlay.cli import main as tool

        return int(tool(list(argv)))
    request = read_request(argv)
    if request is not None:
        return _serve_recipe(request, world)
    _execute(["vllm", "serve", *argv], world.environ, world)


def read_request(argv: Sequence[str]) -> Request | None:
    """The recipe start that ``argv`` asks for, None where it asks for none.

    Only words before ``--`` are ours; vLLM has no flag named ``--recipe``.

    Raises:
        OverlayError: ``--recipe`` without a name, or twice.
    """
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    rest = list(argv[len(own) + 1 :])
    names: list[str] = []
    kept: list[str] = []
    words = iter(own)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != RECIPE_FLAG:
            kept.append(word)
        else:
            names.append(value if equals else next(words, ""))
    if not names:
        return None
    if len(names) > 1 or not names[0] or names[0].startswith("-"):
        raise OverlayError(
            f"{RECIPE_FLAG} wants the name of one recipe",
            seen=" and ".join(name or "nothing" for name in names),
            wanted=f"{RECIPE_FLAG} NAME",
            fix="recipes list shows the names",
        )
    overrides = [word for word in kept if word != DRY_RUN_FLAG] + rest
    return Request(names[0], DRY_RUN_FLAG in kept, tuple(overrides))


def prepare(request: Request, world: World) -> Start:
    """Resolve the recipe against the environment and the machine, and judge it.

    A variable that the container was started with stands over the recipe's. Without a GPU a dry run
    judges the settings alone, for the cards that the recipe names.

    Raises:
        OverlayError: no such recipe, or arguments that cannot be read.
    """
    folder = world.recipe_folder()
    recipe = load(folder, request.recipe)
    command = build_command(recipe, request.overrides)
    environment = {**command.env, **world.environ}
    present = read_gpus(world.sysfs)
    gpus = tuple(visible_gpus(present, world.environ))
    settings = read_settings(recipe, command, world.environ)
    machine = present if present or not request.dry_run else None
    return Start(
        recipe=recipe,
        command=command,
        settings=with_card(settings, gpus),
        gpus=gpus,
        environment=environment,
        variables=tuple((name, value, environment[name]) for name, value in command.env.items()),
        refusals=tuple(preflight.check(settings, machine, load_all(folder))),
    )


def report(start: Start) -> str:
    """The recipe, what the user changed, the memory plan, the environment and the command, as text."""
    recipe, hardware = start.recipe, start.recipe.hardware
    lines = [
        f"recipe {recipe.name}: {recipe.summary}",
        f"  for {recipe.gpus} x {' or '.join(hardware.skus)} ({hardware.architecture}, "
        f"{hardware.memory_gib} GiB)",
    ]
    if recipe.lineage:
        lines.append(f"  extends {' -> '.join(recipe.lineage)}")
    lines.append(f"  {_machine(start.gpus)}")
    lines += ["", "overrides (recipe value -> yours):"]
    lines += [f"  {override}" for override in start.command.overrides] or ["  none"]
    lines += ["", "memory a GPU, GiB:", _indent(_plan_table(start.settings))]
    lines += ["", "environment:"]
    for name, recipes_value, value in start.variables:
        before = shown(name, recipes_value)
        note = "" if value == recipes_value else f"  (yours; the recipe has {before})"
        lines.append(f"  {name}={shown(name, value)}{note}")
    bare = replace(start.command, env={})
    lines += ["", "command:", _indent(bare.line())]
    return "\n".join(lines)


def _plan_table(settings: Settings) -> str:
    return table.render(("what", "GiB", "source"), plan(settings.shape).rows())


def _machine(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no AMD GPU is visible here"
    kinds = sorted({f"{gpu.gfx}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in gpus})
    return f"this machine: {len(gpus)} GPUs ({'; '.join(kinds)})"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _serve_recipe(request: Request, world: World) -> int:
    print(world.identity(), file=world.out, flush=True)
    start = prepare(request, world)
    print(report(start), file=world.out, flush=True)
    if not request.dry_run:
        preflight.refuse(start.recipe.name, start.refusals)
        _execute(start.command.argv(), start.environment, world)
    if start.refusals:
        lines = ["", "preflight would refuse:", *(f"  {refusal}" for refusal in start.refusals)]
        print("\n".join(lines), file=world.out, flush=True)
        return EXIT_FAILED_CHECK
    print("\npreflight: nothing refused; nothing started (dry run)", file=world.out, flush=True)
    return EXIT_OK


def _execute(argv: Sequence[str], environment: Mapping[str, str], world: World) -> NoReturn:
    """Become the server."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        world.execute(argv[0], argv, environment)
    except OSError as error:
        raise OverlayError(
            f"{argv[0]} cannot be started",
            seen=error.strerror or str(error),
            wanted="the base image's vllm command on PATH",
            fix="run in the image, or install vLLM",
            exit_code=127,
        ) from error


if __name__ == "__main__":
    sys.exit(main())
