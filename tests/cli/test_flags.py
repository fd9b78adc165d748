"""The command line's surface: flags, numbers, and what each command must not import."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest

from nanoserve.cli.flags import HELP, engine_args
from nanoserve.cli.main import build_parser, main
from nanoserve.cli.numbers import human_int
from nanoserve.config.args import EngineArgs
from nanoserve.version import __version__

HEAVY = ("torch", "transformers", "fastapi", "pydantic", "zmq", "openai", "numpy", "triton")


def parse(*argv):
    return build_parser().parse_args(list(argv))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("1m", 1_000_000),
        ("1M", 2**20),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("2G", 2 * 2**30),
        ("500mB", 500_000_000),
        ("1_000", 1000),
    ],
)
def test_human_numbers(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "8kk", "-8", "1.5", "8 apples", "1e3", "nan"])
def test_texts_that_are_no_numbers(text):
    with pytest.raises(ValueError, match="number"):
        human_int(text)


def test_every_engine_setting_has_a_flag_and_help():
    assert set(HELP) == {f.name for f in dataclasses.fields(EngineArgs)}


def test_defaults_are_those_of_engine_args():
    assert engine_args(parse("serve")) == EngineArgs()


def test_flags_are_spelled_as_in_vllm():
    args = engine_args(
        parse(
            *("serve", "--max-model-len", "8k", "--kv-cache-memory-bytes", "1GiB"),
            *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "16K"),
            *("--served-model-name", "a", "b", "--block-size", "4", "--dtype", "float32"),
            *("--gpu-memory-utilization", "0.5", "--scheduling-policy", "priority"),
        )
    )
    assert args == EngineArgs(
        max_model_len=8000,
        kv_cache_memory=2**30,
        enable_chunked_prefill=False,
        max_num_batched_tokens=16384,
        served_model_name=["a", "b"],
        block_size=4,
        dtype="float32",
        gpu_memory_utilization=0.5,
        scheduling_policy="priority",
    )


def test_underscores_are_dashes(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--max_model_len", "x"])
    assert exit_info.value.code == 2
    assert "argument --max-model-len: 'x' is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--max-modle-len", "4"], "did you mean --max-model-len?"),
        (["serve", "--port", "70000"], "not a port"),
        (["serve", "--allowed-origins", "x"], "not a JSON list"),
        (["serve", "--dtype", "int3"], "invalid choice"),
        (["sevre"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_are_told_in_a_line(argv, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def run_cli(*argv, **env):
    code = (
        "import sys, json; from nanoserve.cli.main import main\n"
        "try: rc = main(json.loads(sys.argv[1]))\n"
        "except SystemExit as e: rc = e.code\n"
        f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules]); sys.exit(rc)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(argv))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["serve", "--help"], 0),
        (["bench", "--help"], 0),
        (["chat", "--help"], 0),
        (["serve", "--max-modle-len", "4"], 2),
    ],
)
def test_A84_nothing_heavy_is_imported(argv, code):
    done = run_cli(*argv)
    assert done.returncode == code, done.stderr
    assert "LOADED []" in done.stdout
    if argv == ["--version"]:
        assert f"nanoserve {__version__}" in done.stdout


@pytest.mark.parametrize(
    "what",
    [
        *("missing", "empty", "no config", "no weights", "no tokenizer"),
        pytest.param("unknown", marks=pytest.mark.slow),  # found when the models are imported
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_A83_a_wrong_model_is_one_line(tmp_path, tiny_folder, command, what):
    folder = tmp_path / "model"
    if what == "empty":
        folder.mkdir()
    elif what != "missing":
        shutil.copytree(tiny_folder, folder)
        if what == "no config":
            (folder / "config.json").unlink()
        elif what == "no weights":
            (folder / "model.safetensors").unlink()
        elif what == "no tokenizer":
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()
        else:
            text = (folder / "config.json").read_text()
            (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "NoSuchModel"))
    argv = ["serve", str(folder), "--port", "0", "--log-level", "error"]
    if command == "generate":
        argv = ["generate", "x", "--model", str(folder), "--log-level", "error"]
    done = run_cli(*argv)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("nanoserve: error: ")
    assert "Traceback" not in done.stderr
    assert ("NoSuchModel" if what == "unknown" else str(folder)) in lines[0]


def test_A83_debug_shows_the_trace(tmp_path):
    done = run_cli("serve", str(tmp_path / "no"), "--port", "0", "--log-level", "debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "ModelLoadError" in done.stderr


def test_misspelt_variables_are_told(tmp_path):
    done = run_cli("serve", str(tmp_path / "no"), "--port", "0", NANOSERVE_CAHCE="x")
    assert "NANOSERVE_CAHCE" in done.stderr
