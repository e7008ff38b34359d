# SPDX-License-Identifier: BSD-3-Clause
# Where is libfa.so, and what do its status codes mean in Python?
"""Loads libfa.so on first use. The library is optional: the CPU backend works without it.

Found by the variable FA_LIBRARY, else as `lib/libfa.so` of this package.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from fa import _abi

FORWARD, BACKWARD = _abi.FORWARD, _abi.BACKWARD

_BUILD = 'Build it with: FA_ARCHS="80;90a" pip install . (from the source folder of fa)'
_TEXT_BYTES = 1 << 16  # the reasons of some hundred rows


class LibraryMissing(ImportError):
    """libfa.so is not there or cannot be loaded; the text says which command builds it."""


class _Field(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_uint32), ("size", ctypes.c_uint32)]


_DESC_FIELDS = (
    *("op", "arch", "dtype", "dim_qk", "dim_v", "mask", "kv", "tile_m", "tile_n", "stages"),
    *("threads", "smem_bytes", "registers", "local_bytes"),
)


class _KernelDesc(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("id", ctypes.c_char * 64),
        *((name, ctypes.c_int32) for name in _DESC_FIELDS),
    ]


_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def path() -> Path:
    """The file that `load()` would open; it need not exist."""
    named = os.environ.get("FA_LIBRARY")
    return Path(named) if named else Path(__file__).with_name("lib") / "libfa.so"


def load() -> ctypes.CDLL:
    """The library, checked to speak this package's ABI; loaded once per process.

    Raises LibraryMissing where there is none, ImportError for one of another version.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _open(path())
    return _loaded


def available() -> bool:
    """Whether `load()` succeeds."""
    try:
        load()
    except ImportError:
        return False
    return True


def _open(file: Path) -> ctypes.CDLL:
    if not file.is_file():
        source = "named by FA_LIBRARY" if os.environ.get("FA_LIBRARY") else "of the package"
        raise LibraryMissing(f"libfa.so {source} is not at {file}. {_BUILD}")
    try:
        library = ctypes.CDLL(str(file))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"{file} cannot be loaded as libfa.so: {error}. {_BUILD}") from error
    version = library.fa_abi_version()
    if version != _abi.ABI_VERSION:
        raise ImportError(
            f"{file} speaks ABI version {version} (field abi_version), this package "
            f"{_abi.ABI_VERSION}. {_BUILD}"
        )
    fields = ctypes.POINTER(_Field)()
    count = library.fa_abi_layout(ctypes.byref(fields))
    _abi.check_layout([(f.name.decode(), f.offset, f.size) for f in fields[:count]])
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    to_size = ctypes.POINTER(size)
    # Params travel as `bytes`: the library only reads them, and only during the call.
    params = ctypes.c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "fa_abi_version": (ctypes.c_int, []),
        "fa_abi_layout": (size, [ctypes.POINTER(ctypes.POINTER(_Field))]),
        "fa_version": (ctypes.c_char_p, []),
        "fa_status_name": (ctypes.c_char_p, [ctypes.c_int]),
        "fa_last_error": (ctypes.c_char_p, []),
        "fa_params_init": (None, [pointer, size]),
        "fa_workspace_size": (ctypes.c_int, [ctypes.c_int, params, to_size]),
        "fa_forward": (ctypes.c_int, [params, pointer, size, to_size, pointer]),
        "fa_backward": (ctypes.c_int, [params, pointer, size, to_size, pointer]),
        "fa_combine": (ctypes.c_int, [params, pointer]),
        "fa_explain": (ctypes.c_int, [ctypes.c_int, params, pointer, size]),
        "fa_kernel_count": (ctypes.c_int, []),
        "fa_kernel_info": (ctypes.c_int, [ctypes.c_int, ctypes.POINTER(_KernelDesc)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


# fa_status -> exception; numbers of fa.h.
_OK, _UNSUPPORTED = 0, 2
_EXCEPTIONS: dict[int, type[Exception]] = {
    1: ValueError,
    2: NotImplementedError,
    3: RuntimeError,
    4: ImportError,
    5: RuntimeError,
    6: RuntimeError,
    7: RuntimeError,
}


def exception(status: int, text: str) -> Exception:
    """The Python exception of a status and its sentence."""
    return _EXCEPTIONS.get(status, RuntimeError)(text)


def check(status: int) -> None:
    """Raises the exception of a status other than FA_OK, with the library's sentence."""
    if status != _OK:
        raise exception(status, load().fa_last_error().decode(errors="replace"))


def version() -> str:
    """For example "0.1.0+g1a2b3c4 cuda13.0"; "host" instead of CUDA in a build without kernels."""
    return load().fa_version().decode()


def kernels_list() -> list[dict[str, Any]]:
    """Every kernel row of the library, in table order, with the fields of fa_kernel_desc.

    `dtype`, `op`, `mask` and `kv` are words; `registers` and `local_bytes` (bytes of local memory
    per thread) are -1 without a device.
    """
    library = load()
    rows = []
    for index in range(library.fa_kernel_count()):
        desc = _KernelDesc(struct_size=ctypes.sizeof(_KernelDesc))
        check(library.fa_kernel_info(index, ctypes.byref(desc)))
        row: dict[str, Any] = {"id": desc.id.decode()}
        row.update((name, getattr(desc, name)) for name in _DESC_FIELDS)
        row["op"] = {1: "forward", 2: "backward", 3: "combine", 4: "append_kv"}[row["op"]]
        row["dtype"] = _abi.DTYPE_NAMES[row["dtype"]]
        row["mask"] = ("none", "band")[row["mask"]]
        row["kv"] = ("tma", "cpasync", "paged")[row["kv"]]
        rows.append(row)
    return rows


def workspace_size(op: int, params: bytes) -> int:
    """Bytes of device memory the call needs; raises where no row covers it. Reads no addresses."""
    bytes_ = ctypes.c_size_t()
    check(load().fa_workspace_size(op, params, ctypes.byref(bytes_)))
    return bytes_.value


def forward(params: bytes, workspace: int = 0, workspace_bytes: int = 0, stream: int = 0) -> None:
    """Launches the forward on the current device. Addresses and the stream are integers."""
    library = _loaded or load()
    status = library.fa_forward(params, workspace, workspace_bytes, None, stream)
    if status != _OK:
        check(status)


def backward(params: bytes, workspace: int = 0, workspace_bytes: int = 0, stream: int = 0) -> None:
    """Launches the backward on the current device. Addresses and the stream are integers."""
    check(load().fa_backward(params, workspace, workspace_bytes, None, stream))


def explain(op: int, params: bytes) -> str:
    """The plan of a call, or every row's reason why none covers it; raises for invalid params."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    status = load().fa_explain(op, params, text, _TEXT_BYTES)
    if status not in (_OK, _UNSUPPORTED):
        check(status)
    return text.value.decode(errors="replace")


def why_not(op: int, params: bytes) -> str | None:
    """None if a row covers the call, else the sentence of the refusal. No GPU work."""
    library = load()
    status = library.fa_workspace_size(op, params, ctypes.byref(ctypes.c_size_t()))
    return None if status == _OK else library.fa_last_error().decode(errors="replace")
