# SPDX-License-Identifier: BSD-3-Clause
# Has an argument of an operator the Python type that its schema asks for, and if not, what to pass?
"""TypeErrors in our words: torch refuses wrong types itself, with its own text and exception."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa._schemas import SCHEMAS

# Type in a schema -> what Python may pass, in words; None besides where the type ends in "?".
_WORDS = {
    "Tensor": "a torch.Tensor",
    "SymInt": "an integer",
    "int": "an integer",
    "float": "a number",
    "bool": "a bool",
    "ScalarType": "a torch.dtype",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "SymInt": (int, torch.SymInt),
    "int": (int, torch.SymInt),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "bool": (bool, int, torch.SymBool),
    "ScalarType": (torch.dtype,),
}
_INT_VECTORS = re.compile(r"cu_seqlens|seqused|seqlens|leftpad|batch_idx|page_table")
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


def wrong_type(op: str, name: str, found: str) -> TypeError:
    """The sentence for an argument of type `found`."""
    kind = KINDS[op][name]
    words = _WORDS[kind.rstrip("?")] + (" or None" if kind.endswith("?") else "")
    cure = ""
    if kind.startswith("Tensor"):
        dtype = ", dtype=torch.int32" if _INT_VECTORS.search(name) else ""
        cure = f" Pass torch.tensor({name}{dtype}), on the device of the others."
    return TypeError(f"{name} must be {words}, not {found}.{cure}")


def argument_types(op: str, given: Mapping[str, Any]) -> None:
    """TypeError for the first argument of a wrong type, or of a name that the operator lacks.

    Tensors of one element pass as numbers, as torch lets them.
    """
    kinds = KINDS[op]
    for name, value in given.items():
        if name not in kinds:
            raise unknown(op, name)
        kind = kinds[name]
        if (value is None and kind.endswith("?")) or isinstance(value, _TYPES[kind.rstrip("?")]):
            continue
        if isinstance(value, Tensor) and value.numel() == 1 and kind != "ScalarType?":
            continue
        raise wrong_type(op, name, "None" if value is None else type(value).__name__)


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
    return TypeError(f"{name}: was not passed to fa::{op}. Pass {_WORDS[kind]} as {name}.{cure}")


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
