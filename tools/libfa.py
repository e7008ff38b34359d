# SPDX-License-Identifier: BSD-3-Clause
# How is libfa called without torch? By ctypes; cuda.bindings gives memory and streams.
"""A torch-free caller of the C interface, for the driver test, the sanitizers and host timings.

Offsets come from `fa_abi_layout()` at run time, so this file holds no copy of the struct.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ABI_VERSION = 1
FORWARD, BACKWARD = 1, 2
DTYPES = {"float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float32": 4}
DTYPE_NAMES = {number: name for name, number in DTYPES.items()}
_FLOATS = {"score.scale", "score.softcap", "dropout.p"}


class Refused(RuntimeError):
    """A call of the library returned another status than FA_OK; `.status` is its number."""

    def __init__(self, status: int, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.status = status
        self.text = text


class Field(ctypes.Structure):
    """`fa_field`."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_uint32), ("size", ctypes.c_uint32)]


class KernelDesc(ctypes.Structure):
    """`fa_kernel_desc` without its end: to know a kernel's registers is to load it."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("id", ctypes.c_char * 64),
        *[
            (name, ctypes.c_int32)
            for name in (
                *("op", "arch", "dtype", "dim_qk", "dim_v", "mask", "kv", "tile_m", "tile_n"),
                *("stages", "threads", "smem_bytes"),
            )
        ],
    ]


@dataclass(frozen=True)
class Row:
    """One compiled kernel of the library, as `fa_kernel_info` describes it."""

    id: str
    op: int
    arch: int
    dtype: str
    dim_qk: int
    dim_v: int
    mask: str  # "none" or "band"
    tile_m: int
    tile_n: int
    threads: int
    smem_bytes: int  # dynamic

    @property
    def backend(self) -> str:
        """The name `fa.backend` knows this row's architecture by."""
        return f"sm{self.arch}"

    @property
    def score(self) -> str:
        """The column of the table: "any" (softcap, ALiBi) or "scale"."""
        return "any" if "any" in self.id.split("_") else "scale"


def leaves_short_calls(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row beside this forward row of Hopper takes its short calls.

    With lower tiles, or of e4m3 by transposing V itself. This row keeps the batch-invariant ones.
    """
    kind = ("op", "arch", "dtype", "dim_qk", "dim_v", "score")
    return (row.op, row.arch) == (FORWARD, 90) and any(
        (other.tile_m < row.tile_m or other.id == f"{row.id}_vrows")
        and other.mask in (row.mask, "band")
        and all(getattr(other, n) == getattr(row, n) for n in kind)
        for other in rows
    )


def packs_heads(row: Row) -> bool:
    """Whether a tile of this row holds all query heads of a key head: it serves short calls."""
    return row.op == FORWARD and row.id.endswith("_gqa")


def library_path() -> Path | None:
    """libfa.so: FA_LIBRARY, or fa/lib/libfa.so beside the package that Python would import."""
    named = os.environ.get("FA_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("fa")  # finds, does not import: torch stays out
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "lib" / "libfa.so"
        if candidate.is_file():
            return candidate
    return None


class Library:
    """libfa.so with the signatures of the functions used here."""

    def __init__(self, path: Path | str | None = None) -> None:
        found = path or library_path()
        if found is None:
            raise FileNotFoundError(
                "libfa.so was not found: set FA_LIBRARY to its path, or put the folder that "
                "holds fa/lib/libfa.so on PYTHONPATH."
            )
        self.path = Path(found)
        self.c = ctypes.CDLL(str(self.path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        out_size = ctypes.POINTER(size)
        self.c.fa_last_error.restype = ctypes.c_char_p
        self.c.fa_status_name.restype = ctypes.c_char_p
        self.c.fa_version.restype = ctypes.c_char_p
        self.c.fa_params_init.argtypes = [pointer, size]
        self.c.fa_params_init.restype = None
        self.c.fa_workspace_size.argtypes = [ctypes.c_int, pointer, out_size]
        self.c.fa_forward.argtypes = [pointer, pointer, size, out_size, pointer]
        self.c.fa_backward.argtypes = self.c.fa_forward.argtypes
        self.c.fa_explain.argtypes = [ctypes.c_int, pointer, ctypes.c_char_p, size]
        self.c.fa_kernel_info.argtypes = [ctypes.c_int, ctypes.POINTER(KernelDesc)]
        self.c.fa_abi_layout.argtypes = [ctypes.POINTER(ctypes.POINTER(Field))]
        self.c.fa_abi_layout.restype = size
        fields = ctypes.POINTER(Field)()
        count = self.c.fa_abi_layout(ctypes.byref(fields))
        self.fields = {
            fields[i].name.decode(): (fields[i].offset, fields[i].size) for i in range(count)
        }
        end = max(offset + width for offset, width in self.fields.values())
        self.params_size = (end + 7) // 8 * 8

    def version(self) -> str:
        """For example "0.1.0+g1a2b3c4 cuda13.0"."""
        return self.c.fa_version().decode()

    def check(self, status: int) -> None:
        """Raises Refused with the library's own sentence unless status is FA_OK."""
        if status:
            name = self.c.fa_status_name(status).decode()
            raise Refused(status, name, (self.c.fa_last_error() or b"").decode())

    def rows(self) -> list[Row]:
        """Every compiled kernel, in table order."""
        rows = []
        for index in range(self.c.fa_kernel_count()):
            d = KernelDesc(struct_size=ctypes.sizeof(KernelDesc))
            self.check(self.c.fa_kernel_info(index, ctypes.byref(d)))
            rows.append(
                Row(
                    d.id.decode(),
                    d.op,
                    d.arch,
                    DTYPE_NAMES[d.dtype],
                    d.dim_qk,
                    d.dim_v,
                    "band" if d.mask else "none",
                    d.tile_m,
                    d.tile_n,
                    d.threads,
                    d.smem_bytes,
                )
            )
        return rows


class Params:
    """`fa_params`, set by the paths of fa.h: `p["q.stride_row"] = 64`."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.buffer = ctypes.create_string_buffer(library.params_size)
        library.c.fa_params_init(self.buffer, library.params_size)

    def __setitem__(self, name: str, value: float) -> None:
        offset, width = self.library.fields[name]
        if name in _FLOATS:
            code = "<f"
        elif width == 4:
            code = "<i"
        else:
            code = "<q" if ".stride" in name or name.endswith("_stride") else "<Q"
        struct.pack_into(code, self.buffer, offset, value)

    def tensor(self, name: str, address: int, strides: tuple[int, ...], dtype: str) -> None:
        """A tensor group: strides in elements of [B, S, H, D], or of packed [total, H, D]."""
        if len(strides) == 3:
            strides = (0, *strides)
        self[f"{name}.data"] = address
        parts = ("batch", "row", "head", "dim")
        for part, stride in zip(parts, strides, strict=True):
            self[f"{name}.stride_{part}"] = stride
        self[f"{name}.dtype"] = DTYPES[dtype]

    def dense(self, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        """torch's tensors of a dense forward, [B, S, H, D] and lse [B, H, S], and their shape."""
        for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
            self.tensor(name, t.data_ptr(), t.stride(), str(t.dtype).removeprefix("torch."))
        self["lse.data"] = lse.data_ptr()
        self["lse.stride_batch"], self["lse.stride_head"] = lse.stride()[:2]
        for name, value in zip(("batch", "seqlen_q", "heads_q", "dim_qk"), q.shape, strict=True):
            self[f"shape.{name}"] = value
        self["shape.seqlen_k"], self["shape.heads_k"] = k.shape[1:3]
        self["shape.dim_v"] = v.shape[3]

    def explain(self, op: int = FORWARD) -> str:
        """The plan of this call in words; raises Refused where there is none."""
        text = ctypes.create_string_buffer(8192)
        self.library.check(self.library.c.fa_explain(op, self.buffer, text, len(text)))
        return text.value.decode()

    def workspace_bytes(self, op: int = FORWARD) -> int:
        """Bytes of device memory the call needs beside its tensors."""
        size = ctypes.c_size_t()
        self.library.check(self.library.c.fa_workspace_size(op, self.buffer, ctypes.byref(size)))
        return size.value

    def forward(self, stream: int, workspace: int = 0, workspace_bytes: int = 0) -> None:
        """Launches the forward on `stream` (a cudaStream_t as a number)."""
        self._launch(self.library.c.fa_forward, stream, workspace, workspace_bytes)

    def backward(self, stream: int, workspace: int = 0, workspace_bytes: int = 0) -> None:
        """Launches the backward on `stream`."""
        self._launch(self.library.c.fa_backward, stream, workspace, workspace_bytes)

    def _launch(self, function: Any, stream: int, workspace: int, workspace_bytes: int) -> None:
        needed = ctypes.c_size_t()
        self.library.check(
            function(
                self.buffer,
                workspace or None,
                workspace_bytes,
                ctypes.byref(needed),
                stream or None,
            )
        )


# --- values -------------------------------------------------------------------------------------


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of fp32 `values` in `dtype`, rounded to nearest; bfloat16 as uint16."""
    if dtype == "float16":
        return values.astype(np.float16)
    if dtype == "float32":
        return values.astype(np.float32)
    if dtype == "float8_e4m3fn":
        magnitudes = _e4m3_values()[:127]  # 127 is NaN
        places = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values))
        return (places + 128 * np.signbit(values)).astype(np.uint8)
    if dtype != "bfloat16":
        raise ValueError(f"dtype {dtype}: e4m3, float16, bfloat16 and float32 are known here.")
    raw = values.astype(np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def _e4m3_values() -> np.ndarray:
    """fp64 values of the 256 bytes: sign, four bits of exponent, three behind the point."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size = np.where(byte & 127 == 127, np.nan, size)
    return np.where(byte >= 128, -size, size)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """fp64 values of what `to_bits` wrote."""
    if dtype == "float8_e4m3fn":
        return _e4m3_values()[bits]
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64)


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, softcap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """fp64 attention of one sequence: q [Sq, Hq, D], k and v [Sk, Hkv, D] → out, lse [Hq, Sq]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if causal:
        i, j = np.arange(s.shape[1])[:, None], np.arange(s.shape[2])[None, :]
        s = np.where(j <= i + s.shape[2] - s.shape[1], s, -np.inf)
    top = s.max(axis=2, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0))[:, :, 0]
    out = np.einsum("hij,jhd->ihd", p / np.where(total > 0, total, 1), v)
    return out, lse


# --- a CUDA device through cuda.bindings --------------------------------------------------------


class Cuda:
    """Memory, streams and events of one device, by the runtime functions of cuda.bindings."""

    def __init__(self, device: int = 0) -> None:
        from cuda.bindings import runtime

        self.rt = runtime
        self._allocations: list[int] = []
        self.call("cudaSetDevice", device)

    def call(self, name: str, *arguments: Any) -> Any:
        """One runtime call; its result, or RuntimeError with the call's name."""
        status, *results = getattr(self.rt, name)(*arguments)
        if status != self.rt.cudaError_t.cudaSuccess:
            raise RuntimeError(f"{name} failed: {status.name}.")
        return results[0] if results else None

    def empty(self, size: int, fill: int = 0xFF) -> int:
        """Address of `size` bytes; every byte is `fill` (0xFF is NaN in each floating type)."""
        address = int(self.call("cudaMalloc", max(size, 16)))
        self._allocations.append(address)
        self.call("cudaMemset", address, fill, max(size, 16))
        self.call("cudaDeviceSynchronize")  # kernels run on a stream that does not wait for it
        return address

    def upload(self, array: np.ndarray) -> int:
        """Address of a copy of `array` on the device."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        if array.nbytes:
            kind = self.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
            self.call("cudaMemcpy", address, array.ctypes.data, array.nbytes, kind)
        return address

    def download(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A copy of device memory as an array; waits for all work of the device."""
        array = np.empty(shape, dtype)
        self.call("cudaDeviceSynchronize")
        if array.nbytes:
            kind = self.rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self.call("cudaMemcpy", array.ctypes.data, address, array.nbytes, kind)
        return array

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
        return int(self.call("cudaStreamCreateWithFlags", self.rt.cudaStreamNonBlocking))

    def free_all(self) -> None:
        """Gives back everything `empty` and `upload` took."""
        while self._allocations:
            self.call("cudaFree", self._allocations.pop())
