# SPDX-License-Identifier: BSD-3-Clause
# Does the package say what is wrong around it: the backend, the library, the torch beside it?
"""Backends and variables of the environment; a library that is missing, foreign or without rows for
the GPU; an import with too old a torch or with none. The CPU path works through all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fa
import host_build
from fa import _lib

ROOT = host_build.ROOT
SHAPES = ((2, 16, 4, 64), (2, 20, 2, 64), (2, 20, 2, 32))
Q, K, V = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES)


def works_still() -> None:
    want, _ = fa.reference.attention(Q, K, V)
    assert (fa.attention(Q, K, V) - want).abs().max() < 1e-5


# ---- backends -----------------------------------------------------------------------------------


def test_backend_names() -> None:
    with pytest.raises(ValueError, match='"sm70".*"auto", "cpu", "sm80", "sm90"'):
        fa.backend("sm70")
    with pytest.raises(TypeError, match="string"):
        fa.backend(80)  # type: ignore[arg-type]
    for name in ("sm80", "sm90"):
        with fa.backend(name), pytest.raises(ValueError, match=f'q: is on cpu.*"{name}".*CUDA'):
            fa.attention(Q, K, V)
    with fa.backend("cpu"):
        works_still()
    works_still()


def test_backend_nests_and_survives_errors() -> None:
    from fa import _backend

    assert _backend.current() == "auto"
    sm80 = fa.backend("sm80")
    with sm80, sm80:
        assert _backend.current() == "sm80"
        with fa.backend("cpu"):
            assert _backend.current() == "cpu"
        assert _backend.current() == "sm80"
    with pytest.raises(KeyError), fa.backend("sm90"):
        raise KeyError
    assert _backend.current() == "auto"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = str(ROOT / "python")
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_environment_variables() -> None:
    done = python("import fa", FA_BACKEND="hopper")
    assert done.returncode != 0
    assert re.search(r'ValueError: .*FA_BACKEND is "hopper".*"sm80"', done.stderr)
    done = python("import fa", FA_TORCH_OPS="fast")
    assert re.search(r'ValueError: .*FA_TORCH_OPS is "fast".*"ctypes"', done.stderr)
    code = "from fa import _backend; assert _backend.current() == 'sm80', _backend.current()"
    done = python(code, FA_BACKEND="sm80")
    assert done.returncode == 0, done.stderr


# ---- the library: missing, foreign, without rows, without a GPU ---------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Points the package at another libfa.so, for one test."""

    def use(path: Path) -> None:
        monkeypatch.setenv("FA_LIBRARY", str(path))
        monkeypatch.setattr(_lib, "_loaded", None)

    return use


CUDA = [(tuple(t.shape), torch.bfloat16, "cuda") for t in (Q, K, V)]
needs_compiler = pytest.mark.skipif(host_build.compiler() is None, reason="no g++ to compile with")


def test_missing_library(library: Any, tmp_path: Path) -> None:
    library(tmp_path / "libfa.so")
    with pytest.raises(ImportError, match="libfa.so.*FA_LIBRARY.*pip install"):
        fa.kernels()
    with pytest.raises(ImportError, match="pip install"):
        fa.explain(*CUDA, device="h200")
    reason = fa.supports(*CUDA)
    assert isinstance(reason, str) and "pip install" in reason
    assert fa.supports(Q, K, V) is True
    works_still()


def test_foreign_library(library: Any, tmp_path: Path) -> None:
    (tmp_path / "libfa.so").write_bytes(b"not a library")
    library(tmp_path / "libfa.so")
    with pytest.raises(ImportError, match="cannot be loaded.*pip install"):
        fa.kernels()
    works_still()


@needs_compiler
def test_library_of_another_abi(library: Any, tmp_path: Path) -> None:
    names = (
        *("abi_layout", "version", "status_name", "last_error", "params_init", "workspace_size"),
        *("forward", "backward", "combine", "explain", "kernel_count", "kernel_info"),
    )
    text = "int fa_abi_version(void) { return 99; }\n"
    text += "".join(f"int fa_{name}(void) {{ return 0; }}\n" for name in names)
    (tmp_path / "other.c").write_text(text)
    target = str(tmp_path / "libfa.so")
    command = [str(host_build.compiler()), "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*command, str(tmp_path / "other.c"), "-o", target], check=True)
    library(tmp_path / "libfa.so")
    with pytest.raises(ImportError, match=r"ABI version 99.*pip install"):
        fa.kernels()
    works_still()


@needs_compiler
def test_build_without_rows(library: Any, tmp_path: Path) -> None:
    library(host_build.build(tmp_path, table="{}", shim=False))
    assert fa.kernels() == []
    with pytest.raises(RuntimeError, match=r"9\.0.*no rows.*Rebuild.*pip install"):
        fa.explain(*CUDA, device="h200")
    reason = fa.supports(*CUDA)
    assert isinstance(reason, str) and "Rebuild" in reason


@needs_compiler
def test_gpu_that_no_row_serves(library: Any, tmp_path: Path) -> None:
    """Five Hopper rows, and a nominal A100."""
    library(host_build.build(tmp_path, table="Table(test::kTable).first(5)", shim=False))
    with pytest.raises(RuntimeError, match=r"8\.0.*5 rows for 9\.x.*Rebuild.*install \.") as caught:
        fa.explain(*CUDA, device="a100")
    assert "kernel image" not in str(caught.value)
    assert "sm90_fwd_bf16_d64_none" in fa.explain(*CUDA, device="h200")


@needs_compiler
def test_build_with_rows(library: Any, tmp_path: Path) -> None:
    library(host_build.build(tmp_path, shim=False))
    assert "sm90_fwd_bf16_d64_band" in [row["id"] for row in fa.kernels()]
    text = fa.explain(*CUDA, device="h200", causal=True)
    assert "sm90_fwd_bf16_d64_band" in text and "workspace" in text
    assert "sm80_fwd_bf16_d64_band" in fa.explain(*CUDA, device="a100", causal=True)
    with fa.backend("sm80"):
        assert "sm80_fwd_bf16_d64_band" in fa.explain(*CUDA, device="h200")
    # No row: the nearest ones, each with its reason.
    text = fa.explain(*CUDA, device="h200", softcap=30.0)
    assert "softcap" in text and text.count("sm90_fwd_bf16_d64_band") >= 1
    with pytest.raises(ValueError, match='device: "b100".*"h200"'):
        fa.explain(*CUDA, device="b100")
    with pytest.raises(ValueError, match="k: batch size 1 differs from q's 2"):
        fa.explain(CUDA[0], ((1, 20, 2, 64), torch.bfloat16, "cuda"), CUDA[2], device="h200")


def test_explain_and_supports_on_the_cpu() -> None:
    assert "backend cpu" in fa.explain(Q, K, V, causal=True, window_size=(3, -1), softcap=2.0)
    assert fa.supports(Q, K, V, causal=True, return_lse=True) is True
    reason = fa.supports(Q, K[:, :, :1], V)
    assert isinstance(reason, str) and reason.startswith("v: 2 heads")
    with fa.backend("sm80"):
        assert "CUDA tensors only" in str(fa.supports(Q, K, V))
    with pytest.raises(TypeError, match="shape, dtype, device"):
        fa.supports(3, K, V)  # type: ignore[arg-type]


# ---- import -------------------------------------------------------------------------------------


def test_import_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = python("import fa", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'python'}")
    assert re.search(r"ImportError: fa needs .*\(no torch here\).*pip install torch", done.stderr)
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "torch", ["raise ImportError('no torch here')", "__version__ = '2.8.1+cu126'"]
)
def test_commands_without_a_torch_say_so_in_one_line(tmp_path: Path, torch: str) -> None:
    (tmp_path / "torch.py").write_text(torch + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "fa", "info"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'python'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r".*fa needs PyTorch 2\.10 or newer.*pip install .*torch.*\n", done.stderr)


def test_import_with_an_old_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.8.1+cu126'\n")
    done = python("import fa", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'python'}")
    assert re.search(r"ImportError: .*2\.10.*2\.8\.1\+cu126", done.stderr)


def test_import_of_an_incomplete_package(tmp_path: Path) -> None:
    """PyPI has an unrelated `fa`, which installs over this one's files."""
    (tmp_path / "fa").mkdir()
    (tmp_path / "fa" / "__init__.py").write_text((ROOT / "python/fa/__init__.py").read_text())
    done = python("import fa", PYTHONPATH=str(tmp_path))
    assert re.search(r'ImportError: .*not complete.*package "fa".*pip uninstall fa', done.stderr)


def test_version_is_the_projects() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{fa.__version__}"' in text
