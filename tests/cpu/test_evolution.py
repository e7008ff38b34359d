# SPDX-License-Identifier: BSD-3-Clause
# Is FlashAttention 1's schedule right, do the byte formulas count what it moves, is the page whole?

from __future__ import annotations

from pathlib import Path

import ncu_fixture as fixture
import pytest
import torch

import evolution
import evolution_bytes as count
import evolution_count as counting
import evolution_fa1 as fa1
import evolution_impls as generations
import evolution_lines
import ncu_reader
from fa import reference

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 63, 64, 65, 128, 129, 200, 257)


def qkv(length: int, dim: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(length, dim, generator=generator, dtype=dtype) for _ in "qkv")


# --- FlashAttention 1's schedule ----------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_schedule_is_exact(length: int, causal: bool) -> None:
    q, k, v = qkv(length, 64)
    out, lse, _ = fa1.model(q, k, v, causal)
    views = (t[None, :, None] for t in (q, k, v))
    right, right_lse = reference.attention(*views, causal=causal)
    torch.testing.assert_close(out, right[0, :, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, right_lse[0, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tiles", [(16, 16), (16, 64), (64, 64)])
def test_the_schedule_is_exact_with_other_tiles(tiles: tuple[int, int]) -> None:
    q, k, v = qkv(150, 32)
    views = (t[None, :, None] for t in (q, k, v))
    right = reference.attention(*views, causal=True)[0][0, :, 0]
    out = fa1.model(q, k, v, True, *tiles)[0]
    torch.testing.assert_close(out, right, rtol=1e-12, atol=1e-12)


def test_tiles_that_would_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of rows=64"):
        fa1.model(*qkv(100, 64), True, 64, 96)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (100 * t.float() for t in qkv(200, 64))
    out = fa1.model(q, k, v)[0]
    views = (t.double()[None, :, None] for t in (q, k, v))
    right = reference.attention(*views)[0][0, :, 0]
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), right, rtol=1e-2, atol=1e-2)


def test_the_kernel_has_the_tiles_of_the_model() -> None:
    text = fa1.SOURCE.read_text()
    assert f"kRows = {fa1.ROWS}, kKeys = {fa1.KEYS}" in text


# --- formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_formula_counts_what_the_schedule_moves(length: int, causal: bool) -> None:
    q, k, v = qkv(length, 64, torch.bfloat16)
    traffic = fa1.model(q, k, v, causal)[2]
    one_head = count.fa1(count.Shape(1, 1, length, 64, causal), fa1.ROWS, fa1.KEYS)
    assert one_head.read == sum(traffic.read.values())
    assert one_head.written == sum(traffic.written.values())
    more = count.fa1(count.Shape(2, 3, length, 64, causal), fa1.ROWS, fa1.KEYS)
    assert (more.read, more.written) == (6 * one_head.read, 6 * one_head.written)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", [(128, 128), (192, 128), (64, 64), (128, 80)])
@pytest.mark.parametrize("length", [1, 100, 128, 1000, 1024])
def test_keys_read_by_row_tiles(length: int, tiles: tuple[int, int], causal: bool) -> None:
    rows, keys = tiles
    brute = 0
    for first in range(0, length, rows):
        last_row = min(first + rows, length) - 1
        for first_key in range(0, length, keys):
            if not causal or first_key <= last_row:
                brute += min(keys, length - first_key)
    assert count.seen_keys(length, rows, keys, causal) == brute


def test_known_orders_of_growth() -> None:
    """N² for what is stored, N for what is not; passes over K and V grow with N / rows."""
    small, large = (count.Shape(1, 1, n, 128) for n in (8192, 16384))
    assert 3.9 < count.standard(large).total / count.standard(small).total < 4.0
    assert count.flash(large).total == 2 * count.flash(small).total
    assert 3.9 < count.flash_l2(large, 128, 128).read / count.flash_l2(small, 128, 128).read < 4.0
    assert 3.9 < count.fa1(large, 64, 128).read / count.fa1(small, 64, 128).read < 4.01
    # One fp16 score matrix of one head: 128 MiB at 8192, 2 GiB at 32768.
    scores = [count.standard_kernels(count.Shape(1, 1, n, 64))["scores"] for n in (8192, 32768)]
    assert [moved.written for moved in scores] == [128 << 20, 2 << 30]


def test_standard_attention_counts_its_kernels() -> None:
    n, d = 1000, 64
    full = count.standard(count.Shape(1, 1, n, d))
    assert full.total == 2 * (4 * n * n + 4 * n * d)
    causal = count.standard(count.Shape(1, 1, n, d, causal=True))
    assert causal.total == full.total + 2 * 2 * n * n + n * n  # read and written, and the mask


def test_backward_formulas_count_every_tensor() -> None:
    n, d = 1024, 128
    shape = count.Shape(1, 1, n, d)
    one_block = count.flash_backward_l2(shape, 64, n)  # a block that owns all keys: everything once
    assert one_block.read == count.flash_backward(shape).read - 4 * n * d
    causal = count.flash_backward_l2(count.Shape(1, 1, 16 * n, d, causal=True), 64, 128)
    full = count.flash_backward_l2(count.Shape(1, 1, 16 * n, d), 64, 128)
    assert 0.5 < causal.read / full.read < 0.55


def test_e4m3_moves_v_twice_more() -> None:
    wide, narrow = count.Shape(1, 1, 512, 64), count.Shape(1, 1, 512, 64, element=1)
    assert count.flash(narrow).total == count.flash(wide).total - 3 * 512 * 64 + 2 * 512 * 64
    assert count.flash_memory(narrow) - count.flash_memory(wide) == 512 * 64


# --- the tool -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> list[evolution_lines.Line]:
    path = tmp_path_factory.mktemp("evolution") / "lines.jsonl"
    arguments = ["--device", "cpu", "--repeats", "1", "--json", str(path), "--lengths", "64,130"]
    assert evolution.main(arguments) == 0
    return evolution_lines.read(path)


def test_a_smoke_run_times_every_generation(smoke: list[evolution_lines.Line]) -> None:
    forward = evolution_lines.chosen(smoke, "time", op="forward", causal=True, seqlen=130)
    assert {one["impl"] for one in forward} == {"standard", "fa1", "fa2"}
    assert all(one["median_ms"] > 0 and one["tflops"] > 0 for one in forward)
    backward = evolution_lines.chosen(smoke, "time", op="backward", causal=False, seqlen=64)
    assert {one["impl"] for one in backward} == {"standard", "fa2"}
    absent = evolution_lines.chosen(smoke, "absent", op="backward", causal=False, seqlen=64)
    assert {one["impl"] for one in absent} == {"fa1", "fa3"}
    assert all(len(one["note"]) > 20 for one in absent)


def test_all_generations_are_equally_exact(smoke: list[evolution_lines.Line]) -> None:
    errors = {one["impl"]: one["rms_error"] for one in evolution_lines.chosen(smoke, "error")}
    assert set(errors) == {"standard", "fa1", "fa2"}
    assert all(0 < error < 3 * errors["standard"] for error in errors.values())


def test_standard_attention_is_right() -> None:
    one = generations.small(generations.cell(100, 64, True))
    tensors = generations.tensors_of(one, "cpu")
    impl = generations.standard(one, tensors)
    assert not isinstance(impl, str)
    exact = generations.exact_answer(one, tensors)
    assert impl.call().shape == exact.shape
    assert generations.errors(impl.call(), exact)[0] < 0.03


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--parts", "speed"], "speed"),
        (["--lengths", "many"], "whole numbers"),
        (["--dims", "96"], "64 and 128"),
        (["--lengths", "0"], "positive"),
    ],
)
def test_wrong_arguments_are_sentences(arguments: list[str], words: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        evolution.main([*arguments, "--device", "cpu"])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_lines_have_the_same_fields_always(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speed"):
        evolution_lines.line(kind="time", speed=1)
    with pytest.raises(ValueError, match="none of time"):
        evolution_lines.line(kind="guess")
    path = tmp_path / "lines.jsonl"
    path.write_text('{"kind": "time"}\n')
    with pytest.raises(ValueError, match="lines.jsonl:1"):
        evolution_lines.read(path)


# --- counted bytes ------------------------------------------------------------------------------


def launches(*names: str) -> list[ncu_reader.Launch]:
    return ncu_reader.read_csv(fixture.page([(name, {}) for name in names]))


def test_kernels_are_grouped_by_the_separator() -> None:
    separator = "void at::native::vectorized_elementwise_kernel<4, at::native::erfinv_kernel_cuda>"
    groups = counting.grouped(
        launches(fixture.GEMM, fixture.GEMM, separator, separator, fixture.FORWARD, separator)
    )
    assert [len(group) for group in groups] == [2, 0, 1]


def test_bytes_of_a_call_are_summed_over_its_kernels() -> None:
    names = fixture.GEMM, fixture.GEMM
    known = counting.counted(launches(*names))
    assert known["dram_read"] == 2 * 200e6 and known["dram_written"] == 2 * 50e6
    assert known["l2_read"] == 2 * 31.25e6 * 32 and known["l2_read_by"] == counting.L2[0]
    assert known["l2_written"] is None  # not in the page: unknown, not 0
    assert len(known["kernels"]) == 2


def test_a_kernel_with_tma_counts_what_tma_brought() -> None:
    text = fixture.page(
        [(fixture.FORWARD, {counting.TMA: "900,000,000"}), (fixture.PREPARE, {counting.TMA: "0"})]
    )
    known = counting.counted(ncu_reader.read_csv(text))
    assert known["l2_read"] == 900e6 + 31.25e6 * 32  # each kernel by its own way
    assert known["l2_read_by"] == f"{counting.TMA} + {counting.L2[0]}"
    without = counting.counted(launches(fixture.FORWARD))
    assert without["l2_read_by"] == counting.L2[0]


def test_jobs_cover_both_directions_and_masks() -> None:
    jobs = counting.jobs_of(128, evolution.LENGTHS, counting.COUNTED)
    assert [job["number"] for job in jobs] == list(range(len(jobs)))
    kinds = {(job["work"], job["causal"], job["dtype"]) for job in jobs}
    assert ("backward", False, "bfloat16") in kinds and ("forward", True, "bfloat16") in kinds
    assert any(job["dtype"].startswith("float8") for job in jobs)
    assert {job["length"] for job in jobs} == set(counting.COUNTED)
