# SPDX-License-Identifier: BSD-3-Clause
"""Does tools/same_code.py see every change of a kernel, and nothing else?"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

import same_code
import toolchain

NOBITS, PROGBITS = 8, 1
KERNEL = "_Z6fa_fwd"


def cubin(
    code: bytes = b"\x01\x02" * 8,
    constants: bytes = b"\x05" * 16,
    launch: bytes = b"\x03\x04\x08\x00",
    shared: int = 1024,
    registers: int = 168,
    note: bytes = b"compiled in A",
    kernel: str = KERNEL,
) -> bytes:
    """An ELF file with what same_code reads of a cubin, and a note that it must not read."""
    strings = b"\0" + kernel.encode() + b"\0"
    symbols = bytes(24) + struct.pack("<I20x", 1)  # symbol 1 is the kernel
    # A record of another kind, then registers, frame size and one that is not known.
    info = b"\x03\x1b\xff\x00"
    for attribute, value in ((0x2F, registers), (0x11, 0), (0x7E, 7)):
        info += struct.pack("<BBHII", 4, attribute, 8, 1, value)
    sections = [
        ("", 0, b"", 0),
        (f".text.{kernel}", PROGBITS, code, None),
        (f".nv.constant0.{kernel}", PROGBITS, constants, None),
        (f".nv.info.{kernel}", PROGBITS, launch, None),
        (f".nv.shared.{kernel}", NOBITS, b"", shared),
        (".nv.info", PROGBITS, info, None),
        (".symtab", 2, symbols, None),
        (".strtab", 3, strings, None),
        (".note.nv.tkinfo", 7, note, None),
    ]
    names = b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, names, None))
    body, headers, name_at = b"", b"", 0
    for name, kind, held, size in sections:
        length = len(held) if size is None else size
        headers += struct.pack(
            "<IIQQQQIIQQ", name_at, kind, 0, 0, 64 + len(body), length, 0, 0, 1, 0
        )
        body += held
        name_at += len(name) + 1
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, 64 + len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(sections), len(sections) - 1)
    return bytes(head) + body + headers


def changed(**changes: Any) -> list[str]:
    return same_code.differences(
        same_code.code_of_cubin("sm_80", cubin()),
        same_code.code_of_cubin("sm_80", cubin(**changes)),
    )


def test_the_same_kernel_compiled_elsewhere() -> None:
    assert changed() == []
    assert changed(note=b"compiled in another folder") == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"code": b"\x01\x03" * 8}, f"sm_80 .text.{KERNEL}: other bytes, as many."),
        ({"code": b"\x01\x02" * 9}, f"sm_80 .text.{KERNEL}: 16 became 18."),
        ({"constants": b"\x06" * 16}, f"sm_80 .nv.constant0.{KERNEL}: other bytes, as many."),
        ({"launch": b"\x03\x04\x09\x00"}, f"sm_80 .nv.info.{KERNEL}: other bytes, as many."),
        ({"shared": 2048}, f"sm_80 .nv.shared.{KERNEL}: 1024 became 2048."),
        ({"registers": 170}, f"sm_80 registers of {KERNEL}: 168 became 170."),
    ],
)
def test_every_change_is_named(change: dict[str, Any], sentence: str) -> None:
    assert changed(**change) == [sentence]


def test_a_kernel_of_another_name_is_missing_and_new() -> None:
    found = changed(kernel="_Z6fa_bwd")
    assert f"sm_80 .text.{KERNEL}: only in the old code." in found
    assert "sm_80 .text._Z6fa_bwd: only in the new code." in found


def test_a_file_that_is_no_cubin() -> None:
    with pytest.raises(same_code.ToolError, match="no 64-bit ELF"):
        same_code.code_of_cubin("sm_80", b"text")


@pytest.fixture
def cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a file for the cubin that it holds, for two targets; an empty one holds none."""
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        '#!/bin/sh\n[ "$1 $2" = "-xelf all" ] || exit 9\n[ -s "$3" ] || { echo none; exit 0; }\n'
        'name=$(basename "$3")\ncp "$3" "$name.1.sm_80.cubin"\ncp "$3" "$name.2.sm_90a.cubin"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_cuda_tool", lambda name: str(tool))


def folder(path: Path, **objects: bytes) -> Path:
    for name, data in objects.items():
        place = path / "generated" / f"{name}.cu.o"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return path


@pytest.mark.usefixtures("cuobjdump")
def test_build_folders_are_compared_by_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = folder(tmp_path / "old", a=cubin(), b=cubin(), c=cubin())
    new = folder(tmp_path / "new", a=cubin(note=b"later"), b=cubin())
    assert same_code.main([str(old), str(new)]) == 0
    said = capsys.readouterr().out
    assert "a.cu.o: same (sm_80, sm_90a)" in said and "c.cu.o" not in said
    folder(new, b=cubin(registers=80))
    assert same_code.main([str(old), str(new)]) == 1
    said = capsys.readouterr().out
    assert "b.cu.o: CHANGED" in said and "1 of 2 objects changed" in said
    assert f"  sm_90a registers of {KERNEL}: 168 became 80." in said
    one = [str(old / "generated/b.cu.o"), str(new / "generated/b.cu.o")]
    assert same_code.main(one) == 1


@pytest.mark.usefixtures("cuobjdump")
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = folder(tmp_path / "old", a=cubin(), empty=b"")
    other = folder(tmp_path / "other", b=cubin())
    empty = old / "generated/empty.cu.o"
    for before, after, words in (
        (old, other, "no *.cu.o of one name"),
        (old, tmp_path / "nowhere", "does not exist"),
        (old, empty, "one is a file, the other a folder"),
        (empty, empty, "no machine code of a GPU found (none)"),
    ):
        assert same_code.main([str(before), str(after)]) == 2
        assert words in capsys.readouterr().err


def test_without_cuobjdump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "find_cuda_tool", lambda name: None)
    old = folder(tmp_path / "old", a=cubin())
    shutil.copytree(old, tmp_path / "new")
    assert same_code.main([str(old), str(tmp_path / "new")]) == 2
    assert "cuobjdump is needed" in capsys.readouterr().err
