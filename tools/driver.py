# SPDX-License-Identifier: BSD-3-Clause
# Does every kernel row give the right answer on one small case, called from C without torch?
"""Runs each row of libfa.so on a small dense and a small packed problem, compared with numpy.

    python3 tools/driver.py [--rows 'sm90_*'] [--memory bindings|core] [--plan]

The sanitizers run this file (tools/sanitize.sh), because a process without torch starts in a second
and launches nothing but the library's kernels. `--plan` stops before anything is launched and needs
no GPU: it only checks that each row is the one its case selects.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import driver_backward
import libfa
import machine

# Streaming multiprocessors and shared memory of an A100, an RTX 4090 and an H200, which runs rows
# of both architectures.
NOMINAL = {80: ((108, 166912), (128, 101376), (132, 232448)), 90: ((132, 232448),)}
GUARD = 64  # elements around each output that must keep their bytes
FILL = 0xFF


@dataclass(frozen=True)
class Problem:
    """One small call: `lengths` are (q, k) per sequence; packed ones stand behind each other."""

    row: libfa.Row
    lengths: tuple[tuple[int, int], ...]
    packed: bool
    heads_q: int = 2
    heads_k: int = 1

    @property
    def causal(self) -> bool:
        return self.row.mask == "band"

    @property
    def softcap(self) -> float:
        """What rows with the score `any` are selected for; 0: none."""
        return 2.0 if self.row.score == "any" else 0.0

    @property
    def out_dtype(self) -> str:
        """Of O: q's, or bfloat16 for e4m3."""
        return "bfloat16" if self.row.dtype == "float8_e4m3fn" else self.row.dtype

    @property
    def sm_count(self) -> int:
        """Multiprocessors to use, 0: all. More would be left idle by Hopper's packed heads."""
        return 2 if self.row.arch == 90 and libfa.packs_heads(self.row) else 0

    @property
    def name(self) -> str:
        return "packed" if self.packed else "dense"


def problems(row: libfa.Row) -> list[Problem]:
    """The small cases of one row: six tiles each."""
    if libfa.packs_heads(row):  # few positions of four heads each; keys for several warps
        few = 14 if row.arch == 80 else 60
        dense = Problem(row, ((few, 9 * row.tile_n + 5),), False, 4)
        return [dense, Problem(row, ((5, 11), (0, 5), (few + 3, 5 * row.tile_n + 1)), True, 4)]
    tail = row.tile_m // 2 + 3
    dense = Problem(row, ((2 * row.tile_m + tail, 2 * row.tile_n + 37),), False)
    packed = Problem(row, ((tail, tail), (0, 5), (row.tile_m + 1, row.tile_n + 9)), True)
    return [dense, packed]


class CoreMemory:
    """The same services as libfa.Cuda from cuda.core: device buffers, stream, event."""

    def __init__(self) -> None:
        try:
            from cuda.core import Device
        except ImportError:  # before 1.0 the package was marked experimental
            from cuda.core.experimental import Device
        self.device = Device()
        self.device.set_current()
        self.core_stream = self.device.create_stream()
        self.buffers: list[Any] = []
        self.copies = libfa.Cuda()

    def empty(self, size: int, fill: int = FILL) -> int:
        buffer = self.device.allocate(max(size, 16), stream=self.core_stream)
        self.core_stream.sync()
        self.buffers.append(buffer)
        address = int(buffer.handle)
        self.copies.call("cudaMemset", address, fill, max(size, 16))
        self.copies.call("cudaDeviceSynchronize")  # kernels run on a stream that does not wait
        return address

    def upload(self, array: np.ndarray) -> int:
        address = self.empty(array.nbytes)
        if array.nbytes:
            kind = self.copies.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
            source = np.ascontiguousarray(array)
            self.copies.call("cudaMemcpy", address, source.ctypes.data, source.nbytes, kind)
        return address

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        event = self.device.create_event()
        self.core_stream.record(event)
        event.sync()
        return self.copies.download(address, shape, dtype)

    def stream(self) -> int:
        return int(self.core_stream.handle)

    def free_all(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers.clear()


def fill_shapes(p: libfa.Params, problem: Problem) -> None:
    """Everything of the call that is not an address."""
    row = problem.row
    totals = tuple(sum(side) for side in zip(*problem.lengths, strict=True))
    for side, heads, dim, total in (
        ("q", problem.heads_q, row.dim_qk, totals[0]),
        ("k", problem.heads_k, row.dim_qk, totals[1]),
        ("v", problem.heads_k, row.dim_v, totals[1]),
        ("out", problem.heads_q, row.dim_v, totals[0]),
    ):
        strides = (heads * dim, dim, 1)
        dtype = problem.out_dtype if side == "out" else row.dtype
        p.tensor(side, 0, strides if problem.packed else (total * heads * dim, *strides), dtype)
    shape = {
        "batch": len(problem.lengths),
        "heads_q": problem.heads_q,
        "heads_k": problem.heads_k,
        "dim_qk": row.dim_qk,
        "dim_v": row.dim_v,
    }
    if problem.packed:
        shape |= {"total_q": totals[0], "total_k": totals[1]}
    else:
        shape |= {"seqlen_q": totals[0], "seqlen_k": totals[1]}
    for name, value in shape.items():
        p[f"shape.{name}"] = value
    p["lse.stride_head"] = totals[0]
    p["lse.stride_batch"] = 0 if problem.packed else problem.heads_q * totals[0]
    p["mask.window_right"] = 0 if problem.causal else -1
    p["options.force_arch"] = row.arch
    p["options.sm_count"] = problem.sm_count
    p["score.softcap"] = problem.softcap
    p["options.batch_invariant"] = int(libfa.leaves_short_calls(row, p.library.rows()))


def plan_text(library: libfa.Library, problem: Problem) -> str:
    """The plan on the first nominal device that takes the row, without a GPU; else on the last.

    Addresses are stand-ins, never followed.
    """
    p = libfa.Params(library)
    fill_shapes(p, problem)
    for name in ("q", "k", "v", "out", "lse"):
        p[f"{name}.data"] = 1 << 20
    if problem.packed:
        p["seq.cu_q"] = p["seq.cu_k"] = 1 << 20
    if problem.row.op == libfa.BACKWARD:
        driver_backward.fill_shapes(p, problem)
    text = ""
    for device in NOMINAL[problem.row.arch]:
        p["options.sm_count"], p["options.smem_limit"] = problem.sm_count or device[0], device[1]
        text = p.explain(problem.row.op)
        if problem.row.id in text.split():
            break
    return text


def _ends(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    ends = np.zeros((2, len(problem.lengths) + 1), np.int32)
    ends[:, 1:] = np.cumsum(np.array(problem.lengths, np.int32).T, axis=1)
    return ends[0], ends[1]


def run(library: libfa.Library, memory: Any, problem: Problem, seed: int) -> dict[str, float]:
    """Largest errors against numpy in units of their bounds; guards are asserted."""
    row = problem.row
    if row.op == libfa.BACKWARD:
        return driver_backward.run(library, memory, problem, seed, fill_shapes)
    rng = np.random.default_rng(seed)
    ends_q, ends_k = _ends(problem)
    rows_q, rows_k = int(ends_q[-1]), int(ends_k[-1])
    shapes = {
        "q": (rows_q, problem.heads_q, row.dim_qk),
        "k": (rows_k, problem.heads_k, row.dim_qk),
        "v": (rows_k, problem.heads_k, row.dim_v),
    }
    bits = {n: libfa.to_bits(rng.standard_normal(s), row.dtype) for n, s in shapes.items()}
    p = libfa.Params(library)
    fill_shapes(p, problem)
    for name, array in bits.items():
        p[f"{name}.data"] = memory.upload(array)
    out_size, lse_size = rows_q * problem.heads_q * row.dim_v, problem.heads_q * rows_q
    out_address = memory.empty(2 * (out_size + 2 * GUARD), FILL)
    lse_address = memory.empty(4 * (lse_size + 2 * GUARD), FILL)
    p["out.data"], p["lse.data"] = out_address + 2 * GUARD, lse_address + 4 * GUARD
    if problem.packed:
        p["seq.cu_q"], p["seq.cu_k"] = memory.upload(ends_q), memory.upload(ends_k)
    for limit in driver_backward.SHARED_MEMORY if row.arch == 80 else (0,):
        p["options.smem_limit"] = limit
        plan = p.explain()
        if row.id in plan.split():
            break
    else:
        if row.id in plan_text(library, problem).split():
            return {}
        raise RuntimeError(f"the plan does not name {row.id}: {plan}")
    size = p.workspace_bytes()
    p.forward(memory.stream(), memory.empty(size) if size else 0, size)

    code = np.float16 if problem.out_dtype == "float16" else np.uint16
    out_all = memory.download(out_address, (out_size + 2 * GUARD,), code)
    lse_all = memory.download(lse_address, (lse_size + 2 * GUARD,), np.float32)
    for label, array in (("out", out_all), ("lse", lse_all)):
        edges = np.concatenate([array[:GUARD], array[-GUARD:]]).view(np.uint8)
        if not (edges == FILL).all():
            raise RuntimeError(f"{label}: bytes outside of the output were written.")
    out = libfa.from_bits(out_all[GUARD:-GUARD], problem.out_dtype)
    out = out.reshape(rows_q, problem.heads_q, -1)
    lse = lse_all[GUARD:-GUARD].reshape(problem.heads_q, rows_q)
    values = {n: libfa.from_bits(b, row.dtype) for n, b in bits.items()}
    worst_out, worst_lse = _errors(problem, values, out, lse)
    return {"out": worst_out, "lse": worst_lse}


def _errors(
    problem: Problem, values: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray
) -> tuple[float, float]:
    ends_q, ends_k = _ends(problem)
    unit = 2.0**-11 if problem.out_dtype == "float16" else 2.0**-8
    # e4m3 products are summed with about 14 bits, which shows in scores (docs/numerics.md, "FP8").
    weight_unit, lse_bound = unit, 1e-4
    if problem.row.dtype == "float8_e4m3fn":
        weight_unit, lse_bound = 2.0**-4, 3e-3
    worst_out = worst_lse = 0.0
    for b in range(len(problem.lengths)):
        rows, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        if rows.start == rows.stop:
            continue
        k, v = values["k"][keys], values["v"][keys]
        want, want_lse = libfa.reference(values["q"][rows], k, v, problem.causal, problem.softcap)
        if not np.array_equal(np.isfinite(want_lse), np.isfinite(lse[:, rows])):
            return float("inf"), float("inf")
        # Each weight is rounded once to the row's type, and O once.
        total, _ = libfa.reference(values["q"][rows], k, np.abs(v), problem.causal, problem.softcap)
        bound = weight_unit * total + unit * np.abs(want) + 1e-5
        error = np.nan_to_num(np.abs(out[rows] - want) / bound, nan=np.inf)
        worst_out = max(worst_out, float(error.max()))
        finite = np.isfinite(want_lse)
        if finite.any():
            gap = np.abs(lse[:, rows][finite] - want_lse[finite]).max()
            worst_lse = max(worst_lse, float(gap) / lse_bound)
    return worst_out, worst_lse


def check_row(library: libfa.Library, memory: Any, row: libfa.Row, plan: bool) -> list[str]:
    """Sentences about what went wrong with one row; prints one line per problem."""
    if row.op not in (libfa.FORWARD, libfa.BACKWARD):
        return [f"{row.id}: this driver has no small case for op {row.op}."]
    failures = []
    for problem in problems(row):
        label = f"{row.id} {problem.name}"
        try:
            if plan:
                text = plan_text(library, problem)
                named = row.id in text.split()
                print(f"{label}: {'selected' if named else 'NOT selected: ' + text}")
                if not named:
                    failures.append(f"{label}: another row was selected.")
                continue
            errors = run(library, memory, problem, seed=1)
        except libfa.Refused as refused:
            # Only a packed call may be outside of what a row covers; each row has its dense case.
            print(f"{label}: refused: {refused}")
            if not problem.packed or refused.status != 2:
                failures.append(f"{label}: {refused}")
            continue
        except RuntimeError as error:
            failures.append(f"{label}: {error}")
            print(f"{label}: FAILED: {error}")
            continue
        finally:
            if memory is not None:
                memory.free_all()
        if not errors:
            print(f"{label}: another row is better on this GPU")
            continue
        good = max(errors.values()) <= 1
        text = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        print(f"{label}: {'ok' if good else 'WRONG'} (error / bound: {text})")
        if not good:
            failures.append(f"{label}: errors in units of their bounds: {text}.")
    return failures


def main() -> int:
    """Exit status 0: every row right; 1: some row wrong; 2: nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="*", help="glob over row ids (default: every row)")
    parser.add_argument("--memory", choices=("bindings", "core"), default="bindings")
    parser.add_argument("--plan", action="store_true", help="plan only, launch nothing")
    options = parser.parse_args()
    if not options.plan:
        machine.require_gpu("driver.py", "`--plan` plans every row without one")
    library = libfa.Library()
    rows = [row for row in library.rows() if fnmatch.fnmatch(row.id, options.rows)]
    if not rows:
        print(f"{library.path} ({library.version()}) holds no row that matches {options.rows!r}.")
        return 2
    memory = None
    if not options.plan:
        memory = libfa.Cuda() if options.memory == "bindings" else CoreMemory()
    failures = [text for row in rows for text in check_row(library, memory, row, options.plan)]
    if "torch" in sys.modules:
        failures.append("torch was imported: this driver must run without it.")
    print(f"{len(rows)} rows, {len(failures)} failures.")
    for text in failures:
        print(f"failure: {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
