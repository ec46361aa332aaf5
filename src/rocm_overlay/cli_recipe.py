# SPDX-License-Identifier: Apache-2.0
"""The ``recipes`` commands of the tool: list, explain, render, check, table."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_overlay import base_flags, preflight, table
from rocm_overlay.errors import EXIT_OK, CheckFailed, OverlayError
from rocm_overlay.memory import plan
from rocm_overlay.pin import write_text_atomically
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load, load_all
from rocm_overlay.render import DEFAULT_IMAGE, build_command, compose_text, docker_line, text_of

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction

FORMS = ("serve", "docker", "compose")

# The lines of recipes/README.md between which the generated table stands.
TABLE_BEGIN = "<!-- recipes table: begin -->"
TABLE_END = "<!-- recipes table: end -->"


def register(subparsers: Subparsers) -> None:
    """Add ``recipes`` and its commands to the tool's parser."""
    parser = subparsers.add_parser("recipes", help="list, explain, render and check serving recipes")
    verbs = parser.add_subparsers(dest="recipes_command", required=True, metavar="COMMAND")

    verbs.add_parser("list", help="the recipes, one a line").set_defaults(run=_list)

    explain = verbs.add_parser("explain", help="one recipe: its flags, what each is for, its figures")
    explain.add_argument("name")
    explain.set_defaults(run=_explain)

    render = verbs.add_parser(
        "render",
        help="one recipe as a command, with your flags after --",
        parents=[_form_parser()],
        usage="%(prog)s NAME [--as {serve,docker,compose}] [--image IMAGE] [-- FLAGS]",
    )
    render.add_argument("name")
    # argparse cannot tell flags of ours from the server's behind a name, so it hands over both.
    render.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    render.set_defaults(run=_render)

    check = verbs.add_parser("check", help="every recipe against a vLLM's own parser and environment table")
    check.add_argument("--tree", type=Path, help="the folder that contains vllm/ (default: build/tree)")
    check.set_defaults(run=_check)

    generate = verbs.add_parser("table", help="the generated table of recipes")
    mode = generate.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="put it into recipes/README.md")
    mode.add_argument("--check", action="store_true", help="fail where recipes/README.md has another one")
    generate.set_defaults(run=_table)


def _form_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, prog="recipes render NAME")
    parser.add_argument("--as", dest="form", choices=FORMS, default=argparse.SUPPRESS)
    image = "the image of the docker and compose forms"
    parser.add_argument("--image", default=argparse.SUPPRESS, help=f"{image} (default: {DEFAULT_IMAGE})")
    return parser


def _list(_arguments: argparse.Namespace) -> int:
    rows = [(r.name, _hardware(r), r.gpus, r.summary) for r in load_all(Project.find().recipes)]
    print(table.render(("recipe", "hardware", "GPUs", "summary"), rows))
    return EXIT_OK


def _hardware(recipe: Recipe) -> str:
    return f"{'/'.join(recipe.hardware.skus)} {recipe.hardware.memory_gib} GiB"


def _explain(arguments: argparse.Namespace) -> int:
    print(explanation(load(Project.find().recipes, arguments.name)))
    return EXIT_OK


def explanation(recipe: Recipe) -> str:
    """A recipe in full, as text: hardware, flags with what they are for, plan, published figures."""
    lines = [f"{recipe.name}: {recipe.summary}", ""]
    if recipe.lineage:
        lines.append(f"extends   {' -> '.join(recipe.lineage)}")
    lines += [
        f"hardware  {recipe.gpus} x {_hardware(recipe)}, {recipe.hardware.architecture}",
        f"image     base.toml [image.{recipe.image}]",
        f"model     {recipe.model}",
        "",
        "environment",
    ]
    lines += _explained(recipe, recipe.env)
    lines += ["", "arguments"]
    lines += _explained(recipe, {key: text_of(value) for key, value in recipe.args.items()})
    settings = preflight.read_settings(recipe, build_command(recipe), recipe.env)
    rows = table.render(("what", "GiB", "source"), plan(settings.shape).rows())
    lines += ["", "memory a GPU, GiB", *(f"  {row}" for row in rows.splitlines())]
    for published in recipe.published:
        lines += ["", f"published by {published.source}"]
        lines += [f"  on {published.hardware}, with {published.image}"]
        lines += [f"  {what}: {figure}" for what, figure in published.figures.items()]
        lines += [f"  differs: {published.differs}"] if published.differs else []
    return "\n".join(lines)


def _explained(recipe: Recipe, settings: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for key, value in settings.items():
        lines.append(f"  {key} = {value}")
        if key in recipe.notes:
            lines.append(f"      {recipe.notes[key]}")
    return lines


def _render(arguments: argparse.Namespace) -> int:
    rest: list[str] = arguments.rest
    ours = rest[: rest.index("--")] if "--" in rest else rest
    overrides = rest[len(ours) + 1 :]
    _, unknown = _form_parser().parse_known_args(ours, arguments)
    if unknown:
        raise OverlayError(
            "recipes render does not know an argument",
            seen=" ".join(unknown),
            wanted="--as, --image, or flags of vllm serve behind --",
            fix=f"recipes render {arguments.name} -- {' '.join(unknown)}",
        )
    form: str = getattr(arguments, "form", "serve")
    image: str = getattr(arguments, "image", DEFAULT_IMAGE)
    recipe = load(Project.find().recipes, arguments.name)
    command = build_command(recipe, overrides)
    # On stderr, so that the rendered text alone can go into a file.
    for override in command.overrides:
        print(f"# override {override}", file=sys.stderr)
    if form == "serve":
        print(command.line())
    elif form == "docker":
        print(docker_line(recipe, overrides, image))
    else:
        print(compose_text(recipe, overrides, image), end="")
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> int:
    project = Project.find()
    recipes = load_all(project.recipes)
    check_images(recipes, project.pin_file)
    for recipe in recipes:
        settings = preflight.read_settings(recipe, build_command(recipe), recipe.env)
        preflight.refuse(recipe.name, preflight.check(settings))
    tree: Path = arguments.tree or project.tree
    base_flags.refuse(base_flags.find_problems(tree, cases(recipes)), tree)
    print(f"{len(recipes)} recipes: every flag, value, key and variable is known to the vLLM in {tree}")
    return EXIT_OK


def cases(recipes: Sequence[Recipe]) -> list[base_flags.Case]:
    """The recipes' commands as ``base_flags`` takes them."""
    commands = [build_command(recipe) for recipe in recipes]
    return [base_flags.Case(c.recipe, tuple(c.argv()[2:]), dict(c.env)) for c in commands]


def check_images(recipes: Sequence[Recipe], pin_file: Path) -> None:
    """Every recipe's image is one that the pin holds.

    Raises:
        CheckFailed: names the first recipe whose image is not.
    """
    images = tomllib.loads(pin_file.read_text(encoding="utf-8")).get("image", {})
    for recipe in recipes:
        if recipe.image not in images:
            raise CheckFailed(
                f"recipe {recipe.name}: the pin has no image {recipe.image}",
                seen=recipe.image,
                wanted=f"one of {', '.join(sorted(images))}",
                fix=f"correct image, or add [image.{recipe.image}] to {pin_file.name}",
            )


def _table(arguments: argparse.Namespace) -> int:
    project = Project.find()
    wanted = recipe_table(load_all(project.recipes))
    if not (arguments.write or arguments.check):
        print(wanted)
        return EXIT_OK
    for readme in (project.recipes / "README.md", project.root / "README.md"):
        text = readme.read_text(encoding="utf-8")
        changed = with_table(text, wanted)
        if arguments.write:
            write_text_atomically(readme, changed)
        elif changed != text:
            raise CheckFailed(
                f"the table in {readme} is not the recipes'",
                wanted="the table that the recipes give",
                fix="rocm-overlay recipes table --write",
            )
    return EXIT_OK


def recipe_table(recipes: Sequence[Recipe]) -> str:
    """The recipes as a Markdown table."""
    rows = [f"| `{r.name}` | {r.gpus} x {_hardware(r)} | {_kernels(r)} | {r.summary} |" for r in recipes]
    return "\n".join(["| Recipe | Hardware | Kernels | Summary |", "|---|---|---|---|", *rows])


def _kernels(recipe: Recipe) -> str:
    return "yes" if recipe.args.get("monokernel") is True else "no"


def with_table(text: str, wanted: str) -> str:
    """``text`` with ``wanted`` between the table's two marks.

    Raises:
        OverlayError: ``text`` lacks a mark, or has them out of order.
    """
    head, begin, rest = text.partition(TABLE_BEGIN)
    _, end, tail = rest.partition(TABLE_END)
    if not begin or not end:
        raise OverlayError(
            "the file has no place for the table of recipes",
            seen=f"{TABLE_BEGIN if not begin else TABLE_END} is missing",
            wanted=f"{TABLE_BEGIN} and {TABLE_END}, each on a line",
            fix="put the two lines back",
        )
    return f"{head}{begin}\n{wanted}\n{end}{tail}"
