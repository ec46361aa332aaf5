# SPDX-License-Identifier: Apache-2.0
"""Serving recipes: read from YAML, checked against the schema, resolved along ``extends``.

A recipe extends another by naming only what differs. ``args``, ``env`` and ``notes`` join key by
key; a value, a JSON map included, is replaced whole, so that what a server gets can be read in one
place. ``null`` removes an inherited key. ``published`` and ``summary`` are never inherited: they
speak of one server.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import yaml

from rocm_overlay.errors import OverlayError
from rocm_overlay.masking import mask_value
from rocm_overlay.textio import read_text

if TYPE_CHECKING:
    import jsonschema

SCHEMA_NAME = "recipe.schema.json"
SUFFIX = ".yaml"
FIELDS_HINT = "recipes/README.md documents the fields"

# A value of `args`: a flag alone (true), its --no- form (false), a scalar, a list of values, or a
# map that becomes one JSON argument.
Value: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Hardware:
    """The cards a recipe is written for; ``memory_gib`` is of one card, in GiB."""

    skus: tuple[str, ...]
    architecture: str
    memory_gib: int


@dataclass(frozen=True)
class Published:
    """Figures that somebody else published for a server like this one."""

    source: str
    hardware: str
    image: str
    figures: Mapping[str, float | str]
    differs: str = ""


@dataclass(frozen=True)
class Recipe:
    """A recipe with everything it inherits filled in.

    Attributes:
        lineage: the names it extends, nearest first.
    """

    name: str
    summary: str
    hardware: Hardware
    gpus: int
    image: str
    model: str
    env: Mapping[str, str]
    args: Mapping[str, Value]
    notes: Mapping[str, str]
    published: tuple[Published, ...] = ()
    lineage: tuple[str, ...] = ()


def recipe_names(folder: Path) -> list[str]:
    """The names of the recipes in ``folder``, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))


def load_all(folder: Path) -> list[Recipe]:
    """Every recipe of ``folder``, by name.

    Raises:
        OverlayError: one of them is not a valid recipe.
    """
    return [load(folder, name) for name in recipe_names(folder)]


def load(folder: Path, name: str) -> Recipe:
    """The recipe ``name`` of ``folder``, resolved.

    Raises:
        OverlayError: no such recipe, malformed YAML, a field the schema does not know or of the
            wrong form, a cycle of ``extends``, or a note on a flag that the recipe does not set.
    """
    lineage: list[str] = []
    documents: list[dict[str, Any]] = []
    wanted: str | None = name
    while wanted is not None:
        if wanted in lineage:
            raise OverlayError(
                f"recipe {name} extends itself",
                seen=" -> ".join([*lineage, wanted]),
                wanted="a chain that ends at a recipe without extends",
                fix=f"correct extends in {lineage[-1]}{SUFFIX}",
            )
        lineage.append(wanted)
        document = read_document(folder, wanted)
        documents.append(document)
        wanted = document.get("extends")
    merged = functools.reduce(_extend, reversed(documents))
    return _recipe(merged, tuple(lineage[1:]))


def read_document(folder: Path, name: str) -> dict[str, Any]:
    """One recipe file as written, checked against the schema but not resolved."""
    path = folder / f"{name}{SUFFIX}"
    if not path.is_file():
        raise unknown_recipe(name, recipe_names(folder))
    document = parse_yaml(read_text(path, path.name), path.name)
    check_plain(document, path.name)
    validate(document, path.name)
    if document["name"] != name:
        raise OverlayError(
            f"{path.name}: the recipe's name is not its file's",
            seen=document["name"],
            wanted=name,
            fix="rename one of the two",
        )
    return document


def unknown_recipe(name: str, known: Sequence[str]) -> OverlayError:
    """The error for a recipe that does not exist, with the nearest names."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return OverlayError(
        f"no recipe named {name}",
        seen=name,
        wanted=f"one of {', '.join(known) or '(there are no recipes)'}",
        fix=f"did you mean {' or '.join(near)}?" if near else "rocm-overlay recipes list",
    )


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key written twice in one map is an error, not the last one's victory."""


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} is not text", problem_mark=key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} is written twice", problem_mark=key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The one map that ``text`` holds; ``where`` names it in errors.

    Raises:
        OverlayError: not YAML, a key twice, or something other than a map; with the line.
    """
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    # A date or a number out of range and a nesting without end are found by other errors than YAML's.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise OverlayError(
            f"{where}{line}: malformed YAML",
            seen=getattr(error, "problem", None) or str(error),
            wanted="a YAML map of recipe fields",
            fix=f"correct {where}; {FIELDS_HINT}",
        ) from error
    if not isinstance(document, dict):
        raise OverlayError(
            f"{where}: not a recipe",
            seen=type(document).__name__,
            wanted="a YAML map of recipe fields",
            fix=FIELDS_HINT,
        )
    return document


def check_plain(value: object, where: str, place: str = "") -> None:
    """Check that everything in ``value`` can be written as JSON: YAML has dates, sets and NaN beside.

    Raises:
        OverlayError: names the first value that cannot, by its place in the file.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            check_plain(inner, where, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_plain(inner, where, f"{place}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _not_plain(where, place, str(value))
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise _not_plain(where, place, f"{value} ({type(value).__name__})")


def _not_plain(where: str, place: str, seen: str) -> OverlayError:
    return OverlayError(
        f"{where}: {place} cannot be written as JSON",
        seen=seen,
        wanted="text, a finite number, true or false, a list or a map",
        fix=f"quote it, or correct {place.rpartition('.')[2]}",
    )


@functools.cache
def schema() -> Mapping[str, Any]:
    """The JSON schema of a recipe file."""
    text = resources.files("rocm_overlay").joinpath(SCHEMA_NAME).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(document: Mapping[str, Any], where: str) -> None:
    """Check a recipe file's content against the schema.

    Raises:
        OverlayError: names the first fault by its place in the file, and counts the others.
    """
    # The slowest import here by far, and only a read recipe needs it: not a passed-through command.
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    faults = sorted(validator.iter_errors(document), key=lambda fault: [str(part) for part in fault.path])
    if not faults:
        return
    fault = faults[0]
    place = ".".join(str(part) for part in fault.path) or "the recipe"
    more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
    if fault.validator == "additionalProperties" and fault.schema.get("additionalProperties") is False:
        known = sorted(fault.schema["properties"])
        unknown = sorted(set(fault.instance) - set(known))
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=2)]
        raise OverlayError(
            f"{where}: unknown field {', '.join(unknown)} in {place}{more}",
            seen=", ".join(unknown),
            wanted=f"one of {', '.join(known)}",
            fix=f"did you mean {' or '.join(near)}?" if near else FIELDS_HINT,
        )
    raise OverlayError(
        f"{where}: {place} is not as the schema wants it{more}",
        seen=_short(mask_value(".".join(str(part) for part in fault.path), fault.instance)),
        wanted=_wanted(fault),
        fix=FIELDS_HINT,
    )


def _wanted(fault: jsonschema.ValidationError) -> str:
    if fault.validator == "required":
        required, present = cast(list[str], fault.validator_value), cast(dict[str, Any], fault.instance)
        return f"the field {', '.join(name for name in required if name not in present)}"
    if fault.validator == "not":
        return "no secret in a recipe: the container passes it by name (-e HF_TOKEN)"
    return f"{fault.validator} {fault.validator_value}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _extend(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``own`` over ``base``: fields replace, the maps join by key, null removes."""
    merged = {field: value for field, value in base.items() if field != "published"} | own
    for field in ("env", "args"):
        _check_removals(own["name"], field, own.get(field, {}), base.get(field, {}))
    for field in ("env", "args", "notes"):
        joined = {**base.get(field, {}), **own.get(field, {})}
        merged[field] = {key: value for key, value in joined.items() if value is not None}
    # A note goes with its flag: it must not have to be removed a second time.
    gone = {
        key
        for field in ("env", "args")
        for key, value in own.get(field, {}).items()
        if value is None and key not in own.get("notes", {})
    }
    merged["notes"] = {key: note for key, note in merged["notes"].items() if key not in gone}
    return merged


def _check_removals(name: str, field: str, own: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    """A null that removes nothing is a mistake, or an exception that has outlived its reason."""
    for key, value in own.items():
        if value is None and key not in inherited:
            raise OverlayError(
                f"recipe {name}: {field}.{key} removes what nothing set",
                seen="null",
                wanted="a value, or a key that the extended recipe sets",
                fix=f"delete {key} from {name}{SUFFIX}",
            )


def _recipe(fields: Mapping[str, Any], lineage: tuple[str, ...]) -> Recipe:
    name = fields["name"]
    for field in ("env", "args"):
        _check_removals(name, field, fields[field], {})
    recipe = Recipe(
        name=name,
        summary=fields["summary"],
        hardware=Hardware(
            skus=tuple(fields["hardware"]["skus"]),
            architecture=fields["hardware"]["architecture"],
            memory_gib=fields["hardware"]["memory_gib"],
        ),
        gpus=fields["gpus"],
        image=fields["image"],
        model=fields["model"],
        env=MappingProxyType(dict(fields["env"])),
        args=MappingProxyType(dict(fields["args"])),
        notes=MappingProxyType(dict(fields.get("notes", {}))),
        published=tuple(_published(fields.get("published", ()))),
        lineage=lineage,
    )
    stray = [key for key in recipe.notes if key not in recipe.args and key not in recipe.env]
    if stray:
        raise OverlayError(
            f"recipe {name}: notes on what it does not set",
            seen=", ".join(stray),
            wanted="a key of args or env",
            fix=f"remove the notes from {name}{SUFFIX}, or set the flags",
        )
    return recipe


def _published(entries: Sequence[Mapping[str, Any]]) -> Iterator[Published]:
    for entry in entries:
        yield Published(**{**entry, "figures": MappingProxyType(dict(entry["figures"]))})
