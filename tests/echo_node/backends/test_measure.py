"""An engine's speed is measured within the time allowed for it: real engines on small models, and a stub with a
scripted clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from echo_node.backends import measure as measuring
from echo_node.backends import registry
from echo_node.backends.base import EngineEvent, EngineSettings, GroupFailed, PreparedPolicy
from echo_node.backends.measure import measure, widths_up_to
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason


@pytest.mark.parametrize(
    ("width", "widths"),
    [(1, (1,)), (4, (1, 4)), (8, (1, 8)), (32, (1, 8, 32)), (100, (1, 8, 32, 64, 100)), (128, (1, 8, 32, 64, 128))],
)
def test_widths(width: int, widths: tuple[int, ...]) -> None:
    assert widths_up_to(width) == widths


@pytest.mark.parametrize("backend", ["llama_cpp", "torch"])
def test_real_engines(backend: str, base: Path, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    engine = registry.make_engine(backend)
    width = engine.open(base, tmp_path, EngineSettings(width=8, threads=1))
    engine.set_policy(None)
    rows = measure(engine, base, widths=widths_up_to(width), budget_s=1.5)
    engine.close()
    assert [(row["kind"], row["width"]) for row in rows] == [("prefill", 1), ("decode", 1), ("decode", 8)]
    for row in rows:
        assert row["tokens_per_s"] == row["tokens"] / row["seconds"] > 0


class Slow:
    """A stub whose clock advances by `prompt_s` per prompt token, and by `step_s` per step of all rollouts."""

    def __init__(self, *, prompt_s: float, step_s: Callable[[int], float]) -> None:
        self.now = 0.0
        self.requests: list[GroupRequest] = []
        self.cancelled: list[int] = []
        self.fails = False
        self._prompt_s = prompt_s
        self._step_s = step_s

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        return settings.width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        raise AssertionError("an engine is measured without adapters")

    def set_policy(self, policy: PreparedPolicy | None) -> None: ...

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for request in groups:
            self.requests.append(request)
            if self.fails:
                yield [GroupFailed(lease_id=request.lease_id, code="x", what="No.")]
                return
            self.now += self._prompt_s * len(request.prompt_ids)
            yield []
            for _ in range(request.max_tokens - 1):
                if request.lease_id in self.cancelled:
                    return
                self.now += self._step_s(len(request.indices))
                yield []
            yield [self._finished(request, index) for index in request.indices]

    def _finished(self, request: GroupRequest, index: int) -> FinishedRollout:
        return FinishedRollout(
            lease_id=request.lease_id,
            group_id=request.group_id,
            index=index,
            policy_version=0,
            completion_ids=np.zeros(request.max_tokens, np.int32),
            behavior_logprobs=np.zeros(request.max_tokens, np.float32),
            finish_reason=FinishReason.LENGTH,
            sampling_s=0.0,
        )

    def cancel(self, lease_id: int) -> None:
        self.cancelled.append(lease_id)

    def close(self) -> None: ...


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slow]:
    """Return a function that makes a `Slow` stub and lets `measure` read the stub's clock."""

    def make(**speeds: object) -> Slow:
        engine = Slow(**speeds)  # type: ignore[arg-type]
        monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        return engine

    return make


def a_model(directory: Path, *, max_positions: int = 4_096, vocabulary: int = 50) -> Path:
    config = {"vocab_size": vocabulary, "max_position_embeddings": max_positions}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_budget_is_kept_and_spent(timed: Callable[..., Slow], tmp_path: Path) -> None:
    engine = timed(prompt_s=0.001, step_s=lambda width: 0.01 + 0.001 * width)
    rows = measure(engine, a_model(tmp_path), widths=(1, 8, 32, 64), budget_s=10.0)
    assert 5.0 <= engine.now <= 13.0
    rates = {row["width"]: row["tokens_per_s"] for row in rows if row["kind"] == "decode"}
    assert list(rates) == [1, 8, 32, 64]
    assert rates == pytest.approx({width: width / (0.01 + 0.001 * width) for width in rates}, rel=0.2)
    assert next(row["tokens_per_s"] for row in rows if row["kind"] == "prefill") == pytest.approx(1_000)
    assert engine.cancelled == []


def test_a_too_slow_width_and_wider_ones_are_not_measured(
    timed: Callable[..., Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_WARM_UP_TOKENS", 10)
    engine = timed(prompt_s=0.001, step_s=lambda width: 1e-3 if width < 32 else 10.0)
    rows = measure(engine, a_model(tmp_path), widths=(1, 8, 32, 64), budget_s=1.0)
    assert [row["width"] for row in rows if row["kind"] == "decode"] == [1, 8]
    assert len(engine.cancelled) == 1 and max(len(request.indices) for request in engine.requests) == 32
    assert engine.now < 20.0


def test_when_the_budget_is_gone_nothing_more_is_tried(timed: Callable[..., Slow], tmp_path: Path) -> None:
    engine = timed(prompt_s=0.001, step_s=lambda width: 1e-3 if width < 32 else 10.0)
    rows = measure(engine, a_model(tmp_path), widths=(1, 8, 32, 64), budget_s=1.0)
    assert [row["width"] for row in rows if row["kind"] == "decode"] == [1, 8, 32]


def test_an_engine_that_is_far_too_slow_has_no_rows(timed: Callable[..., Slow], tmp_path: Path) -> None:
    engine = timed(prompt_s=10.0, step_s=lambda width: 10.0)
    rows = measure(engine, a_model(tmp_path), widths=(1, 8), budget_s=1.0)
    assert rows == [] or [row["kind"] for row in rows] == ["prefill"]
    assert len(engine.requests) <= 2


@pytest.mark.parametrize("max_positions", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("vocabulary", [1, 50])
def test_a_tiny_context_is_kept(
    timed: Callable[..., Slow], tmp_path: Path, max_positions: int, vocabulary: int
) -> None:
    engine = timed(prompt_s=0.001, step_s=lambda width: 0.01)
    model = a_model(tmp_path, max_positions=max_positions, vocabulary=vocabulary)
    rows = measure(engine, model, widths=(1, 8), budget_s=0.5)
    assert [row["width"] for row in rows] == [1, 1, 8]
    for request in engine.requests:
        assert len(request.prompt_ids) + request.max_tokens - 1 <= max_positions
        assert 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < vocabulary
        assert request.stop_ids == () and request.temperature == 1.0


def test_an_engine_that_fails_raises(timed: Callable[..., Slow], tmp_path: Path) -> None:
    engine = timed(prompt_s=0.001, step_s=lambda width: 0.01)
    engine.fails = True
    with pytest.raises(BackendError, match="cannot sample the measuring prompt"):
        measure(engine, a_model(tmp_path), widths=(1,), budget_s=1.0)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"vocab_size": null, "max_position_embeddings": 1}'])
def test_a_model_without_a_description_raises(timed: Callable[..., Slow], tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BackendError, match=r"config\.json cannot be used"):
        measure(timed(prompt_s=0.1, step_s=lambda width: 0.1), tmp_path, widths=(1,), budget_s=1.0)


def test_a_prompt_too_large_for_memory_is_not_measured(base_of: Callable[[str], Path], tmp_path: Path) -> None:
    base = base_of("qwen3")
    engine = registry.make_engine("llama_cpp")
    shape_bytes = 2 * 4 * 2 * 32 * 4  # Memory for one token: keys and values, 4 layers, 2 heads, 32 numbers, 4 bytes.
    engine.open(base, tmp_path, EngineSettings(width=1, threads=1, kv_cache_bytes=100 * shape_bytes))
    engine.set_policy(None)
    bench = measuring._Bench(engine=engine, bounds=measuring._Bounds(vocab_size=100, max_positions=512))
    found = bench.prefill(1.0)
    engine.close()
    assert found is not None and found[0] == 32
