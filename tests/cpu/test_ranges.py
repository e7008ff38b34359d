# SPDX-License-Identifier: BSD-3-Clause
# Does FA_NVTX=1 put a range around every call, and cost nothing without it?

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")

import fa
from fa import _ranges, functional

RECORD = """
    import torch
    torch.version.cuda = "13.0"  # a CPU build has the functions too; they only raise
    seen = []
    torch.cuda.nvtx.range_push = lambda text: seen.append(text)
    torch.cuda.nvtx.range_pop = lambda: seen.append("end")
    import fa
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_range_per_call_with_op_and_shapes() -> None:
    code = (
        RECORD
        + """
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    k = v = torch.randn(2, 7, 2, 8)
    out, lse = fa.attention(q, k, v, causal=True, return_lse=True)
    out.sum().backward()
    torch.ops.fa.forward(q.detach(), k, v)
    fa.combine([out, out], [lse, lse])
    try:
        fa.attention(q, k, v[:1])
    except ValueError:
        seen.append("refused")
    print("\\n".join(seen))
    """
    )
    done = python(code, FA_NVTX="1")
    assert done.returncode == 0, done.stderr
    forward = "fa::forward float32 q[2, 5, 4, 8] k[2, 7, 2, 8]"
    backward = "fa::backward float32 dout[2, 5, 4, 8]"
    assert done.stdout.splitlines() == [
        *(forward, "end", backward, "end", forward, "end", "fa::combine", "end"),
        *(forward, "end", "refused"),
    ]


def test_compiled_code_has_no_ranges() -> None:
    code = (
        RECORD
        + """
    q = k = v = torch.randn(1, 4, 1, 8)
    compiled = torch.compile(lambda *t: fa.attention(*t), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), fa.reference.attention(q, k, v)[0].float())
    assert not [text for text in seen if "forward" in text], seen
    """
    )
    done = python(code, FA_NVTX="1")
    assert done.returncode == 0, done.stderr


def test_a_trace_has_no_ranges() -> None:
    code = (
        RECORD
        + """
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        q, k, v = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
        fa.attention(q, k, v).sum().backward()
    assert q.grad is not None and seen == [], seen
    """
    )
    done = python(code, FA_NVTX="1")
    assert done.returncode == 0, done.stderr


def test_without_the_variable_nothing_is_wrapped() -> None:
    assert not hasattr(functional.forward, "__wrapped__") or _ranges.WANTED
    code = (
        RECORD
        + """
    fa.attention(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
    assert seen == []
    """
    )
    done = python(code, FA_NVTX="")
    assert done.returncode == 0, done.stderr


def test_a_torch_without_nvtx_says_so_once() -> None:
    code = """
    import torch, fa
    torch.version.cuda = None
    for _ in range(2):
        fa.attention(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
    """
    done = python(code, FA_NVTX="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("so it has no NVTX: no range is recorded.") == 1


def test_other_values_are_refused() -> None:
    done = python("import fa", FA_NVTX="yes")
    assert done.returncode == 1
    assert 'FA_NVTX is "yes". Allowed are "0" and "1".' in done.stderr
    assert fa.attention.__doc__
