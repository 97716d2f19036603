"""A replay of an engine's recorded calls into llama.cpp gives the model the recorded inputs, even after the engine has
overwritten its buffers.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from benchmarks.backends.replay import Recording
from benchmarks.harness.engine import sums
from echo_hub.run.base_files import resolve_base
from echo_node.backends.base import EngineSettings
from echo_node.backends.registry import make_engine


def test_the_recorded_calls_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama_cpp")
    engine.open(resolve_base("builtin:tiny"), tmp_path, EngineSettings(width=8, threads=1))
    engine.set_policy(None)
    calls: Counter[str] = Counter()
    fed: list[list[int]] = []
    for name in ("llama_decode", "llama_memory_seq_cp"):
        monkeypatch.setattr(llama_cpp, name, _counting(name, getattr(llama_cpp, name), calls, fed))
    recording = Recording.of(lambda: list(engine.sample(iter(sums(3, seed=0)))))
    recorded, recorded_fed = calls.copy(), fed.copy()
    list(engine.sample(iter(sums(2, seed=9))))  # Other requests overwrite the engine's buffers.
    calls.clear()
    fed.clear()
    assert recording.replay() > 0
    assert calls == recorded and recorded["llama_decode"] > 3 and recorded["llama_memory_seq_cp"] > 3
    assert fed == recorded_fed
    engine.close()


def _counting(name: str, function: Any, calls: Counter[str], fed: list[list[int]]) -> Any:
    def call(*arguments: Any) -> Any:
        calls[name] += 1
        if name == "llama_decode":
            batch = arguments[1]
            fed.append([batch.token[place] for place in range(batch.n_tokens)])
        return function(*arguments)

    return call
