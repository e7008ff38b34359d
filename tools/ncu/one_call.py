# SPDX-License-Identifier: BSD-3-Clause
# Which call does the profiler look at? One shape, launched a few times.
"""Launches one forward call `--repeats` times; the profiler skips the first two."""

from __future__ import annotations

import argparse

import torch

import fa


def main() -> None:
    """Prints the plan, so that a report can be matched with its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape = (options.batch, options.seqlen, options.heads, options.dim)
    dtype = getattr(torch, options.dtype)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    with fa.backend(options.backend), torch.no_grad():
        print(fa.explain(q, k, v, causal=options.causal))
        for _ in range(options.repeats):
            fa.attention(q, k, v, causal=options.causal)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
