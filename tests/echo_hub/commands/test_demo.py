from __future__ import annotations

import sys

import pytest

from echo_hub.commands.demo import default_backends, missing_engine


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
