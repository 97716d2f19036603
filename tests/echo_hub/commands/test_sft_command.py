from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError, StorageError
from tests.echo_hub.lifecycle.test_starting import made

SETTINGS = {"sampling": {"max_tokens": 4}, "learner": {"threads": 1}, "evaluation": {"problems": 2}}
OPTIONS = ("--batch-tokens", "30", "--epochs", "12", "--learning-rate", "0.01", "--heldout", "0.2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "9", "completion": "12345"}]))
    return path


def said(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["sft", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def begun(directory: RunDirectory, file: Path) -> subprocess.Popen[str]:
    """Start a process that fine-tunes for many epochs, and return it when the first epoch is finished."""
    command = [sys.executable, "-u", "-m", "echo_hub", "sft", directory.root, file, *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = ""
    while "Epoch" not in printed:
        line = process.stdout.readline()
        assert line, f"{printed}{process.communicate()[1]}"
        printed += line
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to another process there")
def test_stopped_and_killed_training_resumes_to_the_same_bits(tmp_path: Path, file: Path) -> None:
    whole, _ = made(tmp_path / "whole", **SETTINGS)
    said(whole.root, file, *OPTIONS)
    parts, _ = made(tmp_path / "parts", **SETTINGS)
    stopped = begun(parts, file)
    stopped.send_signal(signal.SIGINT)
    _, errors = stopped.communicate()
    assert stopped.returncode == 0 and "Nothing is lost: the same command resumes there." in errors
    killed = begun(parts, file)
    killed.kill()
    killed.communicate()
    assert not (parts.root / "sft").exists()
    assert "Resuming after update " in said(parts.root, file, *OPTIONS)
    for name in ("adapter_model.safetensors", "sft.json"):
        assert (parts.root / "sft" / name).read_bytes() == (whole.root / "sft" / name).read_bytes(), name


def test_sft_prints_its_data_and_its_result(tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run", **SETTINGS)
    figures = tmp_path / "figures.json"
    options = ("--epochs", "1", "--batch-tokens", "30", "--learning-rate", "0.01", "--heldout", "0.2")
    text = said(directory.root, file, *options, "--evaluate", "--json", figures)
    assert "12 demonstrations: 9 to train on, 3 held out; " in text
    assert "Skipped 1: a reply is longer than sampling.max_tokens = 4, its stop token included (lines 13)" in text
    assert "0+1=" in text and "1<eos>" in text
    assert "held out: " in text and "perplexity" in text and "Epoch 1 of 1" in text
    found = json.loads(figures.read_text())
    assert len(found["heldout_losses"]) == 2 and len(found["training_losses"]) == 1
    assert [each["policy_version"] for each in found["evaluations"]] == [0, 1]
    assert f"the run starts with it. Next: echo-hub serve {directory.root}" in text


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [("--learning-rate", "0", "above 0"), ("--json", "nowhere/figures.json", "figures cannot be written")],
)
def test_bad_options_are_refused_before_any_training(
    tmp_path: Path, file: Path, option: str, value: str, match: str
) -> None:
    directory, _ = made(tmp_path / "run", **SETTINGS)
    with pytest.raises(ConfigError, match=match):
        said(directory.root, file, option, value)
    assert not (directory.root / "sft-work").exists()


def test_sft_is_refused_while_a_hub_serves_the_run(tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run", **SETTINGS)
    with directory.locked(), pytest.raises(StorageError, match="using this run directory"):
        said(directory.root, file)
