from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from echo_hub.commands import demo as demo_module
from echo_hub.commands.demo import default_backends, exported, missing_engine
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError


def test_with_llama_cpp_each_engine_gets_one_node() -> None:
    pytest.importorskip("llama_cpp")
    assert default_backends() == ("llama_cpp", "torch")
    assert missing_engine() is None


def test_without_llama_cpp_both_nodes_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # An import raises ModuleNotFoundError.
    assert default_backends() == ("torch", "torch")
    line = missing_engine()
    assert line is not None and "llama.cpp" in line and "pip install llama-cpp-python" in line
    assert "\n" not in line


async def test_without_llama_cpp_the_demo_says_how_to_get_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    console = Console(record=True)
    assert await exported(RunDirectory(tmp_path / "run"), console) is None
    said = console.export_text()
    assert f"echo_hub chat {tmp_path / 'run'}" in said and "--gguf q8_0" in said
    assert demo_module.PRECISION == "q8_0"


async def test_a_failed_export_is_an_error_with_the_command_to_repeat(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(ConfigError, match="could not be written") as caught:
        await exported(RunDirectory(tmp_path / "no run"), Console(quiet=True))
    assert "not a run directory" in str(caught.value.got)
    assert "--gguf q8_0" in str(caught.value.do)
