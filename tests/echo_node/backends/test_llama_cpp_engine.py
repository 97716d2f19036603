"""What only llama.cpp has: precisions, long prompts in pieces, and many adapter swaps in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from echo_node.backends import llama_cpp_engine
from echo_node.backends.base import EngineSettings
from echo_node.backends.llama_cpp_engine import LlamaCppEngine


def test_thirty_swaps_neither_crash_nor_leak(
    base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=8, threads=1))
    adapters = [make_adapter(base, 1), make_adapter(base, 2), None]
    requests = kit.make_requests(3, max_tokens=4)
    first: dict[int, list[list[int]]] = {}
    for version in range(30):
        engine.set_policy(version, adapters[version % 3])
        rollouts = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
        drawn = [rollouts[name].completion_ids.tolist() for name in sorted(rollouts)]
        assert first.setdefault(version % 3, drawn) == drawn
        if version == 5:
            settled = psutil.Process().memory_info().rss
    assert first[0] != first[1] != first[2]
    assert psutil.Process().memory_info().rss - settled < 16 * 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3-f32-1.gguf"]
    engine.close()


def test_long_prompts_are_fed_in_pieces(base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp_engine, "_PREFILL_TOKENS", 3)
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=4, threads=1))
    requests = kit.make_requests(5, group_size=3, max_tokens=6)
    rollouts = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
    model = kit.load_reference(base)
    for request in requests:
        for index in request.indices:
            ids, _ = kit.reference_rollout(model, request, index)
            assert rollouts[request.lease_id, index].completion_ids.tolist() == ids
    engine.close()


def test_a_small_cache_only_slows_down(base: Path, kit: Any, tmp_path: Path) -> None:
    """256 cells: too few for two of these groups at once."""
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=16, threads=1, kv_cache_bytes=1))
    requests = kit.make_requests(5, group_size=8, max_tokens=60)
    assert len(kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))) == 40
    engine.close()


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 0.02), ("q8_0", 0.2)])
def test_lower_precisions_stay_close(precision: str, tolerance: float, base: Path, kit: Any, tmp_path: Path) -> None:
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=8, threads=1, precision=precision))
    requests = kit.make_requests(6)
    rollouts = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
    model = kit.load_reference(base)
    errors = []
    for request in requests:
        for index in request.indices:
            rollout = rollouts[request.lease_id, index]
            ids = [*request.prompt_ids.tolist(), *rollout.completion_ids.tolist()]
            scaled = kit.reference_logits(model, ids)[len(request.prompt_ids) - 1 : -1] / request.temperature
            logprobs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
            expected = logprobs[np.arange(len(rollout.completion_ids)), rollout.completion_ids]
            errors += np.abs(expected - rollout.behavior_logprobs).tolist()
    assert 0 < np.mean(errors) < tolerance
    engine.close()
