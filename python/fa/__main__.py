# SPDX-License-Identifier: BSD-3-Clause
# What does `python -m fa` do?
"""`python -m fa info | demo | bench | profile`; see `python -m fa --help`."""

import sys

from fa._cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
