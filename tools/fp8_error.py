#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""How far off is e4m3 attention from fp64 on what was quantised, by granularity and rotation?

    python3 tools/fp8_error.py                    # on a GPU, beside FlashAttention 3 if importable
    python3 tools/fp8_error.py --device cpu

Relative RMSE over all of O; inputs are normal, or normal with a share of values ten times as large.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
importlib.import_module("clone_package")

import torch  # noqa: E402  (after the paths)

import bench_impls  # noqa: E402
import fa  # noqa: E402
import machine  # noqa: E402
from fa.quantize import GRANULARITIES, QuantizedQkv, relative_rmse  # noqa: E402


def inputs(device: str, length: int, dim: int, outliers: float) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, length, 4, dim] in fp32."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, length, 4, dim)
    tensors = []
    for _ in range(3):
        t = torch.randn(shape, generator=generator, device=device)
        large = torch.rand(shape, generator=generator, device=device) < outliers
        tensors.append(torch.where(large, 10 * t, t))
    return tuple(tensors)


def ours(x: QuantizedQkv) -> torch.Tensor:
    return fa.attention(x.q, x.k, x.v, **x.options)


def peers() -> dict[str, Callable[[QuantizedQkv], torch.Tensor]]:
    """FlashAttention 3 takes descales per batch entry and key head."""
    module = bench_impls.peer_modules().get("fa3")
    if module is None:
        return {}
    function = importlib.import_module(module).flash_attn_func

    def fa3(x: QuantizedQkv) -> torch.Tensor:
        if "descale_block_k" in x.options:
            raise NotImplementedError("fa3 has no factors per block")
        shape = (x.k.shape[0], x.k.shape[2])
        factors = {n: t.expand(shape).contiguous() for n, t in x.options.items()}
        result = function(x.q, x.k, x.v, **factors)
        return result[0] if isinstance(result, tuple) else result

    return {"fa3": fa3}


def figure(
    call: Callable[[QuantizedQkv], torch.Tensor], x: QuantizedQkv, right: torch.Tensor
) -> str:
    try:
        return f"{relative_rmse(call(x), right):.2e}"
    except (NotImplementedError, TypeError, RuntimeError) as error:
        return f"– ({type(error).__name__})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    if options.device.startswith("cuda"):
        machine.require_gpu("fp8_error.py", "`--device cpu` gives fa's errors", torch_too=True)
    calls = {"fa": ours} | (peers() if options.device.startswith("cuda") else {})
    print("| inputs | factors | rotated | " + " | ".join(calls) + " |")
    print("|---|---|---|" + "---|" * len(calls))
    for outliers in (0.0, 1e-3):
        tensors = inputs(options.device, options.length, options.dim, outliers)
        right, _ = fa.reference.attention(*tensors)
        for granularity in GRANULARITIES:
            for hadamard in (False, True):
                x = fa.quantize_qkv(*tensors, granularity, hadamard)
                row = [f"{outliers:.1%} outliers" if outliers else "normal", granularity]
                row += ["yes" if hadamard else "no"]
                row += [figure(call, x, right) for call in calls.values()]
                print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
