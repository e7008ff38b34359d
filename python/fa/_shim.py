# SPDX-License-Identifier: BSD-3-Clause
# Is libfa_torch.so there, does it fit, and which kernels does torch get for CUDA tensors?
"""Loads libfa_torch.so and registers its kernels; says why not where it cannot.

The variable FA_TORCH_OPS chooses: "auto" (libfa_torch.so where it loads), "shim" (an error where it
does not) or "ctypes" (never).
"""

from __future__ import annotations

import ctypes
import os
import re

import torch

from fa import _abi, _backend, _lib
from fa._schemas import SCHEMAS

_KINDS = {
    "Tensor": "T",
    "Tensor?": "o",
    "int": "i",
    "SymInt": "i",
    "SymInt?": "I",
    "float": "f",
    "float?": "F",
    "bool": "b",
    "bool?": "B",
    "ScalarType?": "S",
}


class Unusable(ImportError):
    """libfa_torch.so cannot serve this process; the text says why."""


def arguments() -> str:
    """Those of fa::_backward_kernel, as libfa_torch.so must state them: "T q,T k,...".

    Those of fa::_forward and fa::forward_out are their beginning.
    """
    inside = SCHEMAS["_backward_kernel"].split("->")[0].strip()[1:-1]
    items = [item.strip() for item in inside.split(",") if item.strip() != "*"]
    return ",".join(f"{_KINDS[t]} {n}" for t, n in (_split(item) for item in items))


def _split(item: str) -> tuple[str, str]:
    found = re.fullmatch(r"(\S+) (\w+)(=.*)?", item)
    assert found is not None, item
    return found.group(1), found.group(2)


def load() -> ctypes.CDLL:
    """libfa_torch.so beside libfa.so, checked against the schemas. Raises Unusable."""
    try:
        _lib.load()  # first, so that both use the same libfa.so
    except ImportError as error:
        raise Unusable(str(error)) from error
    file = _lib.path().with_name("libfa_torch.so")
    if not file.is_file():
        raise Unusable(f"{file} is not there: the build had FA_TORCH_SHIM off.")
    try:
        shim = ctypes.CDLL(str(file))
        shim.fa_torch_arguments.restype = ctypes.c_char_p
        shim.fa_torch_register.argtypes = [ctypes.c_char_p, ctypes.c_int]
        shim.fa_torch_last_params.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        shim.fa_torch_last_params.restype = None
        stated, abi = shim.fa_torch_arguments().decode(), shim.fa_torch_abi_version()
    except (OSError, AttributeError) as error:
        raise Unusable(f"{file} does not load into torch {torch.__version__}: {error}.") from error
    if stated != arguments() or abi != _abi.ABI_VERSION:
        raise Unusable(f"{file} belongs to another version of this package: install both again.")
    shim.fa_torch_set_default_backend(_backend.default_code())
    shim.fa_torch_set_backend(_backend.BACKENDS[_backend.current()])
    _backend.on_change(shim.fa_torch_set_backend)
    return shim


# What `python -m fa info` prints: "shim", or "ctypes: " and why.
implementation = "ctypes: not asked for"


def register(namespace: str) -> bool:
    """Gives torch the kernels of libfa_torch.so for CUDA tensors; False: use _cuda.py instead."""
    global implementation
    choice = os.environ.get("FA_TORCH_OPS") or "auto"
    if choice not in ("auto", "shim", "ctypes"):
        raise ValueError(
            f'The environment variable FA_TORCH_OPS is "{choice}". Allowed are "auto", "shim" and '
            '"ctypes".'
        )
    if choice == "ctypes":
        implementation = "ctypes: FA_TORCH_OPS says so"
        return False
    if choice == "auto" and torch.version.cuda is None:
        implementation = f"ctypes: torch {torch.__version__} has no CUDA"
        return False
    try:
        error = load().fa_torch_register(namespace.encode(), 0)
        if error:
            raise Unusable(f"torch refused the kernels of libfa_torch.so (error {error}).")
    except Unusable as reason:
        if choice == "shim":
            raise
        implementation = f"ctypes: {reason}"
        return False
    implementation = "shim"
    return True
