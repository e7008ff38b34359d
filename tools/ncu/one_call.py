# SPDX-License-Identifier: BSD-3-Clause
# Which call does the profiler look at? One that the wanted row serves, inside of an NVTX range.
"""Launches one call of a kernel row: a few times to warm up, then once in the range `fa_profile`.

    python3 tools/ncu/one_call.py ROW --shape 2x8192x16        # batch x length x heads
    python3 tools/ncu/one_call.py ROW --shape 8x1x32x16384     # … x keys, where they are others
    python3 tools/ncu/one_call.py 'sm90_fwd_*_d128_none' --list

The row says dtype, head dims, mask and direction; a pattern with * or commas may name several.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
import bench_cells
import libfa
import machine

RANGE = "fa_profile"
WARM_UP = 2
Shape = tuple[int, int, int, int]  # batch, length, heads, keys


def matching(pattern: str, rows: list[libfa.Row]) -> list[libfa.Row]:
    """Rows whose id is `pattern`, matches it as a glob, or else contains it; several by commas."""
    found: dict[str, libfa.Row] = {}
    for part in pattern.split(","):
        exact = [row for row in rows if row.id == part]
        like = [row for row in rows if fnmatch.fnmatchcase(row.id, part) or part in row.id]
        found |= {row.id: row for row in exact or like}
    return list(found.values())


def parse_shape(text: str) -> Shape:
    """BxSxH or BxSxHxK: batch, sequence length, heads, keys (0: as many as the length)."""
    parts = text.lower().split("x")
    if len(parts) not in (3, 4) or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: three or four positive numbers joined by x are needed, batch x length x "
            "heads or batch x length x heads x keys, for example 2x8192x16."
        )
    batch, length, heads, keys = (int(part) for part in [*parts, "0"][:4])
    return batch, length, heads, keys


def cell_of(row: libfa.Row, shape: Shape | None, causal: bool) -> bench_cells.Cell:
    """A call that the row serves: by default 16384 tokens of length 4096, 2048 columns."""
    batch, length, heads, keys = shape or (4, 4096, max(1, 2048 // row.dim_qk), 0)
    return bench_cells.Cell(
        row.dtype,
        row.dim_qk,
        causal,
        length,
        tokens=batch * length,
        heads_q=heads,
        seqlen_k=0 if keys == length else keys,
        dim_v=row.dim_v,
        work="forward" if row.op == libfa.FORWARD else "backward",
    )


def note_of(row: libfa.Row, cell: bench_cells.Cell) -> dict[str, Any]:
    """What no counter says about a profiled call, for the tables: its FLOPs, and where it ran."""
    import torch  # not for a mere list of rows

    import bench

    common = bench.environment(argparse.Namespace(device="cuda", commit=None))
    where = {name: common[name] for name in ("date", "commit", "gpu", "driver")}
    note = {"row": row.id, "flops": cell.flops, "model_bytes": cell.bytes, "cell": cell.name}
    return note | {"batch": cell.batch, "heads": cell.heads, "torch": torch.__version__} | where


def run(row: libfa.Row, cell: bench_cells.Cell) -> str | None:
    """The call, warmed up and then in its range; a sentence where another row would serve it.

    The range is also where CUDA's profiler is on, for an ncu that does not see NVTX. A range
    belongs to a thread, so autograd has to launch its kernels from this one.
    """
    import torch  # not for a mere list of rows

    import bench_impls

    tensors = bench_impls.cell_tensors(cell, "cuda")
    impl = bench_impls.ours(cell, tensors, row.backend)
    if isinstance(impl, str):
        return impl
    if impl.row != row.id:
        return (
            f"row {row.id}: this shape is served by {impl.row} here; give a shape, --causal or a "
            "GPU that this row is for."
        )
    impl = bench_impls.trained(cell, tensors, impl)
    with impl.context(), torch.autograd.set_multithreading_enabled(False):
        for _ in range(WARM_UP):
            impl.call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(RANGE)
        impl.call()
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return None


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2 where no row matches or another one would run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", help="a row id, or a pattern with *")
    parser.add_argument("--shape", type=parse_shape, help="batch x length x heads [x keys]")
    parser.add_argument("--causal", action="store_true", help="a causal call (band rows)")
    parser.add_argument("--list", action="store_true", help="print the ids that match, run nothing")
    parser.add_argument("--note", type=Path, help="write row, shape and FLOPs to this JSON file")
    options = parser.parse_args(arguments)
    if not options.list:
        machine.require_gpu("ncu/one_call.py", "`--list` names the rows", torch_too=True)
    try:
        rows = libfa.Library().rows()
    except OSError as error:
        print(f"one_call.py: {error}", file=sys.stderr)
        return 2
    found = matching(options.row, rows)
    if not found:
        print(
            f"{options.row!r} matches none of the {len(rows)} rows of this build; "
            "`python -m fa info` lists them.",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print("\n".join(row.id for row in found))
        return 0
    row = found[0]
    if options.causal and row.mask == "none":
        print(f"row {row.id} has no mask; leave --causal out.", file=sys.stderr)
        return 2
    cell = cell_of(row, options.shape, options.causal)
    if options.note:
        options.note.write_text(json.dumps(note_of(row, cell)) + "\n")
    reason = run(row, cell)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    print(f"{row.id}: {cell.name}, batch {cell.batch}, {cell.heads} heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
