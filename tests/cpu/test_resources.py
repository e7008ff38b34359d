# SPDX-License-Identifier: BSD-3-Clause
# Are registers, memory and instructions of kernels read right, and is local memory found?

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_same_code import cubin

import resources
import toolchain

ROW = "sm90_fwd_bf16_d64_band"
MANGLED = f"_ZN2fa4sm906fa_fwdINS_4rows{len(ROW)}{ROW}EEEvNS0_12KernelParamsIT_EE"
SASS = """
	code for sm_90a
		Function : {function}
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
        /*0010*/              @!P0 MUFU.EX2 R2, R3 ;
        /*0020*/                   FFMA R2, R3, R4, R5 ;
        /*0030*/                   UTMALDG.4D [UR8], [UR4] ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;{more}
"""


def test_names_are_read_from_mangled_ones() -> None:
    assert resources.kernel_name(MANGLED) == (ROW, "fa_fwd")
    convert = (
        "_ZN2fa14fa_bwd_convertINS_4rows22sm90_bwd_bf16_d64_bandENS_16AccumulatorOrderILi64EEEEE"
        "vNS_7BwdArgsE"
    )
    assert resources.kernel_name(convert) == ("sm90_bwd_bf16_d64_band", "fa_bwd_convert")
    combine = "_ZN2fa16fa_combine_partsIfLi128EEEvNS_11CombineArgsE"
    assert resources.kernel_name(combine) == ("", "fa_combine_parts")
    assert resources.kernel_name("main") == ("", "main")


def test_every_kernel_of_the_architectures_folders_is_known() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [
        p.read_text() for f in ("kernels_sm80", "kernels_sm90") for p in root.glob(f"{f}/**/*.h")
    ]
    names = {n for s in sources for n in re.findall(r"__global__[^{;]*?\b(fa_\w+)\(", s)}
    beside = {"fa_transpose_v"}  # ahead of an e4m3 forward: no products
    assert names - beside == set(resources.MAIN_KERNELS)


def test_a_cubin_is_read_without_disassembly() -> None:
    (kernel,) = resources.kernels_of_cubin("sm_90a", cubin(kernel=MANGLED, code=bytes(160)))
    assert (kernel.row, kernel.name, kernel.target) == (ROW, "fa_fwd", "sm_90a")
    assert (kernel.registers, kernel.stack, kernel.static_shared, kernel.code) == (
        168,
        0,
        1024,
        160,
    )
    assert kernel.blocks is None, "nobody said how many threads"
    kernel.threads, kernel.dynamic_shared = 384, 115712
    assert kernel.blocks == 1, "65536 registers hold one block of 384 x 168"
    kernel.registers, kernel.threads = 64, 128
    assert kernel.blocks == 2, "228 KB hold two of 114 KB; the reserved 1 KB counts once"
    (other,) = resources.kernels_of_cubin("sm_80", cubin(kernel="_Z5otherv"))
    assert other.row == other.name == "other"


@pytest.fixture
def cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in: one cubin per object, and the disassembly that the test wants."""

    def put(more: str = "", function: str = MANGLED) -> Path:
        script = tmp_path / "bin" / "cuobjdump"
        script.parent.mkdir(exist_ok=True)
        text = SASS.format(function=function, more=more)
        script.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"if sys.argv[1] == '-sass': print({text!r})\n"
            "else:\n"
            "    assert sys.argv[1:3] == ['-xelf', 'all'], sys.argv\n"
            f"    pathlib.Path('x.1.sm_90a.cubin').write_bytes({cubin(kernel=MANGLED)!r})\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(toolchain, "find_cuda_tool", lambda name: str(script))
        (tmp_path / "build").mkdir(exist_ok=True)
        (tmp_path / "build" / "row.cu.o").touch()
        return tmp_path / "build"

    return put


def test_a_build_folder_as_table_and_json(
    cuobjdump, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = cuobjdump()
    file, markdown = tmp_path / "r.json", tmp_path / "r.md"
    arguments = [str(build), "--instructions", "--json", str(file), "--markdown", str(markdown)]
    assert resources.main(arguments) == 0
    out = capsys.readouterr().out
    assert (
        f"| {ROW} | fa_fwd | sm_90a | 168 | – | – | 1024 | – | 0 | 16 | 1 | 1 | 1 | 1 | 0 " in out
    )
    record = json.loads(file.read_text())
    assert (record["row"], record["opcodes"]["HGMMA"], record["opcodes"]["MUFU"]) == (ROW, 1, 1)
    assert markdown.read_text().startswith("# Resources of every kernel")
    assert resources.main([str(build), "--rows", "sm80_*"]) == 2
    assert "no row that matches 'sm80_*'" in capsys.readouterr().out


def test_local_memory_is_a_failure(cuobjdump, capsys: pytest.CaptureFixture[str]) -> None:
    build = cuobjdump("\n        /*0050*/                   STL [R1], R2 ;")
    assert resources.main([str(build)]) == 0, "without --instructions only a stack frame is seen"
    assert resources.main([str(build), "--instructions"]) == 1
    assert f"{ROW} fa_fwd on sm_90a: 1 accesses of local memory." in capsys.readouterr().err
    framed = resources.Kernel(ROW, "fa_fwd", "sm_90a", MANGLED, stack=16)
    assert resources.problems([framed]) == [f"{ROW} fa_fwd on sm_90a: a stack frame of 16 bytes."]


def test_a_kernel_without_code_is_no_kernel_without_local_memory(
    cuobjdump, capsys: pytest.CaptureFixture[str]
) -> None:
    build = cuobjdump(function="another")
    assert resources.main([str(build), "--instructions"]) == 2
    assert f"cuobjdump shows no code of {MANGLED}" in capsys.readouterr().err


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resources.main([str(tmp_path)]) == 2
    assert "holds no *.cu.o: name a library" in capsys.readouterr().err
    (tmp_path / "a.cu.o").touch()
    monkeypatch.setattr(toolchain, "find_cuda_tool", lambda name: None)
    assert resources.main([str(tmp_path)]) == 2
    assert "cuobjdump is needed" in capsys.readouterr().err
