# SPDX-License-Identifier: BSD-3-Clause
# Has an argument of a function its Python type, and by which name does the caller know it?
"""`checked`: public functions say a TypeError themselves, and speak of their own arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

# A type as annotations write it -> in words.
WORDS = {
    "Tensor": "a torch.Tensor",
    "int": "an integer",
    "float": "a number",
    "bool": "a bool",
    "torch.dtype": "a torch.dtype",
    "str": "a string",
}
_EXACT: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor,),
    "int": (int, torch.SymInt),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "bool": (bool, int, torch.SymBool),
    "torch.dtype": (torch.dtype,),
    "str": (str,),
}
_NUMPY = {"int": "__index__", "float": "__float__"}  # what a number of another library has
_INT_VECTORS = re.compile(r"cu_seqlens|seqused|seqlens|leftpad|batch_idx|page_table|block_table")


def fits(kind: str, value: object) -> bool:
    """Whether a value may be passed for a type of `WORDS`. A bool is no number.

    Tensors of one element pass as numbers, as torch lets them.
    """
    if isinstance(value, bool):
        return kind == "bool"
    if isinstance(value, _EXACT[kind]):
        return True
    if isinstance(value, Tensor):
        whole = kind == "bool" or not value.is_floating_point()
        return value.numel() == 1 and (kind == "float" or (kind in ("int", "bool") and whole))
    if kind == "bool":
        return type(value).__module__ == "numpy" and type(value).__name__ in ("bool_", "bool")
    return kind in _NUMPY and hasattr(type(value), _NUMPY[kind])


def wrong(name: str, kinds: tuple[str, ...], none: bool, found: str) -> TypeError:
    """The sentence for a value that fits none of the types; `found` says what it is."""
    words = [WORDS[kind] for kind in kinds] + ["None"] * none
    text = ", ".join(words[:-2] + [" or ".join(words[-2:])])
    cure = ""
    if "Tensor" in kinds:
        dtype = ", dtype=torch.int32" if _INT_VECTORS.search(name) else ""
        cure = f" Pass torch.tensor({name}{dtype}), on the device of the others."
    return TypeError(f"{name} must be {text}, not {found}.{cure}")


def require(kind: str, **values: object) -> None:
    """TypeError for a value of another type; None is one."""
    for name, value in values.items():
        if not fits(kind, value):
            raise wrong(name, (kind,), False, shown(value))


def shown(value: object) -> str:
    """A value of a wrong type, in a message."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return type(value).__name__


def in_words_of(error: Exception, names: Mapping[str, str]) -> Exception:
    """An error of an inner call, with our caller's names in the place of the inner ones."""
    words = re.compile(rf"(?<![\w.\"])({'|'.join(map(re.escape, names))})(?![\w(])")
    return type(error)(words.sub(lambda found: names[found[1]], str(error)))


def _kinds(annotation: object) -> tuple[tuple[str, ...], bool] | None:
    """(types, whether None may be passed); None for an annotation that is not checked here."""
    parts = [part.strip() for part in str(annotation).split("|")]
    kinds = tuple(part for part in parts if part != "None")
    return (kinds, "None" in parts) if all(kind in WORDS for kind in kinds) else None


def _usual(kinds: tuple[str, ...], none: bool) -> frozenset[type]:
    types = {exact for kind in kinds for exact in _EXACT[kind]}
    return frozenset(types | {type(None)} if none else types)


def checked(
    **names: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: arguments have the types of their annotations, and errors use their names.

    `names`: those of calls inside the function -> its own. Where torch.compile traces, the function
    itself is traced.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        found = {p.name: _kinds(p.annotation) for p in parameters}
        allowed = {name: kinds for name, kinds in found.items() if kinds is not None}
        # What most calls pass costs a look at the type alone.
        usual = {name: _usual(*kinds) for name, kinds in allowed.items()}
        order = tuple((name, usual.get(name)) for name in found)

        def check(name: str, value: object) -> None:
            kinds, none = allowed[name]
            if (value is None and none) or any(fits(kind, value) for kind in kinds):
                return
            raise wrong(name, kinds, none, shown(value))

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if is_compiling():
                return function(*args, **options)
            for (name, types), value in zip(order, args, strict=False):
                if types is not None and type(value) not in types:
                    check(name, value)
            for name, value in options.items():
                if name in usual and type(value) not in usual[name]:
                    check(name, value)
            try:
                return function(*args, **options)
            except (TypeError, ValueError, NotImplementedError) as error:
                if type(error) not in (TypeError, ValueError, NotImplementedError):
                    raise  # who knows how another is made
                undeclared = options.keys() - found.keys()
                known = {inner: own for inner, own in names.items() if inner not in undeclared}
                if not known or str(error).startswith(f"{function.__name__}()"):
                    raise
                raise in_words_of(error, known) from None

        return call

    return decorate
