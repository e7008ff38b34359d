# SPDX-License-Identifier: BSD-3-Clause
# Which backend runs the next call of this thread?
"""The choice of a backend: the variable FA_BACKEND, and `fa.backend` as a context manager."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

from torch.compiler import is_compiling

# The number is what the C side sees: 0 no preference, 1 the torch implementation, else the
# architecture (fa_options.force_arch).
BACKENDS = {"auto": 0, "cpu": 1, "sm80": 80, "sm90": 90}

_thread = threading.local()
# libfa_torch.so keeps its own copy per thread, so that a call need not ask Python.
_listeners: list[Callable[[int], None]] = []


def _checked(name: str, source: str) -> str:
    if not isinstance(name, str):
        shown = "None" if name is None else type(name).__name__
        raise TypeError(f"{source} must be a string, not {shown}.")
    if name not in BACKENDS:
        raise ValueError(
            f'{source} is "{name}": no such backend. Allowed are '
            + ", ".join(f'"{b}"' for b in BACKENDS)
            + ' ("auto": the GPU\'s best kernel row, torch operations on the CPU).'
        )
    return name


_default = _checked(os.environ.get("FA_BACKEND") or "auto", "The environment variable FA_BACKEND")


def default_code() -> int:
    """The number of the backend that FA_BACKEND chose for the process."""
    return BACKENDS[_default]


def current() -> str:
    """The name of the backend that this thread has chosen; "auto" when nobody chose."""
    return getattr(_thread, "name", None) or _default


def on_change(listener: Callable[[int], None]) -> None:
    """Calls `listener(number)` in the thread that changes its backend, at each change."""
    _listeners.append(listener)


def _set(name: str) -> None:
    _thread.name = name
    for listener in _listeners:
        listener(BACKENDS[name])


class during:
    """`name` is this thread's backend while the context lasts; also while something is traced.

    Costs next to nothing where it is that already, which each backward of autograd asks for.
    """

    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = current()
        if self._before != self._name:
            _set(self._name)

    def __exit__(self, *exception: object) -> None:
        if self._before != self._name:
            _set(self._before)


class backend:
    """Chooses the backend of every call in this thread while the context lasts.

    * "auto": by the device of the tensors and the rows in this build;
    * "sm90", "sm80": only rows of that architecture, CUDA tensors only;
    * "cpu": the torch implementation, on whatever device the tensors are: on a CUDA tensor the same
      algorithm runs in torch operations (slow, and it synchronises to read packed lengths), which
      gives every feature and the backward where a kernel row is missing.

    A backward runs on the backend that its forward ran on. Code compiled by torch.compile asks at
    run time. The environment variable FA_BACKEND is the choice of threads that made none.

    Raises:
        TypeError, ValueError: something not a string; any other name.
        RuntimeError: entered inside a function that torch.compile traces.

    Example:
        >>> q = k = v = torch.randn(1, 16, 2, 32)
        >>> with fa.backend("cpu"):
        ...     out = fa.attention(q, k, v)
    """

    def __init__(self, name: str) -> None:
        self._name = _checked(name, "The backend")
        self._before: list[str] = []

    def __enter__(self) -> backend:
        if is_compiling():
            raise RuntimeError(
                f'fa.backend("{self._name}") was entered inside a function that torch.compile '
                "traces, where it would last for the trace only. Enter it around the call of the "
                "compiled function."
            )
        self._before.append(current())
        _set(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _set(self._before.pop())
