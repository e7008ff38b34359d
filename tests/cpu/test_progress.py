# SPDX-License-Identifier: BSD-3-Clause
# Does a long run show a bar in a terminal, and nothing of it in a log?

from __future__ import annotations

import io

import pytest

import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "stdout", "prints", "bar"),
    [
        (Terminal, io.StringIO, True, True),
        (Terminal, Terminal, False, True),
        (Terminal, Terminal, True, False),  # the lines would cut through it
        (io.StringIO, Terminal, False, False),
    ],
)
def test_a_bar_is_shown_where_it_stays_whole(
    stderr: type, stdout: type, prints: bool, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stderr()
    monkeypatch.setattr(progress.sys, "stderr", shown)
    monkeypatch.setattr(progress.sys, "stdout", stdout())
    assert list(progress.shown([3, 1, 2], "numbers", "of them", prints)) == [3, 1, 2]
    assert ("numbers" in shown.getvalue()) == bar
