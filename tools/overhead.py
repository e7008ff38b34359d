#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
# What does a call cost on the host before its kernel starts, and in which layer?
"""Host time per call, layer by layer, beside SDPA.

    python3 tools/overhead.py                      # B 1, S 128, H 8, D 128 on the GPU
    python3 tools/overhead.py --profile fa.train   # the Python functions behind one entry
    python3 tools/overhead.py --device cpu         # tiny tensors: Python's share alone

Entries, each calling the one above it:

* fa.c_call: fa_forward through ctypes with a ready struct: plan, launch;
* fa.raw_op: torch.ops.fa._forward: and checks, allocation, the struct from tensors;
* fa.ops.forward, fa.attention: and options, the question who watches (autograd, modes);
* fa.record: fa.attention where an input requires a gradient; fa.backward_op: torch.ops.fa.backward;
  fa.backward: the same gradients by autograd; fa.train: a forward that records, and its backward;
* sdpa, sdpa.record, …: PyTorch's scaled_dot_product_attention, choosing its own kernel.

Nothing waits inside a sample: what is timed is the host. The entries alternate.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import io
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import clone_package  # noqa: F401  isort: skip  (before everything that imports fa)
import fa
import machine
from bench_cells import host_rival
from bench_timers import Impl, no_garbage_collection

SHAPE = (1, 128, 8, 128)
TINY = (1, 4, 1, 8)  # on a CPU: the arithmetic must not be what is timed


def _c_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """fa_forward through ctypes with a ready struct: no checks, no allocation, no torch."""
    import libfa

    library = libfa.Library()
    out, lse = (
        torch.empty_like(q),
        q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32),
    )
    p = libfa.Params(library)
    p.dense(q, k, v, out, lse)
    stream = torch.cuda.current_stream().cuda_stream
    needed, buffer, forward = ctypes.c_size_t(), p.buffer, library.c.fa_forward
    p.forward(stream)  # raises where the timed call would only return a status
    kept = (out, lse, p)

    def call() -> Any:
        return forward(buffer, None, 0, needed, stream) or kept

    return call


def _training(
    name: str, function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> list[Impl]:
    """A recording forward, its backward, and both in turn."""

    def record() -> torch.Tensor:
        with torch.enable_grad():
            return function(*inputs)

    def train() -> tuple[torch.Tensor, ...]:
        out = record()
        return torch.autograd.grad(out, inputs, out.detach())

    kept = record()
    dout = kept.detach()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(kept, inputs, dout, retain_graph=True)

    calls = {"record": record, "backward": backward, "train": train}
    return [Impl(f"{name}.{part}", call) for part, call in calls.items()]


def host_impls(
    device: str, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE
) -> tuple[list[Impl], list[str]]:
    """The entries, and sentences about those that cannot run here."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    raw, public = torch.ops.fa._forward.default, torch.ops.fa.forward
    sdpa = torch.nn.functional.scaled_dot_product_attention
    impls = [
        Impl("sdpa", lambda: sdpa(qt, kt, vt)),
        Impl("fa.raw_op", lambda: raw(q, k, v)),
        Impl("fa.attention", lambda: fa.attention(q, k, v)),
        Impl("fa.ops.forward", lambda: public(q, k, v)),
    ]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    turned = [t.transpose(1, 2).detach().requires_grad_() for t in leaves]
    impls += _training("sdpa", sdpa, turned)
    reason = fa.supports(*leaves)
    if reason is True:
        impls += _training("fa", fa.attention, leaves)
        out, lse = public(q, k, v)
        impls.append(Impl("fa.backward_op", lambda: torch.ops.fa.backward(out, q, k, v, out, lse)))
    if device.startswith("cuda"):
        impls.append(Impl("fa.c_call", _c_call(q, k, v)))
    return impls, [] if reason is True else [f"training is not measured: {reason}"]


def time_host(impls: list[Impl], cuda: bool, repeats: int, calls: int) -> None:
    """Fills `samples_ms` with host time per call, without a wait inside a sample."""
    with torch.no_grad(), no_garbage_collection():
        for turn in range(repeats + 2):
            for step in range(len(impls)):
                impl = impls[(turn + step) % len(impls)]
                if cuda:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    impl.call()
                elapsed = (time.perf_counter() - start) * 1e3 / calls
                if turn >= 2:  # two rounds to warm up
                    impl.samples_ms.append(elapsed)
    if cuda:
        torch.cuda.synchronize()


def table(impls: list[Impl]) -> list[str]:
    """Markdown: microseconds per call, and the share of SDPA doing the same."""
    medians = {impl.name: impl.quantile(0.5) for impl in impls}
    rows = ["| entry | µs per call | p20 – p80 | to SDPA |", "|---|---|---|---|"]
    for impl in impls:
        rival = medians.get(host_rival(impl.name))
        share = f"{medians[impl.name] / rival:.2f}" if rival else "–"
        low, high = (1e3 * impl.quantile(s) for s in (0.2, 0.8))
        rows.append(
            f"| {impl.name} | {1e3 * medians[impl.name]:.1f} | {low:.1f} – {high:.1f} | {share} |"
        )
    return rows


def profiled(impl: Impl, calls: int) -> str:
    """Python functions by their own time, over `calls` calls after a warm-up."""
    for _ in range(3):
        impl.call()
    profile = cProfile.Profile()
    with torch.no_grad():
        profile.enable()
        for _ in range(calls):
            impl.call()
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Exit status 2 for bad arguments, or without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--dtype", default="bfloat16", help="torch's name (default bfloat16)")
    parser.add_argument("--repeats", type=int, default=21, help="samples per entry (default 21)")
    parser.add_argument("--calls", type=int, default=200, help="calls per sample (default 200)")
    parser.add_argument("--profile", metavar="ENTRY", help="also run cProfile over this entry")
    options = parser.parse_args(arguments)
    cuda = options.device.startswith("cuda")
    if cuda:
        machine.require_gpu(
            "overhead.py", "`--device cpu` times Python's share on tiny tensors", torch_too=True
        )
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        parser.error(f"--dtype: {options.dtype} is not a dtype of torch, such as bfloat16.")
    impls, notes = host_impls(options.device, dtype, SHAPE if cuda else TINY)
    chosen = [impl for impl in impls if impl.name == options.profile]
    if options.profile and not chosen:
        names = ", ".join(impl.name for impl in impls)
        parser.error(f"--profile: {options.profile} is no entry here; allowed are {names}.")
    time_host(impls, cuda, max(1, options.repeats), max(1, options.calls))
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"fa {fa.__version__}, torch {torch.__version__}, {where}, {options.dtype}")
    print("\n".join([*table(impls), *notes]))
    for impl in chosen:
        print(profiled(impl, max(1, options.calls)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
