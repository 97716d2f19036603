"""Features only of the llama.cpp engine: precisions, prompts fed in pieces, cache layouts, adapters loaded while it
samples.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from echo_node.backends import kv_layout, llama_cpp_engine
from echo_node.backends.base import EngineSettings, GroupFailed
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_shared.sampling.interface import GroupRequest, Prefix


def open_engine(base: Path, derived: Path, **settings: Any) -> LlamaCppEngine:
    engine = LlamaCppEngine()
    engine.open(base, derived, EngineSettings(**{"width": 8, "threads": 1, **settings}))
    return engine


def sample(engine: LlamaCppEngine, requests: list[GroupRequest]) -> list[Any]:
    return list(chain.from_iterable(engine.sample(iter(requests))))


def drawn(kit: Any, engine: LlamaCppEngine, requests: list[GroupRequest]) -> dict[Any, list[int]]:
    rollouts = kit.rollouts_of(sample(engine, requests))
    return {name: rollouts[name].completion_ids.tolist() for name in sorted(rollouts)}


def references(kit: Any, model: Any, requests: list[GroupRequest]) -> dict[Any, list[int]]:
    return {
        (request.lease_id, index): kit.reference_rollout(model, request, index)[0]
        for request in requests
        for index in request.indices
    }


def test_many_swaps_neither_crash_nor_leak(
    base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    engine = open_engine(base, tmp_path)
    adapters = [make_adapter(base, 1), make_adapter(base, 2), None]
    requests = kit.make_requests(2, max_tokens=2)
    first: dict[int, dict[Any, list[int]]] = {}
    used = None
    for version in range(200):
        adapter = adapters[version % 3]
        policy = None if adapter is None else engine.prepare(adapter)
        engine.set_policy(policy)
        if used is not None:
            used.free()
        used = policy
        if version < 6 or version > 190:
            now = drawn(kit, engine, requests)
            assert first.setdefault(version % 3, now) == now
        if version == 20:
            settled = psutil.Process().memory_info().rss
    assert first[0] != first[1] != first[2]
    assert psutil.Process().memory_info().rss - settled < 16 * 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3-f32-1.gguf"]
    engine.close()


def test_policies_are_prepared_while_another_samples(
    base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    """Adapters are loaded and freed on another thread while the engine samples, which must not change the rollouts.
    Closing the engine frees the remaining adapters.
    """
    engine = open_engine(base, tmp_path)
    adapters = [make_adapter(base, 1), make_adapter(base, 2)]
    first = engine.prepare(adapters[0])
    engine.set_policy(first)
    requests = kit.make_requests(40, group_size=8, max_tokens=20)
    undisturbed = drawn(kit, engine, requests)
    prepared: list[Any] = []
    thread = threading.Thread(target=lambda: prepared.extend(engine.prepare(adapters[1]) for _ in range(10)))
    events: list[Any] = []
    for number, step in enumerate(engine.sample(iter(requests))):
        if number == 0:
            thread.start()
        events += step
        if len(prepared) > 2:
            prepared.pop(0).free()
    thread.join()
    rollouts = kit.rollouts_of(events)
    assert {name: rollouts[name].completion_ids.tolist() for name in sorted(rollouts)} == undisturbed
    engine.set_policy(prepared[-1])
    few = kit.make_requests(3)
    assert drawn(kit, engine, few) == references(kit, kit.load_reference(base, adapters[1]), few)
    engine.close()
    first.free()
    engine.close()


def test_long_prompts_are_fed_in_pieces(base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp_engine, "_PREFILL_TOKENS", 3)
    engine = open_engine(base, tmp_path, width=4)
    requests = kit.make_requests(5, group_size=3, max_tokens=6)
    assert drawn(kit, engine, requests) == references(kit, kit.load_reference(base), requests)
    engine.close()


@pytest.mark.parametrize("gain", [0, 1_000])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_both_arrangements_draw_the_same(
    gain: int, width: int, base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts must be equal in both arrangements of the key-value cache (the engine picks the faster one), even when
    groups of many lengths free and refill the cache's slots out of order.
    """
    monkeypatch.setattr(kv_layout, "_UNIFIED_GAIN", gain)
    monkeypatch.setattr(llama_cpp_engine, "_PREFILL_TOKENS", 7)
    engine = open_engine(base, tmp_path, width=width)
    requests = [
        dataclasses.replace(request, indices=tuple(range(1 + 3 * number % 7)), max_tokens=1 + 5 * number % 14)
        for number, request in enumerate(kit.make_requests(9))
    ]
    assert drawn(kit, engine, requests) == references(kit, kit.load_reference(base), requests)
    engine.close()


def test_the_layout_follows_the_requests(base: Path, kit: Any, tmp_path: Path) -> None:
    """The cache's memory suffices for four short rollouts or two long ones, so the layout must change in between."""
    shape_bytes = 2 * 4 * 2 * 32 * 4
    engine = open_engine(base, tmp_path, kv_cache_bytes=1_024 * shape_bytes)
    engine._planner = dataclasses.replace(engine._planner, max_positions=512)
    short = [dataclasses.replace(request, stop_ids=()) for request in kit.make_requests(3, max_tokens=6)]
    long = dataclasses.replace(kit.make_requests(1, first_lease=50)[0], max_tokens=300, stop_ids=())
    assert {len(ids) for ids in drawn(kit, engine, short).values()} == {6}
    assert engine._layout is not None
    assert (engine._layout.sequences, engine._layout.cells) == (4, 256)
    found = drawn(kit, engine, [short[0], long])
    assert sorted({len(ids) for ids in found.values()}) == [6, 300]
    assert (engine._layout.sequences, engine._layout.cells) == (2, 512)
    drawn(kit, engine, short)
    assert engine._layout.sequences == 4
    too_long = dataclasses.replace(long, max_tokens=2_000)
    (failed,) = sample(engine, [too_long])
    assert isinstance(failed, GroupFailed)
    assert failed.code == "too_long"
    engine.close()


def test_a_group_shares_its_prompt(base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(base, tmp_path, width=3)
    fed: list[int] = []
    feed = engine._llama.feed_prompt

    def noting(piece: NDArray[np.int32], begin: int, sequence: int) -> NDArray[np.float32]:
        fed.append(len(piece))
        return feed(piece, begin, sequence)

    monkeypatch.setattr(engine._llama, "feed_prompt", noting)
    request = dataclasses.replace(kit.make_requests(4)[3], indices=tuple(range(20)))
    assert drawn(kit, engine, [request]) == references(kit, kit.load_reference(base), [request])
    assert fed == [len(request.prompt_ids)]
    engine.close()


def test_a_continued_rollout_shares_a_running_ones_prompt(
    base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine must compute the shared prompt only once, and then each rollout's prefix."""
    engine = open_engine(base, tmp_path, width=4)
    fed: list[int] = []
    feed = engine._llama.feed_prompt

    def noting(piece: NDArray[np.int32], begin: int, sequence: int) -> NDArray[np.float32]:
        fed.append(len(piece))
        return feed(piece, begin, sequence)

    request = dataclasses.replace(kit.make_requests(4)[3], indices=(0, 1, 2), stop_ids=())
    whole = kit.rollouts_of(sample(engine, [request]))
    prefixes = tuple(
        Prefix(
            index=index,
            ids=whole[request.lease_id, index].completion_ids[: 3 * index],
            logprobs=whole[request.lease_id, index].behavior_logprobs[: 3 * index],
        )
        for index in (1, 2)
    )
    monkeypatch.setattr(engine._llama, "feed_prompt", noting)
    found = drawn(kit, engine, [dataclasses.replace(request, prefixes=prefixes)])
    assert found == {name: rollout.completion_ids.tolist() for name, rollout in whole.items()}
    assert fed == [len(request.prompt_ids), 3, 6]
    fed.clear()
    leases = [
        dataclasses.replace(
            request, lease_id=100 + index, indices=(index,), prefixes=prefixes[index - 1 : index] if index else ()
        )
        for index in (0, 1, 2)
    ]
    found = drawn(kit, engine, leases)
    assert found == {(100 + index, index): whole[request.lease_id, index].completion_ids.tolist() for index in range(3)}
    assert fed == [len(request.prompt_ids), 3, 6]
    another_turn = dataclasses.replace(leases[2], prompt_ids=request.prompt_ids[::-1].copy())
    fed.clear()
    drawn(kit, engine, [leases[0], another_turn])
    assert fed == [len(request.prompt_ids), len(request.prompt_ids) + 6]
    engine.close()


@pytest.mark.parametrize("home_survives", [True, False])
def test_cancelling_a_partly_started_group(home_survives: bool, base: Path, kit: Any, tmp_path: Path) -> None:
    engine = open_engine(base, tmp_path, width=4)
    wide, other = (dataclasses.replace(request, stop_ids=()) for request in kit.make_requests(2))
    wide = dataclasses.replace(wide, indices=tuple(range(9)), max_tokens=30 if home_survives else 2)
    events: list[Any] = []
    for number, step in enumerate(engine.sample(iter([wide, other]))):
        events += step
        if number == 1:
            engine.cancel(wide.lease_id)
    rollouts = kit.rollouts_of([event for event in events if event.lease_id == other.lease_id])
    found = {name: rollout.completion_ids.tolist() for name, rollout in rollouts.items()}
    assert found == references(kit, kit.load_reference(base), [other])
    engine.close()


def test_cancelling_while_the_prompt_is_fed(
    base: Path, kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_engine, "_PREFILL_TOKENS", 2)
    engine = open_engine(base, tmp_path, width=4)
    first, second = kit.make_requests(4)[2:]
    steps = engine.sample(iter([first, second]))
    assert next(iter(steps)) == []
    engine.cancel(first.lease_id)
    rollouts = kit.rollouts_of(list(chain.from_iterable(steps)))
    found = {name: rollout.completion_ids.tolist() for name, rollout in rollouts.items()}
    assert found == references(kit, kit.load_reference(base), [second])
    engine.close()


def test_a_base_given_as_gguf(base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path) -> None:
    open_engine(base, tmp_path / "derived").close()
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(next((tmp_path / "derived").iterdir()), given / "any.gguf")
    adapter = make_adapter(base, 1)
    engine = open_engine(given, tmp_path / "unused")
    requests = kit.make_requests(3)
    assert drawn(kit, engine, requests) == references(kit, kit.load_reference(base), requests)
    engine.set_policy(engine.prepare(adapter))
    assert drawn(kit, engine, requests) == references(kit, kit.load_reference(base, adapter), requests)
    engine.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's address space")
def test_a_cache_too_large_for_memory_is_reported(base: Path, tmp_path: Path) -> None:
    """The test limits the process to 2 GiB more memory; the key-value cache needs 4 GiB."""
    open_engine(base, tmp_path).close()
    program = f"""
        import dataclasses, resource, psutil
        from pathlib import Path
        import numpy as np
        from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings
        from echo_node.backends.kv_layout import KvLayout
        from echo_node.backends.llama_cpp_engine import LlamaCppEngine
        from echo_shared.errors import BackendError
        engine = LlamaCppEngine()
        engine.open(Path({str(base)!r}), Path({str(tmp_path)!r}), EngineSettings(width=4, threads=1))
        limit = psutil.Process().memory_info().vms + 2**31
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            engine._llama.reserve(KvLayout(sequences=64, cells=32_768, unified=False))
        except BackendError as error:
            assert error.code == OUT_OF_MEMORY, error
            print("said so")
        engine.close()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "said so", result.stderr


def test_a_small_cache_only_slows_down(base: Path, kit: Any, tmp_path: Path) -> None:
    engine = open_engine(base, tmp_path, width=16, kv_cache_bytes=1)
    requests = kit.make_requests(5, group_size=8, max_tokens=60)
    assert len(kit.rollouts_of(sample(engine, requests))) == 40
    assert engine._layout is not None
    assert engine._layout.sequences == 1
    engine.close()


@pytest.mark.parametrize(("precision", "tolerance"), [("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2), ("q4_k_m", 1.0)])
def test_lower_precisions_stay_close(precision: str, tolerance: float, base: Path, kit: Any, tmp_path: Path) -> None:
    engine = open_engine(base, tmp_path, precision=precision)
    requests = kit.make_requests(6)
    rollouts = kit.rollouts_of(sample(engine, requests))
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
