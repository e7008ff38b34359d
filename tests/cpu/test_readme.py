# SPDX-License-Identifier: BSD-3-Clause
# Is README.md true? Its code runs, its tables are those of the table of rows and of the results.

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import docs_links
import fa
import gen_variants

ROOT = docs_links.ROOT
README = (ROOT / "README.md").read_text("utf-8")


def tables(text: str) -> Iterator[list[list[str]]]:
    """Every table, as rows of cells; the second line is left out."""
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def table_of(text: str, first: str) -> list[list[str]]:
    """The table whose first cell is `first`."""
    return next(rows for rows in tables(text) if rows[0][0] == first)


# ---- what exists ---------------------------------------------------------------------------------

INT = torch.int32
LENGTHS = torch.tensor([3, 4], dtype=INT)
ENDS = torch.tensor([0, 3, 10], dtype=INT)
PAGES = {"page_table": torch.zeros(2, 1, dtype=INT), "seqused_k": LENGTHS}


def meta(*shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def runs(
    arch: str,
    *,
    gpu: str = "",
    dim: int = 128,
    heads_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    packed: bool = False,
    grad: bool = False,
    forced: bool = True,
    **options: Any,
) -> bool:
    """Does a row of `arch` plan this call (with its backward if `grad`) on a GPU of its kind?"""
    gpu = gpu or {"sm90": "h200", "sm80": "a100"}[arch]
    front = (10,) if packed else (2, 5)
    kv = kv_dtype or dtype
    q = meta(*front, 4, dim, dtype=dtype, grad=grad)
    k, v = (meta(*front, heads_k, dim, dtype=kv, grad=grad) for _ in range(2))
    try:
        with fa.backend(arch if forced else "auto"):
            text = fa.explain(q, k, v, device=gpu, **options)
    except NotImplementedError:
        return False
    except ValueError as error:
        if "dtype" not in str(error):  # then the call itself is wrong
            raise
        return False
    return "not supported" not in text and "nearest" not in text


# What a word of the feature table means as options.
MEANS: dict[str, list[dict[str, Any]]] = {
    "causal": [{"causal": True}],
    "windows": [{"window_size": (2, 1)}],
    "chunks": [{"attention_chunk": 2}],
    "sinks": [{"sinks": torch.zeros(4)}],
    "GQA/MQA": [{}],
    "any strides": [{}],
    "ragged lengths": [{"seqused_q": LENGTHS, "seqused_k": LENGTHS}],
    "LSE": [{"return_lse": True}],
    "fp32 output": [{"out_dtype": torch.float32}],
    "packed (`cu_seqlens`)": [{"packed": True, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}],
    "`seqused`": [{"seqused_k": LENGTHS}],
    "`leftpad_k`": [{"leftpad_k": LENGTHS}],
    "`kv_batch_idx`": [{"kv_batch_idx": torch.tensor([1, 0], dtype=INT)}],
    "softcap": [{"softcap": 5.0}],
    "ALiBi": [{"alibi_slopes": torch.zeros(4)}],
    "dropout": [{"dropout_p": 0.5}],
    "split keys (`num_splits`)": [{"num_splits": 2}],
    "pages (`page_table`)": [PAGES],
}
ELSEWHERE = ("appending", "rotary")  # operators of their own, no option of the forward


@pytest.mark.usefixtures("shipped")
def test_the_feature_table_is_that_of_the_rows() -> None:
    rows = table_of(README, "feature")
    assert rows[0][1:3] == ["Hopper rows", "Ampere rows"]
    words = {w for row in rows[1:-2] for w in re.split(r"[,;] ", row[0])}
    assert words == {*MEANS, *ELSEWHERE}
    wrong = []
    for name, *cells in rows[1:-2]:
        for word in set(re.split(r"[,;] ", name)) - {*ELSEWHERE}:
            for arch, cell in zip(("sm90", "sm80"), cells, strict=False):
                for options in MEANS[word]:
                    if runs(arch, **options) != (cell != "no"):
                        wrong.append(f"{word} on {arch}: {cell}")
    for option in ("softcap", "ALiBi"):  # in the backward too
        assert all(runs(arch, grad=True, **MEANS[option][0]) for arch in ("sm90", "sm80"))
    assert not wrong


@pytest.mark.usefixtures("shipped")
def test_the_backward_and_the_dtypes_of_the_feature_table() -> None:
    backward, dtypes = table_of(README, "feature")[-2:]
    assert backward[1] == "without dropout" and runs("sm90", grad=True, dim=256)
    assert runs("sm90", grad=True, deterministic=True) and runs("sm80", grad=True, dim=256)
    assert not runs("sm90", grad=True, dropout_p=0.5) and runs("sm80", grad=True, dropout_p=0.5)
    fp8 = torch.float8_e4m3fn
    assert "e4m3" in dtypes[1] and "e4m3" not in dtypes[2]
    for dtype in (torch.float16, torch.bfloat16):
        assert runs("sm90", dtype=dtype) and runs("sm80", dtype=dtype)
    assert runs("sm90", dtype=fp8, softcap=1.0) and runs("sm90", dtype=fp8, **MEANS["ALiBi"][0])
    assert runs("sm90", dtype=fp8, q_descale=torch.ones(1)) and not runs("sm80", dtype=fp8)


@pytest.mark.usefixtures("shipped")
def test_what_the_readme_says_refuses_does() -> None:
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    refused: list[Callable[[], bool]] = [
        lambda: runs("sm80", gpu="h200", forced=False, **PAGES),
        lambda: runs("sm90", dtype=torch.float32),
        lambda: runs("sm90", dtype=torch.float64),
        lambda: runs("sm80", dtype=fp8, forced=False),
        lambda: runs("sm90", dtype=torch.float8_e5m2, forced=False),
        lambda: runs("sm90", dtype=bf16, kv_dtype=fp8, forced=False),
        lambda: runs("sm90", dtype=fp8, forced=False, num_splits=2),
        lambda: runs("sm90", dtype=fp8, forced=False, dropout_p=0.5),
        lambda: runs(
            "sm90", dtype=fp8, forced=False, k_descale=torch.ones(2, 2, 1), descale_block_k=8
        ),
    ]
    assert [i for i, call in enumerate(refused) if call()] == []
    small = {"gpu": "rtx4090", "forced": False, "grad": True}
    assert runs("sm80", **small)
    for option in ("softcap", "ALiBi", "dropout"):
        assert runs("sm80", **small, **MEANS[option][0])
    # A Hopper GPU falls back for these.
    fallbacks: list[dict[str, Any]] = [
        {"dropout_p": 0.5},
        {"num_splits": 2, "heads_k": 4},
        {"grad": True, "dropout_p": 0.5},
    ]
    for options in fallbacks:
        assert runs("sm90", forced=False, **options) and not runs("sm90", **options)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("function", [fa.kernels, fa.explain], ids=lambda f: f.__name__)
def test_examples_that_need_the_rows(function: Callable[..., Any]) -> None:
    """Those that tests/cpu/test_docs.py leaves out, for there may be no library."""
    text = (function.__doc__ or "").replace("# doctest: +SKIP", "")
    test = doctest.DocTestParser().get_doctest(
        text, {"fa": fa, "torch": torch}, function.__name__, None, 0
    )
    log: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=log.append)
    assert result.failed == 0 and result.attempted > 0, "".join(log)


def test_how_long_a_build_takes() -> None:
    said = re.search(r"take (\d+) core-minutes to [^;]*; `FA_PROFILE=dev` .* in (\w+)\.", README)
    assert said is not None
    rows = gen_variants.parse(gen_variants.TABLE.read_text())
    for profile, minutes in (("release", int(said[1])), ("dev", {"two": 2}[said[2]])):
        seconds = sum(int(row.est_s) for row in gen_variants.in_profile(rows, profile))
        assert 0.75 < seconds / (60 * minutes) < 1.25, f"{profile}: {seconds} s in the table"


# ---- how fast ------------------------------------------------------------------------------------


def test_the_figures_of_the_readme_are_those_of_the_performance_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    cells: dict[tuple[str, str], str] = {}  # (direction and cell, column) -> figure
    section = ""
    for block in re.split(r"^(?=\| cell )", page, flags=re.M)[1:]:
        header, *rows = next(tables(block))
        section = "backward" if any("det" in c for c in header) else "forward"
        for row in rows:
            for column, value in zip(header[1:], row[1:], strict=True):
                cells.setdefault((f"{section} {row[0]}", column), value)
    kinds = {"forward": "bfloat16", "backward": "bfloat16", "forward, e4m3": "float8_e4m3fn"}
    compared = 0
    for kind, dtype in kinds.items():
        header, *rows = table_of(README, kind)
        for name, *figures in rows:
            dim, mask = name.removeprefix("D ").split()
            for column, text in zip(header[1:], figures, strict=True):
                for length, shown in zip((1024, 4096, 16384), text.split(" / "), strict=False):
                    where = f"{kind.split(',')[0]} {dtype} D{dim} {mask} S{length}"
                    names = {"Hopper rows": ["fa sm90"], "Ampere rows": ["fa sm80"]}
                    wanted = names.get(column, column.removeprefix("best of ").lower().split(", "))
                    found = [cells[where, n] for n in wanted if cells.get((where, n), "–") != "–"]
                    if column.startswith("best of "):
                        measured = {n for at, n in cells if at == where} & {"cudnn", "fa3", "fa4"}
                        measured = {n for n in measured if cells[where, n] != "–"}
                        assert measured <= set(wanted), f"{where}: the README leaves a peer out"
                    best = max(found, key=float) if found else "–"
                    assert shown == best, f"{where}, {column}: {shown}, the page has {best}"
                    compared += found != []
    assert compared > 130
    for figure in re.findall(r"\d\.\d{3}", README[README.index("Geometric means") :]):
        assert f"geometric mean {figure}" in page, figure


# ---- its code ------------------------------------------------------------------------------


def small_inputs() -> dict[str, Any]:
    """What README.md takes for given, small enough for any machine."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, heads, 16, generator=g) for heads in (4, 2, 2))
    lengths = torch.tensor([0, 10, 32], dtype=torch.int32)
    pages = torch.arange(4, dtype=torch.int32).view(2, 2)
    return {
        "torch": torch,
        **{"q": q, "k": k, "v": v, "k_new": k[:, :1], "v_new": v[:, :1]},
        **{f"packed_{name}": t[0] for name, t in (("q", q), ("k", k), ("v", v))},
        **{"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "pages": pages},
        **{"k_cache": torch.zeros(4, 64, 2, 16), "v_cache": torch.zeros(4, 64, 2, 16)},
        "lengths": torch.tensor([5, 9], dtype=torch.int32),
    }


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="README shows a model of transformers"
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
    model.save_pretrained(tmp_path)
    scope = small_inputs() | {"path": str(tmp_path), "ids": torch.tensor([[1, 2, 3]])}
    found = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "README.md", "exec"), scope)
    want, _ = fa.reference.attention(scope["q"], scope["k"], scope["v"], causal=True)
    assert (scope["out"] - want).abs().max() < 1e-5  # of its last line with this name
    assert sys.modules["flash_attn"] is fa.flash_attn
