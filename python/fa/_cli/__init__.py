# SPDX-License-Identifier: BSD-3-Clause
# Which command was asked for?
"""The commands behind `python -m fa`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

# name: (module with `run(arguments) -> exit code`, what it does)
COMMANDS = {
    "info": ("fa._cli.info", "the environment, for a bug report"),
    "env": ("fa._cli.env", "info, and the compilers, GPUs and packages around it"),
    "demo": ("fa._cli.demo", "a real model with fa's attention, and why it pays"),
    "bench": ("fa._cli.tools", "time the kernels beside their peers (from the source tree)"),
    "profile": ("fa._cli.tools", "a few calls under torch's profiler, or one row under ncu"),
}

USAGE = "\n".join(
    [
        "usage: python -m fa COMMAND [options]",
        "",
        *(f"  {name:<9}{text}" for name, (_, text) in COMMANDS.items()),
        "",
        "python -m fa COMMAND --help says more.",
    ]
)


def main(arguments: Sequence[str]) -> int:
    """Runs one command. Returns 0, 1 where something failed, or 2 for a wrong command line."""
    arguments = list(arguments)
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if not arguments:
        print(f"No command was given.\n\n{USAGE}", file=sys.stderr)
        return 2
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f'Unknown command "{name}": allowed are {known}.\n\n{USAGE}', file=sys.stderr)
        return 2
    try:
        status = importlib.import_module(COMMANDS[name][0]).run(rest, name)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
