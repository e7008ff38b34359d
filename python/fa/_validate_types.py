# SPDX-License-Identifier: BSD-3-Clause
# Has an argument of an operator the Python type that its schema asks for, and if not, what to pass?
"""TypeErrors in our words: torch refuses wrong types itself, with its own text and exception."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa import _types
from fa._schemas import SCHEMAS

# Type in a schema -> in an annotation.
_KINDS = {"SymInt": "int", "ScalarType": "torch.dtype"}
_REFUSED = re.compile(
    r"fa::_?(\w+)\(\) Expected a value of type '.*?' for argument '(\w+)'.*? type '(.*?)'"
)

_MISSING = re.compile(r"fa::_?(\w+)\(\) is missing value for argument '(\w+)'")


def arguments(schema: str) -> dict[str, str]:
    """Name -> type of every argument of a schema, in order."""
    inside = schema[1 : schema.index(") ->")].replace("*, ", "")
    pairs = (part.split("=")[0].split() for part in re.split(r", (?![a-z]!)", inside))
    return {name: re.sub(r"\(.!\)", "", kind) for kind, name in pairs}


KINDS = {op: arguments(schema) for op, schema in SCHEMAS.items()}


def _kind(schema_type: str) -> tuple[str, bool]:
    """(as an annotation, whether None may be passed)"""
    kind = schema_type.rstrip("?")
    return _KINDS.get(kind, kind), schema_type.endswith("?")


def wrong_type(op: str, name: str, found: str) -> TypeError:
    """The sentence for an argument of a type of this name."""
    kind, none = _kind(KINDS[op][name])
    return _types.wrong(name, (kind,), none, found)


_USUAL = {"Tensor": Tensor, "int": int, "float": float, "bool": bool, "torch.dtype": torch.dtype}
_ALLOWED = {op: {name: _kind(x) for name, x in kinds.items()} for op, kinds in KINDS.items()}


def argument_types(op: str, given: Mapping[str, Any]) -> None:
    """TypeError for the first argument of a wrong type, or of a name that the operator lacks."""
    allowed = _ALLOWED[op]
    for name, value in given.items():
        if name not in allowed:
            raise unknown(op, name)
        kind, none = allowed[name]
        if type(value) is _USUAL[kind]:
            continue
        if not (none if value is None else _types.fits(kind, value)):
            raise _types.wrong(name, (kind,), none, _types.shown(value))


def unknown(op: str, name: str) -> TypeError:
    """The sentence for an argument that the operator does not have."""
    known = ", ".join(KINDS[op])
    if op != "forward":
        return TypeError(f'"{name}" is not an argument of fa::{op}. Arguments are {known}.')
    known = known.removeprefix("q, k, v, ")
    return TypeError(
        f'"{name}" is not an option of fa::forward. Options are {known}. (Instead of is_causal '
        "take causal, aligned at the bottom right; of scale, softmax_scale; enable_gqa is not "
        "needed; a mask of scores does not exist.)"
    )


def absent(op: str, name: str) -> TypeError:
    """The sentence for an argument that was not passed, and has no default."""
    kind = KINDS[op][name]
    cure = f" fa::{op.removesuffix('_out')} allocates its results." if op.endswith("_out") else ""
    return TypeError(
        f"{name}: was not passed to fa::{op}. Pass {_types.WORDS[_kind(kind)[0]]} as {name}.{cure}"
    )


def in_our_words(error: RuntimeError) -> TypeError | None:
    """What torch says about a wrong argument of one of our operators; None for any other error."""
    text = str(error)
    found = _REFUSED.search(text)
    if found:
        op = found[1].removesuffix("_dense")
        if found[2] in KINDS.get(op, ()):
            return wrong_type(op, found[2], found[3])
    missing = _MISSING.search(text)
    if missing and missing[1] in KINDS:
        return absent(missing[1], missing[2])
    if "Unknown keyword argument" in text:
        operator = re.search(r"operator 'fa::_?(\w+)'", text)
        if operator and operator[1] in KINDS:
            return unknown(operator[1], text.split("'")[1])
    return None
