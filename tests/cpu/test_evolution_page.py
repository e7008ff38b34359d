# SPDX-License-Identifier: BSD-3-Clause
# Is the page about attention's evolution whole, in both languages, with what was measured?
# The lines are made up; no figure of them is a result.

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import docs_links
import evolution_lines
import evolution_page
import evolution_tables as tables
import machine
import perf_page
from evolution_lines import Line, line

COMMON: dict[str, Any] = {
    **{"date": "2000-01-01", "commit": "0123456789abcdef", "gpu": "a made-up GPU", "driver": "1"},
    **{"torch": "2", "run_id": "r", "head_dim": 128, "heads": 16},
}
BF16 = "bfloat16"
SPEED = {"standard": 100.0, "fa1": 50.0, "fa2": 300.0, "fa3": 600.0}
ROWS = {"fa1": "fa1", "fa2": "sm80_fwd_bf16_d128_band", "fa3": "sm90_fwd_bf16_d128_none"}


def timed(impl: str, length: int, op: str = "forward", causal: bool = False, **more: Any) -> Line:
    batch = more.pop("batch", max(1, 16384 // length))
    tflops = SPEED[impl] * length / 1024
    flops = 4 * batch * 16 * length**2 * 128
    pairs = batch * 16 * length**2 * (4 if impl == "standard" else 0)
    memory = {"peak_bytes": pairs + (64 << 20), "model_memory": pairs + (64 << 20)}
    known = {"median_ms": flops / tflops / 1e9, "tflops": tflops, "row": ROWS.get(impl)} | memory
    known |= {"kind": "time", "op": op, "causal": causal, "dtype": BF16, "batch": batch} | more
    return line(**COMMON, **known, impl=impl, seqlen=length)


def counted(impl: str, length: int, **more: Any) -> Line:
    known: dict[str, Any] = {"kind": "bytes", "op": "forward", "causal": False, "dtype": BF16}
    known |= {"dram_read": 6e9, "dram_written": 4e9, "l2_read": 3e9, "model_dram": 10e9}
    known |= {"model_l2_read": None if impl == "standard" else 3e9, "kernels": [{}, {}, {}]}
    known |= {"batch": max(1, 16384 // length), "row": ROWS.get(impl)}
    return line(**COMMON, **(known | more), impl=impl, seqlen=length)


def lines() -> list[Line]:
    made = [
        timed(impl, n, op, causal)
        for impl in SPEED
        for n in (512, 1024, 16384)
        for op, causal in (("forward", False), ("forward", True), ("backward", False))
        if not (impl == "fa1" and op == "backward")
    ]
    made += [timed("fa3", n, dtype=tables.FP8, tflops=900.0) for n in (512, 1024, 16384)]
    made += [timed(impl, n, batch=1) for impl in ("standard", "fa2") for n in (128, 512)]
    made += [counted(impl, n) for impl in SPEED for n in (1024, 16384)]
    made += [counted("fa2", 4096, op="backward", dram_read=20e9)]
    for impl, error in (("standard", 2e-3), ("fa1", 1e-3), ("fa2", 1e-3), ("fa3", 1.5e-3)):
        known = {"kind": "error", "op": "forward", "causal": False, "dtype": BF16, "batch": 1}
        made.append(
            line(**COMMON, **known, impl=impl, seqlen=2048, rms_error=error, max_error=9e-3)
        )
    return made


def ablated() -> list[Line]:
    made = []
    for impl, row, ms in (
        ("fa3", "sm90_fwd_bf16_d128_none", 1.0),
        ("ablation x", "sm90_fwd_bf16_d128_none_noturns", 1.25),
    ):
        known = {"kind": "ablation", "op": "forward", "causal": False, "dtype": BF16, "batch": 4}
        made.append(
            line(
                **COMMON, **known, impl=impl, row=row, seqlen=4096, median_ms=ms, tflops=500.0 / ms
            )
        )
    return made


def figures(text: str) -> list[str]:
    """The numbers of a page's tables, in order, without those of the texts around them."""
    rows = [row for row in text.splitlines() if row.startswith("|")]
    return re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", "\n".join(rows))


def test_both_pages_are_whole() -> None:
    made = evolution_page.pages(lines() + ablated())
    assert [path.name for path in made] == ["evolution.md", "evolution.zh.md"]
    for text in made.values():
        assert "{{" not in text and "}}" not in text and "nan" not in text
        assert "a made-up GPU" in text and "0123456789ab" in text
        for name in (*evolution_page.PLOTS, evolution_page.SMALL):
            assert f"](results/{name})" in text


def test_both_languages_say_the_same_figures() -> None:
    english, chinese = evolution_page.pages(lines() + ablated()).values()
    claims = english.split("## What is claimed")[0], chinese.split("## 各种说法")[0]
    assert claims[0] and claims[1]
    wanted = [figures(text.split("## ", 2)[2]) for text in (english, chinese)]
    assert wanted[0] == wanted[1] and len(wanted[0]) > 150


def test_templates_ask_for_the_same_blocks() -> None:
    folder = evolution_page.ROOT / "tools" / "evolution"
    names = [
        re.findall(r"\{\{([^}]+)\}\}", (folder / name).read_text())
        for name in evolution_page.TEMPLATES.values()
    ]
    assert names[0] == names[1]
    asked, made = set(names[0]), set(evolution_page.blocks(lines(), tables.words_of("en")))
    assert asked == made  # nothing is made that no page shows


def test_words_exist_in_both_languages() -> None:
    english, chinese = tables.words_of("en"), tables.words_of("zh")
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert re.findall(r"\{(\w*)", text) == re.findall(r"\{(\w*)", chinese[key]), key


def test_links_of_the_pages_lead_somewhere() -> None:
    made = evolution_page.pages(lines())
    for path, text in made.items():
        for _, target in docs_links.links(text):
            if docs_links.OUTSIDE.match(target) or target.startswith("results/evolution_"):
                continue
            file, anchor = docs_links.target_of(path, target)
            assert file.is_file() or file in made, target
            if anchor and file in made:
                assert anchor in docs_links.anchors(made[file]), target
            elif anchor:
                assert anchor in docs_links.anchors(file.read_text("utf-8")), target


def test_tables_say_what_was_measured() -> None:
    words, made = tables.words_of("en"), lines()
    time = "\n".join(tables.time_table(made, words, "forward", False, 128))
    assert "| 1024 | 1.37 ms, 100 TFLOP/s | 2.75 ms, 50 TFLOP/s, 0.5× |" in time
    assert "300 TFLOP/s, 3.0×" in time and "900 TFLOP/s" in time
    assert "| 128 |" not in time  # single short sequences have a table of their own
    assert "| 128 |" in "\n".join(tables.short_table(made, words, 128))
    dram = "\n".join(tables.bytes_table(made, words, "dram"))
    assert "| 9.31 GiB | 9.31 GiB | 1.00 |" in dram
    assert "2.40 ⚠" in dram  # the backward: 24e9 counted, 10e9 by the formula
    l2 = "\n".join(tables.bytes_table(made, words, "l2"))
    assert "torch" not in l2  # no formula knows cuBLAS's tiles
    errors = "\n".join(tables.error_table(made, words))
    assert "| 1.00e-03 | 9.00e-03 | 0.50 |" in errors
    assert "400 TFLOP/s (0.80)" in "\n".join(tables.ablation_table(made + ablated(), words))
    slower = [{**one, "run_id": "s", "median_ms": 2 * one["median_ms"]} for one in ablated()]
    other = [
        {**one, "row": f"{one['row']}2", "impl": one["impl"].replace("x", "y")} for one in slower
    ]
    text = "\n".join(tables.ablation_table(made + ablated() + other, words))
    assert text.count("(0.80)") == 2  # each run against its own shipped row


def test_claims_have_their_figures() -> None:
    text = "\n".join(tables.claim_table(lines(), tables.words_of("en"), 128))
    assert "FlashAttention 2 3.0 to 3.0 times as fast" in text
    assert "FlashAttention 3 6.0 to 6.0 times" in text
    assert "16 heads, N = 128 to 512" in text
    assert "equal tokens: standard 576 MiB and 16.1 GiB" in text


@pytest.mark.parametrize("kind", evolution_page.NEEDED)
def test_a_page_with_holes_is_not_written(kind: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "lines.jsonl"
    evolution_lines.write(path, [one for one in lines() if one["kind"] != kind])
    assert evolution_page.main(["--results", str(path), "--check"]) == 2
    assert f"no lines of kind {kind}" in capsys.readouterr().err


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(tables.PageError, match="tmie"):
        evolution_page.page("{{tmie full}}", lines(), tables.words_of("en"))


def test_without_results_there_is_a_sentence(tmp_path: Path, capsys) -> None:
    assert evolution_page.main(["--results", str(tmp_path / "none.jsonl")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_committed_pages_follow_from_committed_results() -> None:
    assert evolution_page.main(["--check"]) == 0


def test_what_was_counted_agrees_with_the_formulas() -> None:
    """From N = 4096 on: L2 → SM bytes of all flash kernels, DRAM bytes of the standard form."""
    found = [
        one
        for one in evolution_lines.chosen(evolution_lines.read(evolution_page.RESULTS), "bytes")
        if one["seqlen"] >= 4096
    ]
    flash = {(one["impl"], one["op"]) for one in found if one["model_l2_read"]}
    assert flash >= {("fa1", "forward"), ("fa2", "forward"), ("fa3", "forward")}
    assert {("fa2", "backward"), ("fa3", "backward")} <= flash
    for one in found:
        if one["model_l2_read"]:
            assert one["l2_read"] == pytest.approx(one["model_l2_read"], rel=tables.AGREES)
    standard = [one for one in found if one["impl"] == "standard"]
    assert {one["seqlen"] for one in standard} >= {4096, 16384}
    assert {one["op"] for one in standard} == {"forward", "backward"}
    for one in standard:
        moved = one["dram_read"] + one["dram_written"]
        assert moved == pytest.approx(one["model_dram"], rel=tables.AGREES), one["op"]


def test_a_call_that_did_not_fit_is_named() -> None:
    said = "Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB"
    note = f"cell: standard did not run: OutOfMemoryError: CUDA out of memory. {said} is free. "
    note += "Of the allocated memory 96.81 GiB is allocated by PyTorch."
    cell = {"op": "backward", "causal": False, "dtype": BF16, "batch": 1, "seqlen": 32768}
    missing = line(**COMMON, **cell, kind="absent", impl="standard", note=note)
    some = [*lines(), timed("fa2", 32768, "backward"), missing]
    words = tables.words_of("en")
    for text in (
        tables.time_table(some, words, "backward", False, 128)[-1],
        tables.memory_table(some, words, "backward", 128)[-1],
    ):
        assert text.startswith("| 32768 | out of memory | ")
    (sentence,) = tables.memory_line(some, words)
    assert all(f"{n} GiB" in sentence for n in ("96.81", "32.00", "139.80"))
    # A generation that cannot do the work at all has a dash.
    other = line(**COMMON, **cell, kind="absent", impl="standard", note="there is no such kernel.")
    table = tables.time_table([*some[:-1], other], words, "backward", False, 128)
    assert table[-1].startswith("| 32768 | – | ")


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evolution_page.plots(lines(), tmp_path)
    for name in (*evolution_page.PLOTS, evolution_page.SMALL):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tool", [evolution_page, perf_page])
def test_without_matplotlib_nothing_is_written(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    results, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    evolution_lines.write(results, lines())
    monkeypatch.setattr(perf_page, "PAGE", page)
    page.write_text(f"{perf_page.BEGIN}\nold\n{perf_page.END}\n")
    story = tmp_path / "story.md"
    monkeypatch.setattr(evolution_page, "pages", lambda made: {story: "text"})
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        tool.main([] if tool is perf_page else ["--results", str(results)])
    assert stop.value.code == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert "old" in page.read_text() and not story.exists()
