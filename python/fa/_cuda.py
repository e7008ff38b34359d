# SPDX-License-Identifier: BSD-3-Clause
# What runs for CUDA tensors when libfa_torch.so does not load?
"""The ctypes implementation of the raw operators: fills fa_params and calls libfa.so."""

from __future__ import annotations

import torch


def register(library: torch.library.Library) -> None:
    pass
