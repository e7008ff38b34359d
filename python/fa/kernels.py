# SPDX-License-Identifier: BSD-3-Clause
# Which kernel rows does this build hold, and which would run for a call?
"""Introspection: `kernels()`, `explain(...)`, `supports(...)`."""

from __future__ import annotations

from typing import Any


def kernels() -> list[Any]:
    raise NotImplementedError


def explain(q: Any, k: Any, v: Any, **options: Any) -> str:
    raise NotImplementedError


def supports(q: Any, k: Any, v: Any, **options: Any) -> bool | str:
    raise NotImplementedError
