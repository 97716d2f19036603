"""Features only of the MLX engine: a new rollout reuses a row of the batch, and the cache grows with the rollouts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("mlx_lm", reason="MLX is not installed: make env")

import mlx.core as mx

from echo_node.backends import mlx_model
from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings
from echo_node.backends.mlx_engine import MlxEngine
from echo_node.backends.mlx_model import MlxModel
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import GroupRequest


def open_engine(base: Path, **settings: Any) -> MlxEngine:
    engine = MlxEngine()
    engine.open(base, base, EngineSettings(**{"width": 8, "precision": "f32", **settings}))
    return engine


def sample(kit: Any, engine: MlxEngine, requests: list[GroupRequest]) -> Any:
    return kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))


def test_little_memory_only_slows_sampling_down(base: Path, kit: Any) -> None:
    """Even with memory for only one row, the samples are equal."""
    requests = kit.make_requests(4, group_size=5)
    wide = sample(kit, open_engine(base), requests)
    narrow = sample(kit, open_engine(base, kv_cache_bytes=1), requests)
    assert {name: r.completion_ids.tolist() for name, r in wide.items()} == {
        name: r.completion_ids.tolist() for name, r in narrow.items()
    }


def test_the_batch_is_full_while_there_is_work(base: Path, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    step = MlxModel.step

    def counted(model: MlxModel, tokens: Any, positions: Any) -> Any:
        widths.append(len(tokens))
        return step(model, tokens, positions)

    monkeypatch.setattr(MlxModel, "step", counted)
    rollouts = sample(kit, open_engine(base), kit.make_requests(9, group_size=5))
    tokens = sum(len(rollout.completion_ids) for rollout in rollouts.values())
    assert sum(widths) == tokens
    assert widths[0] == 8
    drained = next(number for number, width in enumerate(widths) if width < 8)
    assert sorted(widths[drained:], reverse=True) == widths[drained:]


def test_a_prompt_is_computed_once(base: Path, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = []
    prefill = MlxModel.prefill

    def counted(model: MlxModel, prompts: Any) -> Any:
        prefilled.extend(prompts)
        return prefill(model, prompts)

    monkeypatch.setattr(MlxModel, "prefill", counted)
    requests = kit.make_requests(3, group_size=20)
    sample(kit, open_engine(base), requests)
    assert [prompt.tolist() for prompt in prefilled] == [request.prompt_ids.tolist() for request in requests]


def test_groups_of_any_length_share_the_cache(base: Path, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of long and of short rollouts need caches of different shape; a change of shape must not affect rows in
    use.
    """
    monkeypatch.setattr(mlx_model, "_LENGTH_STEP", 4)
    shapes = []
    reserve = MlxModel.reserve

    def counted(model: MlxModel, rows: int, length: int, kept_rows: int) -> None:
        shapes.append((rows, length, kept_rows))
        reserve(model, rows, length, kept_rows)

    monkeypatch.setattr(MlxModel, "reserve", counted)
    requests = kit.make_requests(8, group_size=3)
    requests = [dataclasses.replace(r, max_tokens=4 + 8 * (n % 3)) for n, r in enumerate(requests)]
    cells = 80
    engine = open_engine(base, kv_cache_bytes=cells * 2 * 4 * 2 * 32 * 4)
    rollouts = sample(kit, engine, requests)
    assert len(set(shapes)) >= 3
    assert any(kept for _, _, kept in shapes)
    assert all(rows * length <= cells for rows, length, _ in shapes)
    model = kit.load_reference(base)
    for request in requests:
        for index in request.indices:
            ids, _ = kit.reference_rollout(model, request, index)
            assert rollouts[request.lease_id, index].completion_ids.tolist() == ids


def test_a_policy_is_prepared_while_another_samples(base: Path, make_adapter: Callable[..., Path], kit: Any) -> None:
    engine = open_engine(base)
    first, second = make_adapter(base, 1), make_adapter(base, 2)
    requests = kit.make_requests(4)
    engine.set_policy(engine.prepare(second))
    expected = sample(kit, engine, requests)
    engine.set_policy(engine.prepare(first))
    prepared = []
    thread = threading.Thread(target=lambda: prepared.append(engine.prepare(second)))
    steps = engine.sample(iter(requests))
    next(steps)
    thread.start()
    for _ in steps:
        pass
    thread.join()
    engine.set_policy(prepared[0])
    again = sample(kit, engine, requests)
    assert all(np.array_equal(again[name].completion_ids, expected[name].completion_ids) for name in expected)


def test_fifty_swaps_do_not_leak(base: Path, make_adapter: Callable[..., Path], kit: Any) -> None:
    engine = open_engine(base)
    adapters = [make_adapter(base, 1), make_adapter(base, 2, r=4)]
    requests = kit.make_requests(2, max_tokens=2)
    settled = 0
    for version in range(50):
        policy = engine.prepare(adapters[version % 2])
        engine.set_policy(policy)
        sample(kit, engine, requests)
        engine.set_policy(None)
        policy.free()
        if version == 10:
            settled = psutil.Process().memory_info().rss
    assert psutil.Process().memory_info().rss - settled < 16 * 2**20


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RuntimeError("[malloc] Unable to allocate 17179869184 bytes."), OUT_OF_MEMORY),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), OUT_OF_MEMORY),
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("[matmul] Last dimension of first input does not match"), "backend"),
    ],
)
def test_mlx_errors_are_distinguished(
    raised: Exception, code: str, base: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(base)

    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(mx, "contiguous", fail)
    with pytest.raises(BackendError) as caught:
        sample(kit, engine, kit.make_requests(3))
    assert caught.value.code == code


def test_a_model_that_computes_nonsense_is_found_out(base: Path, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(base)
    monkeypatch.setattr(MlxModel, "step", lambda _self, tokens, _positions: np.full((len(tokens), 100), np.nan))
    with pytest.raises(BackendError, match="not numbers"):
        sample(kit, engine, kit.make_requests(1))
