# SPDX-License-Identifier: Apache-2.0
"""The contract list against a vLLM that is imported: ``python -m rocm_overlay.contract_import RECORDED``.

Run in a process of its own, whose import path holds the tree and whose platform is set up already.
What a module needs and this machine lacks is said and is no fault of the tree.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from rocm_overlay.contracts import CLASS, FUNCTION, MODULE, Contract

AGREES, NEEDS, DIFFERS = "agrees", "needs", "differs"
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.KEYWORD_ONLY: "keyword only",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def check(contract: Contract) -> tuple[str, str]:
    """How the imported name meets the contract: agrees, needs (a package that is not here) or differs."""
    try:
        found = importlib.import_module(contract.module)
    except ModuleNotFoundError as error:
        if (error.name or "vllm").split(".")[0] == "vllm":
            return DIFFERS, repr(error)
        return NEEDS, str(error.name)
    except Exception as error:
        return DIFFERS, f"does not import: {error!r}"
    if not contract.name:
        return AGREES, ""
    if not hasattr(found, contract.name):
        return DIFFERS, f"{contract.module} has no {contract.name}"
    value = getattr(found, contract.name)
    if contract.member:
        return _member(contract, value)
    return _meets(contract, value)


def _member(contract: Contract, owner: Any) -> tuple[str, str]:
    fields = {**getattr(owner, "__dataclass_fields__", {}), **getattr(owner, "__pydantic_fields__", {})}
    if hasattr(owner, contract.member):
        return _meets(contract, inspect.getattr_static(owner, contract.member))
    annotated = any(contract.member in vars(one).get("__annotations__", {}) for one in owner.__mro__)
    if contract.member in fields or annotated or contract.member in _set_by_methods(owner):
        return AGREES, ""
    return DIFFERS, f"{contract.name} has no {contract.member}"


def _set_by_methods(owner: type[Any]) -> set[str]:
    """The attributes that the methods of a class and its bases set on ``self``."""
    names: set[str] = set()
    for one in owner.__mro__:
        for method in vars(one).values():
            if inspect.isfunction(method):
                names |= set(method.__code__.co_names)
    return names


def _meets(contract: Contract, value: Any) -> tuple[str, str]:
    value = getattr(value, "__func__", value)
    if contract.kind == MODULE:
        return (AGREES, "") if inspect.ismodule(value) else (DIFFERS, f"is a {type(value).__name__}")
    if contract.kind == CLASS and not inspect.isclass(value):
        return DIFFERS, f"is a {type(value).__name__}"
    if contract.kind == FUNCTION and not callable(value):
        return DIFFERS, f"is a {type(value).__name__}"
    if contract.parameters is None or contract.kind not in (FUNCTION, CLASS):
        return AGREES, ""
    found = [one for one in inspect.signature(value).parameters.values() if one.name not in ("self", "cls")]
    has = [(one.name, KINDS[one.kind], one.default is not inspect.Parameter.empty) for one in found]
    wanted = [(one.name, one.kind, one.default is not None) for one in contract.parameters]
    if has != wanted:
        return DIFFERS, f"signature {_shown(has)}, wanted {_shown(wanted)}"
    defaults = {one.name: one.default for one in found}
    for one in contract.parameters:
        if one.default is not None and not _equal(one.default, defaults[one.name]):
            return DIFFERS, f"default of {one.name} is {defaults[one.name]!r}, wanted {one.default}"
    return AGREES, ""


def _equal(source: str, value: Any) -> bool:
    """Whether a default is what its source says; a source that is no literal says nothing."""
    try:
        return bool(ast.literal_eval(source) == value)
    except (ValueError, SyntaxError):
        return True


def _shown(parameters: list[tuple[str, str, bool]]) -> str:
    return ", ".join(f"{name}{'=...' if default else ''} ({kind})" for name, kind, default in parameters)


def main(arguments: list[str]) -> None:
    """Print a JSON line a contract: its name, agrees, needs or differs, and what."""
    record = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for plain in record["contracts"]:
        contract = Contract.of(plain)
        print(json.dumps(["contract", str(contract), *check(contract)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
