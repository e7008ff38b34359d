# SPDX-License-Identifier: BSD-3-Clause
"""Does tools/variants.csv say what the build makes of it, and is every broken rule noticed?"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import gen_variants as gv

ROWS = gv.parse(gv.TABLE.read_text())
HEADER = (gv.ROOT / "kernels_common" / "host" / "kernel_config.h").read_text()


def changed(index: int = 0, **columns: str) -> list[gv.Row]:
    rows = list(ROWS)
    rows[index] = dataclasses.replace(rows[index], **columns)
    return rows


def test_the_table_is_sound_and_aligned():
    assert gv.problems(ROWS) == []
    assert gv.TABLE.read_text() == gv.format_table(ROWS)
    assert gv.parse(gv.format_table(ROWS)) == ROWS


def test_the_forward_has_its_rows():
    ids = {r.id for r in ROWS}
    for dtype in ("bf16", "fp16"):
        for dim in ("d64", "d128", "d192x128", "d256"):
            for mask in ("none", "band"):
                assert f"sm90_fwd_{dtype}_{dim}_{mask}" in ids
        for dim in ("d64", "d128"):
            assert f"sm80_fwd_{dtype}_{dim}_band" in ids


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"why": ""}, "why is empty"),
        ({"arch": "70"}, "arch '70' is not one of 80, 90"),
        ({"dtype": "fp64"}, "dtype 'fp64' is not one of fp16, bf16, e4m3"),
        ({"tile_m": "0"}, "tile_m '0' is not a positive whole number"),
        ({"stages": ""}, "stages '' is not a positive whole number"),
        ({"profile": "daily"}, "profile 'daily' is not one of dev, release, full, lab"),
        ({"knobs": "warp=1"}, "knob 'warp' is not known for op fwd"),
        ({"knobs": "turns=both"}, "knob turns=both is not one of none, gemm"),
        ({"knobs": "turns=gemm turns=none"}, "knob 'turns' is given twice"),
        ({"d_qk": "64"}, "the columns spell sm90_fwd_bf16_d64x128_band"),
        ({"score": "any"}, "the columns spell sm90_fwd_bf16_d128_band_any"),
        ({"kv": "paged"}, "the columns spell sm90_fwd_bf16_d128_band_paged"),
        ({"id": "sm90_fwd_bf16_d128_band_two_words"}, "plus _<tag>"),
        ({"id": "sm90_fwd_bf16_d128_band_" + "t" * 60}, "longer than 63 characters"),
    ],
)
def test_a_broken_rule_is_named(columns, sentence):
    assert ROWS[0].id == "sm90_fwd_bf16_d128_band"
    found = gv.problems(changed(**columns))
    assert any(sentence in text for text in found), found


def test_a_tag_is_allowed_and_ids_are_unique():
    tagged = dataclasses.replace(ROWS[0], id=ROWS[0].id + "_k100", profile="lab")
    assert gv.problems([*ROWS, tagged]) == []
    assert any("stands twice" in text for text in gv.problems([*ROWS, ROWS[0]]))


def test_nothing_is_only_fast():
    without = [r for r in ROWS if r.id != "sm90_fwd_bf16_d128_band"]
    assert any("no band row beside it" in text for text in gv.problems(without))
    later = changed(0, profile="release")  # its `none` sibling stays in dev
    assert any("profile dev has no band row" in text for text in gv.problems(later))


def test_the_build_time_of_a_profile_is_bounded():
    found = gv.problems(changed(0, est_s="5000"))
    assert any("the budget is 3600" in text for text in found), found


def test_unreadable_tables_say_where():
    with pytest.raises(gv.TableError, match="line 1: columns are"):
        gv.parse("id,arch\n")
    with pytest.raises(gv.TableError, match="line 2: 3 cells; expected 22"):
        gv.parse(",".join(gv.COLUMNS) + "\na,b,c\n")
    with pytest.raises(gv.TableError, match="empty"):
        gv.parse("")


def test_profiles_contain_the_smaller_ones():
    sizes = [{r.id for r in gv.in_profile(ROWS, p)} for p in gv.PROFILES]
    assert all(a <= b for a, b in zip(sizes, sizes[1:], strict=False))
    assert 0 < len(sizes[0]) < len(sizes[1])
    assert {r.arch for r in gv.in_profile(ROWS, "dev")} == {"80", "90"}


def test_selection_by_architecture_profile_and_glob():
    assert gv.select(ROWS, [], "full") == []
    assert {r.arch for r in gv.select(ROWS, ["80"], "full")} == {"80"}
    assert len(gv.select(ROWS, ["80", "90a"], "lab")) == len(ROWS)
    one = gv.select(ROWS, ["80", "90a"], "dev", "sm90_fwd_fp16_d64_*")
    assert {r.id for r in one} == {r.id for r in ROWS if r.id.startswith("sm90_fwd_fp16_d64_")}
    assert {"sm90_fwd_fp16_d64_band", "sm90_fwd_fp16_d64_none"} < {r.id for r in one}
    with pytest.raises(gv.TableError, match="FA_ONLY=sm70.* matches no row"):
        gv.select(ROWS, ["80"], "dev", "sm70*")


def test_every_word_of_the_table_is_an_enumerator():
    enumerators = set()
    for name, body in re.findall(r"enum class (\w+) : int \{([^}]*)\}", HEADER):
        enumerators |= {f"{name}::{e}" for e in re.findall(r"(k\w+) = ", body)}
    words = [v for values in gv.ENUMS.values() for v in values.values()]
    knobs = [v for keys in gv.KNOBS.values() for values in keys.values() for v in values.values()]
    missing = {w for w in [*words, *knobs] if "::" in w} - enumerators
    assert not missing


def test_a_unit_initialises_the_fields_in_declared_order():
    struct = HEADER[HEADER.index("struct KernelConfig {") :]
    struct = re.sub(r"//.*", "", struct[: struct.index("};")])
    declared = []
    for line in re.findall(r"^\s+(?:int|\w+) ([^;]+);", struct, re.M):
        declared += [part.split("=")[0].strip() for part in line.split(",")]
    knobs = {name for keys in gv.KNOBS.values() for name in keys}
    needed = [name for name in declared if name not in knobs]
    assert knobs <= set(declared)
    for op, keys in gv.KNOBS.items():
        every_knob = dataclasses.replace(
            ROWS[0], op=op, knobs=" ".join(f"{k}={next(iter(v))}" for k, v in keys.items())
        )
        given = re.findall(r"^\s+\.(\w+) = ", gv.unit_text(every_knob), re.M)
        assert given == [name for name in declared if name in needed or name in keys]
    for row in ROWS:
        given = re.findall(r"^\s+\.(\w+) = ", gv.unit_text(row), re.M)
        assert [name for name in given if name in needed] == needed


def test_generation_rewrites_only_what_changed(tmp_path):
    units = gv.generate(ROWS, tmp_path)
    assert [p.stem for _, p in units] == [r.id for r in ROWS]
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    gv.generate(changed(0, tile_n="176"), tmp_path)
    after = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert {n for n in after if after[n] != before[n]} == {f"{ROWS[0].id}.cu", "rows.json"}
    gv.generate(ROWS[1:], tmp_path)
    assert not (tmp_path / f"{ROWS[0].id}.cu").exists()
    assert [r["id"] for r in json.loads((tmp_path / "rows.json").read_text())] == [
        r.id for r in ROWS[1:]
    ]


def test_the_registry_lists_the_rows_in_table_order():
    listed = re.findall(r"&rows::entry_(\w+),", gv.registry_text(ROWS))
    assert listed == [r.id for r in ROWS]
    assert "return {};" in gv.registry_text([])


def test_the_support_table_of_the_readme_is_current():
    readme = gv.README.read_text()
    assert readme == gv.with_block(readme, ROWS)
    assert "Hopper" in gv.readme_block(ROWS) and "Ampere" in gv.readme_block(ROWS)
    with pytest.raises(gv.TableError, match="has no block"):
        gv.with_block("no markers here", ROWS)


def test_the_library_holds_rows_of_the_table():
    from fa import _lib, kernels

    try:
        built = kernels()
    except _lib.LibraryMissing as error:
        pytest.skip(str(error))
    known = {r.id: r for r in ROWS}
    ids = [row["id"] for row in built]
    assert ids == [i for i in known if i in set(ids)], "order or ids differ from the table"
    for row in built:
        line = known[row["id"]]
        for name, column in (
            *(("tile_m", line.tile_m), ("tile_n", line.tile_n)),
            *(("dim_qk", line.d_qk), ("dim_v", line.d_v), ("arch", line.arch)),
        ):
            assert row[name] == int(column), (row["id"], name)


def test_only_unusual_widths_pay_for_the_large_header():
    macro = "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n#include"
    for row in ROWS:
        unusual = row.arch == "90" and not {row.tile_n, row.d_v} <= set(gv.PLAIN_WIDTHS)
        assert (macro in gv.unit_text(row)) == unusual, row.id
    assert any(macro in gv.unit_text(row) for row in ROWS)
