# SPDX-License-Identifier: BSD-3-Clause
# How do tests get a libfa.so with rows, and a libfa_torch.so, where nothing is built?
"""The host side and the torch operators, compiled with the table of tests/cpp/fixture.h.

Its rows plan like real ones and cannot launch. Takes about six seconds, once per session.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

import gen_variants

ROOT = Path(__file__).resolve().parents[1]

_REGISTRY = """
#include "tests/cpp/fixture.h"
namespace fa {
std::span<const KernelEntry* const> kernels() { return %s; }
}  // namespace fa
"""


def compiler() -> str | None:
    return shutil.which("g++")


def build(
    folder: Path, table: str = "test::kTable", shim: bool = True, declarations: str = ""
) -> Path:
    """libfa.so (and libfa_torch.so) in `folder`; `table` is a C++ expression of the rows, which may
    name what the C++ text `declarations` declares.
    """
    registry = folder / "registry.cpp"
    registry.write_text("#include <array>\n#include <utility>\n" + declarations + _REGISTRY % table)
    sources = [str(p) for d in ("api", "host") for p in (ROOT / "kernels_common" / d).glob("*.cpp")]
    common = [str(compiler()), "-O1", "-fPIC", "-shared", f"-I{ROOT}", "-Wl,-z,now"]
    library = folder / "libfa.so"
    # A name of its own: the loader takes a library of a name that it knows for the one it knows.
    soname = f"-Wl,-soname,libfa-{uuid.uuid4().hex}.so"
    names = ["-std=c++20", soname, *sources, str(registry), "-o", str(library)]
    subprocess.run([*common, *names], check=True)
    if shim:
        build_shim(folder)
    return library


def shipped_rows() -> str:
    """Declarations of `fa::rows::kShipped`: the rows of tools/variants.csv, without their kernels.

    Shared memory is what the operands need; the kernels take about a kilobyte more.
    """
    rows = gen_variants.in_profile(gen_variants.parse(gen_variants.TABLE.read_text()), "full")
    structs, entries = [], []
    for row in rows:
        text = gen_variants.unit_text(row)
        structs.append(text[text.index("struct ") : text.index("};\n\nextern") + 3])
        entries.append(
            f'{{"{row.id}", {row.id}::kConfig, {row.id}::kConfig.warps * 32, {_operands(row)}, '
            "nullptr, nullptr}"
        )
    text = (
        "\n".join(structs) + f"inline constexpr KernelEntry kEntries[] = {{{','.join(entries)}}};"
    )
    return f"""
#include "kernels_common/host/registry.h"
namespace fa::rows {{
{text}
template <size_t... I>
constexpr auto pointers(std::index_sequence<I...>) {{
  return std::array<const KernelEntry*, sizeof...(I)>{{&kEntries[I]...}};
}}
inline constexpr auto kShipped = pointers(std::make_index_sequence<{len(rows)}>());
}}  // namespace fa::rows
"""


def _operands(row: gen_variants.Row) -> int:
    """Bytes of shared memory of the operands of 16-bit rows; Hopper rows run on Hopper anyway."""
    m, n, stages, widest = (int(x) for x in (row.tile_m, row.tile_n, row.stages, row.d_qk))
    if row.arch == "90":
        return 220 * 1024
    if row.op == "fwd":
        return 2 * (m * widest + stages * n * (widest + int(row.d_v)))
    return 2 * (2 * n * widest + 2 * stages * m * widest + 2 * n * max(m, 64))


def build_shim(folder: Path) -> Path:
    """libfa_torch.so from python/torch_ops.cpp, as CMake links it."""
    stub = folder / "libtorch_name.so"
    source = folder / "name.c"
    source.write_text("int fa_stub_for_the_name_libtorch;\n")
    common = [str(compiler()), "-fPIC", "-shared"]
    soname = "-Wl,-soname,libtorch.so"
    subprocess.run([*common, "-x", "c", str(source), soname, "-o", str(stub)], check=True)
    shim = folder / "libfa_torch.so"
    subprocess.run(
        [
            *(*common, "-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{ROOT}"),
            *(str(ROOT / "python" / "torch_ops.cpp"), "-Wl,--no-as-needed", str(stub)),
            *(str(folder / "libfa.so"), "-Wl,-rpath,$ORIGIN", "-o", str(shim)),
        ],
        check=True,
    )
    return shim
