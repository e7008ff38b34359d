# SPDX-License-Identifier: BSD-3-Clause
# What does `import fa` give?
"""Exact attention kernels for NVIDIA Ampere and Hopper GPUs, and the same algorithm on the CPU.

    out = fa.attention(q, k, v, causal=True)       # [B, S, H, D]; differentiable

Importing needs torch and nothing else: no GPU, no compiled library. Where libfa.so is missing,
tensors on a GPU are refused with the command that builds it.
"""

from __future__ import annotations

try:
    import torch as _torch
except ImportError as _error:
    # One traceback for an import and, by the name, none for `python -m fa`.
    raise ImportError(
        f"fa needs PyTorch 2.10 or newer, and `import torch` failed ({_error}). Install it first "
        "(pip install torch); fa itself does not choose a build of torch for you.",
        name=__name__,
    ) from None

_found = getattr(_torch, "__version__", "0.0 (a folder named torch, not PyTorch)")
if tuple(int(_part) for _part in _found.split(" ")[0].split(".")[:2]) < (2, 10):
    raise ImportError(
        f"fa needs PyTorch 2.10 or newer, and {_found} is what `import torch` finds. "
        "Upgrade it (pip install --upgrade torch).",
        name=__name__,
    )

try:
    from fa import flash_attn, flash_attn_interface, reference
    from fa._backend import backend
    from fa._version import __version__
    from fa.functional import attention, attention_varlen, combine
    from fa.kernels import explain, kernels, supports
    from fa.kvcache import append_kv, attention_kvcache
    from fa.quantize import QuantizedQkv, quantize_qkv
except ImportError as _error:
    if _error.name is None or _error.name.partition(".")[0] != "fa":
        raise
    raise ImportError(
        f"The package `fa` in {list(__path__)} is not complete ({_error.msg}). PyPI's "
        'unrelated package "fa" installs into the same folder. Remove both (pip uninstall fa '
        "fa-kernels), then install this project again."
    ) from _error

__all__ = [
    "QuantizedQkv",
    "__version__",
    "append_kv",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "backend",
    "combine",
    "explain",
    "flash_attn",
    "flash_attn_interface",
    "kernels",
    "quantize_qkv",
    "reference",
    "supports",
]
