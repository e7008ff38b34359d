# SPDX-License-Identifier: BSD-3-Clause
# Does the training script train, compare, and notice a wrong attention? A tiny model on the CPU.

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="4.56", reason="transformers is not installed: pip install '.[test]'"
)

import fa
import train

TINY = ("--tiny", "--device", "cpu", "--steps", "12", "--length", "48")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of fa.attention."""
    seen: list[dict[str, Any]] = []

    def spy(function: Any, *args: Any, **options: Any) -> Any:
        seen.append(options)
        return function(*args, **options)

    monkeypatch.setattr(fa, "attention", functools.partial(spy, fa.attention))
    return seen


def test_curves_agree(
    tmp_path: Path, calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*TINY, "--out", str(tmp_path)]) == 0
    # twelve steps of two layers called ours; whether the rounding differs is the machine's affair
    assert len(calls) == 12 * 2 and all(options["causal"] for options in calls)
    eager, ours = (json.loads(x) for x in (tmp_path / "train.jsonl").read_text().splitlines())
    assert (eager["name"], ours["name"]) == ("eager", "fa")
    assert max(abs(a - b) for a, b in zip(eager["losses"], ours["losses"], strict=True)) < 1e-4
    assert ours["losses"][-1] < ours["losses"][0] - 0.5 and ours["seconds"] > 0
    assert "The curves agree" in capsys.readouterr().out
    if (tmp_path / "train.png").exists():  # matplotlib is there
        assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_attention_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fa.attention
    monkeypatch.setattr(fa, "attention", lambda *args, **options: 1.05 * right(*args, **options))
    assert train.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "DO NOT agree" in capsys.readouterr().out


def test_a_refusal_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise NotImplementedError("no row covers the backward")

    monkeypatch.setattr(fa, "attention", refuse)
    assert train.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "fa: no row covers the backward" in capsys.readouterr().out


def test_loss_that_is_no_number_never_agrees() -> None:
    runs = [train.Run(name, [5.0, 4.0], 0.1, None) for name in ("eager", "fa")]
    assert train.report(runs, 1e-3)[1]
    runs[1].losses[1] = float("nan")
    assert not train.report(runs, 1e-3)[1]
    runs[1].losses[1] = 4.1
    assert not train.report(runs, 1e-3)[1]


def test_batches_are_excerpts_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    options = train.parse([*TINY, "--text", str(tmp_path / "a.txt")])
    ids = train.token_ids(train.read_text(options.text), None)
    steps = train.batches(ids, options)
    assert len(steps) == 12 and steps[0].shape == (2, 48) and steps[0].dtype == torch.int64
    text = bytes(steps[3][1].tolist()).decode()
    assert text in "abcdefghij" * 20
    assert all(torch.equal(a, b) for a, b in zip(steps, train.batches(ids, options), strict=True))
    with pytest.raises(SystemExit, match="--length: 48, and the text has 30 tokens"):
        train.batches(ids[:30], options)
    assert len(train.read_text(None)) > 50_000


@pytest.mark.parametrize(
    "arguments", ["--steps 0", "--impl fa", "--impl eager flash", "--tiny --random"]
)
def test_wrong_command_lines(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        train.parse(arguments.split())
    assert caught.value.code == 2


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--model", "./nothing", "--device", "cpu"]) == 1
    assert "there is no folder nothing" in capsys.readouterr().out
