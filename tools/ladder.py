# SPDX-License-Identifier: BSD-3-Clause
# What did a change do to each kernel row? A before and after table from two benchmark files.
"""python3 tools/ladder.py before.jsonl after.jsonl [--rows 'sm90_fwd_bf16_d128_*']

Prints Markdown for a pull request: the ratio to the best peer that both runs measured (else
milliseconds), the gain of every cell, and the geometric mean of the gains of every row.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from bench_cells import compare, geometric_mean, read_lines
from bench_tables import change_table


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2 where the files have no cell in common."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rows", default="*", help="glob over row ids")
    options = parser.parse_args(arguments)
    for name in (options.before, options.after):
        if not Path(name).is_file():
            parser.error(f"there is no file {name}.")
    before, after = read_lines(options.before), read_lines(options.after)
    changes = [
        change
        for change in compare(before, after)
        if fnmatch.fnmatch(change.row or change.name, options.rows)
    ]
    if not changes:
        print("No cell of these rows stands in both files.", file=sys.stderr)
        return 2
    first, last = before[0], after[0]
    print(f"{first['commit'][:10]} ({first['date']}) → {last['commit'][:10]} ({last['date']}), ")
    print(f"{last['gpu']}, torch {last['torch']}\n")
    print("\n".join(change_table(changes)))
    gains: dict[str, list[float]] = {}
    for change in changes:
        gains.setdefault(change.row or change.name, []).append(1 + change.gain)
    print()
    for row, factors in gains.items():
        mean = (geometric_mean(factors) - 1) * 100
        print(f"* {row}: {mean:+.1f} % over {len(factors)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
