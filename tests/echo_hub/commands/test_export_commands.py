from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from echo_hub.config.sections import HubConfig
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.test_export import make_run_with_version


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--dtype", "int8", "--merged"), "--dtype is one of"),
        (("--dtype", "float16"), "needs --merged or --gguf"),
        (("--merged", "--base", "a/b"), "--base is for an adapter"),
        (("--gguf", "q8_0", "--base", "a/b"), "--base is for an adapter"),
        (("--merged", "--gguf", "q8_0"), "Choose one"),
        (("--ollama",), "--ollama needs --gguf"),
        (("--public",), "--public needs --push"),
    ],
)
def test_options_that_do_not_belong_together(tmp_path: Path, options: tuple[str, ...], advice: str) -> None:
    make_run(RunDirectory(tmp_path / "run"), HubConfig())
    result = invoke(tmp_path / "run", tmp_path / "out", *options)
    assert isinstance(result.exception, ConfigError) and advice in str(result.exception.do)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_gguf_file_with_a_modelfile_is_written_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    make_run_with_version(tmp_path, "builtin:tiny", strength=0.3)
    result = invoke(tmp_path / "run", tmp_path / "out", "--gguf", "q8_0", "--ollama", "--version", "3")
    assert result.exit_code == 0, result.output
    assert f"Policy version 3 is in {tmp_path / 'out' / 'spring-sums-v3-q8_0.gguf'}" in result.stdout
    assert "ollama create spring-sums:v3 -f Modelfile && ollama run spring-sums:v3" in result.stdout
    assert "Note: llama.cpp reads" in result.stderr
