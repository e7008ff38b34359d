# SPDX-License-Identifier: BSD-3-Clause
"""Does the build ask for what it needs and no more, and do its gauges notice a bad row?"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

import check_budgets
import check_sass
import compile_probe
import gen_variants
import toolchain

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLES = ("FA_ARCHS", "FA_NVCC", "FA_CUTLASS_DIR", "FA_PROFILE", "FA_ONLY", "FA_BUILD_DIR")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (*VARIABLES, "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# --- Architectures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("80;90a", ["80", "90a"]),
        ("90a,80", ["80", "90a"]),
        ("90a 80 80", ["80", "90a"]),
        (" 90a ", ["90a"]),
        ("none", []),
        ("NONE", []),
        ("", []),
    ],
)
def test_archs_are_read(text, archs):
    assert toolchain.parse_archs(text) == archs


@pytest.mark.parametrize("text", ["90", "70", "80;sm_90", "none;80", "80+PTX"])
def test_unknown_archs_are_refused_with_the_allowed_ones(text):
    with pytest.raises(toolchain.ToolchainError) as error:
        toolchain.parse_archs(text)
    assert "80, 90a" in str(error.value) and text in str(error.value)


@pytest.mark.parametrize(
    ("capabilities", "archs"),
    [
        ([], []),
        ([7.5], []),
        ([8.0], ["80"]),
        ([8.9, 7.0], ["80"]),
        ([9.0], ["80", "90a"]),
        ([12.0, 9.0], ["80", "90a"]),
        ([10.0], ["80"]),
    ],
)
def test_archs_follow_the_gpus(capabilities, archs):
    assert toolchain.archs_for(capabilities) == archs


@pytest.mark.parametrize(
    ("script", "archs", "words"),
    [
        ("print('9.0'); print('9.0')", ["80", "90a"], "compute capability 9.0"),
        ("print('8.6')", ["80"], "compute capability 8.6"),
        ("print('7.0')", [], "kernels need 8.0 or newer"),
        ("import sys; sys.exit('driver not loaded')", [], "driver not loaded"),
    ],
)
def test_the_default_asks_nvidia_smi(tmp_path, monkeypatch, script, archs, words):
    program(tmp_path / "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, line = toolchain.wanted_archs()
    assert found == archs
    assert words in line and "\n" not in line


def test_no_gpu_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found, line = toolchain.wanted_archs()
    assert found == [] and "host library without GPU kernels" in line
    assert "FA_ARCHS='80;90a'" in line and "\n" not in line


# --- Compilers and headers ----------------------------------------------------------------------


def test_nvcc_is_searched_and_old_ones_are_passed_over(tmp_path, monkeypatch):
    old = program(tmp_path / "old" / "nvcc", "print('release 12.4, V12.4.1')")
    new = program(tmp_path / "home" / "bin" / "nvcc", "print('release 12.8, V12.8.0')")
    monkeypatch.setenv("CUDACXX", str(old))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_nvcc() == str(new)
    monkeypatch.setenv("FA_NVCC", str(old))
    with pytest.raises(toolchain.ToolchainError, match=r"is release 12\.4; nvcc 12\.8 or newer"):
        toolchain.find_nvcc()
    monkeypatch.setenv("FA_NVCC", str(tmp_path / "absent"))
    with pytest.raises(toolchain.ToolchainError, match="does not run"):
        toolchain.find_nvcc()


def test_cutlass_is_found_without_an_import(tmp_path, monkeypatch):
    tree = tmp_path / "tree" / "include" / "cute"
    tree.mkdir(parents=True)
    (tree / "tensor.hpp").write_text("")
    monkeypatch.setenv("FA_CUTLASS_DIR", str(tmp_path / "tree"))
    assert toolchain.find_cutlass() == str(tmp_path / "tree" / "include")
    monkeypatch.setenv("FA_CUTLASS_DIR", str(tmp_path))
    with pytest.raises(toolchain.ToolchainError, match=r"holds no include/cute/tensor\.hpp"):
        toolchain.find_cutlass()
    monkeypatch.delenv("FA_CUTLASS_DIR")
    package = tmp_path / "site" / "cutlass_library"
    (package / "source" / "include" / "cute").mkdir(parents=True)
    (package / "source" / "include" / "cute" / "tensor.hpp").write_text("")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert toolchain.find_cutlass() == str(package / "source" / "include")


# --- Build backend ------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch):
    """Our backend over a recording stand-in for scikit-build-core, which tests need not have."""
    calls = []

    def build_wheel(directory, settings=None, metadata=None):
        calls.append(settings)
        return "fa.whl"

    skbuild = types.ModuleType("scikit_build_core.build")
    for kind in ("wheel", "editable", "sdist"):
        setattr(skbuild, f"get_requires_for_build_{kind}", lambda settings=None: ["ninja>=1.5"])
        setattr(skbuild, f"build_{kind}", build_wheel)
    package = types.ModuleType("scikit_build_core")
    package.build = skbuild
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", skbuild)
    monkeypatch.delitem(sys.modules, "build_backend", raising=False)
    import build_backend

    monkeypatch.delitem(sys.modules, "build_backend")
    build_backend.calls = calls
    return build_backend


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_requirements_follow_the_architectures(backend, monkeypatch, kind):
    requires = getattr(backend, f"get_requires_for_build_{kind}")
    monkeypatch.setenv("FA_ARCHS", "none")
    assert requires() == ["ninja>=1.5"]
    monkeypatch.setenv("FA_ARCHS", "80;90a")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    assert requires() == ["ninja>=1.5", "nvidia-cutlass==4.2.0.0"]
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    everything = requires()
    assert everything[:2] == ["ninja>=1.5", "nvidia-cutlass==4.2.0.0"]
    names = {re.split("[=<>]", r)[0] for r in everything[2:]}
    assert names == {
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-cccl",
        "nvidia-cuda-runtime",
    }
    monkeypatch.setenv("FA_CUTLASS_DIR", "somewhere")
    assert "nvidia-cutlass==4.2.0.0" not in requires()
    assert requires({"cmake.define.FA_ARCHS": "none"}) == ["ninja>=1.5"]
    assert not any("torch" in r for r in everything)


def test_the_static_requirements_hold_no_compiler_and_no_torch():
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = (\[.*\])$", text, re.M)
    assert requires and json.loads(requires[1]) == ["scikit-build-core>=0.11"]
    assert re.search(r"^dependencies = \[\]$", text, re.M)


def test_settings_reach_cmake(backend, monkeypatch, capsys):
    monkeypatch.setenv("FA_ARCHS", "90a")
    monkeypatch.setenv("FA_PROFILE", "dev")
    monkeypatch.setenv("FA_BUILD_DIR", "kept")
    backend.build_wheel("out", {"cmake.define.FA_BUILD_TESTS": "ON"})
    (settings,) = backend.calls
    assert settings["cmake.define.FA_ARCHS"] == "90a"
    assert settings["cmake.define.FA_PROFILE"] == "dev"
    assert settings["cmake.define.FA_ONLY"] == ""
    assert settings["cmake.define.FA_BUILD_TESTS"] == "ON"
    assert settings["build-dir"] == "kept"
    assert capsys.readouterr().out == "fa: kernels for 90a (FA_ARCHS).\n"
    backend.build_wheel("out", {"build-dir": "mine", "cmake.define.FA_ARCHS": "none"})
    assert backend.calls[1]["build-dir"] == "mine"
    assert backend.calls[1]["cmake.define.FA_ARCHS"] == "none"


def test_presets_name_profiles_that_exist():
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    visible = {p["name"]: p for p in presets["configurePresets"] if not p.get("hidden")}
    assert set(visible) == {"dev", "one", "release", "full", "lab", "smoke"}
    assert {p["configurePreset"] for p in presets["buildPresets"]} == set(visible)
    profiles = {p["cacheVariables"].get("FA_PROFILE") for p in visible.values()}
    assert profiles - {None} == set(gen_variants.PROFILES)


# --- Gauges -------------------------------------------------------------------------------------

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6fa_fwd' for 'sm_90a'
ptxas info    : Function properties for _Z6fa_fwd
    {stack} bytes stack frame, {spill} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
NOTE = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in function '_Z6fa_fwd'\n"
)


def fake_compiler(path: Path, said: str, status: int = 0, hit: bool = False) -> Path:
    return program(
        path,
        f"""import os, sys
sys.stderr.write({said!r})
if {hit}:
    open(os.environ["CCACHE_STATSLOG"], "w").write("# row.cu\\ndirect_cache_hit\\n")
open(sys.argv[sys.argv.index("-o") + 1], "w").write("object")
sys.exit({status})
""",
    )


def probe(tmp_path: Path, compiler: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "compile_probe.py", "--records", tmp_path / "probe"]
    command += ["--", compiler, "-c", "row.cu", "-o", tmp_path / "row.cu.o"]
    return subprocess.run([str(w) for w in command], capture_output=True, text=True, check=False)


def test_the_probe_records_what_ptxas_said(tmp_path):
    said = PTXAS.format(stack=16, spill=8) + NOTE + "row.cu(3): warning: unused\n"
    done = probe(tmp_path, fake_compiler(tmp_path / "cc", said))
    assert done.returncode == 0
    assert "C7510" in done.stderr and "warning: unused" in done.stderr
    assert "stack frame" not in done.stderr and "registers, used" not in done.stderr
    record = json.loads((tmp_path / "probe" / "row.json").read_text())
    (kernel,) = record["kernels"]
    assert kernel["target"] == "sm_90a" and kernel["registers"] == 168
    assert (kernel["stack"], kernel["spill_stores"]) == (16, 8)
    assert record["seconds"] > 0 and record["peak_mb"] > 0 and not record["cached"]
    assert len(record["advisories"]) == 1


def test_a_cached_unit_keeps_its_last_record(tmp_path):
    said = PTXAS.format(stack=0, spill=0)
    assert probe(tmp_path, fake_compiler(tmp_path / "cc", said, hit=True)).returncode == 0
    path = tmp_path / "probe" / "row.json"
    first = json.loads(path.read_text())
    assert first["cached"] and first["seconds"] is None and first["kernels"][0]["registers"] == 168
    path.write_text(json.dumps(first | {"seconds": 17.5, "peak_mb": 900}))
    assert probe(tmp_path, fake_compiler(tmp_path / "cc", said, hit=True)).returncode == 0
    again = json.loads(path.read_text())
    assert (again["seconds"], again["peak_mb"]) == (17.5, 900)


def test_seconds_in_which_a_compiler_waits_do_not_count(tmp_path):
    compiler = fake_compiler(tmp_path / "cc", PTXAS.format(stack=0, spill=0))
    slow = "import os, sys, time\ntime.sleep(1.5)\n"
    compiler.write_text(compiler.read_text().replace("import os, sys\n", slow))
    assert probe(tmp_path, compiler).returncode == 0
    assert slow in compiler.read_text()
    assert 0 < json.loads((tmp_path / "probe" / "row.json").read_text())["seconds"] < 1.5


def test_a_failing_compiler_fails_and_leaves_no_record(tmp_path):
    said = PTXAS.format(stack=0, spill=0) + "row.cu(7): error: no\n"
    done = probe(tmp_path, fake_compiler(tmp_path / "cc", said, status=3))
    assert done.returncode == 3 and "error: no" in done.stderr
    assert not (tmp_path / "probe").exists()


def record_of(stack: int = 0, spill: int = 0, note: str = "", seconds: float = 20.0) -> dict:
    kernels, advisories = compile_probe.parse_ptxas(PTXAS.format(stack=stack, spill=spill) + note)
    return {"unit": "row", "seconds": seconds, "kernels": kernels, "advisories": advisories}


def test_budgets_name_each_broken_limit():
    assert check_budgets.row_problems(record_of()) == []
    assert check_budgets.row_problems(record_of() | {"seconds": None}) == []
    for record, words in [
        (record_of(stack=16), "16 bytes of stack frame on sm_90a"),
        (record_of(spill=4), "4 bytes of spill stores"),
        (record_of(note=NOTE), "C7510"),
        (record_of(note=NOTE.replace("C7510", "C7508")), "C7508"),
        (record_of(note=NOTE.replace("C7510", "C7519")), "C7519"),
        (record_of(seconds=121), "121 core-seconds; the limit is 120."),
        (record_of() | {"kernels": []}, "ptxas named no kernel"),
    ]:
        found = check_budgets.row_problems(record)
        assert len(found) == 1 and words in found[0]
    assert check_budgets.row_problems(record_of(note=NOTE.replace("C7510", "C7520"))) == []


def test_occupancy_by_registers_threads_and_shared_memory():
    fits = check_budgets.blocks_per_multiprocessor
    assert fits(255, 128, 98816, 233472, 2048) == 2  # both limits
    assert fits(255, 128, 98816, 167936, 2048) == 1  # shared memory
    assert fits(168, 128, 49664, 167936, 2048) == 3
    assert fits(169, 128, 1024, 167936, 2048) == 2  # registers, in eights
    assert fits(32, 1024, 1024, 167936, 1536) == 1  # threads
    assert fits(32, 128, 167936, 167936, 2048) == 0
    record = {
        "unit": "row",
        "kernels": [
            {"target": "sm_80", "registers": 40},
            {"target": "sm_80", "registers": 230},
            {"target": "sm_90", "registers": 168},
        ],
    }
    line = check_budgets.occupancy_line(record, 128, 74368)
    assert "8.0: 2 x 4 warps; 8.6/8.9: 1 x 4 warps; 9.0: 3 x 4 warps" in line


SASS = """
Fatbin elf code:
================
arch = sm_90a
\t\tFunction : _Z6fa_fwd
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x0 */
        /*0010*/              @!P0 UTMALDG.4D [UR8], [UR4], desc[UR6] ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0030*/                   HFMA2.MMA R3, -RZ, RZ, 0, 0 ;
        /*12340*/             @UP1 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def test_machine_code_is_counted_and_judged():
    counts = check_sass.opcodes(SASS)
    assert counts["sm_90a"]["HGMMA"] == 2 and counts["sm_90a"]["UTMALDG"] == 1
    assert counts["sm_90a"]["HMMA"] == 0
    assert check_sass.problems("row", 90, counts) == []
    assert any("no QGMMA" in text for text in check_sass.problems("row", 90, counts, "e4m3"))
    bytes_ = check_sass.opcodes(SASS.replace("HGMMA", "QGMMA"))
    assert check_sass.problems("row", 90, bytes_, "e4m3") == []
    spilled = check_sass.opcodes(SASS + "        /*0040*/    STL [R1], R2 ;\n")
    assert any("1 STL" in text for text in check_sass.problems("row", 90, spilled))
    assert any("no sm_90a code" in text for text in check_sass.problems("row", 90, {}))
    plain = {"sm_80": Counter(HMMA=4)}
    assert check_sass.problems("row", 80, plain) == ["row: no LDGSTS in its sm_80 code."]


# --- The libraries that were built --------------------------------------------------------------


def needed(library: Path) -> set[str]:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed (package binutils)")
    text = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))


@pytest.fixture
def library() -> Path:
    from fa import _lib

    path = _lib.path()
    if not path.exists():
        pytest.skip(f"{path} does not exist; install the package or set FA_LIBRARY")
    return path


def test_the_library_needs_no_cuda_and_no_torch(library):
    names = needed(library)
    assert names and not [
        n for n in names if n.startswith(("libcu", "libtorch", "libc10", "libnv"))
    ]


def test_the_shim_names_torch_and_finds_fa_beside_it(library):
    shim = library.with_name("libfa_torch.so")
    if not shim.exists():
        pytest.skip(f"{shim} was not built (FA_TORCH_SHIM=OFF)")
    assert {"libtorch.so", "libfa.so"} <= needed(shim)
    text = subprocess.run(["readelf", "-d", shim], capture_output=True, text=True).stdout
    assert re.search(r"\(RUNPATH\).*\[\$ORIGIN\]", text), text
