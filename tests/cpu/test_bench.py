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

import ladder
import perf_page
from bench_cells import (
    BASE_FIELDS,
    FIELDS,
    Cell,
    Record,
    backward_cells,
    best_peer,
    by_cell,
    cell_key,
    column,
    compare,
    forward_cells,
    geometric_mean,
    is_ours,
    not_measured,
    ratio,
    read_lines,
    record,
    shape_cells,
    step_cells,
    visible_pairs,
    write_lines,
)
from bench_models import model_cells, small
from bench_report import page
from bench_tables import change_table, columns_of, figure, forward_table
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
    assert list(BASE_FIELDS) == ACCEPTED
    assert FIELDS[: len(ACCEPTED)] == BASE_FIELDS
    with pytest.raises(ValueError, match="speed"):
        record(speed=1)


def test_cells_are_those_of_the_table() -> None:
    cells = forward_cells(["bfloat16"])
    assert len(cells) == 3 * 2 * 3
    one = next(c for c in cells if (c.head_dim, c.causal, c.seqlen) == (128, True, 4096))
    assert (one.batch, one.heads) == (4, 16)
    assert one.flops == 4 * 128 * 4 * 16 * (4096 * 4097 / 2)
    assert one.bytes == 4 * 2 * 4 * 4096 * 16 * 128 + 4 * 4 * 16 * 4096


def test_cells_of_other_shapes() -> None:
    cells = shape_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.fields()["op"] == "shapes" for cell in cells)
    named = {cell.name: cell for cell in cells}
    group = named["bfloat16 D128 causal S4096 B4 H32/8"]
    assert group.bytes == (2 * 128 * (2 * 32 + 2 * 8) + 4 * 32) * 16384
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
    assert visible_pairs(8, 8, True) == reference.visible(8, 8, -1, 0, 0).sum() == 36


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
    with pytest.raises(SystemExit):
        ladder.main([files[0], str(tmp_path / "c.jsonl")])
    assert "there is no file" in capsys.readouterr().err


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
    command += ["--report", str(tmp_path / "run.html")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_lines(file)
    ops = {"forward", "shapes", "backward", "models", "models step", "host", "gemm", "copy"}
    assert {x["op"] for x in found} == ops
    assert {x["score"] for x in found if x["model"]} == {"scale", "softcap 50", "sinks"}
    assert all(x["p20_ms"] <= x["median_ms"] <= x["p80_ms"] for x in found)
    modes = {(x["impl"], x["deterministic"]) for x in found if x["op"] == "backward"}
    assert modes == {("fa", False), ("fa", True), ("sdpa", False)}
    assert {x["impl"] for x in found if x["op"] == "forward"} == {"fa", "sdpa"}
    entries = {x["impl"] for x in found if x["op"] == "host"}
    both = {f"{who}.{part}" for who in ("sdpa", "fa") for part in ("record", "backward", "train")}
    alone = {"sdpa", "fa.raw_op", "fa.attention", "fa.ops.forward", "fa.backward_op"}
    assert entries == both | alone
    assert all(x["median_ms"] > 0 and x["repeats"] >= 3 for x in found)
    assert len({x["run_id"] for x in found}) == 1
    assert "geometric mean" in done.stdout
    assert "peer sdpa: " in done.stdout
    assert "WRONG" not in done.stdout
    assert (tmp_path / "run.html").read_text().startswith(page(found)[:-1])


def test_backward_cells_count_five_products() -> None:
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

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("no 80 GB")

    impls = [
        bench_impls.Impl("peer", lambda: right),
        bench_impls.Impl("fa", lambda: right * 1.5, row=SM90),
        bench_impls.Impl("broken", lambda: 1 / 0),
        bench_impls.Impl("fa", lambda: 1 / 0, row=SM80),
        bench_impls.Impl("fa", out_of_memory, row="sm80_large"),
    ]
    good, notes = bench_impls.usable(Cell("bfloat16", 64, False, 4), impls)
    assert [impl.name for impl in good] == ["peer"]
    assert any("WRONG" in note and SM90 in note for note in notes)
    (peer,) = (note for note in notes if "broken did not run: ZeroDivisionError" in note)
    assert "WRONG" not in peer, "a peer may fail"
    assert any(f"WRONG: fa {SM80} did not run: ZeroDivisionError" in note for note in notes)
    (large,) = (note for note in notes if "OutOfMemoryError" in note)
    assert "WRONG" not in large


def test_bad_arguments_say_what_is_allowed() -> None:
    for arguments, text in (
        (["--ops", "sideways"], "forward"),
        (["--device", "cpu", "--timer", "graph"], "graph needs a GPU"),
        (["--report", "page.pdf"], ".html or .png"),
        (["--compare", "no.jsonl"], "there is no file no.jsonl"),
    ):
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


def test_cells_of_models() -> None:
    cells = model_cells()
    assert len({cell_key(record(**cell.fields(), l2="hot")) for cell in cells}) == len(cells)
    named = {(cell.model, cell.work): cell for cell in cells}
    llama = named["Llama-3 8B", "forward"]
    assert (llama.heads, llama.key_heads, llama.head_dim, llama.seqlen) == (32, 8, 128, 8192)
    assert llama.name == "Llama-3 8B: bfloat16 D128 causal S8192 B1 H32/8"
    assert llama.flops == 4 * 128 * 32 * (8192 * 8193 / 2)
    oss = named["gpt-oss local", "forward"]
    assert (oss.score, oss.window, oss.causal) == ("sinks", (127, 0), False)
    assert oss.flops == 4 * 64 * 64 * reference.visible(16384, 16384, 127, 0, 0).sum()
    assert named["Gemma-2 9B local", "forward"].name.endswith(
        "window 4095,0 S8192 B1 H16/8 softcap 50"
    )
    decode = named["Llama-3 8B decode", "forward"]
    assert (decode.batch, decode.seqlen, decode.keys) == (16, 1, 8192)
    assert decode.flops / decode.bytes < 5, "reads of the cache are what it costs"
    assert named["BERT large", "step"].op == "models step"
    videos = [cell for cell in cells if cell.seqlen > 30000 and not cell.causal]
    assert len(videos) == 2
    for cell in cells:
        tiny = small(cell)
        assert tiny.flops < 2e8
        assert (tiny.score, tiny.head_dim, tiny.head_dim_v) == (
            *(cell.score, cell.head_dim, cell.head_dim_v),
        )


def test_bytes_follow_the_dtype() -> None:
    e4m3, bf16 = (Cell(dtype, 128, False, 1024) for dtype in ("float8_e4m3fn", "bfloat16"))
    elements, rows = 16384 * 2048, 16384 * 16
    assert bf16.bytes == 4 * 2 * elements + 4 * rows
    assert e4m3.bytes == (3 * 1 + 2) * elements + 4 * rows, "its output has 16 bits"


def test_memory_bound_cells_show_their_bandwidth() -> None:
    assert figure(record(tflops=2.0, gbs=3000.0)) == "2 (3000 GB/s)"
    assert figure(record(tflops=600.0, gbs=800.0)) == "600"


def spread(ms: float, low: float, high: float) -> list[Record]:
    return [line("fa", ms, SM90) | {"p20_ms": low, "p80_ms": high}]


def test_a_loss_within_the_spread_of_both_runs_is_none() -> None:
    (inside,) = compare(spread(1.0, 0.9, 1.2), spread(1.1, 1.0, 1.3))
    assert inside.gain == pytest.approx(-1 / 11)
    assert not inside.lost, "p20 of the new run is faster than p80 of the old"
    (outside,) = compare(spread(1.0, 0.98, 1.02), spread(1.1, 1.08, 1.12))
    assert outside.lost
    (slight,) = compare(spread(1.0, 0.999, 1.001), spread(1.02, 1.019, 1.021))
    assert not slight.lost, "2 % are allowed"
    without = [x | {"p20_ms": None, "p80_ms": None} for x in spread(1.0, 1.0, 1.0)]
    (old,) = compare(without, spread(1.1, 1.08, 1.12))
    assert old.lost, "a file from before the fields"


def test_a_host_time_is_held_against_the_same_work_of_sdpa() -> None:
    def host(**times: float) -> list[Record]:
        return [
            record(op="host", dtype="bfloat16", impl=name.replace("_", "."), median_ms=ms)
            for name, ms in times.items()
        ]

    before = host(sdpa=0.03, sdpa_train=0.3, fa_train=0.3, fa_attention=0.02)
    after = host(sdpa=0.06, sdpa_train=0.3, fa_train=0.3, fa_attention=0.04)
    changes = {change.name: change for change in compare(before, after)}
    assert changes["fa.train"].unit == "x best of sdpa.train" and not changes["fa.train"].lost
    assert changes["fa.attention"].unit == "x best of sdpa"
    assert changes["fa.attention"].gain == pytest.approx(0)


def test_cells_that_are_gone_are_named() -> None:
    assert not_measured(lines(), lines()) == []
    gone = not_measured(lines() + lines(seqlen=4096), lines())
    assert gone == [f"forward bfloat16 D128 full S4096 {row}" for row in (SM90, SM80)]
    assert not_measured([record(op="host", impl="fa.train")], lines()) == []


def test_a_file_without_the_later_fields_can_be_read(tmp_path: Path) -> None:
    old = dict.fromkeys(BASE_FIELDS) | {"op": "copy"}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    (found,) = read_lines(tmp_path / "old.jsonl")
    assert list(found) == list(FIELDS)
    assert read_lines(ROOT / "docs" / "results" / "h200.jsonl")


def test_the_page_shows_every_cell_and_its_spread() -> None:
    common = {"commit": "c" * 40, "gpu": "H<200>", "driver": "1", "torch": "2", "timer": "events"}
    one = [x | common | {"p20_ms": 0.9, "p80_ms": 1.1, "sm_mhz": [1500, 1700]} for x in lines()]
    text = page(one, ["a <note>"])
    assert text.count("<rect") == len(one)
    assert text.count("<path") == len(one)
    assert "SM clock 1500 to 1700 MHz, temperature unknown." in text
    assert "H&lt;200&gt;" in text
    assert "<p>a &lt;note&gt;</p>" in text


def test_the_list_of_cells_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    import bench

    only = ["--only", "Wan*", "--only", "BERT*"]
    assert bench.main(["--list", "--ops", "models", *only]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[:22] for line in out] == [
        *("models      BERT large", "models      Wan2.1 1.3", "models      Wan2.1 14B"),
        "models step BERT large",
    ]
    assert out[0].endswith(": bfloat16 D64 full S512 B32 H16: 34.36 GFLOP, 135.3 MB")


def test_losses_on_another_gpu_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    import bench

    options = bench.parse(["--device", "cpu", "--ops", "forward", "--no-peers"])
    run = bench.Bench(options)
    run.lines = lines(ours=1.25)
    run.common["gpu"] = "H200"
    old = [x | {"gpu": "H200"} for x in lines() + lines(seqlen=2048)]
    (one, two) = bench.compared(run, old)
    assert SM90 in one
    assert "-20.0 %" in one
    assert SM80 in two
    out = capsys.readouterr().out
    assert "in the older file alone: forward bfloat16 D128 full S2048" in out
    assert "compared: 2 rows, -20.0 % in the mean, 2 lost." in out
    run.common["gpu"] = "A100"
    assert bench.compared(run, old) == []
    assert "the older file is of H200, this is A100; none counts." in capsys.readouterr().out
    run.lines = lines(seqlen=512)
    assert bench.compared(run, old) == ["the older file has no cell in common with this run."]


def test_a_row_that_is_gone_is_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that this build refuses, and that the older file has figures of."""
    pytest.importorskip("torch")
    import bench

    run = bench.Bench(bench.parse(["--device", "cpu", "--ops", "forward", "--no-peers"]))
    run.common["gpu"] = "H200"
    old = [x | {"gpu": "H200"} for x in lines()]
    run.lines = [x for x in lines() if x["row"] != SM90]
    assert bench.compared(run, old) == [], "not asked for in this run"
    key = bench.cells.cell_key(old[0])
    run.refused = {(key, "sm80")}
    assert bench.compared(run, old) == [], "measured all the same"
    run.refused.add((key, "sm90"))
    (one,) = bench.compared(run, old)
    assert (
        one == f"forward bfloat16 D128 full S1024 {SM90}: refused now, measured in the older file."
    )
    run.common["gpu"] = "A100"
    assert bench.compared(run, old) == []
    capsys.readouterr()


def test_what_a_run_refuses_is_kept_for_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    import bench

    monkeypatch.setattr(bench.impls, "ours", lambda *_: "no row for it")
    run = bench.Bench(bench.parse(["--device", "cpu", "--ops", "forward", "--no-peers"]))
    cell = Cell("float32", 64, False, 64, 64, 64)
    run._cells([cell])
    line = bench.cells.record(**cell.fields(), l2="hot")
    assert run.refused == {(bench.cells.cell_key(line), "cpu")}
    assert any("no row for it" in note for note in run.notes)
    capsys.readouterr()


def test_peers_are_named_with_what_they_never_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import bench_impls

    report = bench_impls.peer_report({"fa4": "flash_attn.cute"}, True)
    assert any(
        line.startswith("peer fa4: flash_attn.cute") and "16 bits" in line for line in report
    )
    assert "peer fa3: absent, no module fa3_fwd_interface or flash_attn_interface" in report
    monkeypatch.setattr(bench_impls, "MODULES", {})
    monkeypatch.setenv(bench_impls.KEEP_COMPILED, "")  # so that it is undone
    monkeypatch.delenv(bench_impls.KEEP_COMPILED)
    assert bench_impls.peer_modules() == {}
    assert os.environ[bench_impls.KEEP_COMPILED] == "1", "before it is imported"


def test_columns_of_a_table_have_one_order() -> None:
    names = ("fa4", "cudnn", "fa3", "fa2", "fa sm90", "fa sm80")
    cells: dict[tuple[str, ...], dict[str, Record]] = {(): dict.fromkeys(names, {})}
    assert columns_of(cells) == ["fa sm90", "fa sm80", "fa2", "cudnn", "fa3", "fa4"]
