"""Echo's part of sampling with vLLM: draws, requests and converted adapters. The whole engine is tested if there is
CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from echo_node.backends.base import EngineSettings
from echo_node.backends.vllm_engine import (
    MAX_RANK,
    DrawTable,
    VllmEngine,
    VllmPolicy,
    check_adapter,
    read_shapes,
    write_adapter,
)
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import BackendError
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, Prefix
from echo_shared.wire.messages import FinishReason

VOCABULARY = 3_000


def options_of(seed: int, index: int, temperature: float, prompt_tokens: int, given: int = 0) -> dict[str, Any]:
    return {
        "echo_seed": seed,
        "echo_index": index,
        "echo_temperature": temperature,
        "echo_prompt_tokens": prompt_tokens,
        "echo_given": given,
    }


def reference(logits: Any, seed: int, index: int, temperature: float, position: int) -> tuple[int, float]:
    u = draws.uniforms(seed, index, position + 1)[-1:]
    token, logprob = draws.draw(logits[None], u, temperature)
    return int(token[0]), float(logprob[0])


def test_samples_equal_the_references_in_any_slot_order() -> None:
    table = DrawTable(4)
    assert table.start(2, options_of(7, 0, 0.7, 5), 40)
    assert table.start(0, options_of(7, 3, 1.0, 9), 30)
    assert table.start(3, options_of(2**64 - 1, 1, 1.3, 1), 10)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    expected = [
        reference(logits[0].numpy(), 7, 3, 1.0, 29),
        reference(logits[1].numpy(), 2**64 - 1, 1, 1.3, 0),
        reference(logits[2].numpy(), 7, 0, 0.7, 4),
    ]
    forced = table.force(logits, np.array([0, 3, 2]), np.array([38, 1, 9], np.int32))
    assert forced is logits
    assert forced.argmax(dim=1).tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(forced.amax(dim=1).numpy(), [logprob for _, logprob in expected], rtol=1e-6)
    assert (forced == -torch.inf).sum(dim=1).tolist() == [VOCABULARY - 1] * 3


def test_a_slot_is_used_again() -> None:
    table = DrawTable(1)
    table.start(0, options_of(1, 1, 1.0, 3), 20)
    table.start(0, options_of(5, 2, 0.5, 4), 2)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    token, _ = reference(logits[0].numpy(), 5, 2, 0.5, 1)
    assert int(table.force(logits, np.array([0]), np.array([5])).argmax()) == token


def test_after_a_prefix_the_next_uniform_is_used() -> None:
    """Token number n of a completion uses uniform number n, also after a prefix. With 5 prompt tokens and a prefix of
    30, the next uniform has the number 30, not 0.
    """
    table = DrawTable(1)
    table.start(0, options_of(7, 2, 1.0, 5, given=30), 10)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    expected = [reference(logits[0].numpy(), 7, 2, 1.0, position)[0] for position in (30, 39)]
    drawn = [int(table.force(logits.clone(), np.array([0]), np.array([length])).argmax()) for length in (35, 44)]
    assert drawn == expected


class HandsOver:
    """A stub of vLLM's engine that returns the given tokens of each rollout, a few per step."""

    def __init__(self, deltas: dict[int, list[tuple[list[int], bool]]]) -> None:
        self.deltas = deltas
        self.requests: dict[str, tuple[Any, Any]] = {}

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
        self.requests[name] = prompt, params

    def step(self) -> list[Any]:
        outputs = []
        for name, (_, params) in self.requests.items():
            index = params["extra_args"]["echo_index"]
            if self.deltas[index]:
                ids, finished = self.deltas[index].pop(0)
                logprobs = SimpleNamespace(logprobs=[-0.5] * len(ids))
                completion = SimpleNamespace(token_ids=ids, logprobs=logprobs)
                outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=finished))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]


@pytest.fixture
def vllm_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ModuleType("vllm")
    words.SamplingParams = words.TokensPrompt = dict  # type: ignore[attr-defined]
    parameters = ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", words)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)


def test_vllms_tokens_are_reported_and_appended_to_the_prefix(kit: Any, vllm_words: None) -> None:
    (request,) = kit.make_requests(1, group_size=2, max_tokens=5)
    prefix = Prefix(index=3, ids=np.array([7, 8], np.int32), logprobs=np.array([-1, -2], np.float32))
    request = dataclasses.replace(request, prefixes=(prefix,))
    engine = VllmEngine()
    engine._width, engine._vocab_size, engine._max_positions = 8, kit.vocabulary, 64
    engine._running, engine._numbers, engine._lora = {}, itertools.count(), None
    vllm = engine._engine = HandsOver({2: [([11], False), ([12, 15], True)], 3: [([13], False), ([14, 16], True)]})
    steps = engine.sample(iter([request]))
    assert next(steps) == []
    told = {part.index: (part.start, part.ids.tolist(), part.logprobs.tolist()) for part in engine.news()}
    assert told == {2: (0, [11], [-0.5]), 3: (2, [13], [-0.5])}
    assert engine.news() == []
    fresh, begun = vllm.requests.values()
    assert [len(prompt["prompt_token_ids"]) for prompt, _ in (fresh, begun)] == [1, 3]
    assert [params["max_tokens"] for _, params in (fresh, begun)] == [5, 3]
    found = {rollout.index: rollout for rollout in next(steps) if isinstance(rollout, FinishedRollout)}
    assert [(found[n].completion_ids.tolist(), found[n].num_given) for n in (2, 3)] == [
        ([11, 12, 15], 0),
        ([7, 8, 13, 14, 16], 2),
    ]
    assert [found[n].finish_reason for n in (2, 3)] == [FinishReason.STOP, FinishReason.LENGTH]
    assert found[3].behavior_logprobs.tolist() == [-1, -2, -0.5, -0.5, -0.5]
    assert list(steps) == []


def test_warm_up_and_unfinished_prompts_do_no_harm() -> None:
    table = DrawTable(2)
    logits = torch.zeros(1, VOCABULARY)
    assert not table.start(0, None, 16)
    assert not table.start(0, {"other": 1}, 16)
    assert torch.equal(table.force(logits.clone(), np.array([0]), np.array([1])), logits)
    assert table.start(1, options_of(1, 1, 1.0, 100), 4)
    # vLLM has fed 64 of the prompt's 100 tokens to the model.
    table.force(logits, np.array([1]), np.array([64]))
    assert int(logits.isfinite().sum()) == 1


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    table = DrawTable(1)
    table.start(0, options_of(1, 1, 1.0, 1), 4)
    logits = table.force(torch.full((1, VOCABULARY), torch.nan), np.array([0]), np.array([1]))
    assert not bool(logits.isfinite().any())


def test_an_adapter_is_written_with_its_scaling(base: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    """vLLM reads one rank and one scale for all modules, so rank-stabilised LoRA with a rank per module must be
    converted without changing its result.
    """
    source = make_adapter(base, 1, r=4, use_rslora=True, rank_pattern={"q_proj": 6}, alpha_pattern={"down_proj": 3})
    adapter = load_adapter(source)
    check_adapter(adapter, read_shapes(base))
    write_adapter(adapter, tmp_path)
    written = load_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 6
    assert {len(module.a) for module in adapter.modules} == {4, 6}
    for mine, original in zip(written.modules, adapter.modules, strict=True):
        assert mine.path == original.path
        np.testing.assert_allclose(mine.b @ mine.a, original.b @ original.a, atol=1e-6)


def test_adapters_that_do_not_fit_are_refused(
    base: Path, base_of: Callable[[str], Path], make_adapter: Callable[..., Path]
) -> None:
    shapes = read_shapes(base)
    with pytest.raises(BackendError, match="does not have"):
        check_adapter(load_adapter(make_adapter(base_of("qwen2_wide"), 5)), shapes)
    high = make_adapter(base, 1, r=MAX_RANK + 1, target_modules=["q_proj"])
    with pytest.raises(BackendError, match="rank"):
        check_adapter(load_adapter(high), shapes)


def test_freeing_a_policy_removes_its_files(tmp_path: Path) -> None:
    policy = VllmPolicy(3, tmp_path / "3")
    policy.directory.mkdir()
    (policy.directory / "file").touch()
    policy.free()
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_open_is_refused_before_vllm_is_imported(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="precision"):
        VllmEngine().open(base, tmp_path, EngineSettings(precision="f32"))
    with pytest.raises(BackendError, match="safetensors"):
        VllmEngine().open(tmp_path, tmp_path, EngineSettings())


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or not torch.cuda.is_available(),
    reason="vLLM or CUDA is not here: on Linux with a CUDA GPU, pip install '.[vllm]'",
)
def test_rollouts_follow_the_reference(base: Path, make_adapter: Callable[..., Path], kit: Any, tmp_path: Path) -> None:
    """vLLM computes adapters in 16 bits, so the log-probabilities are only close to the float32 reference; also after
    each change of adapter.
    """
    engine = VllmEngine()
    engine.open(base, tmp_path, EngineSettings(device="cuda", width=8, precision="f16", kv_cache_bytes=2**28))
    for version, adapter in enumerate((None, make_adapter(base, 1), make_adapter(base, 2, r=4), None)):
        engine.set_policy(None if adapter is None else engine.prepare(adapter))
        requests = kit.make_requests(8, group_size=6, policy_version=version, first_lease=100 * version)
        rollouts = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
        model = kit.load_reference(base, adapter)
        same, errors = [], []
        for request in requests:
            for index in request.indices:
                ids, logprobs = kit.reference_rollout(model, request, index)
                rollout = rollouts[request.lease_id, index]
                same.append(rollout.completion_ids.tolist() == ids)
                if same[-1]:
                    errors += np.abs(rollout.behavior_logprobs - logprobs).tolist()
        assert len(rollouts) == 48
        assert np.mean(same) > 0.8
        assert np.mean(errors) < 0.02
    engine.close()
