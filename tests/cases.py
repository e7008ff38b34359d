# SPDX-License-Identifier: BSD-3-Clause
# On which problems is every backend tested?
"""Case: one attention problem. hand_picked(): edges and known kinds of fault. sweep(): drawn ones.

A test filters by `Case.features` (what a backend must be able to do) and `Case.cost` (what a
machine has time for), and calls `Case.make(device)`. Both tiers use the same list.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from case_inputs import DTYPES, Guarded, Inputs, Lengths, make_inputs, strides_of

__all__ = ["DTYPES", "Case", "Guarded", "Inputs", "hand_picked", "strides_of", "sweep"]

# Around the edges of tiles of 64 to 256 rows.
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000, 2049, 4097)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem. Lengths given as tuples make that side packed; batch follows from them."""

    dtype: str = "bf16"
    dim: int = 64
    dim_v: int = 0  # 0: as dim
    heads_q: int = 2
    heads_k: int = 0  # 0: as heads_q
    batch: int = 1
    q: int | Lengths = 64  # seqlen_q, or q lengths of packed sequences
    k: int | Lengths = 64
    slack_q: int = 0  # rows of a packed tensor after its last sequence
    slack_k: int = 0
    seqused_q: Lengths | None = None
    seqused_k: Lengths | None = None
    leftpad_k: Lengths | None = None
    kv_batch_idx: Lengths | None = None  # the cache then has two rows more than needed
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    scale: float | None = None
    alibi: str = ""  # "h": slopes [Hq], "bh": [B, Hq]
    sinks: str = ""  # "fp32" or "same" (the input dtype)
    layout: tuple[str, str, str, str] = ("bshd", "bshd", "bshd", "bshd")  # of q, k, v, dout
    values: str = "normal"
    out_fp32: bool = False
    backward: bool = True
    dlse: bool = False
    tag: str = ""  # the fault it stands for, or any other word

    @property
    def packed_q(self) -> bool:
        return isinstance(self.q, tuple)

    @property
    def packed_k(self) -> bool:
        return isinstance(self.k, tuple)

    @property
    def sequences(self) -> int:
        for side in (self.q, self.k):
            if isinstance(side, tuple):
                return len(side)
        return self.batch

    @property
    def group(self) -> int:
        return self.heads_q // (self.heads_k or self.heads_q)

    def lengths_q(self) -> Lengths:
        """q_len of every sequence."""
        if self.seqused_q is not None:
            return self.seqused_q
        return self.q if isinstance(self.q, tuple) else (self.q,) * self.sequences

    def lengths_k(self) -> Lengths:
        """k_len of every sequence, without left padding."""
        used = self.k if isinstance(self.k, tuple) else (self.k,) * self.sequences
        used = self.seqused_k or used
        return tuple(u - p for u, p in zip(used, self.leftpad_k or (0,) * len(used), strict=True))

    @property
    def cost(self) -> int:
        """Multiplications of one unmasked forward."""
        pairs = sum(a * b for a, b in zip(self.lengths_q(), self.lengths_k(), strict=True))
        return pairs * self.heads_q * (self.dim + (self.dim_v or self.dim))

    @property
    def tiles(self) -> int:
        """Work tiles of 128 query rows."""
        return self.heads_q * sum(math.ceil(n / 128) for n in self.lengths_q())

    @property
    def features(self) -> frozenset[str]:
        """What a backend must be able to do to run the case."""
        wanted = {
            "causal": self.causal,
            "window_left": self.window[0] >= 0,
            "window_right": self.window[1] >= 0,
            "chunk": self.chunk > 0,
            "softcap": self.softcap > 0,
            "alibi": bool(self.alibi),
            "sinks": bool(self.sinks),
            "gqa": self.group > 1,
            "dim_v": self.dim_v not in (0, self.dim),
            "odd_dim": self.dim % 8 != 0 or self.dim_v % 8 != 0,
            "packed_q": self.packed_q,
            "packed_k": self.packed_k,
            "seqused_q": self.seqused_q is not None,
            "seqused_k": self.seqused_k is not None,
            "leftpad_k": self.leftpad_k is not None,
            "kv_batch_idx": self.kv_batch_idx is not None,
            "strided": any(name not in ("bshd", "scalar") for name in self.layout[:3]),
            "dout_scalar": self.layout[3] == "scalar",
            "out_fp32": self.out_fp32,
            "backward": self.backward,
            "dlse": self.backward and self.dlse,
            "empty_batch": self.sequences == 0,
        }
        return frozenset(name for name, value in wanted.items() if value)

    @property
    def id(self) -> str:
        def listed(name: str, values: Lengths | None) -> str:
            if values is None:
                return ""
            shown = "+".join(map(str, values[:8]))
            return name + shown + (f"+to{len(values)}" if len(values) > 8 else "")

        def side(name: str, value: int | Lengths, slack: int) -> str:
            text = listed(name, value) if isinstance(value, tuple) else f"{name}{value}"
            return text + (f"s{slack}" if slack else "")

        same_dim = self.dim_v in (0, self.dim)
        words = [
            self.dtype,
            f"d{self.dim}" if same_dim else f"d{self.dim}x{self.dim_v}",
            "causal" * self.causal,
            "" if self.window == (-1, -1) else "w{}_{}".format(*self.window),
            f"chunk{self.chunk}" if self.chunk else "",
            f"cap{self.softcap:g}" if self.softcap else "",
            "" if self.scale is None else f"scale{self.scale:g}",
            f"alibi_{self.alibi}" if self.alibi else "",
            f"sinks_{self.sinks}" if self.sinks else "",
            f"h{self.heads_q}",
            f"gqa{self.group}" if self.group > 1 else "",
            f"b{self.batch}" if self.sequences == self.batch and self.batch != 1 else "",
            side("q", self.q, self.slack_q),
            side("k", self.k, self.slack_k),
            listed("uq", self.seqused_q),
            listed("uk", self.seqused_k),
            listed("pad", self.leftpad_k),
            listed("idx", self.kv_batch_idx),
            "" if self.layout == ("bshd",) * 4 else "_".join(self.layout),
            "" if self.values == "normal" else self.values,
            "out32" * self.out_fp32,
            "dlse" * self.dlse,
            "fwd" * (not self.backward),
            self.tag,
        ]
        return "-".join(word for word in words if word)

    def make(
        self,
        device: str | torch.device = "cpu",
        *,
        poison: float = math.nan,
        seed: int = 0,
    ) -> Inputs:
        """Tensors of the case; every byte that the result must not depend on holds `poison`.

        That is: guards around the tensors, gaps between strided rows, rows beyond the lengths or
        under the left padding, cache rows in no use, and keys that no query row sees.
        """
        return make_inputs(self, torch.device(device), poison, seed)


# ---- the list ---------------------------------------------------------------------------------


def hand_picked() -> list[Case]:
    """Edges of tiles and the kinds of fault that attention without pages can have."""
    cases = [
        *_length_edges(),
        *_empty_rows_and_sequences(),
        *_extreme_values(),
        *_bytes_past_the_end(),
        *_masks(),
        *_scores(),
        *_heads_and_dims(),
        *_layouts(),
        *_large(),
    ]
    assert len({case.id for case in cases}) == len(cases), "two cases with one id"
    return cases


def _length_edges() -> list[Case]:
    cases = []
    for n, q in enumerate(LENGTHS):
        k = LENGTHS[(5 * n + 3) % len(LENGTHS)]
        one = Case(dtype=("bf16", "fp16")[n % 2], dim=(64, 128)[n // 2 % 2], q=q, k=k)
        cases += [one, replace(one, causal=True, dtype=("fp16", "bf16")[n % 2], heads_k=1)]
    return cases + [Case(q=n, k=n, causal=True, batch=2) for n in (65, 128, 257, 1000)]


def _empty_rows_and_sequences() -> list[Case]:
    return [
        Case(heads_q=21, heads_k=7, dim=120, q=(0, 0, 0, 0, 1), k=(0, 0, 0, 0, 1), tag="A2"),
        Case(dim=128, q=(0, 0, 1023), k=(0, 1, 2045), causal=True, tag="A3"),
        Case(dim=128, q=(0, 0, 103), k=(0, 1, 245), causal=True, tag="A3s"),
        Case(dtype="fp16", batch=2, heads_q=4, q=16, k=0, tag="A5"),
        Case(dtype="fp16", batch=2, heads_q=4, q=16, k=0, causal=True, sinks="fp32", tag="A5"),
        Case(heads_q=8, dim=128, q=(64, 64), k=(0, 64), tag="A6"),
        Case(dtype="fp16", dim=68, q=(1, 2, 1, 2), k=(0, 2, 0, 2), tag="A8"),
        Case(dtype="fp16", dim=72, q=(1, 2, 1, 2), k=(0, 2, 0, 2), tag="A8"),
        Case(batch=4, heads_q=16, heads_k=1, dim=128, q=1, k=64, seqused_k=(0,) * 4, tag="A9"),
        Case(
            heads_q=4, q=(100, 200), k=(100, 200), slack_q=212, slack_k=212, causal=True, tag="A11"
        ),
        Case(dtype="fp16", heads_q=1, q=4, k=2, causal=True, tag="A12"),
        Case(dtype="fp16", heads_q=2, q=4, k=2, causal=True, sinks="same", dlse=True, tag="A12"),
        Case(
            batch=8,
            heads_q=8,
            heads_k=2,
            dim=128,
            q=1,
            k=500,
            seqused_k=(500, 0, 500, 7, 500, 500, 1, 500),
            tag="A15",
        ),
        Case(q=(1,) * 6, k=(50, 0, 50, 1, 64, 65), heads_q=4, heads_k=1, causal=True, tag="A15"),
        Case(batch=0, q=8, k=8, tag="B0"),
        Case(batch=2, q=0, k=8, tag="noq"),
        Case(q=(0, 0), k=(3, 0), tag="noq"),
        Case(q=300, k=40, causal=True, batch=2, dlse=True, tag="empty_tiles"),
        Case(q=300, k=40, window=(10, 20), sinks="fp32", dlse=True, tag="empty_tiles"),
    ]


def _extreme_values() -> list[Case]:
    return [
        Case(
            dtype="fp16",
            heads_q=1,
            dim=32,
            q=(76, 34, 146),
            k=(1, 1, 1),
            causal=True,
            tag="B20",
        ),
        Case(dtype="fp16", heads_q=1, dim=128, q=512, k=512, causal=True, values="x3", tag="B21"),
        Case(heads_q=14, heads_k=2, q=88, k=448, causal=True, values="negative", tag="B23"),
        Case(dim=128, q=1, k=1, scale=1.0, values="below_sentinel", tag="B24"),
        Case(dtype="fp16", dim=128, q=3, k=70, scale=1.0, values="below_sentinel", tag="B24"),
        Case(q=1, k=128, values="negative10", tag="B26"),
        Case(dim=128, q=256, k=256, batch=2, causal=True, values="x20", tag="B27"),
        Case(dim=64, q=129, k=257, heads_q=4, heads_k=2, values="x20", tag="B27"),
        Case(q=64, k=64, heads_q=1, seqused_k=(63,), tag="B29"),
        Case(q=64, k=192, heads_q=1, window=(20, 10), tag="B29"),
        Case(dtype="fp16", heads_q=1, q=50, k=50, values="const100", tag="B30"),
        Case(heads_q=1, q=50, k=50, values="const1000", causal=True, tag="B30"),
        Case(q=130, k=130, values="onehot", causal=True),
        Case(dtype="fp16", dim=128, q=193, k=257, values="onehot", window=(64, 3)),
        Case(q=100, k=200, values="x3", scale=0.0, tag="uniform"),
        Case(q=100, k=200, values="x3", scale=0.5, causal=True),
    ]


def _bytes_past_the_end() -> list[Case]:
    return [
        Case(dim=128, q=64, k=128, seqused_k=(65,), tag="C32"),
        Case(dim=128, q=128, k=128, seqused_k=(65,), causal=True, tag="C32"),
        Case(dtype="fp16", batch=2, heads_q=1, q=1, k=3, seqused_k=(1, 3), tag="C33"),
        Case(heads_q=4, dim=128, q=(129, 255, 1), k=(129, 255, 1), causal=True, tag="C38"),
        Case(heads_q=1, dim=32, q=1, k=257, tag="C42"),
        Case(batch=3, q=100, k=200, seqused_q=(100, 0, 37), seqused_k=(200, 64, 0), causal=True),
        Case(batch=2, q=70, k=140, leftpad_k=(0, 33), seqused_k=(140, 99), causal=True),
        Case(batch=2, q=70, k=140, leftpad_k=(65, 140), window=(31, 5), dlse=True),
        Case(
            batch=3, q=5, k=90, kv_batch_idx=(4, 0, 2), seqused_k=(90, 1, 64), heads_q=4, heads_k=2
        ),
        Case(batch=3, q=5, k=90, kv_batch_idx=(1, 1, 2), causal=True, tag="shared_row"),
        Case(q=(70, 1, 130), k=150, batch=3, seqused_k=(150, 3, 130), causal=True, tag="q_packed"),
        Case(q=33, k=(64, 0, 100), slack_k=30, batch=3, tag="k_packed"),
        Case(
            q=(40, 60), k=(80, 60), seqused_q=(13, 60), seqused_k=(80, 22), slack_q=5, causal=True
        ),
        Case(
            q=(40, 60), k=120, batch=2, leftpad_k=(3, 0), kv_batch_idx=(3, 1), heads_q=6, heads_k=2
        ),
    ]


def _masks() -> list[Case]:
    big = 2**31 - 1
    return [
        Case(q=129, k=64, window=(32, 64), tag="D44"),
        Case(dtype="fp16", heads_q=1, q=256, k=64, window=(60, -1), tag="D45"),
        Case(dtype="fp16", heads_q=1, q=256, k=64, window=(60, big), tag="D45"),
        Case(dtype="fp16", heads_q=1, q=256, k=64, window=(-1, 100), tag="D45"),
        Case(dtype="fp16", q=128, k=128, window=(-1, 0), tag="D48"),
        Case(dtype="fp16", q=128, k=128, window=(5, -1), tag="D48"),
        Case(dtype="fp16", heads_q=16, dim=192, q=3, k=7, causal=True, scale=0.07, tag="D50"),
        Case(dtype="fp16", heads_q=16, dim=96, q=3, k=7, causal=True, scale=0.07, tag="D50"),
        Case(heads_q=32, heads_k=8, dim=128, q=1, k=1500, window=(1023, 0), tag="D51"),
        Case(heads_q=32, heads_k=8, dim=128, q=5, k=1500, window=(1023, 0), tag="D51"),
        Case(heads_q=8, heads_k=2, q=300, k=1024, window=(333, -1), tag="D53"),
        Case(heads_q=4, dim=128, batch=2, q=384, k=384, causal=True, tag="D56"),
        Case(q=1025, k=1025, causal=True, tag="D60"),
        Case(dtype="fp16", q=4, k=8, causal=True, tag="D62"),
        Case(q=200, k=200, window=(0, 0), tag="diagonal"),
        Case(q=200, k=300, window=(64, 64)),
        Case(q=300, k=200, window=(0, 17), causal=False, batch=2),
        Case(dim=128, q=257, k=500, window=(100, -1), causal=True, heads_q=4, heads_k=1),
        Case(q=200, k=200, chunk=64, causal=True),
        Case(q=200, k=333, chunk=50),
        Case(q=333, k=200, chunk=70, causal=True, tag="negative_positions"),
        Case(q=150, k=260, chunk=100, window=(30, 200)),
        # Rows of one tile whose first keys lie further apart than a tile of keys is wide.
        Case(heads_q=1, dim=32, q=300, k=1300, chunk=1250, tag="far_apart"),
        Case(q=(100, 33, 5), k=(100, 133, 2), window=(20, 0), heads_q=4, heads_k=2),
    ]


def _scores() -> list[Case]:
    return [
        Case(q=100, k=130, softcap=1.5, causal=True),
        Case(q=100, k=130, softcap=30.0, values="x3", dtype="fp16", heads_q=4, heads_k=2),
        Case(q=100, k=130, alibi="h", causal=True, heads_q=4),
        Case(q=100, k=70, alibi="bh", batch=2, heads_q=4, heads_k=2, dlse=True),
        Case(q=(30, 70), k=(60, 20), alibi="bh", softcap=5.0, heads_q=4),
        Case(q=130, k=130, sinks="fp32", causal=True, heads_q=4, heads_k=2, dlse=True),
        Case(dtype="fp16", q=130, k=200, sinks="same", window=(50, 10)),
        Case(q=(5, 0, 64), k=(70, 3, 0), sinks="fp32", dlse=True, heads_q=4),
        Case(q=64, k=300, sinks="fp32", values="x20", tag="peaked"),
        Case(dtype="fp16", q=64, k=64, dlse=True, tag="F92"),
        Case(q=200, k=257, causal=True, dlse=True, heads_q=4, heads_k=1),
        Case(q=100, k=300, out_fp32=True),
        Case(q=100, k=300, causal=True, out_fp32=True, dlse=True, heads_q=4, heads_k=2),
        Case(dtype="fp32", q=130, k=270, causal=True, heads_q=4, heads_k=2, dlse=True),
        Case(dtype="fp32", q=100, k=300, softcap=4.0, alibi="h", sinks="fp32", window=(70, 9)),
        Case(dtype="fp32", q=70, k=300, values="x20"),
        Case(dtype="fp64", q=130, k=270, causal=True, heads_q=4, heads_k=2, dlse=True),
        Case(
            dtype="fp64", q=270, k=130, softcap=4.0, alibi="bh", sinks="same", chunk=60, dlse=True
        ),
        Case(dtype="fp64", q=(70, 3, 0), k=(40, 70, 6), sinks="same", causal=True, dlse=True),
    ]


def _heads_and_dims() -> list[Case]:
    groups = [
        Case(dtype="fp16", heads_q=4 * g, heads_k=4, q=9, k=70, causal=True, tag="G75")
        for g in (3, 5, 6, 7, 9, 12, 14, 16)
    ]
    dims = [Case(dim=d, q=70, k=130, causal=d % 16 == 0) for d in (8, 16, 24, 32, 40, 80, 96, 112)]
    large = [Case(dim=d, q=129, k=130, dtype="bf16", tag="F87") for d in (160, 192, 224, 256)]
    unequal = [
        Case(dim=d, dim_v=v, q=130, k=200, causal=True, heads_q=4, heads_k=2)
        for d, v in ((64, 128), (128, 64), (96, 32), (24, 120), (192, 128), (64, 512))
    ]
    odd = [Case(dim=d, dim_v=v, q=33, k=66) for d, v in ((1, 1), (33, 57), (100, 64))]
    return groups + dims + large + unequal + odd


def _layouts() -> list[Case]:
    one = Case(dtype="fp16", batch=2, heads_q=4, heads_k=2, q=100, k=130, causal=True)
    layouts = [
        ("bhsd", "bhsd", "bhsd", "bhsd"),
        ("bshd", "bhsd", "sbhd", "bshd"),
        ("bshd", "alternate", "bshd", "bhsd"),
        ("padded", "padded", "alternate", "sbhd"),
        ("sbhd", "bshd", "bhsd", "padded"),
        ("one_batch", "bshd", "one_batch", "one_batch"),
        ("one_head", "bshd", "bshd", "bshd"),
        ("bshd", "bshd", "bshd", "scalar"),
    ]
    cases = [replace(one, layout=layout) for layout in layouts]
    cases.append(
        Case(
            batch=2,
            heads_q=8,
            q=100,
            k=257,
            layout=("bshd", "one_head", "one_head", "bshd"),
            tag="F96",
        )
    )
    packed = Case(q=(40, 0, 100), k=(50, 3, 100), heads_q=4, heads_k=2, causal=True, slack_q=7)
    cases += [
        replace(packed, layout=("bhsd", "padded", "bhsd", "alternate")),
        replace(packed, layout=("alternate", "bhsd", "padded", "bhsd"), slack_k=9),
    ]
    return cases


def _large() -> list[Case]:
    """For machines with time: far more work than the CPU tier has room for."""
    return [
        Case(batch=2, heads_q=16, heads_k=4, dim=128, q=1023, k=2047, causal=True),
        Case(batch=2, heads_q=8, dim=64, q=2049, k=4097, dtype="fp16"),
        Case(heads_q=8, heads_k=2, dim=128, q=300, k=4096, window=(333, -1), tag="D53"),
        Case(
            dim=128,
            q=(3, 700, 321),
            k=(3, 700, 321),
            heads_q=8,
            heads_k=2,
            window=(128, 0),
            tag="F90",
        ),
        Case(heads_q=1, dtype="fp16", q=33728, k=128, dim=128, tag="G107"),
        Case(heads_q=1, dtype="fp16", q=64, k=33728, dim=128, causal=True, tag="G107"),
        Case(
            batch=64, heads_q=8, heads_k=2, dim=128, q=1, k=500, seqused_k=(500, 0) * 32, tag="A15"
        ),
        Case(heads_q=8, dim=64, q=2048, k=2048, chunk=300, causal=True),
    ]


def sweep(seed: int, count: int, max_length: int = 300) -> list[Case]:
    """`count` drawn problems over all options; the same for the same seed."""
    rng = random.Random(seed)
    return [draw_case(rng, f"sweep{seed}_{n}", max_length) for n in range(count)]


def draw_case(rng: random.Random, tag: str, max_length: int) -> Case:
    """The case that a source of numbers chooses."""

    def length() -> int:
        edge = rng.choice(LENGTHS)
        return edge if edge <= max_length and rng.random() < 0.5 else rng.randint(0, max_length)

    def often(chance: float) -> bool:
        return rng.random() < chance

    sequences = rng.randint(1, 3)
    heads_k, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4, 5))
    q: int | Lengths = tuple(length() for _ in range(sequences)) if often(0.35) else length()
    k: int | Lengths = tuple(length() for _ in range(sequences)) if often(0.35) else length()
    whole_q = q if isinstance(q, tuple) else (q,) * sequences
    whole_k = k if isinstance(k, tuple) else (k,) * sequences
    seqused_q = tuple(rng.randint(0, n) for n in whole_q) if often(0.15) else None
    seqused_k = tuple(rng.randint(0, n) for n in whole_k) if often(0.25) else None
    pads = tuple(rng.randint(0, n) for n in seqused_k or whole_k) if often(0.15) else None
    dense_k = not isinstance(k, tuple)
    index = (
        tuple(rng.randrange(sequences + 2) for _ in whole_k) if dense_k and often(0.15) else None
    )
    left = rng.choice((0, 1, 17, 64, 200, 5000)) if often(0.35) else -1
    causal = often(0.45)
    right = rng.choice((0, 3, 64, 100)) if not causal and often(0.3) else -1
    dim = rng.choice((64, 128, 64, 128, 32, 80, 96, 120))
    layouts = ("bshd", "bshd", "bhsd", "sbhd", "alternate", "padded")
    return Case(
        dtype=rng.choice(("bf16", "fp16")),
        dim=dim,
        dim_v=rng.choice((0, 0, 0, 40, 64, 128)),
        heads_q=heads_k * group,
        heads_k=heads_k,
        batch=sequences,
        q=q,
        k=k,
        slack_q=rng.choice((0, 9)) if isinstance(q, tuple) else 0,
        slack_k=rng.choice((0, 70)) if isinstance(k, tuple) else 0,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=pads,
        kv_batch_idx=index,
        causal=causal,
        window=(left, right),
        chunk=rng.choice((1, 30, 64, 150)) if often(0.15) else 0,
        softcap=rng.choice((2.0, 15.0)) if often(0.15) else 0.0,
        scale=rng.choice((0.0, 0.3, 1.0)) if often(0.15) else None,
        alibi=rng.choice(("h", "bh")) if often(0.15) else "",
        sinks=rng.choice(("fp32", "same")) if often(0.2) else "",
        layout=tuple(rng.choice(layouts) for _ in range(4)) if often(0.4) else ("bshd",) * 4,
        values=rng.choice(("normal", "normal", "normal", "x3", "x20", "onehot")),
        out_fp32=often(0.1),
        dlse=often(0.4),
        tag=tag,
    )
