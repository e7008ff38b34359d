# SPDX-License-Identifier: BSD-3-Clause
# Does libfa.so keep the promises of docs/abi.md towards a caller that is not C++?
"""Layout, versions, symbols, plans and errors, through ctypes; no GPU and no kernels are needed.

The library under test is the one that `fa` finds. Where there is none, and where a test depends on
what rows there are, one is compiled from the host sources with the rows of tests/cpp/fixture.h.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gen_variants
from fa import _abi, _lib

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernels_common" / "api" / "fa.h"
H200 = {"sm_count": 132, "smem_limit": 232448}
A100 = {"sm_count": 108, "smem_limit": 166912}


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of the host sources and the rows of tests/cpp/fixture.h, which can be planned."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host library with rows for tests")
    folder = tmp_path_factory.mktemp("libfa")
    exports = folder / "exports.map"
    exports.write_text("{ global: fa_*; local: *; };\n")
    sources = [*ROOT.glob("kernels_common/api/*.cpp"), *ROOT.glob("kernels_common/host/*.cpp")]
    sources.append(ROOT / "tests" / "cpp" / "registry_for_tests.cpp")
    library = folder / "libfa.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT}"]
    link = [f"-Wl,--version-script={exports}", "-o", str(library)]
    subprocess.run(["g++", *flags, *map(str, sources), *link], check=True)
    return library


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The library that `fa` finds, else the stand-in."""
    file = _lib.path()
    if not file.is_file():
        file = request.getfixturevalue("stand_in")
    monkeypatch.setattr(_lib, "_loaded", _lib._open(file))
    monkeypatch.setattr(_lib, "path", lambda: file)
    return _lib.load()


@pytest.fixture
def with_rows(
    library: ctypes.CDLL, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ctypes.CDLL:
    """The rows of tests/cpp/fixture.h: a refusal needs a row that is missing."""
    monkeypatch.setattr(_lib, "_loaded", _lib._open(request.getfixturevalue("stand_in")))
    return _lib.load()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def call(seqlen: int = 4096, dim: int = 128, **options: object) -> bytes:
    """Two batch entries, 16 query and 4 key/value heads."""
    q, k = meta(2, seqlen, 16, dim), meta(2, seqlen, 4, dim)
    return _abi.params_from_tensors(q, k, k, addresses=False, **options)


def packed_call(**options: object) -> bytes:
    q, k = meta(1000, 16, 128), meta(3000, 4, 128)
    cu = ints(6)
    return _abi.params_from_tensors(
        q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, addresses=False, **options
    )


# --- The struct ---------------------------------------------------------------------------------


def test_layout_equals_the_library(library: ctypes.CDLL) -> None:
    fields = ctypes.POINTER(_lib._Field)()
    count = library.fa_abi_layout(ctypes.byref(fields))
    theirs = [(f.name.decode(), f.offset, f.size) for f in fields[:count]]
    assert [name for name, _, _ in theirs] == list(_abi.FIELDS)
    _abi.check_layout(theirs)
    assert theirs[-1][1] + theirs[-1][2] == _abi.SIZE


def test_layout_mismatch_names_the_field() -> None:
    mine = list(
        zip(
            _abi.FIELDS,
            _abi._mirror.offsets,
            (struct.calcsize("=" + code) for code in _abi._mirror.codes),
            strict=True,
        )
    )
    _abi.check_layout(mine)
    _abi.check_layout([*mine, ("later.field", _abi.SIZE, 4)])  # a newer library, another group
    at = _abi.INDEX["mask.chunk"]
    moved = [*mine]
    moved[at] = ("mask.chunk", mine[at][1] + 4, 4)
    with pytest.raises(ImportError, match=r"mask\.chunk.*offset.*install both"):
        _abi.check_layout(moved)
    with pytest.raises(ImportError, match=r"no field state\.bytes"):
        _abi.check_layout(mine[:-1])


def test_defaults_equal_fa_params_init(library: ctypes.CDLL) -> None:
    buffer = ctypes.create_string_buffer(b"\xff" * _abi.SIZE, _abi.SIZE)
    library.fa_params_init(buffer, _abi.SIZE)
    got = dict(zip(_abi.FIELDS, _abi.unpack(buffer.raw), strict=True))
    wanted = dict(zip(_abi.FIELDS, _abi.DEFAULTS, strict=True))
    assert math.isnan(got.pop("score.scale")) and math.isnan(wanted.pop("score.scale"))
    assert got == wanted


def test_pack_params_by_name() -> None:
    values = _abi.unpack(_abi.pack_params({"q.stride_row": 64}, mask__chunk=3))
    assert values[_abi.INDEX["q.stride_row"]] == 64
    assert values[_abi.INDEX["mask.chunk"]] == 3
    assert values[_abi.INDEX["mask.window_left"]] == -1
    with pytest.raises(ValueError, match="q.stride_rows: fa_params has no such field"):
        _abi.pack_params({"q.stride_rows": 64})


def test_every_keyword_reaches_its_field() -> None:
    q = torch.zeros(2, 6, 4, 16, dtype=torch.bfloat16)
    k = torch.zeros(2, 5, 2, 16, dtype=torch.bfloat16)
    v = torch.zeros(2, 5, 2, 24, dtype=torch.bfloat16)
    out = torch.zeros(2, 4, 6, 24).transpose(1, 2)
    lse = torch.zeros(2, 4, 6)
    used_q, used_k, pad, index = (torch.ones(2, dtype=torch.int32) for _ in range(4))
    slopes, sinks = torch.zeros(2, 4), torch.zeros(4, dtype=torch.bfloat16)
    seed = torch.zeros(2, dtype=torch.int64)
    packed = _abi.params_from_tensors(
        *(q, k, v, out, lse),
        seqused_q=used_q,
        seqused_k=used_k,
        leftpad_k=pad,
        kv_batch_idx=index,
        alibi_slopes=slopes,
        sinks=sinks,
        softmax_scale=0.25,
        window_left=3,
        window_right=1 << 40,
        attention_chunk=7,
        softcap=2.0,
        dropout_p=0.5,
        philox_seed_offset=seed,
        num_splits=2,
        batch_invariant=True,
        deterministic=True,
        force_arch=80,
        sm_count=5,
        smem_limit=6,
    )
    got = dict(zip(_abi.FIELDS, _abi.unpack(packed), strict=True))
    wanted = dict(zip(_abi.FIELDS, _abi.DEFAULTS, strict=True))
    for name, t, dtype in (("q", q, 2), ("k", k, 2), ("v", v, 2), ("out", out, 4)):
        wanted[f"{name}.data"] = t.data_ptr()
        for part, stride in zip(("batch", "row", "head", "dim"), t.stride(), strict=True):
            wanted[f"{name}.stride_{part}"] = stride
        wanted[f"{name}.dtype"] = dtype
    wanted |= {"lse.data": lse.data_ptr(), "lse.stride_batch": 24, "lse.stride_head": 6}
    wanted |= {"shape.batch": 2, "shape.seqlen_q": 6, "shape.seqlen_k": 5}
    wanted |= {"shape.heads_q": 4, "shape.heads_k": 2, "shape.dim_qk": 16, "shape.dim_v": 24}
    wanted |= {"score.scale": 0.25, "score.softcap": 2.0}
    wanted |= {"score.alibi_slopes.data": slopes.data_ptr(), "score.alibi_slopes.dtype": 4}
    wanted |= {"score.alibi_slopes.stride_batch": 4, "score.alibi_slopes.stride_head": 1}
    wanted |= {"score.sinks.data": sinks.data_ptr(), "score.sinks.dtype": 2}
    wanted |= {"score.sinks.stride_head": 1}
    wanted |= {"mask.window_left": 3, "mask.window_right": 1 << 30, "mask.chunk": 7}
    wanted |= {"seq.used_q": used_q.data_ptr(), "seq.used_k": used_k.data_ptr()}
    wanted |= {"seq.leftpad_k": pad.data_ptr(), "seq.batch_index_k": index.data_ptr()}
    wanted |= {"dropout.p": 0.5, "dropout.seed_offset": seed.data_ptr()}
    wanted |= {"options.num_splits": 2, "options.force_arch": 80, "options.deterministic": 1}
    wanted |= {"options.batch_invariant": 1, "options.sm_count": 5, "options.smem_limit": 6}
    assert {n: v for n, v in got.items() if v != wanted[n]} == {}


def test_packed_and_paged_shapes() -> None:
    values = dict(zip(_abi.FIELDS, _abi.unpack(packed_call(max_seqlen_q=300)), strict=True))
    assert values["shape.batch"] == 5 and values["shape.seqlen_q"] == 300
    assert values["shape.total_q"] == 1000 and values["shape.total_k"] == 3000
    assert values["q.stride_batch"] == 0 and values["q.stride_row"] == 16 * 128
    assert values["seq.cu_q"] == _abi.PLACEHOLDER and values["q.data"] == 0
    q, pages = meta(2, 1, 4, 64), meta(100, 32, 2, 64)
    packed = _abi.params_from_tensors(
        *(q, pages, pages), page_table=ints(2, 9), seqused_k=ints(2), addresses=False
    )
    values = dict(zip(_abi.FIELDS, _abi.unpack(packed), strict=True))
    assert values["pages.page_size"] == 32 and values["pages.num_pages"] == 100
    assert values["pages.table_stride"] == 9 and values["shape.seqlen_k"] == 9 * 32
    with pytest.raises(ValueError, match=r"seqused_k: dtype torch\.int64 is not int32"):
        _abi.params_from_tensors(q, q, q, seqused_k=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="window_right: 3 contradicts causal=True"):
        _abi.params_from_tensors(q, q, q, causal=True, window_right=3)


# --- Versions -----------------------------------------------------------------------------------


def test_versions_are_checked(library: ctypes.CDLL) -> None:
    good = _lib.why_not(_lib.FORWARD, call(**H200))
    with pytest.raises(ImportError, match="abi_version is 0.*fa_params_init"):
        _lib.workspace_size(_lib.FORWARD, bytes(_abi.SIZE))
    with pytest.raises(ImportError, match="abi_version is 7"):
        _lib.workspace_size(_lib.FORWARD, _abi.pack_params(abi_version=7))
    with pytest.raises(ImportError, match="struct_size is 100 bytes"):
        _lib.workspace_size(_lib.FORWARD, _abi.pack_params(struct_size=100))
    # Older: ends where `state` begins, and what follows is never read.
    params = bytearray(call(**H200))
    short = _abi._mirror.offsets[_abi.INDEX["state.data"]]
    struct.pack_into("=I", params, 0, short)
    assert _lib.why_not(_lib.FORWARD, bytes(params[:short]) + b"\xee" * 16) == good
    # Newer: an unknown tail of zeros is nothing, anything else an option we do not have.
    struct.pack_into("=I", params, 0, _abi.SIZE + 24)
    assert _lib.why_not(_lib.FORWARD, bytes(params) + bytes(24)) == good
    with pytest.raises(ImportError, match="byte 850 beyond them is not zero.*Install a library"):
        _lib.workspace_size(_lib.FORWARD, bytes(params) + bytes(10) + b"\1" + bytes(13))


def compile_stub(folder: Path, code: str) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile a library of another version")
    names = re.findall(r"FA_API [^;(]*?(fa_\w+)\(", HEADER.read_text())
    lines = [code]
    lines += [f"int {name}(void) {{ return 0; }}" for name in names if f"{name}(" not in code]
    (folder / "stub.c").write_text("\n".join(lines))
    library = folder / "stub.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(library), str(folder / "stub.c")], check=True
    )
    return library


def test_a_foreign_library_is_refused(tmp_path: Path) -> None:
    other = compile_stub(tmp_path, "int fa_abi_version(void) { return 2; }")
    with pytest.raises(ImportError, match=r"stub\.so speaks ABI version 2.*pip install \."):
        _lib._open(other)


def test_a_foreign_layout_is_refused(tmp_path: Path) -> None:
    code = """
      struct field { const char* name; unsigned offset, size; };
      static const struct field fields[] = {{"struct_size", 0, 4}, {"abi_version", 8, 4}};
      unsigned long fa_abi_layout(const struct field** f) { *f = fields; return 2; }
      int fa_abi_version(void) { return 1; }"""
    with pytest.raises(ImportError, match=r"abi_version \(offset 8.*abi_version \(offset 4"):
        _lib._open(compile_stub(tmp_path, code))


def test_a_missing_library_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lib, "_loaded", None)
    monkeypatch.setenv("FA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(_lib.LibraryMissing, match=r"none\.so.*FA_ARCHS.*pip install \."):
        _lib.load()
    assert not _lib.available()
    (tmp_path / "none.so").write_text("not a library")
    with pytest.raises(ImportError, match=r"cannot be loaded.*pip install \."):
        _lib.load()


# --- The file -----------------------------------------------------------------------------------


def test_exports_equal_the_header(library: ctypes.CDLL) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm to list the symbols of the library")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(_lib.path())], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in listing.splitlines()}
    declared = set(re.findall(r"FA_API [^;(]*?(fa_\w+)\(", HEADER.read_text()))
    assert len(declared) == 16
    assert exported == declared


def test_loads_without_gpu_and_torch(library: ctypes.CDLL) -> None:
    code = f"""
import ctypes, sys
library = ctypes.CDLL({str(_lib.path())!r})
library.fa_version.restype = ctypes.c_char_p
print(library.fa_version().decode(), library.fa_kernel_count())
maps = open("/proc/self/maps").read()
assert "torch" not in sys.modules and "libtorch" not in maps and "libcuda.so" not in maps, maps
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == _lib.version().split()[0]


# --- Plans --------------------------------------------------------------------------------------


def test_explain_on_a_nominal_h200(with_rows: ctypes.CDLL) -> None:
    text = _lib.explain(_lib.FORWARD, call(causal=True, **H200))
    assert re.search(r"^row +sm90_fwd_bf16_d128_band ", text, re.M), text
    assert "132 SMs" in text and re.search(r"^grid +132 blocks, each", text, re.M), text
    assert re.search(r"^workspace +0 bytes", text, re.M), text
    assert "fallback" not in text
    assert _lib.why_not(_lib.FORWARD, call(causal=True, **H200)) is None
    assert _lib.workspace_size(_lib.FORWARD, call(causal=True, **H200)) == 0


def test_explain_on_a_nominal_a100(with_rows: ctypes.CDLL) -> None:
    text = _lib.explain(_lib.FORWARD, call(causal=True, **A100))
    assert re.search(r"^row +sm80_fwd_bf16_d128_band ", text, re.M), text
    assert "compute capability 8.0 (nominal), 108 SMs" in text
    assert "fallback" not in text


def test_explain_says_why_hopper_falls_back(with_rows: ctypes.CDLL) -> None:
    rows = [row["id"] for row in _lib.kernels_list() if row["arch"] == 90]
    q = meta(2, 512, 16, 128)
    far = torch.empty_strided(
        (2, 512, 4, 128), (1 << 39, 512, 128, 1), dtype=torch.bfloat16, device="meta"
    )

    def strided(**options: object) -> bytes:
        return _abi.params_from_tensors(q, far, far, addresses=False, **H200, **options)

    text = _lib.explain(_lib.FORWARD, strided())
    assert re.search(r"^row +sm80_fwd_bf16_d128_band ", text, re.M), text
    assert "a Hopper GPU runs an Ampere row" in text
    assert any(f"{row}: a stride of 2^40 bytes or more" in text for row in rows)
    refusal = _lib.why_not(_lib.FORWARD, strided(force_arch=90))
    assert refusal is not None
    assert "but 90 is forced" in _lib.explain(_lib.FORWARD, strided(force_arch=90))


def test_packed_calls_run_on_hopper_rows(with_rows: ctypes.CDLL) -> None:
    text = _lib.explain(_lib.FORWARD, packed_call(**H200))
    assert re.search(r"^row +sm90_fwd_bf16_d128_", text, re.M), text
    assert "fallback" not in text


def test_explain_lists_every_row_and_the_line_needed(with_rows: ctypes.CDLL) -> None:
    text = _lib.explain(_lib.FORWARD, call(softcap=30.0, **H200))
    assert text.startswith("fa: not supported: forward bf16, head dims 128 and 128, softcap 30")
    for row in _lib.kernels_list():
        assert re.search(rf"^  {row['id']}: .+", text, re.M), row["id"]
    assert "sm90_fwd_bf16_d128_band_any,90,fwd,bf16,bf16,128,128,band,any,tma,tma," in text


def test_the_line_needed_fits_the_table(with_rows: ctypes.CDLL) -> None:
    for params in (call(dim=80, softcap=30.0, **H200), call(dim=192, **A100)):
        line = _lib.why_not(_lib.FORWARD, params).split("tools/variants.csv: ")[1]
        rows = gen_variants.parse(",".join(gen_variants.COLUMNS) + "\n" + line)
        assert gen_variants.problems(rows) == []


def test_planning_needs_a_device_or_its_sizes(library: ctypes.CDLL) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so planning without sizes succeeds")
    with pytest.raises(RuntimeError, match=r"sm_count and smem_limit \(H200: 90, 132, 232448"):
        _lib.workspace_size(_lib.FORWARD, call())
    q = torch.zeros(2, 16, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out: begins at the address of q"):
        _lib.forward(_abi.params_from_tensors(q, q, q, q, **H200))
    with pytest.raises(RuntimeError, match="sm_count and smem_limit"):
        _lib.forward(_abi.params_from_tensors(q, q, q, q.clone(), **H200))


def test_kernels_are_described(library: ctypes.CDLL, request: pytest.FixtureRequest) -> None:
    if not _lib.kernels_list():
        request.getfixturevalue("with_rows")
    rows = _lib.kernels_list()
    assert rows
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        op = {"forward": "fwd", "backward": "bwd"}[row["op"]]
        assert row["id"].startswith(f"sm{row['arch']}_{op}_{row['dtype']}_d{row['dim_qk']}")
        assert row["mask"] in row["id"]
        assert row["threads"] % 32 == 0 and 0 < row["smem_bytes"] <= 232448


# --- Failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"shape.heads_k": 3}, "heads_q is 16, it must be a multiple of heads_k, which is 3"),
        ({"shape.dim_qk": 100}, "shape.dim_qk is 100, it must be a multiple of 8. Pad"),
        ({"shape.dim_v": 512}, "shape.dim_v is 512, it must be between 8 and 256"),
        ({"shape.seqlen_q": 1 << 30}, "shape.seqlen_q is 1073741824, it must be below 2^30"),
        ({"shape.batch": -3}, "shape.batch is -3, it must not be negative"),
        ({"q.stride_dim": 2}, "q: the stride of the last dimension is 2, it must be 1"),
        (
            {"k.stride_row": 100},
            "k: row stride 100 is not a multiple of 8 elements (16 bytes for bf16)",
        ),
        ({"v.data": 8}, "v: data 0x8 is not aligned to 16 bytes"),
        ({"v.dtype": 1}, "v has dtype fp16 (1), it must be bf16 like k"),
        ({"out.stride_head": 0}, "out: a stride is 0 (an expanded tensor)"),
        ({"mask.window_left": -2}, "mask.window_left is -2, allowed are -1 (unlimited)"),
        ({"score.scale": -1.0}, "score.scale is -1, it must be finite and >= 0"),
        ({"score.softcap": math.inf}, "score.softcap is inf"),
        ({"dropout.p": 1.5}, "dropout.p is 1.5, it must be in [0, 1)"),
        ({"options.force_arch": 70}, "options.force_arch is 70, allowed are 0"),
    ],
)
def test_invalid_values_are_named(
    library: ctypes.CDLL, change: dict[str, float], part: str
) -> None:
    fields = dict(zip(_abi.FIELDS, _abi.unpack(call(**H200)), strict=True))
    params = _abi.pack_params({**fields, **change})
    with pytest.raises(ValueError, match=re.escape(part)):
        _lib.workspace_size(_lib.FORWARD, params)
    with pytest.raises(ValueError, match=re.escape(part)):
        _lib.explain(_lib.FORWARD, params)


def test_null_data_is_refused_by_a_call_only(library: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="q: data is NULL"):
        _lib.forward(call())


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"softcap": 30.0}, "no softcap"),
        ({"alibi_slopes": torch.empty(16, device="meta")}, "no ALiBi"),
        ({"num_splits": 3, "force_arch": 90}, "cannot split the keys (num_splits 3)"),
        ({"k_descale": torch.empty(2, 4, device="meta")}, "no descales"),
        ({"dropout_p": 0.5, "philox_seed_offset": torch.empty(2, device="meta")}, "no dropout"),
    ],
)
def test_unbuilt_options_are_refused(
    with_rows: ctypes.CDLL, options: dict[str, object], part: str
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(part)) as refusal:
        _lib.workspace_size(_lib.FORWARD, call(**options, **H200))
    assert str(refusal.value).startswith("fa: not supported: ")


def test_error_texts_belong_to_their_thread(library: ctypes.CDLL) -> None:
    size = ctypes.c_size_t()

    def text_after(batch: int) -> str:
        fields = dict(zip(_abi.FIELDS, _abi.unpack(call(**H200)), strict=True))
        params = _abi.pack_params({**fields, "shape.batch": batch})
        assert library.fa_workspace_size(_lib.FORWARD, params, ctypes.byref(size)) == 1
        return library.fa_last_error().decode()

    mine = text_after(-1)
    with ThreadPoolExecutor(1) as other:
        assert "shape.batch is -2" in other.submit(text_after, -2).result()
        assert "shape.batch is -2" in other.submit(library.fa_last_error).result().decode()
    assert library.fa_last_error().decode() == mine


def test_statuses_become_exceptions() -> None:
    kinds = [type(_lib.exception(status, "text")) for status in range(1, 8)]
    assert kinds == [
        *(ValueError, NotImplementedError, RuntimeError, ImportError),
        *(RuntimeError, RuntimeError, RuntimeError),
    ]
