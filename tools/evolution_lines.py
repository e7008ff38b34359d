# SPDX-License-Identifier: BSD-3-Clause
# What is one measurement of the evolution? JSON lines with every field, read and written. No torch.
"""Lines of docs/results/evolution.jsonl, by `kind`:

* time: median of a cell's time per call, its rate, and the memory that one call allocates;
* bytes: what Nsight Compute counted for one call, and what the formulas say;
* error: differences from the fp64 answer;
* ablation: time and rate of a Hopper row of another build, beside the shipped one;
* absent: why a generation has no figure in a cell (`note`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
KINDS = ("time", "bytes", "error", "ablation", "absent")
FIELDS = (
    *("date", "commit", "gpu", "driver", "torch", "run_id", "kind", "op", "dtype", "head_dim"),
    *("causal", "batch", "heads", "seqlen", "impl", "row", "note", "median_ms", "p20_ms", "p80_ms"),
    *("tflops", "peak_bytes", "dram_read", "dram_written", "l2_read", "l2_read_by", "l2_written"),
    *("kernels", "model_dram", "model_l2_read", "model_memory", "max_error", "rms_error"),
)
CELL = ("op", "dtype", "head_dim", "causal", "seqlen")


def line(**known: Any) -> Line:
    """A line with every field, null where not given; an unknown field or kind is a ValueError."""
    unknown = set(known) - set(FIELDS)
    if unknown or known.get("kind") not in KINDS:
        raise ValueError(
            f"fields {sorted(unknown)} are not part of a line, or kind {known.get('kind')!r} is "
            f"none of {', '.join(KINDS)}."
        )
    return {name: known.get(name) for name in FIELDS}


def read(path: Path | str) -> list[Line]:
    """Every line of a file; one with other fields is a ValueError that names file and number."""
    lines = []
    for number, text in enumerate(Path(path).read_text().splitlines(), start=1):
        if text.strip():
            found = json.loads(text)
            if set(found) != set(FIELDS):
                wrong = sorted(set(found) ^ set(FIELDS))
                raise ValueError(f"{path}:{number}: fields {wrong} are missing or unknown.")
            lines.append(found)
    return lines


def write(path: Path | str, lines: Iterable[Line]) -> None:
    """Replaces the file at `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))


def chosen(lines: Iterable[Line], kind: str, **wanted: Any) -> list[Line]:
    """Lines of a kind whose fields have the wanted values."""
    return [
        one
        for one in lines
        if one["kind"] == kind and all(one[name] == value for name, value in wanted.items())
    ]
