# SPDX-License-Identifier: BSD-3-Clause
# Are Nsight Compute's numbers read, shown, compared and drawn as they are? On made-up reports.

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "ncu"))

import ncu_fixture as fixture  # noqa: E402
import ncu_table  # noqa: E402
import one_call  # noqa: E402
import profile_page  # noqa: E402

import bench_cells  # noqa: E402
import ncu_reader  # noqa: E402
from libfa import Row  # noqa: E402

FLOPS = 1e12


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "new.csv"
    path.write_text(fixture.page([(fixture.FORWARD, {}), (fixture.PREPARE, {})]))
    path.with_suffix(".json").write_text(json.dumps({"flops": FLOPS}))
    return path


def test_a_raw_page_is_read(report: Path) -> None:
    forward, prepare = ncu_reader.read_report(report)
    assert forward.row == "sm90_fwd_bf16_d128_none" and prepare.row == "sm90_bwd_bf16_d128_band"
    assert forward.label == "fa_fwd sm90_fwd_bf16_d128_none"
    assert forward.metrics["gpu__time_duration.sum"] == 1_250_000
    assert forward.units["dram__bytes_read.sum"] == "byte"
    absent = "sm__pipe_tma_cycles_active.avg.pct_of_peak_sustained_active"
    assert absent not in forward.metrics  # "n/a" is no number


def test_a_kernel_of_another_library_has_its_own_name() -> None:
    launch = ncu_reader.read_csv(fixture.page([(fixture.GEMM, {})]))[0]
    assert launch.row is None and launch.label == fixture.GEMM


@pytest.mark.parametrize("text", ["", "==ERROR== nothing\n", '"Metric Name","Metric Value"\n'])
def test_what_is_no_raw_page_is_refused(text: str) -> None:
    with pytest.raises(ncu_reader.ReportError, match="not a raw page"):
        ncu_reader.read_csv(text)


@pytest.mark.parametrize("family", ncu_reader.FAMILIES)
def test_the_sets_are_complete(family: str) -> None:
    metrics = ncu_reader.metric_set(family)
    names = [m.name for m in metrics]
    assert len(set(names)) == len(names)
    wanted = "pipe_tensor pipe_xu pipe_fma inst_issued lts__t_sectors dram__bytes stalled"
    wanted += " bank_conflicts op_local_ld op_local_st gpu__time"
    for part in wanted.split() + (["tma", "gmma"] if family == "sm90" else ["hmma"]):
        assert any(part in name for name in names), part
    # wgmma reads 0 under these (design of the sets), so that no table may show them.
    assert not any("sm__ops_path_tensor" in name or "subpipe" in name for name in names)
    assert all(m.title and m.group for m in metrics)


def test_a_table_shows_counters_and_what_follows(report: Path, capsys) -> None:
    assert ncu_table.main([str(report)]) == 0
    text = capsys.readouterr().out
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "1250.0 µs" in lines["duration"]
    assert "200.0 MB" in lines["DRAM read"]
    assert "1.00 GB" in lines["L2 sectors read by multiprocessors"]  # 31.25e6 sectors of 32 bytes
    assert "80.5 %" in lines["tensor pipe busy"]
    # 1e12 FLOPs in 1.25 ms; only the kernel that does the arithmetic has them.
    assert lines["TFLOP/s"].split("|")[2:4] == [" 800 ", " – "]
    assert lines["FLOPs per DRAM byte"].split("|")[2] == " 4000 "
    assert "0.20 TB/s" in lines["DRAM rate"]
    assert "sm__pipe_tma_cycles_active" in text.rsplit("Not in the report", 1)[1]


def test_two_reports_are_compared(report: Path, tmp_path: Path, capsys) -> None:
    old = tmp_path / "old.csv"
    slower = {
        "gpu__time_duration.sum": "2,500,000",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "40.5",
    }
    old.write_text(fixture.page([(fixture.FORWARD, slower), (fixture.GEMM, {})]))
    assert ncu_table.main([str(report), "--compare", str(old)]) == 0
    text = capsys.readouterr().out
    assert "| duration | 2500.0 µs | 1250.0 µs | -50.0 % |" in text
    assert "| tensor pipe busy | 40.5 % | 80.5 % | +40.0 points |" in text
    assert "the older report has no such kernel" in text  # prepare
    assert f"{fixture.GEMM}: the newer report has no such kernel" in text


def test_a_roofline_has_the_measured_ceilings(report: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results.jsonl"
    known = {"op": "gemm", "tflops": 700.0}, {"op": "copy", "gbs": 4200.0}
    bench_cells.write_lines(results, [bench_cells.record(**line) for line in known])
    assert ncu_table.ceilings(results) == (700.0, 4.2)
    picture = tmp_path / "roofline.png"
    arguments = [str(report), "--roofline", str(picture), "--ceilings", str(results)]
    assert ncu_table.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1 of 2 kernels" in capsys.readouterr().out


def test_without_ceilings_there_is_no_roofline(report: Path, tmp_path: Path, capsys) -> None:
    arguments = ["--roofline", str(tmp_path / "r.png"), "--ceilings", str(tmp_path / "none.jsonl")]
    assert ncu_table.main([str(report), *arguments]) == 2
    assert "bench.py --ops gemm,copy" in capsys.readouterr().err


def test_a_roofline_without_matplotlib_is_a_sentence(
    report: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ncu_table.main([str(report), "--roofline", str(tmp_path / "r.png")]) == 2
    said = capsys.readouterr()
    assert "a roofline needs matplotlib, which is not installed" in said.err
    assert "| duration |" in said.out, "the table is there all the same"


def test_the_committed_results_hold_the_ceilings() -> None:
    tflops, tbs = ncu_table.ceilings()
    assert 100 < tflops < 2000 and 1 < tbs < 10


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.ncu-rep"], "no such report"),
        (["--set", "sm90", "nowhere.csv"], "no such report"),
    ],
)
def test_a_missing_report_is_a_sentence(arguments: list[str], words: str, capsys) -> None:
    assert ncu_table.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "output, words",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may not read"),
        ("==WARNING== No kernels were profiled.", "no kernel of that name"),
        ("==ERROR== Failed to find metric x", "Failed to find metric x"),
        ("all is well", None),
    ],
)
def test_why_nothing_was_counted(output: str, words: str | None) -> None:
    reason = ncu_reader.complaint(output)
    assert reason is None if words is None else words in (reason or "")


# --- what is profiled ---------------------------------------------------------------------------


def row(name: str, op: int = 1, dim: int = 128, dim_v: int = 128) -> Row:
    return Row(name, op, 90, "bfloat16", dim, dim_v, "band", 128, 128, 384, 100000)


def test_rows_by_id_and_by_pattern() -> None:
    rows = [row("sm90_fwd_bf16_d64_band"), row("sm90_fwd_bf16_d64_band_m128"), row("sm80_fwd")]
    patterns = rows[0].id, "*d64*", "m128", "x", "m128,sm80_fwd"
    ids = [[r.id for r in one_call.matching(p, rows)] for p in patterns]
    both = [rows[1].id, rows[2].id]
    assert ids == [[rows[0].id], [rows[0].id, rows[1].id], [rows[1].id], [], both]


def test_a_row_says_what_is_called() -> None:
    cell = one_call.cell_of(row("a", op=2, dim=192), one_call.parse_shape("2x8192x16"), True)
    assert (cell.batch, cell.seqlen, cell.heads, cell.work) == (2, 8192, 16, "backward")
    assert (cell.head_dim, cell.head_dim_v, cell.causal) == (192, 128, True)
    assert one_call.cell_of(row("a"), None, False).heads == 16
    decode = one_call.cell_of(row("a"), one_call.parse_shape("8x1x32x16384"), False)
    assert (decode.batch, decode.seqlen, decode.heads, decode.keys) == (8, 1, 32, 16384)


@pytest.mark.parametrize("text", ["2x8192", "0x1x1", "axbxc", "1x2x3x4x5"])
def test_a_wrong_shape_is_a_sentence(text: str) -> None:
    with pytest.raises(Exception, match="batch x length x heads"):
        one_call.parse_shape(text)


def profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "tools" / "ncu" / "profile.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    "arguments, words",
    [((), "which row"), (("--shape",), "which row"), (("sm90", "-o"), "needs a folder")],
)
def test_profile_says_what_it_misses(arguments: tuple[str, ...], words: str) -> None:
    done = profile(*arguments)
    assert done.returncode == 2 and words in done.stderr


def test_profile_explains_itself() -> None:
    done = profile("--help")
    assert done.returncode == 0 and "FA_NCU_SET" in done.stdout and "2x8192x16" in done.stdout


PYTHON = """#!/bin/sh
case $* in
  *machine.py*) exit 0 ;;
  *one_call.py*--list*) echo sm90_fwd_row; echo sm80_fwd_row; exit 0 ;;
esac
exec {python} "$@"
"""
NCU = """#!{python}
import sys
from pathlib import Path
words = sys.argv[1:]
if "--query-metrics" in words:
    sys.exit(0)
if "--import" in words:
    print({page!r})
    sys.exit(0)
Path({calls!r}).open("a").write(repr(words) + "\\n")
if "regex:sm80_fwd_row|fa_combine" in words:
    print("==ERROR== made up")
    sys.exit(1)
Path(words[words.index("-o") + 1]).touch()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("ncu_report") is not None,
    reason="the package ncu-report would read the report, which is a stand-in for ncu here",
)
def test_profile_goes_on_behind_a_row_that_fails(tmp_path: Path) -> None:
    calls, folder = tmp_path / "calls", tmp_path / "a folder"
    known = {"python": sys.executable, "page": fixture.page([(fixture.FORWARD, {})])}
    for name, text in (("python", PYTHON), ("ncu", NCU)):
        (tmp_path / name).write_text(text.format(calls=str(calls), **known))
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        [
            *("bash", str(ROOT / "tools" / "ncu" / "profile.sh"), "sm*", "2x512x4", "--causal"),
            *("-o", str(folder)),
        ],
        env=os.environ | {"PYTHON": str(tmp_path / "python"), "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "sm80_fwd_row: nothing was profiled: made up" in done.stderr
    assert "| duration | 1250.0 µs |" in (folder / "sm90_fwd_row.md").read_text()
    assert not (folder / "sm80_fwd_row.md").exists()
    first = calls.read_text().splitlines()[0]
    for words in ("'--shape', '2x512x4', '--causal'", repr(str(folder / "sm90_fwd_row.json"))):
        assert words in first


# --- reports and ncu itself ---------------------------------------------------------------------


def listing(*names: str) -> str:
    """What `ncu --query-metrics` prints: base names, type, unit, words."""
    many = [f"made_up__metric_{i}" for i in range(200)]
    lines = [f"{name:<60} Counter  byte  # of something" for name in (*names, *many)]
    return "\n".join(["Device NVIDIA (made up)", "-" * 70, *lines])


def test_metrics_that_ncu_does_not_count_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = listing("dram__bytes_read", "smsp__sass_inst_executed_op_local_ld")
    done = subprocess.CompletedProcess([], 0, text, "")
    monkeypatch.setattr(ncu_reader, "need_ncu", lambda: "ncu")
    monkeypatch.setattr(ncu_reader.subprocess, "run", lambda *_, **__: done)
    asked = ["dram__bytes_read.sum", "nothing__of_that.sum"]
    asked += [f"smsp__sass_inst_executed_op_local_{way}.sum" for way in ("ld", "st")]
    known, unknown = ncu_reader.known_metrics(asked)
    assert known == [asked[0], asked[2]] and unknown == [asked[1], asked[3]]


def test_an_ncu_that_lists_nothing_judges_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "unrecognised option")
    monkeypatch.setattr(ncu_reader, "need_ncu", lambda: "ncu")
    monkeypatch.setattr(ncu_reader.subprocess, "run", lambda *_, **__: done)
    assert ncu_reader.known_metrics(["a__b.sum"]) == (["a__b.sum"], [])


class StandInMetric:
    """A metric as the package `ncu-report` gives it."""

    ValueKind_STRING = 1

    def __init__(self, value: float | str) -> None:
        self.value = value

    def has_value(self) -> bool:
        return True

    def kind(self) -> int:
        return int(isinstance(self.value, str))

    def as_double(self) -> float:
        assert isinstance(self.value, float)
        return self.value

    def unit(self) -> str:
        return "byte"


class StandInAction:
    NameBase_DEMANGLED = 1
    metrics = {"dram__bytes_read.sum": 5.0, "launch__block": "(384, 1, 1)"}

    def name(self, base: int) -> str:
        assert base == self.NameBase_DEMANGLED
        return fixture.FORWARD

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def metric_by_name(self, name: str) -> StandInMetric:
        return StandInMetric(self.metrics[name])


class StandInRange:
    def num_actions(self) -> int:
        return 2

    def action_by_idx(self, _: int) -> StandInAction:
        return StandInAction()


class StandInPackage:
    @staticmethod
    def load_report(path: str) -> StandInPackage:
        assert path.endswith(".ncu-rep")
        return StandInPackage()

    def num_ranges(self) -> int:
        return 1

    def range_by_idx(self, _: int) -> StandInRange:
        return StandInRange()


def test_a_report_is_read_by_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "row.ncu-rep"
    path.touch()
    monkeypatch.setattr(ncu_reader.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(ncu_reader.importlib, "import_module", lambda _: StandInPackage)
    launches = ncu_reader.read_report(path)
    assert [launch.row for launch in launches] == ["sm90_fwd_bf16_d128_none"] * 2
    assert launches[0].metrics == {"dram__bytes_read.sum": 5.0}  # words are no numbers
    assert launches[0].units == {"dram__bytes_read.sum": "byte"}


def test_a_report_without_a_reader_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "row.ncu-rep"
    path.touch()
    monkeypatch.setattr(ncu_reader.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(ncu_reader, "find_ncu", lambda: None)
    with pytest.raises(ncu_reader.ReportError, match="ncu-report"):
        ncu_reader.read_report(path)


# --- the page of committed profiles -------------------------------------------------------------


def test_committed_profiles_and_their_page_agree() -> None:
    assert profile_page.main(["--check"]) == 0
    lines = profile_page.read()
    rows = [line["row"] for line in lines]
    for family in ("sm90_fwd_bf16", "sm90_bwd", "sm90_fwd_e4m3", "sm80_fwd", "sm80_bwd"):
        assert any(row.startswith(family) for row in rows), f"no {family} row was profiled"


def test_a_page_of_profiles_is_made_from_reports(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name in ("LINES", "PAGE", "PLOT"):
        monkeypatch.setattr(profile_page, name, tmp_path / name.lower())
    assert profile_page.main(["--check"]) == 2 and "does not exist" in capsys.readouterr().err
    assert profile_page.main([str(report)]) == 2 and "profile the row again" in (
        capsys.readouterr().err
    )
    note = {"row": "sm90_fwd_bf16_d128_none", "cell": "a call", "batch": 4, "heads": 16}
    note |= {"flops": FLOPS, "date": "2000-01-01", "commit": "0" * 40, "gpu": "made up"}
    report.with_suffix(".json").write_text(json.dumps(note | {"driver": "1"}))
    monkeypatch.setattr(profile_page, "PLOT", tmp_path / "roofline.png")
    assert profile_page.main([str(report)]) == 0 and (tmp_path / "roofline.png").is_file()
    text = (tmp_path / "page").read_text()
    assert "## sm90_fwd_bf16_d128_none" in text and "| duration | 1250.0 µs | 1250.0 µs |" in text
    assert profile_page.main(["--check"]) == 0
    (tmp_path / "page").write_text(text + "x")
    assert profile_page.main(["--check"]) == 1


def test_the_busiest_units_come_first() -> None:
    shares = {profile_page.UNITS[unit]: share for unit, share in (("XU", 40.0), ("DRAM", 70.0))}
    kernel = ncu_table.Kernel(ncu_reader.Launch(fixture.FORWARD, shares))
    assert profile_page.busiest(kernel) == "DRAM 70 %, XU 40 %"
    known = {m.name for family in ncu_reader.FAMILIES for m in ncu_reader.metric_set(family)}
    assert set(profile_page.UNITS.values()) <= known
