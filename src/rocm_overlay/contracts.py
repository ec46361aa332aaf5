# SPDX-License-Identifier: Apache-2.0
"""The contract list: what our overlay files rely on of the base, recorded, and compared with any base.

``contracts/recorded.json`` is generated: from the overlay's own syntax trees, and from the names of
``contracts/reviewed.toml``, which hold what a syntax tree does not show. Interface drift in files
that we do not touch is found here, before a server finds it.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rocm_overlay.base_index import BaseIndex, Found, Parameter, parameters
from rocm_overlay.contract_uses import Use, find_uses
from rocm_overlay.errors import OverlayError
from rocm_overlay.overlay import Overlay
from rocm_overlay.textio import read_text, write_text_atomically

FOLDER, RECORDED, REVIEWED = "contracts", "recorded.json", "reviewed.toml"
FORMAT = 1
MODULE, FUNCTION, CLASS, VALUE, GONE = "module", "function", "class", "value", "gone"


@dataclass(frozen=True)
class Contract:
    """One name of the base as our files rely on it.

    Attributes:
        module, name, member: where it is.
        kind: module, function (or method), class, or value (a constant, a field, an attribute).
        parameters: of a function, and of a class that is made by calling it.
        default: of a value, as source; None where it has none, or it is no literal.
        users: the overlay files, or 'reviewed: why'.
    """

    module: str
    name: str
    member: str
    kind: str
    parameters: tuple[Parameter, ...] | None
    default: str | None
    users: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.name, self.member) if part)

    @property
    def use(self) -> Use:
        """The name, as it is used."""
        called = self.kind == CLASS and self.parameters is not None
        return Use(self.module, self.name, self.member, called)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Contract:
        """The contract that a record holds."""
        given = plain["parameters"]
        parts = None if given is None else tuple(Parameter(**one) for one in given)
        return cls(**{**plain, "parameters": parts, "users": tuple(plain["users"])})


@dataclass(frozen=True)
class Drift:
    """How a base differs from a contract; ``breaks`` is False for what our use of it survives."""

    contract: Contract
    what: str
    breaks: bool = True


def record(
    overlay: Overlay, folder: Path, base: Path, laid: Mapping[str, bytes], skip: Collection[str] = ()
) -> list[Contract]:
    """The contract list for an overlay over the base at ``base``.

    Args:
        overlay: whose files use the base.
        folder: contracts/, which holds the reviewed names.
        base: the folder that holds the base's vllm/.
        laid: what overlay and series make of its files, by path. A name that only they bring is our own
            affair and no contract.
        skip: names that may be missing.

    Raises:
        OverlayError: a name that is used or reviewed is not in the base.
    """
    index = BaseIndex(base)
    users: dict[Use, list[str]] = dict(find_uses(overlay, index))
    for use, why in read_reviewed(folder / REVIEWED).items():
        users.setdefault(use, []).append(f"reviewed: {why}")
    for use in [use for use in users if replace(use, called=True) in users and not use.called]:
        users[replace(use, called=True)] += users.pop(use)
    read = [_read(index, use, tuple(sorted(names))) for use, names in sorted(users.items())]
    contracts = [one for one in read if one.kind != GONE]
    whole = BaseIndex(base, laid)
    lacking = [Use(one.module, one.name, one.member) for one in read if one.kind == GONE]
    if missing := [
        str(use) for use in lacking if _read(whole, use, ()).kind == GONE and str(use) not in skip
    ]:
        raise OverlayError(
            "names of the base that our files use are not in it",
            seen=", ".join(missing),
            fix="correct the overlay file, or the entry in contracts/reviewed.toml",
        )
    return contracts


def read_reviewed(path: Path) -> dict[Use, str]:
    """The reviewed names with what each is for.

    Raises:
        OverlayError: the file is no TOML, or an entry lacks a field.
    """
    try:
        data = tomllib.loads(read_text(path, f"{FOLDER}/{REVIEWED}"))
    except tomllib.TOMLDecodeError as error:
        raise OverlayError(
            f"{FOLDER}/{REVIEWED} is not valid TOML", seen=error, fix="correct that line"
        ) from None
    found = {}
    for entry in data.get("contract", []):
        if set(entry) - {"module", "name", "members", "why"} or not {"module", "name", "why"} <= set(entry):
            raise OverlayError(
                f"{FOLDER}/{REVIEWED}: an entry's fields",
                seen=", ".join(entry),
                wanted="module, name, why, and members of a class",
            )
        for member in entry.get("members", [""]):
            found[Use(entry["module"], entry["name"], member)] = str(entry["why"])
    return found


def _read(index: BaseIndex, use: Use, users: tuple[str, ...]) -> Contract:
    """The name as a base has it; of kind 'gone' where it does not."""

    def made(kind: str, given: Iterable[Parameter] | None = None, default: str | None = None) -> Contract:
        return Contract(
            use.module, use.name, use.member, kind, None if given is None else tuple(given), default, users
        )

    if not use.name:
        return made(MODULE if index.path_of(use.module) else GONE)
    found = index.resolve(use.module, use.name)
    if found is None:
        return made(GONE)
    if use.member:
        member = index.member(found, use.member) if isinstance(found.node, ast.ClassDef) else None
        if member is None:
            return made(GONE)
        found = member
    node = found.node
    if node is None:
        return made(MODULE)
    if isinstance(node, ast.ClassDef):
        return made(CLASS, _constructor(index, found) if use.called else None)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return made(VALUE, default=_literal(node.value))
    is_property = any(
        ast.unparse(one).split(".")[-1] in ("property", "cached_property") for one in node.decorator_list
    )
    return made(VALUE) if is_property else made(FUNCTION, parameters(node))


def _literal(value: ast.expr | None) -> str | None:
    """A default's source where it is a literal or a plain name; what is computed says nothing by itself."""
    if value is None:
        return None
    try:
        ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value) if isinstance(value, ast.Name | ast.Attribute) else _field_default(value)
    return ast.unparse(value)


def _field_default(value: ast.expr) -> str | None:
    """The default that a dataclass's or pydantic's ``field`` call gives."""
    if not isinstance(value, ast.Call):
        return None
    for keyword in value.keywords:
        if keyword.arg in ("default", "default_factory"):
            return ast.unparse(keyword.value)
    return None


def _constructor(index: BaseIndex, found: Found) -> list[Parameter] | None:
    """What a class takes: its ``__init__``'s parameters, or its fields where a decorator makes them one."""
    assert isinstance(found.node, ast.ClassDef)
    init = index.member(found, "__init__")
    if init and isinstance(init.node, ast.FunctionDef):
        return parameters(init.node)
    if not any(
        name in ast.unparse(one) for one in found.node.decorator_list for name in ("dataclass", "config")
    ):
        return None
    fields = {}
    for _, node in reversed(list(index.classes(found.module, found.node))):
        for child in node.body:
            if not isinstance(child, ast.AnnAssign) or not isinstance(child.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(child.annotation):
                default = None if child.value is None else _literal(child.value) or "computed"
                fields[child.target.id] = Parameter(child.target.id, "either", default)
    return list(fields.values())


def compare(contracts: Iterable[Contract], base: Path) -> list[Drift]:
    """How the base at ``base`` differs from each contract."""
    index = BaseIndex(base)
    return [drift for one in contracts for drift in _differences(one, _read(index, one.use, one.users))]


def _differences(had: Contract, has: Contract) -> list[Drift]:
    if has.kind == GONE:
        return [Drift(had, "gone" if not had.member else f"{had.name} has no {had.member}")]
    if had.kind != has.kind:
        return [Drift(had, f"was a {had.kind}, is a {has.kind}")]
    if had.kind == VALUE and had.default != has.default:
        return [Drift(had, f"default was {had.default or 'none'}, is {has.default or 'none'}")]
    if had.parameters is None or has.parameters is None:
        return [] if had.parameters == has.parameters else [Drift(had, "is made in another way")]
    return [Drift(had, what, breaks) for what, breaks in _parameters_differ(had.parameters, has.parameters)]


def _parameters_differ(had: tuple[Parameter, ...], has: tuple[Parameter, ...]) -> list[tuple[str, bool]]:
    before, after = ({one.name: one for one in side} for side in (had, has))
    rows = []
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    for name in gone:
        heirs = [one for one in new if list(after).index(one) == list(before).index(name)]
        rows.append((f"argument {name} is gone" + (f", {heirs[0]} is in its place" if heirs else ""), True))
    for name in new:
        needed = after[name].default is None and after[name].kind not in ("*", "**")
        rows.append((f"new argument {name}" + ("" if needed else f" = {after[name].default}"), needed))
    for name in before:
        if name in after and before[name].kind != after[name].kind:
            rows.append((f"argument {name} was {before[name].kind}, is {after[name].kind}", True))
        if name in after and before[name].default != after[name].default:
            rows.append((f"default of {name} was {before[name].default}, is {after[name].default}", True))
    orders = [[name for name in side if name in before and name in after and side[name].kind == "either"]
              for side in (before, after)]  # fmt: skip
    first_new = min(
        (list(after).index(name) for name in new if after[name].kind == "either"), default=len(after)
    )
    if orders[0] != orders[1]:
        rows.append((f"arguments were in the order {', '.join(orders[0])}, are {', '.join(orders[1])}", True))
    elif not gone and any(list(after).index(name) > first_new for name in orders[1]):
        rows.append(("a new argument stands before old ones", True))
    return rows


def text_of(contracts: Iterable[Contract], version: str) -> str:
    """The content of recorded.json."""
    body = {"format": FORMAT, "vllm": version, "contracts": [asdict(one) for one in contracts]}
    return json.dumps(body, indent=1) + "\n"


def load(folder: Path) -> list[Contract]:
    """The recorded contracts.

    Raises:
        OverlayError: the record is missing or damaged.
    """
    path = folder / RECORDED
    try:
        return [Contract.of(one) for one in json.loads(read_text(path, f"{FOLDER}/{RECORDED}"))["contracts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise OverlayError(f"{FOLDER}/{RECORDED} is damaged", seen=error, fix="make lock") from None


def write(folder: Path, contracts: Iterable[Contract], version: str) -> None:
    """Replace recorded.json."""
    write_text_atomically(folder / RECORDED, text_of(contracts, version))
