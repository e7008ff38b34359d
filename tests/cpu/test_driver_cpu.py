# SPDX-License-Identifier: BSD-3-Clause
# Is the torch-free caller right about values, the struct and the plans, as far as no GPU is needed?

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import driver_backward
import libfa

np = pytest.importorskip("numpy", reason="the torch-free driver needs numpy")
torch = pytest.importorskip("torch")
from fa import reference  # noqa: E402  (after the check for torch)

ROOT = Path(__file__).resolve().parents[2]
NO_LIBRARY = "no libfa.so: install the package, or set FA_LIBRARY"


@pytest.fixture
def library() -> libfa.Library:
    if libfa.library_path() is None:
        pytest.skip(NO_LIBRARY)
    return libfa.Library()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_are_rounded_as_torch_rounds(dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 100
    want = torch.tensor(values).to(getattr(torch, dtype)).double().numpy()
    assert (libfa.from_bits(libfa.to_bits(values, dtype), dtype) == want).all()


@pytest.mark.parametrize("causal", [False, True])
def test_numpy_reference_agrees_with_the_torch_one(causal: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((9, 4, 16), (5, 2, 16), (5, 2, 8)))
    out, lse = libfa.reference(q, k, v, causal)
    tensors = (torch.tensor(t)[None] for t in (q, k, v))
    want, want_lse = reference.attention(*tensors, causal=causal)
    assert np.allclose(out, want[0].numpy(), atol=1e-12)
    assert np.array_equal(np.isneginf(lse), torch.isneginf(want_lse[0]).numpy())
    seen = np.isfinite(lse)
    assert np.allclose(lse[seen], want_lse[0].numpy()[seen], atol=1e-12)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_numpy_gradients_agree_with_the_torch_ones(softcap: float) -> None:
    rng = np.random.default_rng(2)
    shapes = ((9, 4, 16), (7, 2, 16), (7, 2, 8), (9, 4, 8))
    *inputs, dout = (rng.standard_normal(shape) for shape in shapes)
    exact, bound, out, lse = driver_backward.gradients(*inputs, dout, True, softcap)
    tensors = [torch.tensor(t)[None].requires_grad_() for t in inputs]
    want, want_lse = reference.attention(*tensors, causal=True, softcap=softcap)
    grads = torch.autograd.grad(want, tensors, torch.tensor(dout)[None])
    assert np.allclose(out, want[0].detach().numpy(), atol=1e-12)
    assert np.allclose(lse[:, 2:], want_lse[0, :, 2:].detach().numpy(), atol=1e-12)
    for (name, mine), right in zip(exact.items(), grads, strict=True):
        assert np.allclose(mine, right[0].numpy(), atol=1e-12), name
        assert (bound[name] >= np.abs(mine)).all()


def test_params_are_initialised_and_refused_with_a_sentence(library: libfa.Library) -> None:
    p = libfa.Params(library)
    with pytest.raises(libfa.Refused) as caught:
        p.workspace_bytes()  # no tensors yet
    assert caught.value.status != 0
    assert len(caught.value.text) > 20
    with pytest.raises(KeyError):
        p["no.such_field"] = 1


def test_dense_tensors_fill_the_struct(library: libfa.Library) -> None:
    q, k = torch.empty(2, 5, 6, 64, dtype=torch.float16), torch.empty(2, 7, 3, 64).half()
    v, out = torch.empty(2, 3, 7, 32).half().transpose(1, 2), torch.empty(2, 5, 6, 32).half()
    lse = torch.empty(2, 6, 5)
    p = libfa.Params(library)
    p.dense(q, k, v, out, lse)

    def field(name: str) -> int:
        offset, width = library.fields[name]
        return int.from_bytes(p.buffer.raw[offset : offset + width], sys.byteorder)

    names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "dim_qk", "dim_v")
    assert [field(f"shape.{name}") for name in names] == [2, 5, 7, 6, 3, 64, 32]
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert field(f"{name}.data") == t.data_ptr()
        parts = ("batch", "row", "head", "dim")
        assert tuple(field(f"{name}.stride_{part}") for part in parts) == t.stride()
        assert field(f"{name}.dtype") == libfa.DTYPES["float16"]
    assert (field("lse.data"), field("lse.stride_batch")) == (lse.data_ptr(), 30)
    assert field("lse.stride_head") == 5


def test_every_small_case_selects_its_row(library: libfa.Library) -> None:
    """Also: the driver imports no torch and needs no GPU for plans."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "driver.py"), "--plan"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if not library.rows():
        assert done.returncode == 2, done.stdout + done.stderr
        assert "holds no row" in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr
    for row in library.rows():
        assert f"{row.id} dense: selected" in done.stdout
    assert "0 failures" in done.stdout
