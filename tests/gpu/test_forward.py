# SPDX-License-Identifier: BSD-3-Clause
# Is every kernel row right, on the hand-picked problems and on drawn ones?

from __future__ import annotations

import re
from typing import Any

import harness
import pytest
import torch

import fa
import libfa
from cases import Case, hand_picked, sweep

SWEEP_SEED = 20261130
SWEEP_COUNT = 200
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


def row_cases(row: libfa.Row) -> list[Case]:
    """Problems on which this very row must be the one that runs: dense, by its mask's need."""
    if row.op != libfa.FORWARD or row.dtype not in SHORT_DTYPE:
        return []
    base = {"dtype": SHORT_DTYPE[row.dtype], "backward": False, "tag": row.backend}
    dims = {"dim": row.dim_qk, "dim_v": row.dim_v}
    if libfa.packs_heads(row):
        return _packed_cases(row, base | dims)
    band = {"causal": True} if row.mask == "band" else {}
    cases = [
        Case(**base, **dims, **band, q=257, k=321, batch=2, heads_q=4, heads_k=2),
        Case(**base, **dims, **band, q=row.tile_m, k=row.tile_n, heads_q=3, heads_k=1),
        # A group of four would be packed, and its keys split.
        Case(**base, **dims, **band, q=1023, k=2047, heads_q=3, heads_k=1, values="x3"),
        # Fewer rows of a key head would be packed.
        Case(**base, **dims, **band, q=33, k=7, batch=3, heads_q=4, heads_k=2),
        Case(**base, dim=row.dim_qk - 8, dim_v=row.dim_v - 24, **band, q=300, k=193, batch=2),
    ]
    if row.score == "any":
        return _score_cases(row, base | dims)
    if row.mask == "band":
        cases.append(Case(**base, **dims, window=(100, 20), q=513, k=700, heads_q=4, heads_k=2))
        cases.append(Case(**base, **dims, causal=True, q=700, k=300, heads_q=2, sinks="fp32"))
        cases.append(Case(**base, **dims, causal=True, chunk=150, q=400, k=470))
    return cases


def _packed_cases(row: libfa.Row, base: dict[str, Any]) -> list[Case]:
    """Calls of few queries: every option, groups of every kind, many key blocks."""
    n, grouped = row.tile_n, {"heads_q": 8, "heads_k": 2}
    # Of Hopper: groups of 2 to 64; under a mask, where no other wins; more tiles of one head each
    # than multiprocessors, or packing would leave some idle.
    if row.score == "scale":
        base = base | {"causal": True}
        return [
            Case(**base, q=30, k=9 * n + 1, batch=20, **grouped),
            Case(**base, q=60, k=700, batch=9, heads_q=16, heads_k=2, values="x3"),
            Case(**base, q=33, k=300, batch=34, heads_q=4, heads_k=2, sinks="fp32", out_fp32=True),
            Case(**base, q=64, k=40, batch=9, heads_q=16, heads_k=1, sinks="same"),
            Case(**base, q=50, k=1000, chunk=150, batch=17, **grouped),
            Case(**(base | {"causal": False}), q=45, k=1000, window=(100, 20), batch=17, **grouped),
            Case(**base, q=(30, 0, 16, 1), k=(70, 5, 513, 0), heads_q=64, heads_k=4),
            Case(**base, q=(1, 40), k=(900, 40), slack_q=9, heads_q=128, heads_k=8, sinks="fp32"),
            Case(
                **base,
                q=40,
                k=300,
                batch=2,
                heads_q=128,
                heads_k=8,
                seqused_k=(290, 0),
                leftpad_k=(7, 0),
            ),
            Case(**base, q=2, k=4000, batch=9, heads_q=16, heads_k=1, values="x20"),
            Case(**base, q=(5, 3), k=300, batch=2, heads_q=192, heads_k=3),  # O: 16 heads a box
            Case(
                **{**base, "dim": row.dim_qk - 8, "dim_v": row.dim_v - 24},
                **grouped,
                q=31,
                k=600,
                batch=17,
            ),
        ]
    return [
        Case(**base, q=1, k=9 * n + 1, batch=3, **grouped, softcap=15.0),
        Case(**base, q=2, k=7, batch=3, heads_q=3, alibi="h"),
        Case(**base, q=16, k=33 * n, causal=True, **grouped, softcap=30.0, values="x3"),
        Case(**base, q=9, k=5, causal=True, heads_q=7, heads_k=1, alibi="bh", sinks="fp32"),
        Case(**base, q=5, k=700, batch=2, heads_q=12, heads_k=1, alibi="bh", out_fp32=True),
        Case(**base, q=3, k=50, batch=2, causal=True, heads_q=20, heads_k=1, alibi="h"),
        Case(**base, q=13, k=1000, window=(100, 20), heads_q=9, heads_k=3, softcap=5.0),
        Case(**base, q=20, k=470, causal=True, chunk=150, heads_q=6, heads_k=2, alibi="h"),
        Case(**base, q=(3, 0, 16, 1), k=(70, 5, 513, 0), heads_q=4, heads_k=1, softcap=9.0),
        Case(**base, q=(1, 4), k=(900, 40), slack_q=9, causal=True, **grouped, alibi="bh"),
        Case(**base, q=4, k=300, batch=2, seqused_k=(290, 0), leftpad_k=(7, 0), alibi="bh"),
        Case(**base, q=1, k=4000, batch=2, heads_q=16, heads_k=1, softcap=1e4, values="x20"),
        Case(**{**base, "dim": row.dim_qk - 8, "dim_v": row.dim_v - 24}, q=6, k=600, softcap=2.0),
    ]


def _score_cases(row: libfa.Row, base: dict[str, Any]) -> list[Case]:
    """Softcap and ALiBi, each and both, with every kind of mask and length."""
    both = {"softcap": 20.0, "alibi": "bh"}
    return [
        Case(**base, softcap=2.0, q=257, k=321, batch=2, heads_q=4, heads_k=2),
        Case(**base, softcap=30.0, causal=True, q=300, k=513, heads_q=3, values="x3"),
        Case(**base, softcap=1e4, causal=True, q=130, k=700, out_fp32=True),
        Case(**base, softcap=0.05, q=130, k=200, values="x20"),
        Case(**base, alibi="h", causal=True, q=513, k=1023, heads_q=4, heads_k=1),
        Case(**base, alibi="bh", q=200, k=130, batch=3, heads_q=4, heads_k=2, out_fp32=True),
        Case(**base, **both, window=(100, 20), q=513, k=700, heads_q=4, heads_k=2),
        Case(**base, **both, causal=True, q=700, k=300, batch=2, sinks="fp32"),
        Case(**base, **both, q=(3, 0, 300, 129), k=(70, 5, 513, 129), heads_q=4, causal=True),
        Case(**base, **both, q=150, k=(400, 7), batch=2, heads_q=8, heads_k=2, chunk=150),
        Case(**base, **both, scale=0.0, q=100, k=200, values="x3"),
        Case(
            **{**base, "dim": row.dim_qk - 8, "dim_v": row.dim_v - 24},
            **both,
            q=(300, 20),
            k=300,
            batch=2,
            leftpad_k=(7, 0),
            seqused_k=(290, 100),
        ),
    ]


ROW_CASES = [(row, case) for row in harness.rows() for case in row_cases(row)]
SIXTEEN_BIT = [
    row for row in harness.rows() if row.dtype in SHORT_DTYPE
]  # test_fp8.py has the others
_without = [row.id for row in SIXTEEN_BIT if row.op == libfa.FORWARD and not row_cases(row)]
if _without:
    raise RuntimeError(f"kernel rows without a test case: {', '.join(_without)}.")


@pytest.mark.parametrize(
    ("row", "case"),
    ROW_CASES or [pytest.param(None, None, marks=pytest.mark.skip("the library holds no rows"))],
    ids=lambda value: value.id if hasattr(value, "id") else str(value),
)
def test_row(
    row: libfa.Row, case: Case, cuda_only: None, record_property: pytest.RecordProperty
) -> None:
    if row.backend not in harness.backends():
        pytest.skip(f"{row.id} does not run on {torch.cuda.get_device_name()}")
    inputs = harness.inputs_of(case)
    options = {n: value for n, value in inputs.options.items() if "window" not in n}
    fixed = {"batch_invariant": True} if libfa.leaves_short_calls(row, harness.rows()) else {}
    with fa.backend(row.backend):
        plan = fa.explain(inputs.q, inputs.k, inputs.v, window_size=case.window, **options, **fixed)
    record_property("plan", plan)
    chosen = re.search(r"^row\s+(\S+)", plan, re.MULTILINE)
    assert chosen is not None, plan
    if row.id in harness.ELSEWHERE and chosen[1] != row.id:
        pytest.skip(f"{row.id} runs where shared memory is smaller; here {chosen[1]} does")
    assert chosen[1] == row.id, f"another row runs than {row.id}: {plan}"
    right = harness.expected_of(case)
    assert harness.check_inputs(inputs, row.backend, lambda: right, **fixed) == "ran"


def test_build_holds_rows_for_this_device(cuda_only: None) -> None:
    """Everything below would pass without a single kernel: this is what fails then."""
    assert harness.rows(), "the library holds no kernel row (or was not found)"
    assert harness.backends(), f"no row runs on {torch.cuda.get_device_name()}"


HAND_PICKED = [case for case in hand_picked() if harness.can_be_case(case)]
SWEEP = [case for case in sweep(SWEEP_SEED, SWEEP_COUNT) if harness.can_be_case(case)]


@harness.each_backend()
@pytest.mark.parametrize("case", HAND_PICKED, ids=lambda case: case.id)
def test_hand_picked(case: Case, backend: str) -> None:
    harness.check_case(case, backend)


@harness.each_backend()
@pytest.mark.parametrize("case", SWEEP, ids=lambda case: case.id)
def test_sweep(case: Case, backend: str) -> None:
    harness.check_case(case, backend)
