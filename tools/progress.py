# SPDX-License-Identifier: BSD-3-Clause
# How far is a long run? A bar on stderr, where nothing else would be printed across it.

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
from fa._cli.progress import Progress

T = TypeVar("T")


def shown(items: Sequence[T], title: str, unit: str, prints: bool = True) -> Iterator[T]:
    """The items, with a bar while they are worked on, if stderr is a terminal.

    `prints`: each item prints lines, which would cut through the bar if stdout is a terminal too;
    there these lines are the progress.
    """
    if not sys.stderr.isatty() or (prints and sys.stdout.isatty()):
        yield from items
        return
    with Progress(title, len(items), unit) as progress:
        for item in items:
            yield item
            progress.update()
