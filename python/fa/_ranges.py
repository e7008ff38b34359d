# SPDX-License-Identifier: BSD-3-Clause
# Which call of fa does a stretch of a profiler's time line belong to?
"""NVTX ranges around the calls of fa, where the environment says FA_NVTX=1.

One range per call, "fa::forward bfloat16 q[2, 4096, 16, 128] k[2, 4096, 4, 128]", for Nsight
Systems and Nsight Compute. Without the variable nothing is wrapped: calls cost what they cost.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])


def _wanted(value: str | None) -> bool:
    if value not in (None, "", "0", "1"):
        raise ValueError(f'The environment variable FA_NVTX is "{value}". Allowed are "0" and "1".')
    return value == "1"


WANTED = _wanted(os.environ.get("FA_NVTX"))


def message(op: str, **tensors: Any) -> str:
    """The text of a range: the first tensor's dtype, the shapes; what is no tensor is left away."""
    given = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    dtypes = [str(t.dtype).removeprefix("torch.") for t in given.values()]
    return " ".join([f"fa::{op}", *dtypes[:1], *(f"{n}{list(t.shape)}" for n, t in given.items())])


@functools.cache
def _nvtx() -> Any:
    """torch's NVTX functions, or None with one warning where this torch has none."""
    if torch.version.cuda is None:
        warnings.warn(
            f"FA_NVTX=1, but torch {torch.__version__} was built without CUDA, so it has no NVTX: "
            "no range is recorded.",
            stacklevel=2,
        )
        return None
    return torch.cuda.nvtx


def ranged(op: str, **places: int) -> Callable[[F], F]:
    """A decorator: a range around each call; `places` of the arguments that its text names.

    What torch.compile traces has no ranges.
    """

    def decorate(function: F) -> F:
        if not WANTED:
            return function

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            nvtx = None if is_compiling() else _nvtx()
            if nvtx is None:
                return function(*args, **options)
            given = {name: args[place] for name, place in places.items() if place < len(args)}
            if any(is_fake(t) for t in given.values()):  # a trace that is_compiling() does not see
                return function(*args, **options)
            nvtx.range_push(message(op, **given))
            try:
                return function(*args, **options)
            finally:
                nvtx.range_pop()

        return call  # type: ignore[return-value]

    return decorate
