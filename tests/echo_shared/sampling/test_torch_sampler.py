from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from echo_shared.errors import BackendError
from echo_shared.sampling import draws, torch_prefill, torch_sampler
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.wire.messages import FinishReason

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

VOCABULARY = 30
FULL = "full_attention"
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def _bare() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))


def _windowed() -> Any:
    config = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "sliding_attention" in config.layer_types
    return Qwen3ForCausalLM(config)


def _llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def _recurrent() -> Any:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
    config = Qwen3NextConfig(
        **{**SHAPE, "num_hidden_layers": 4}, **heads, **experts, linear_value_head_dim=8, moe_intermediate_size=16
    )
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    return Qwen3NextForCausalLM(config)


def _adapted() -> Any:
    model = get_peft_model(_bare(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[_bare, _windowed, _llama, _adapted, _recurrent])
def any_model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    make: Callable[[], Any] = request.param
    return make().eval()


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return _bare().eval()


def group(number: int, **changes: Any) -> GroupRequest:
    """Return group `number`, whose settings and prompt length (one to seven tokens) follow from the number."""
    values = {
        "lease_id": 100 + number,
        "group_id": number,
        "indices": tuple(range(number % 3, number % 3 + 1 + number % 4)),
        "prompt_ids": np.random.default_rng(number).integers(0, VOCABULARY, 1 + number % 7).astype(np.int32),
        "seed": draws.derive_seed("test", number),
        "policy_version": 5,
        "temperature": (0.7, 1.0, 1.6)[number % 3],
        "max_tokens": (1, 6, 12)[number % 3],
        "stop_ids": ((), (1, 2, 3), (4,))[number % 3],
    }
    return GroupRequest(**{**values, **changes})


def naive(model: Any, group: GroupRequest, index: int) -> tuple[list[int], list[float]]:
    """Sample one rollout by the reference's draws, token by token, without cache, batch or padding."""
    ids, drawn, logprobs = group.prompt_ids.tolist(), [], []
    for u in draws.uniforms(group.seed, index, group.max_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[:, -1].float().numpy()
        tokens, nats = draws.draw(logits, np.array([u]), group.temperature)
        ids.append(int(tokens[0]))
        drawn.append(int(tokens[0]))
        logprobs.append(float(nats[0]))
        if drawn[-1] in group.stop_ids:
            break
    return drawn, logprobs


def by_place(rollouts: Iterator[FinishedRollout]) -> dict[tuple[int, int], FinishedRollout]:
    return {(rollout.group_id, rollout.index): rollout for rollout in rollouts}


def continuous(
    model: Any, groups: list[GroupRequest], width: int, max_cells: int | None = None, *, fixed: bool = False
) -> Any:
    batch = torch_sampler.Batch(model, width=width, max_cells=max_cells, fixed=fixed)
    return by_place(chain.from_iterable(batch.sample(iter(groups))))


@pytest.mark.parametrize(("width", "fixed"), [(1, False), (5, False), (1_000, False), (5, True)])
def test_a_batch_of_mixed_groups_equals_the_reference(any_model: Any, width: int, fixed: bool) -> None:
    groups = [group(number) for number in range(14)]
    found = continuous(any_model, groups, width, fixed=fixed)
    # A prefill computes the recurrent state in chunks, a step token by token, which rounds differently.
    tolerance = 2e-4 if isinstance(any_model, Qwen3NextForCausalLM) else 2e-5
    assert set(found) == {(g.group_id, index) for g in groups for index in g.indices}
    for one in groups:
        for index in one.indices:
            rollout = found[one.group_id, index]
            tokens, logprobs = naive(any_model, one, index)
            assert rollout.completion_ids.tolist() == tokens
            np.testing.assert_allclose(rollout.behavior_logprobs, logprobs, atol=tolerance)
            stopped = tokens[-1] in one.stop_ids
            assert rollout.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert (rollout.lease_id, rollout.policy_version) == (one.lease_id, 5)
            assert rollout.completion_ids.dtype == np.int32
            assert rollout.behavior_logprobs.dtype == np.float32
    lengths = {len(rollout.completion_ids) for rollout in found.values()}
    assert len(lengths) > 4, "rows must leave the batch at different times"


def cut(one: GroupRequest, found: dict[tuple[int, int], FinishedRollout]) -> GroupRequest:
    """Return the group with a prefix for each rollout except the first."""
    drawn = {index: found[one.group_id, index] for index in one.indices[1:]}
    prefixes = tuple(
        Prefix(
            index=index,
            ids=rollout.completion_ids[: len(rollout.completion_ids) // 2],
            logprobs=rollout.behavior_logprobs[: len(rollout.completion_ids) // 2],
        )
        for index, rollout in drawn.items()
        if len(rollout.completion_ids) > 1
    )
    return dataclasses.replace(one, prefixes=prefixes)


@pytest.mark.parametrize(("width", "fixed"), [(2, False), (1_000, False), (5, True)])
def test_rollouts_continued_from_prefixes_equal_uninterrupted_ones(any_model: Any, width: int, fixed: bool) -> None:
    groups = [group(number) for number in range(14)]
    undisturbed = continuous(any_model, groups, 1_000)
    begun = [cut(one, undisturbed) for one in groups]
    assert sum(len(one.prefixes) for one in begun) > 8
    found = continuous(any_model, begun, width, fixed=fixed)
    tolerance = 2e-4 if isinstance(any_model, Qwen3NextForCausalLM) else 2e-5
    assert set(found) == set(undisturbed)
    for one in begun:
        given = {prefix.index: len(prefix.ids) for prefix in one.prefixes}
        for index in one.indices:
            rollout, whole = found[one.group_id, index], undisturbed[one.group_id, index]
            assert rollout.completion_ids.tolist() == whole.completion_ids.tolist()
            assert (rollout.num_given, rollout.finish_reason) == (given.get(index, 0), whole.finish_reason)
            np.testing.assert_allclose(rollout.behavior_logprobs, whole.behavior_logprobs, atol=tolerance)


def test_padding_and_company_change_logprobs_by_rounding_only(model: Any) -> None:
    groups = [group(number, max_tokens=8, stop_ids=(), temperature=1.0) for number in range(14)]
    together = by_place(torch_sampler.sample_groups(model, groups))
    for one in groups:
        for index, alone in by_place(torch_sampler.sample_groups(model, [one])).items():
            assert together[index].completion_ids.tolist() == alone.completion_ids.tolist()
            np.testing.assert_allclose(together[index].behavior_logprobs, alone.behavior_logprobs, atol=1e-5)


def test_the_same_batch_gives_the_same_bits(model: Any) -> None:
    groups = [group(number) for number in range(14)]
    first, second = (by_place(torch_sampler.sample_groups(model, groups)) for _ in range(2))
    for place, rollout in first.items():
        assert rollout.completion_ids.tobytes() == second[place].completion_ids.tobytes()
        assert rollout.behavior_logprobs.tobytes() == second[place].behavior_logprobs.tobytes()


def test_a_group_split_over_leases_draws_the_same(model: Any) -> None:
    whole = group(3, indices=(0, 1, 2, 3), max_tokens=8)
    parts = [group(3, indices=indices, max_tokens=8) for indices in ((2,), (0, 3), (1,))]
    expected = by_place(torch_sampler.sample_groups(model, [whole]))
    found = by_place(torch_sampler.sample_groups(model, parts))
    assert {place: r.completion_ids.tolist() for place, r in found.items()} == {
        place: r.completion_ids.tolist() for place, r in expected.items()
    }


def test_equal_prompts_are_prefilled_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    forward = model.forward

    def watched(**arguments: Any) -> Any:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", watched)
    prompt = np.array([3, 4, 5], dtype=np.int32)
    twice = [group(n, prompt_ids=prompt, indices=(0, 1), max_tokens=2, stop_ids=()) for n in (1, 2)]
    list(torch_sampler.sample_groups(model, twice))
    assert shapes == [(1, 3), (4, 1)]


def test_finished_rows_leave_the_batch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    forward = model.forward

    def watched(**arguments: Any) -> Any:
        widths.append(len(arguments["input_ids"]))
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", watched)
    limits = (2, 2, 4, 4, 6)
    groups = [group(n, indices=(0,), max_tokens=limit, stop_ids=()) for n, limit in enumerate(limits)]
    assert len(list(torch_sampler.sample_groups(model, groups))) == 5
    assert widths == [5, 5, 3, 3, 1, 1]


def test_each_rollout_is_returned_when_it_finishes(model: Any) -> None:
    groups = [group(n, indices=(0,), max_tokens=limit, stop_ids=()) for n, limit in enumerate((5, 1, 3))]
    assert [rollout.group_id for rollout in torch_sampler.sample_groups(model, groups)] == [1, 2, 0]


def test_between_two_rollouts_gradients_work_as_usual(model: Any) -> None:
    rollouts = torch_sampler.sample_groups(model, [group(1, indices=(0, 1, 2))])
    next(rollouts)
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(1, requires_grad=True).mul(2).requires_grad
    rollouts.close()  # type: ignore[attr-defined]


def test_nothing_to_do_is_done_at_once(model: Any) -> None:
    assert list(torch_sampler.sample_groups(model, [])) == []
    assert torch_sampler.greedy(model, [], max_tokens=3, stop_ids=()) == []


def test_greedy_takes_the_most_likely_token(any_model: Any) -> None:
    prompts = [group(number).prompt_ids for number in range(7)]
    found = torch_sampler.greedy(any_model, prompts, max_tokens=7, stop_ids=(1, 2, 3, 4, 5, 6))
    for prompt, completion in zip(prompts, found, strict=True):
        ids, expected = prompt.tolist(), []
        while len(expected) < 7 and not (expected and expected[-1] in range(1, 7)):
            with torch.no_grad():
                expected.append(int(any_model(input_ids=torch.tensor([ids + expected])).logits[0, -1].argmax()))
        assert completion.tolist() == expected


def test_logits_that_are_no_numbers_are_an_error(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(BackendError, match="not finite"):
        list(torch_sampler.sample_groups(model, [group(1)]))


@pytest.fixture
def widths(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list to which each forward pass of the model adds its shape (rows, tokens)."""
    shapes: list[tuple[int, int]] = []
    forward = model.forward

    def watched(**arguments: Any) -> Any:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", watched)
    return shapes


def _long(number: int, **changes: Any) -> GroupRequest:
    """Return a group whose prompt has four tokens, so that a forward pass of one token is always a step."""
    prompt = np.random.default_rng(number).integers(0, VOCABULARY, 4).astype(np.int32)
    return group(number, **{"prompt_ids": prompt, "stop_ids": (), "max_tokens": 5, **changes})


def test_a_finished_rollouts_row_goes_to_the_next_at_once(model: Any, widths: list[tuple[int, int]]) -> None:
    groups = [_long(n, indices=(0, 1, 2), max_tokens=2 + n % 5) for n in range(12)]
    found = continuous(model, groups, 4)
    assert len(found) == 36
    steps = [rows for rows, length in widths if length == 1]
    assert set(steps[:-6]) == {4}, "no step runs with a free row while there is work"
    assert sum(steps) == sum(len(rollout.completion_ids) - 1 for rollout in found.values())
    assert sum(rows for rows, length in widths if length == 4) == 12, "each prompt is computed once"


def test_memory_bounds_the_rows(model: Any, widths: list[tuple[int, int]]) -> None:
    """Memory suffices for three rows of 32 columns. A rollout that exceeds this memory is sampled alone."""
    groups = [_long(n, indices=(0, 1)) for n in range(4)]
    groups += [_long(4, indices=(0,), max_tokens=110), _long(5, indices=(0, 1))]
    found = continuous(model, groups, 10, max_cells=96)
    assert {place: len(rollout.completion_ids) for place, rollout in found.items()} == {
        (g.group_id, index): g.max_tokens for g in groups for index in g.indices
    }
    steps = [rows for rows, length in widths if length == 1]
    assert max(steps) == 3
    assert steps.count(1) >= 109


def test_cancelled_rows_are_free_at_once(model: Any, widths: list[tuple[int, int]]) -> None:
    groups = [_long(n, indices=(0, 1, 2), max_tokens=8) for n in range(4)]
    undisturbed = continuous(model, groups, 6)
    widths.clear()
    batch = torch_sampler.Batch(model, width=6)
    steps = batch.sample(iter(groups))
    events = [next(steps), next(steps)]
    batch.cancel(groups[1].lease_id)
    batch.cancel(groups[2].lease_id)
    events += list(steps)
    found = by_place(chain.from_iterable(events))
    assert {place[0] for place in found} == {0, 3}
    for place, rollout in found.items():
        assert rollout.completion_ids.tolist() == undisturbed[place].completion_ids.tolist()
    assert [rows for rows, length in widths if length == 1] == [6] * 7 + [3] * 2


def test_a_batch_ends_if_all_its_work_is_cancelled(model: Any) -> None:
    batch = torch_sampler.Batch(model, width=2)
    steps = batch.sample(iter([_long(0, indices=(0, 1, 2, 3))]))
    next(steps)
    batch.cancel(100)
    assert list(steps) == []


def test_first_tokens_alone_are_reported_step_by_step(model: Any) -> None:
    batch = torch_sampler.Batch(model, width=2)
    steps = list(batch.sample(iter([_long(n, indices=(0, 1), max_tokens=1) for n in range(3)])))
    assert [len(step) for step in steps] == [2, 2, 2]


def test_long_prompts_are_computed_in_turns(
    model: Any, widths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_prefill, "PREFILL_TOKENS", 8)
    assert len(continuous(model, [_long(n, indices=(0,)) for n in range(5)], 10)) == 5
    assert widths[:3] == [(2, 4), (2, 4), (1, 4)]


def test_the_next_prompts_are_computed_with_those_that_begin(model: Any, widths: list[tuple[int, int]]) -> None:
    assert len(continuous(model, [_long(n, indices=(0, 1)) for n in range(6)], 4)) == 12
    assert [shape for shape in widths if shape[1] > 1] == [(3, 4), (2, 4), (1, 4)]
    assert [shape for shape in widths if shape[1] == 1] == [(4, 1)] * 12


def _next_turn(groups: list[GroupRequest], rollouts: dict[tuple[int, int], FinishedRollout]) -> list[GroupRequest]:
    """Return a group for each rollout; its prompt is the complete rollout plus random tokens, like an environment's
    answer.
    """
    rng = np.random.default_rng(1)
    return [
        group(
            1_000 + 10 * one.group_id + index,
            indices=(index,),
            prompt_ids=np.concatenate(
                [
                    one.prompt_ids,
                    rollouts[one.group_id, index].completion_ids,
                    rng.integers(0, VOCABULARY, 1 + index).astype(np.int32),
                ]
            ),
        )
        for one in groups
        for index in one.indices
    ]


@pytest.mark.parametrize("width", [3, 1_000])
def test_the_next_turn_continues_from_the_prefix_cache(
    any_model: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [group(number) for number in range(14)]
    second = _next_turn(first, by_place(torch_sampler.sample_groups(any_model, first)))
    second.append(group(3, prompt_ids=np.array([7], np.int32)))  # No kept sequence begins with this prompt.
    computed = [0]
    inner = torch_sampler.Batch._forward

    def counting(batch: Any, inputs: Any, mask: Any, cache: Any) -> Any:
        computed[-1] += inputs[0].size
        return inner(batch, inputs, mask, cache)

    monkeypatch.setattr(torch_sampler.Batch, "_forward", counting)
    found = []
    for prefixes in (None, TorchPrefixCache(10_000)):
        list(torch_sampler.sample_groups(any_model, first, prefixes=prefixes))
        computed.append(0)
        found.append(by_place(torch_sampler.sample_groups(any_model, second, width=width, prefixes=prefixes)))
    anew, gone_on = found
    assert set(anew) == set(gone_on)
    for place, rollout in gone_on.items():
        assert rollout.completion_ids.tolist() == anew[place].completion_ids.tolist()
        np.testing.assert_allclose(rollout.behavior_logprobs, anew[place].behavior_logprobs, atol=2e-5)
    if set(getattr(any_model.config, "layer_types", None) or [FULL]) == {FULL}:
        assert computed[2] < 0.8 * (computed[1] - computed[0])
    else:
        assert computed[2] == computed[1] - computed[0]
