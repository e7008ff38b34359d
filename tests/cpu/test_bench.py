# SPDX-License-Identifier: BSD-3-Clause
# Are benchmark lines complete, ratios right, and losses found? The smoke run needs no GPU.

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench_cells
import ladder
import perf_page
from bench_cells import (
    FIELDS,
    Cell,
    Record,
    best_peer,
    by_cell,
    change_table,
    column,
    compare,
    forward_cells,
    forward_table,
    geometric_mean,
    is_ours,
    ratio,
    read_lines,
    record,
    shape_cells,
    visible_pairs,
    write_lines,
)
from fa import reference

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = (  # acceptance of results: the fields of one line, in order
    "date commit gpu driver torch op dtype head_dim head_dim_v causal window batch heads_q heads_k "
    "seqlen_q seqlen_k score layout deterministic num_splits impl row median_ms tflops gbs repeats "
    "timer l2 run_id"
).split()
SM90, SM80 = "sm90_fwd_bf16_d128_none", "sm80_fwd_bf16_d128_band"


def line(impl: str, ms: float, row: str | None = None, seqlen: int = 1024) -> Record:
    cell = Cell("bfloat16", 128, False, seqlen)
    figures = {"median_ms": ms, "tflops": cell.flops / ms / 1e9}
    return record(**cell.fields(), **figures, impl=impl, row=row, l2="hot", run_id="r", date="d")


def lines(ours: float = 1.0, seqlen: int = 1024, slower: float = 1.0) -> list[Record]:
    return [
        line("fa", ours * slower, SM90, seqlen),
        line("fa", 2.0 * ours * slower, SM80, seqlen),
        line("fa2", 2.4 * slower, seqlen=seqlen),
        line("cudnn", 1.2 * slower, seqlen=seqlen),
    ]


def test_fields_are_those_agreed_on() -> None:
    assert list(FIELDS) == ACCEPTED
    with pytest.raises(ValueError, match="speed"):
        record(speed=1)


def test_cells_are_those_of_the_table() -> None:
    cells = forward_cells(["bfloat16"])
    assert len(cells) == 3 * 2 * 3
    one = next(c for c in cells if (c.head_dim, c.causal, c.seqlen) == (128, True, 4096))
    assert (one.batch, one.heads) == (4, 16)
    assert one.flops == 4 * 4 * 16 * 4096**2 * 128 / 2
    assert one.bytes == 4 * 2 * 4 * 4096 * 16 * 128


def test_cells_of_other_shapes() -> None:
    cells = shape_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.fields()["op"] == "shapes" for cell in cells)
    named = {cell.name: cell for cell in cells}
    group = named["bfloat16 D128 causal S4096 B4 H32/8"]
    assert group.bytes == 2 * 128 * (2 * 32 + 2 * 8) * 16384
    assert named["bfloat16 D192x128 full S1024 B16 H16"].flops == 2 * 320 * 16 * 16 * 1024**2
    assert sum(1 for cell in cells if cell.dtype == "float16") == 6
    for rows, keys, causal, window in (
        (7, 7, False, (-1, -1)),
        (7, 12, True, (-1, -1)),
        (12, 7, True, (-1, -1)),
        (9, 9, True, (3, -1)),
        (9, 14, False, (2, 4)),
    ):
        seen = reference.visible(rows, keys, window[0], 0 if causal else window[1], 0)
        assert visible_pairs(rows, keys, causal, window) == seen.sum()
    assert visible_pairs(8, 8, True) == 32


def test_columns_tell_ours_from_fa2() -> None:
    assert [column(x) for x in lines()] == ["fa sm90", "fa sm80", "fa2", "cudnn"]
    assert [is_ours(column(x)) for x in lines()] == [True, True, False, False]
    assert is_ours("fa.attention")
    assert not is_ours("fa3")


def test_ratio_is_to_the_best_peer_and_above_one_when_faster() -> None:
    (columns,) = by_cell(lines(), "forward").values()
    peer = best_peer(columns)
    assert peer is not None
    assert peer["impl"] == "cudnn"
    assert ratio(columns["fa sm90"], peer) == pytest.approx(1.2)
    table = "\n".join(forward_table(lines() + lines(ours=1.5, seqlen=4096)))
    assert "1.20 (cudnn)" in table
    assert "0.80 (cudnn)" in table
    assert "1.20 (fa2)" in table, "an Ampere row is held against FA2"
    mean = math.sqrt(1.2 * 0.8)
    assert f"fa sm90: geometric mean {mean:.3f} × best peer, worst cell 0.80, 2 cells" in table


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(geometric_mean([]))


def test_a_slower_machine_is_no_loss_and_a_slower_kernel_is() -> None:
    for change in compare(lines(), lines(slower=1.1)):
        assert change.gain == pytest.approx(0.0)
    gains = {c.row: c.gain for c in compare(lines(), lines(ours=1.25))}
    assert gains[SM90] == pytest.approx(-0.2)
    assert "-20.0 %" in "\n".join(change_table(compare(lines(), lines(ours=1.25))))


def test_without_peers_milliseconds_are_compared() -> None:
    alone = [x for x in lines() if x["impl"] == "fa"]
    slower = [x | {"median_ms": x["median_ms"] * 2} for x in alone]
    assert {c.unit for c in compare(alone, slower)} == {"ms"}
    assert all(c.gain == pytest.approx(-0.5) for c in compare(alone, slower))


def test_files_keep_their_lines_and_refuse_others(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", lines())
    assert read_lines(tmp_path / "a.jsonl") == lines()
    (tmp_path / "b.jsonl").write_text(json.dumps({"op": "forward"}) + "\n")
    with pytest.raises(ValueError, match=r"b.jsonl:1.*median_ms"):
        read_lines(tmp_path / "b.jsonl")


def test_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = {"commit": "c" * 40}
    write_lines(tmp_path / "a.jsonl", [x | commit for x in lines()])
    write_lines(tmp_path / "b.jsonl", [x | commit for x in lines(ours=0.5)])
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert ladder.main([*files, "--rows", "sm90_*"]) == 0
    text = capsys.readouterr().out
    assert f"* {SM90}: +100.0 % over 1 cells" in text
    assert SM80 not in text
    assert ladder.main([*files, "--rows", "nothing"]) == 2


def test_page_block_and_plot(tmp_path: Path) -> None:
    common = {"commit": "c" * 40, "gpu": "H200", "driver": "1", "torch": "2"}
    all_lines = [x | common for x in lines() + lines(seqlen=4096)]
    host = record(**common, op="host", dtype="bfloat16", impl="sdpa", median_ms=0.02, run_id="r")
    ours = host | {"impl": "fa.attention", "median_ms": 0.01}
    text = perf_page.block([*all_lines, host, ours])
    assert "1.20 (cudnn)" in text
    assert "| host bfloat16 | fa.attention | 10.0 µs per call | 0.50 |" in text
    page = f"by hand\n{perf_page.BEGIN}\nold\n{perf_page.END}\nladder\n"
    assert perf_page.with_block(page, text) == f"by hand\n{text}\nladder\n"
    with pytest.raises(ValueError, match="marker"):
        perf_page.with_block("no markers", text)
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (pip install matplotlib)")
    perf_page.plot(all_lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_follows_from_the_committed_results() -> None:
    assert perf_page.main(["--check"]) == 0


def test_smoke_run(tmp_path: Path) -> None:
    """The whole program on the CPU backend, compared with itself."""
    file = tmp_path / "run.jsonl"
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "--device", "cpu", "--quick"]
    command += ["--dims", "64", "--lengths", "64", "--repeats", "3", "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_lines(file)
    assert {x["op"] for x in found} == {"forward", "shapes", "backward", "host", "gemm", "copy"}
    modes = {(x["impl"], x["deterministic"]) for x in found if x["op"] == "backward"}
    assert modes == {("fa", False), ("fa", True), ("sdpa", False)}
    assert {x["impl"] for x in found if x["op"] == "forward"} == {"fa", "sdpa"}
    entries = {x["impl"] for x in found if x["op"] == "host"}
    both = {"sdpa", "sdpa.train", "fa.train"}
    assert entries == {*both, "fa.raw_op", "fa.attention", "fa.ops.forward"}
    assert all(x["median_ms"] > 0 and x["repeats"] >= 3 for x in found)
    assert len({x["run_id"] for x in found}) == 1
    assert "geometric mean" in done.stdout


def test_backward_cells_count_five_products() -> None:
    from bench_cells import backward_cells, step_cells

    (cell,) = backward_cells(["bfloat16"], [128], [1024])[:1]
    (forward,) = forward_cells(["bfloat16"], [128], [1024])[:1]
    assert cell.flops == 2.5 * forward.flops
    assert cell.fields()["op"] == "backward"
    assert {c.fields()["op"] for c in step_cells()} == {"step"}
    line = lines()[0] | {"impl": "fa", "row": SM90, "deterministic": True}
    assert column(line) == "fa sm90 det"


def test_a_wrong_result_is_not_timed() -> None:
    torch = pytest.importorskip("torch")
    import bench_impls

    right = torch.ones(4)
    impls = [
        bench_impls.Impl("peer", lambda: right),
        bench_impls.Impl("fa", lambda: right * 1.5, row=SM90),
        bench_impls.Impl("broken", lambda: 1 / 0),
    ]
    good, notes = bench_impls.usable(Cell("bfloat16", 64, False, 4), impls)
    assert [impl.name for impl in good] == ["peer"]
    assert any("WRONG" in note and SM90 in note for note in notes)
    assert any("broken did not run: ZeroDivisionError" in note for note in notes)


def test_bad_arguments_say_what_is_allowed() -> None:
    for arguments, text in ((["--ops", "sideways"], "forward"), ([], "no CUDA GPU")):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        assert text in done.stderr


def test_row_is_read_from_a_plan() -> None:
    pytest.importorskip("torch")
    import bench_impls

    assert bench_impls.row_of(f"row {SM90}, grid 132 x 1") == SM90
    assert bench_impls.row_of("no kernel") is None


assert bench_cells.FIELDS is FIELDS
