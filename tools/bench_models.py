# SPDX-License-Identifier: BSD-3-Clause
# Which attention calls do well-known models make?
"""Cells with the heads, head dims, masks and scores of published model configurations.

Prefill of one sequence unless said otherwise; windows are (left, right) around the diagonal, so a
sliding window of 1024 tokens is (1023, 0). Latent attention (DeepSeek) is meant as it is trained
and prefilled: keys of 192, values of 128, a key head per query head.
"""

from __future__ import annotations

from dataclasses import replace

from bench_cells import Cell


def _cell(model: str, heads: tuple[int, int], dim: int, length: int, **known: object) -> Cell:
    """bf16; `heads`: of queries and of keys."""
    batch = int(str(known.pop("batch", 1)))
    causal = bool(known.pop("causal", True))
    window = known.get("window", (-1, -1))
    assert not (causal and window != (-1, -1)), "a window states its right side itself"
    cell = Cell("bfloat16", dim, causal, length, tokens=batch * length, model=model)
    return replace(cell, heads_q=heads[0], heads_k=heads[1], **known)  # type: ignore[arg-type]


def _window(tokens: int) -> dict[str, object]:
    """A causal sliding window of so many tokens, the row's own included."""
    return {"causal": False, "window": (tokens - 1, 0)}


def model_cells() -> list[Cell]:
    """Forward; then training steps of those that are trained with these lengths."""
    latent = {"dim_v": 128}
    decode = {"causal": False, "seqlen_k": 8192}  # one row sees every key: no mask is needed
    forward = [
        _cell("Llama-3 8B", (32, 8), 128, 8192),
        _cell("Llama-3.1 8B 128k", (32, 8), 128, 131072),
        _cell("Llama-3 70B, Qwen3 32B", (64, 8), 128, 8192),
        _cell("Qwen3 8B", (32, 8), 128, 32768),
        _cell("Qwen3 30B-A3B", (32, 4), 128, 16384),
        _cell("Llama-3 8B decode", (32, 8), 128, 1, batch=16, **decode),
        _cell("Llama-3 70B decode", (64, 8), 128, 1, batch=64, **decode),
        _cell("Gemma-3 12B local", (16, 8), 256, 16384, **_window(1024)),
        _cell("Gemma-3 12B global", (16, 8), 256, 16384),
        _cell("Gemma-3 27B local", (32, 16), 128, 16384, **_window(1024)),
        _cell("Gemma-2 9B local", (16, 8), 256, 8192, softcap=50.0, **_window(4096)),
        _cell("Gemma-2 27B global", (32, 16), 128, 8192, softcap=50.0),
        _cell("gpt-oss local", (64, 8), 64, 16384, sinks=True, **_window(128)),
        _cell("gpt-oss global", (64, 8), 64, 16384, sinks=True),
        _cell("DeepSeek-V3", (128, 128), 192, 4096, **latent),
        _cell("BERT large", (16, 16), 64, 512, batch=32, causal=False),
        _cell("ModernBERT local", (12, 12), 64, 8192, batch=4, causal=False, window=(64, 64)),
        _cell("Wan2.1 1.3B 480p", (12, 12), 128, 32760, causal=False),
        _cell("Wan2.1 14B 480p", (40, 40), 128, 32760, causal=False),
        _cell("CogVideoX 5B", (48, 48), 64, 17776, causal=False),
    ]
    trained = ("Llama-3 8B", "Qwen3 30B-A3B", "DeepSeek-V3", "BERT large", "CogVideoX 5B")
    steps = [replace(cell, work="step") for cell in forward if cell.model in trained]
    return forward + steps


def small(cell: Cell) -> Cell:
    """A cell of the same kind that a CPU computes in a moment: fewer heads, at most 96 tokens."""
    group = cell.heads // cell.key_heads
    left, right = (min(side, 16) for side in cell.window)
    length = min(cell.seqlen, 96)
    return replace(
        cell,
        dtype="float32",
        seqlen=length,
        seqlen_k=min(cell.seqlen_k, 96),
        tokens=min(cell.batch, 2) * length,
        heads_q=group,
        heads_k=1,
        window=(left, right),
    )
