# SPDX-License-Identifier: BSD-3-Clause
# What does `python -m fa` do?
"""`python -m fa info | env | demo | bench | profile`; see `python -m fa --help`."""

import os
import sys

from fa._cli import main

# Threads of a CPU run wait asleep: spinning at barriers, they slow a shared machine by ten times.
# OpenMP reads this when torch is loaded, which `python -m fa` has done by now: start again.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def _wait_asleep() -> None:
    if sys.argv[1:2] == ["demo"] and not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    _wait_asleep()
    sys.exit(main(sys.argv[1:]))
