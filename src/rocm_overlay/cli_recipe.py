# SPDX-License-Identifier: Apache-2.0
"""The ``recipes`` commands of the tool: list, explain, render, check, table."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_overlay import __version__, base_flags, flags, preflight, table
from rocm_overlay.container import compose_text, docker_line
from rocm_overlay.errors import EXIT_OK, CheckFailed, OverlayError
from rocm_overlay.install import find_site
from rocm_overlay.masking import mask_words
from rocm_overlay.memory import plan
from rocm_overlay.project import Project
from rocm_overlay.recipe import Recipe, load, load_all, recipe_names
from rocm_overlay.render import build_command
from rocm_overlay.settings import read_settings
from rocm_overlay.textio import read_text, write_text_atomically
from rocm_overlay.values import shown

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction

FORMS = ("serve", "docker", "compose")
TREE_DEFAULT = "default: build/tree, and where there is none the installed vllm"

# The lines of recipes/README.md between which the generated table stands.
TABLE_BEGIN = "<!-- recipes table: begin -->"
TABLE_END = "<!-- recipes table: end -->"


class _VerbParser(argparse.ArgumentParser):
    """A parser that leaves everything behind the first ``--`` alone, and unknown words to the verb.

    argparse drops the ``--`` before a verb sees it, and repeats unknown words in its error, where
    one can be a secret.
    """

    takes_words = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if not self.takes_words or args is None:
            return super().parse_known_args(args, namespace)
        words = list(args)
        own = words[: words.index("--")] if "--" in words else words
        found, unknown = super().parse_known_args(own, namespace)
        found.unknown, found.overrides = unknown, words[len(own) + 1 :]
        return found, []


def register(subparsers: Subparsers) -> None:
    """Add ``recipes`` and its commands to the tool's parser."""
    parser = subparsers.add_parser("recipes", help="list, explain, render and check serving recipes")
    verbs = parser.add_subparsers(
        dest="recipes_command", required=True, metavar="COMMAND", parser_class=_VerbParser
    )

    verbs.add_parser("list", help="the recipes, one a line").set_defaults(run=_list)

    explain = verbs.add_parser("explain", help="one recipe: its flags, what each is for, its figures")
    explain.add_argument("name")
    explain.set_defaults(run=_explain)

    render = verbs.add_parser(
        "render",
        help="one recipe as a command, with your flags after --",
        usage="%(prog)s NAME [--as {serve,docker,compose}] [--image IMAGE] [-- FLAGS]",
        allow_abbrev=False,
    )
    render.takes_words = True
    render.add_argument("name")
    render.add_argument("--as", dest="form", choices=FORMS, default="serve")
    image = "the image of the docker and compose forms (default: the name that make image gives it)"
    render.add_argument("--image", help=image)
    render.set_defaults(run=_render)

    check = verbs.add_parser("check", help="every recipe against a vLLM's own parser and environment table")
    check.add_argument("--tree", type=Path, help=f"the folder that contains vllm/ ({TREE_DEFAULT})")
    check.set_defaults(run=_check)

    spellings = verbs.add_parser("flags", help="the table of every spelling of the base's flags")
    spellings.add_argument("--tree", type=Path, help=f"the folder that contains vllm/ ({TREE_DEFAULT})")
    spellings.add_argument("--write", action="store_true", help="write it anew")
    spellings.set_defaults(run=_flags)

    generate = verbs.add_parser("table", help="the generated table of recipes")
    mode = generate.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="put it into recipes/README.md")
    mode.add_argument("--check", action="store_true", help="fail where recipes/README.md has another one")
    generate.set_defaults(run=_table)


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
    lines += _explained(recipe, recipe.args)
    settings = read_settings(recipe, build_command(recipe), {})
    rows = table.render(("what", "GiB", "source"), plan(settings.shape).rows())
    lines += ["", "memory a GPU, GiB", *(f"  {row}" for row in rows.splitlines())]
    for published in recipe.published:
        lines += ["", f"published by {published.source}"]
        lines += [f"  on {published.hardware}, with {published.image}"]
        lines += [f"  {what}: {figure}" for what, figure in published.figures.items()]
        lines += [f"  differs: {published.differs}"] if published.differs else []
    return "\n".join(lines)


def _explained(recipe: Recipe, settings: Mapping[str, object]) -> list[str]:
    lines: list[str] = []
    for key, value in settings.items():
        lines.append(f"  {key} = {shown(key, value)}")
        if key in recipe.notes:
            lines.append(f"      {recipe.notes[key]}")
    return lines


def _render(arguments: argparse.Namespace) -> int:
    overrides: list[str] = arguments.overrides
    if arguments.unknown:
        words = " ".join(mask_words(arguments.unknown))
        # Behind an unknown flag, what is taken for the name may be that flag's value.
        known = arguments.name in recipe_names(Project.find().recipes)
        raise OverlayError(
            "recipes render does not know an argument",
            seen=words,
            wanted="--as, --image, or flags of vllm serve behind --",
            fix=f"recipes render {arguments.name if known else 'NAME'} -- {words}",
        )
    form: str = arguments.form
    project = Project.find()
    recipe = load(project.recipes, arguments.name)
    command = build_command(recipe, overrides)
    # On stderr, so that the rendered text alone can go into a file.
    for override in command.overrides:
        print(f"# override {override}", file=sys.stderr)
    if form == "serve":
        print(command.line())
        return EXIT_OK
    image: str = arguments.image or built_image(recipe, project)
    if form == "docker":
        print(docker_line(recipe, overrides, image))
    else:
        print(compose_text(recipe, overrides, image), end="")
    return EXIT_OK


def built_image(recipe: Recipe, project: Project) -> str:
    """The name that ``make image`` gives the image that the recipe runs on."""
    # What builds images is not needed for anything else here.
    from rocm_overlay.image import image_tags
    from rocm_overlay.pin import Pin

    return image_tags(Pin.load(project.pin_file), recipe.image, __version__, stand_in=False)[0]


def _check(arguments: argparse.Namespace) -> int:
    project = Project.find()
    recipes = load_all(project.recipes)
    check_images(recipes, project.pin_file)
    for recipe in recipes:
        settings = read_settings(recipe, build_command(recipe), {})
        preflight.refuse(recipe.name, preflight.check(settings))
    tree: Path = arguments.tree or default_tree(project)
    base_flags.refuse(base_flags.find_problems(tree, cases(recipes)), tree)
    print(f"{len(recipes)} recipes: every flag, value, key and variable is known to the vLLM in {tree}")
    return EXIT_OK


def default_tree(project: Project) -> Path:
    """The laid tree of a checkout; in the image, which has none, the folder of the installed vllm.

    Raises:
        OverlayError: neither is there.
    """
    return project.tree if (project.tree / "vllm").is_dir() else find_site()


def _flags(arguments: argparse.Namespace) -> int:
    tree: Path = arguments.tree or default_tree(Project.find())
    wanted = flags.table_text(base_flags.read_spellings(tree))
    kept = Path(str(resources.files("rocm_overlay").joinpath(flags.TABLE_NAME)))
    if arguments.write:
        write_text_atomically(kept, wanted)
    elif read_text(kept, kept.name) != wanted:
        raise CheckFailed(
            f"{kept.name} is not the table of the vllm serve in {tree}",
            wanted="every spelling that its parser takes",
            fix="rocm-overlay recipes flags --write",
        )
    print(f"{kept.name}: {len(wanted.splitlines()) - 2} flags, as the vllm serve in {tree} takes them")
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
    images = tomllib.loads(read_text(pin_file, pin_file.name)).get("image", {})
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
        text = read_text(readme, readme.name)
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
    """Whether the server decodes on the kernels, and what they hold a GPU beyond a server without them."""
    shape = read_settings(recipe, build_command(recipe), {}).shape
    return f"{plan(shape).kernels:+.1f} GiB" if shape.monokernel else "no"


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
