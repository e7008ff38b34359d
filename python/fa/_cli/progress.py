# SPDX-License-Identifier: BSD-3-Clause
# How does a user see that something long is still running?
"""Progress on stderr: a bar where tqdm and a terminal are there, else a line every two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

INTERVAL_S = 2.0


class Progress:
    """`with Progress("download", total, "MB") as p: p.update(3)`; the total may come later."""

    def __init__(self, title: str, total: float | None = None, unit: str = "") -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, 0.0
        self._last = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit} "
            form += "[{elapsed}<{remaining}]"
            self._bar = tqdm(
                desc=title,
                total=total,
                unit=unit,
                leave=False,
                bar_format=form if total else None,
            )

    def update(self, amount: float = 1, note: str = "") -> None:
        """`amount` more is done; `note` says what comes now."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(amount)
            if note:
                self._bar.set_description_str(f"{self.title}: {note}")
        elif time.monotonic() - self._last >= INTERVAL_S:
            self._last = time.monotonic()
            of = f" of {self.total:.0f}" if self.total else ""
            unit = f" {self.unit}" if self.unit else ""
            print(f"{self.title}: {self.done:.0f}{of}{unit} {note}".rstrip(), file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
