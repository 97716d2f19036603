"""Rules for every engine: it samples exactly the rollouts that the seeds define, which are those of the naive sampler
in conftest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_node.backends.base import Engine, EngineSettings, GroupFailed
from echo_node.backends.registry import NAMES, choose, make_engine
from echo_node.host import hardware
from echo_shared.errors import BackendError, CodecError
from echo_shared.sampling import draws
from echo_shared.sampling.interface import GroupRequest, Prefix
from echo_shared.wire.messages import FinishReason

WIDTH = 6
EXACT = [name for name in NAMES if name != "vllm"]
"""Engines that must be exact. vLLM is not: it computes adapters in 16 bits, so test_vllm_engine allows a tolerance."""
EDGE_NATS = 1e-3
Parts = Callable[[GroupRequest, int, list[int], list[int], int], None]


def make_usable(name: str) -> Engine:
    try:
        choose(hardware.detect(), name)
    except BackendError as error:
        pytest.skip(str(error))
    return make_engine(name)


@pytest.fixture(scope="module", params=EXACT)
def engine(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = make_usable(request.param)
    settings = EngineSettings(width=WIDTH, threads=1, precision="f32", kept_keys_share=0.1)
    made.open(base, tmp_path_factory.mktemp("derived"), settings)
    yield made
    made.close()


def run(engine: Engine, requests: list[GroupRequest]) -> list[Any]:
    return list(chain.from_iterable(engine.sample(iter(requests))))


def assert_same_as_reference(kit: Any, model: Any, requests: list[GroupRequest], rollouts: dict[Any, Any]) -> None:
    assert set(rollouts) == {(request.lease_id, index) for request in requests for index in request.indices}
    for request in requests:
        for index in request.indices:
            rollout = rollouts[request.lease_id, index]
            ids, logprobs = kit.reference_rollout(model, request, index)
            assert rollout.completion_ids.tolist() == ids
            np.testing.assert_allclose(rollout.behavior_logprobs, logprobs, atol=1e-4)
            stopped = ids[-1] in request.stop_ids
            assert rollout.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert (rollout.group_id, rollout.policy_version) == (request.group_id, request.policy_version)
            assert rollout.completion_ids.dtype == np.int32
            assert rollout.behavior_logprobs.dtype == np.float32


def test_rollouts_equal_the_references(engine: Engine, base: Path, make_adapter: Callable[..., Path], kit: Any) -> None:
    """Rollouts must equal the reference sampler's after every change of policy: to an adapter of equal shape, of lower
    rank or on fewer layers, and to the base and back.
    """
    first = make_adapter(base, 1)
    second = make_adapter(base, 2)
    thin = make_adapter(base, 3, r=4)
    few = make_adapter(base, 4, r=4, use_rslora=True, target_modules=["q_proj", "down_proj"])
    for version, adapter in enumerate((None, first, second, thin, few, None, first)):
        engine.set_policy(None if adapter is None else engine.prepare(adapter))
        requests = kit.make_requests(7, group_size=2, policy_version=version, first_lease=100 * version, max_tokens=8)
        model = kit.load_reference(base, adapter)
        assert_same_as_reference(kit, model, requests, kit.rollouts_of(run(engine, requests)))


def test_a_group_wider_than_the_engine(engine: Engine, base: Path, kit: Any) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(3, group_size=2 * WIDTH + 1, max_tokens=5)
    assert_same_as_reference(kit, kit.load_reference(base), requests, kit.rollouts_of(run(engine, requests)))


def test_one_token_at_most(engine: Engine, base: Path, kit: Any) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(4, max_tokens=1)
    assert_same_as_reference(kit, kit.load_reference(base), requests, kit.rollouts_of(run(engine, requests)))


def next_turn(request: GroupRequest, rollout: Any, answer: np.random.Generator) -> GroupRequest:
    """Return the request of the turn that follows a rollout, after an answer of three tokens."""
    answered = answer.integers(0, 100, 3).astype(np.int32)
    return dataclasses.replace(
        request,
        lease_id=request.lease_id + 1_000,
        indices=(rollout.index,),
        prompt_ids=np.concatenate([request.prompt_ids, rollout.completion_ids, answered]),
        seed=request.seed + 1,
    )


@pytest.mark.parametrize("max_tokens", [9, 1])
def test_later_turns_begin_with_kept_keys(engine: Engine, base: Path, kit: Any, max_tokens: int) -> None:
    """Rollouts in four conversations of five turns equal the reference sampler's, whatever else is drawn between them.
    Each turn after the first computes only what is new.
    """
    engine.set_policy(None)
    engine.forget()
    others, model, answers = kit.make_requests(9, first_lease=50), kit.load_reference(base), np.random.default_rng(4)
    requests = kit.make_requests(4, group_size=1, max_tokens=max_tokens)
    requests = [dataclasses.replace(one, stop_ids=()) for one in requests]
    requests = [dataclasses.replace(one, prompt_ids=np.resize(one.prompt_ids, 20)) for one in requests]
    before, tokens = engine.kept, 0
    for turn in range(5):
        between = [dataclasses.replace(one, lease_id=one.lease_id + 100 * turn, keep_keys=False) for one in others]
        rollouts = kit.rollouts_of(run(engine, [*requests, *between]))
        assert_same_as_reference(kit, model, [*requests, *between], rollouts)
        if turn:
            tokens += sum(len(one.prompt_ids) - 4 for one in requests)
        requests = [next_turn(one, rollouts[one.lease_id, one.indices[0]], answers) for one in requests]
    assert engine.kept.hits - before.hits == 4 * 4
    # PyTorch prefills several prompts at once and computes the same number of tokens for each: the most that one of
    # them needs.
    assert 0.5 * tokens < engine.kept.tokens - before.tokens <= tokens
    each = engine.kept.kept_bytes
    engine.forget(requests[0].policy_version + 1)
    assert engine.kept.kept_bytes == each > 0
    engine.forget(requests[0].policy_version)
    assert engine.kept.kept_bytes == 0


def continued(request: GroupRequest, rollouts: dict[Any, Any], cuts: np.random.Generator) -> GroupRequest:
    """Return the request with prefixes: for each rollout with two tokens or more, except every fourth one, a random
    number of its first tokens.
    """
    prefixes = []
    for index in request.indices:
        drawn = rollouts[request.lease_id, index]
        if len(drawn.completion_ids) > 1 and index % 4:
            cut = int(cuts.integers(1, len(drawn.completion_ids)))
            # Change the log-probabilities: the engine must return the prefix's log-probabilities unchanged, even if it
            # would compute others.
            given = drawn.behavior_logprobs[:cut] - np.float32(0.25)
            prefixes.append(Prefix(index=index, ids=drawn.completion_ids[:cut], logprobs=given))
    return dataclasses.replace(request, prefixes=tuple(prefixes))


def assert_same_as_undisturbed(
    requests: list[GroupRequest], found: dict[Any, Any], undisturbed: dict[Any, Any], parts: Parts | None = None
) -> None:
    """Check that the rollouts equal those of an uninterrupted run. With `parts`, one rollout may differ if `parts`
    accepts its first different token.
    """
    assert set(found) == set(undisturbed)
    parted = 0
    for request in requests:
        given = {prefix.index: prefix.logprobs for prefix in request.prefixes}
        for index in request.indices:
            one, other = found[request.lease_id, index], undisturbed[request.lease_id, index]
            count = len(given.get(index, ()))
            if parts is not None and one.completion_ids.tolist() != other.completion_ids.tolist():
                parts(request, index, one.completion_ids.tolist(), other.completion_ids.tolist(), count)
                parted += 1
                continue
            assert one.completion_ids.tolist() == other.completion_ids.tolist()
            assert (one.num_given, one.finish_reason) == (count, other.finish_reason)
            np.testing.assert_array_equal(one.behavior_logprobs[:count], given.get(index, []))
            np.testing.assert_allclose(one.behavior_logprobs[count:], other.behavior_logprobs[count:], atol=1e-4)
            assert (one.completion_ids.dtype, one.behavior_logprobs.dtype) == (np.int32, np.float32)
    assert parted <= 1


def on_an_edge(kit: Any, model: Any) -> Parts:
    """Return a function that checks that a draw's random number u is within `EDGE_NATS` of the cumulative probability
    at which one token ends and the other begins. So close to this edge, the drawn token may depend on the processor,
    because another batch shape rounds differently.
    """

    def check(request: GroupRequest, index: int, one: list[int], other: list[int], given: int) -> None:
        place = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        assert place >= given, "given tokens stay"
        logits = kit.reference_logits(model, [*request.prompt_ids.tolist(), *one[:place]])[-1:]
        u = draws.uniforms(request.seed, index, place + 1)[-1:]
        for token in (one[place], other[place]):
            interval = draws.interval(logits, np.array([token]), request.temperature)
            (nats,) = draws.nats_outside(*interval, u)
            assert nats < EDGE_NATS

    return check


@pytest.mark.parametrize("seed", range(3))
def test_a_rollout_continues_from_its_prefix(
    engine: Engine, base: Path, make_adapter: Callable[..., Path], kit: Any, seed: int
) -> None:
    """Continued and new rollouts are mixed, arrive at different times, and may be more than fit into the engine's
    batch.
    """
    adapter = make_adapter(base, 1)
    engine.set_policy(engine.prepare(adapter))
    whole = [
        dataclasses.replace(request, indices=tuple(range(1 + 3 * number % (2 * WIDTH))), max_tokens=2 + 9 * number % 25)
        for number, request in enumerate(kit.make_requests(12, first_lease=10 * seed))
    ]
    undisturbed = kit.rollouts_of(run(engine, whole))
    cuts = np.random.default_rng(seed)
    requests = [continued(request, undisturbed, cuts) for request in whole]
    assert sum(len(request.prefixes) for request in requests) > 20
    source = Dripping(requests, seed)
    events: list[Any] = []
    while source.left:
        events += chain.from_iterable(engine.sample(source))
    model = kit.load_reference(base, adapter)
    assert_same_as_undisturbed(requests, kit.rollouts_of(events), undisturbed, on_an_edge(kit, model))


def test_long_prompts_with_long_prefixes(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    dice = np.random.default_rng(5)
    whole = [
        dataclasses.replace(
            request,
            prompt_ids=dice.integers(0, kit.vocabulary, length).astype(np.int32),
            max_tokens=kit.max_positions - length,
            stop_ids=(),
        )
        for request, length in zip(kit.make_requests(4, group_size=3), (1, 40, 150, 200), strict=True)
    ]
    undisturbed = kit.rollouts_of(run(engine, whole))
    requests = [continued(request, undisturbed, dice) for request in whole]
    assert_same_as_undisturbed(requests, kit.rollouts_of(run(engine, requests)), undisturbed)


def test_an_impossible_prefix_fails_alone(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    good, *others = kit.make_requests(7)

    def prefix(ids: list[int], index: int = 2, logprobs: int | None = None) -> Prefix:
        count = len(ids) if logprobs is None else logprobs
        return Prefix(index=index, ids=np.array(ids, np.int32), logprobs=np.zeros(count, np.float32))

    bad = [
        ((prefix([1, 2, 5]),), "it holds a stop token"),
        ((prefix([1] * 12),), "12 tokens of 12"),
        ((prefix([1, kit.vocabulary]),), "not in the vocabulary"),
        ((prefix([1], index=9),), "not in the request"),
        ((prefix([1]), prefix([2])), "two prefixes"),
        ((prefix([1, 2], logprobs=1),), "2 tokens and 1 log"),
    ]
    requests = [dataclasses.replace(request, prefixes=one) for request, (one, _) in zip(others, bad, strict=True)]
    events = run(engine, [*requests, good])
    failed = [event for event in events if isinstance(event, GroupFailed)]
    assert [(one.lease_id, one.code) for one in failed] == [(one.lease_id, "bad_prefix") for one in requests]
    for one, (_, words) in zip(failed, bad, strict=True):
        assert words in one.what
    assert len(events) == len(failed) + len(good.indices)


def test_sampled_tokens_are_reported_once_and_in_order(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(6, max_tokens=40)
    first = kit.rollouts_of(run(engine, requests))
    requests = [continued(request, first, np.random.default_rng(1)) for request in requests]
    given = {(one.lease_id, prefix.index): prefix.ids.tolist() for one in requests for prefix in one.prefixes}
    told: dict[Any, list[int]] = {}
    rollouts: dict[Any, Any] = {}
    for number, events in enumerate(engine.sample(iter(requests))):
        rollouts |= kit.rollouts_of(events)
        for part in engine.news() if number % 3 == 0 else []:
            name = part.lease_id, part.index
            assert name not in rollouts
            drawn = told.setdefault(name, list(given.get(name, [])))
            assert part.start == len(drawn) and len(part.ids) == len(part.logprobs) > 0
            assert (part.ids.dtype, part.logprobs.dtype) == (np.int32, np.float32)
            drawn += part.ids.tolist()
    assert len(told) > 6 and engine.news() == []
    for name, ids in told.items():
        assert rollouts[name].completion_ids.tolist()[: len(ids)] == ids


class Dripping:
    """An iterator of groups that is empty now and then, although groups follow; the engine must ask again."""

    def __init__(self, requests: list[GroupRequest], seed: int) -> None:
        self.left = list(requests)
        self._dice = np.random.default_rng(seed)

    def __iter__(self) -> Dripping:
        return self

    def __next__(self) -> GroupRequest:
        if not self.left or self._dice.random() < 0.5:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize("seed", range(6))
def test_groups_may_come_later(engine: Engine, base: Path, kit: Any, seed: int) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(8, group_size=1 + seed % 3)
    source = Dripping(requests, seed)
    events: list[Any] = []
    while source.left:
        events += chain.from_iterable(engine.sample(source))
    assert_same_as_reference(kit, kit.load_reference(base), requests, kit.rollouts_of(events))


@pytest.mark.parametrize("seed", range(2))
def test_prompts_and_completions_of_all_lengths(engine: Engine, base: Path, kit: Any, seed: int) -> None:
    """Edge cases: a prompt as long as one prefill step, a rollout whose first token ends it, a group larger than the
    batch.
    """
    engine.set_policy(None)
    dice = np.random.default_rng(seed)
    requests = [
        dataclasses.replace(
            request,
            prompt_ids=dice.integers(0, kit.vocabulary, dice.choice([1, 3, 40, 128, 192, 200, 250])).astype(np.int32),
            max_tokens=int(dice.integers(1, 6)),
            indices=tuple(range(int(dice.integers(1, 2 * WIDTH)))),
        )
        for request in kit.make_requests(14)
    ]
    source = Dripping(requests, seed)
    events: list[Any] = []
    while source.left:
        events += chain.from_iterable(engine.sample(source))
    assert_same_as_reference(kit, kit.load_reference(base), requests, kit.rollouts_of(events))


def test_a_request_that_cannot_be_sampled_fails_alone(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    good, long, foreign, empty, last = kit.make_requests(5)
    bad = [
        dataclasses.replace(long, prompt_ids=np.ones(kit.max_positions, np.int32)),
        dataclasses.replace(foreign, prompt_ids=np.array([1, kit.vocabulary], np.int32)),
        dataclasses.replace(empty, prompt_ids=np.array([], np.int32)),
    ]
    events = run(engine, [good, *bad, last])
    failed = [event for event in events if isinstance(event, GroupFailed)]
    assert [(event.lease_id, event.code) for event in failed] == [
        (long.lease_id, "too_long"),
        (foreign.lease_id, "bad_prompt"),
        (empty.lease_id, "too_long"),
    ]
    rollouts = kit.rollouts_of([event for event in events if not isinstance(event, GroupFailed)])
    assert {lease_id for lease_id, _ in rollouts} == {good.lease_id, last.lease_id}


def test_a_cancelled_lease_gives_nothing_more(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(6, group_size=WIDTH)
    undisturbed = kit.rollouts_of(run(engine, requests))
    events: list[Any] = []
    after: list[Any] = []
    cancelled: int | None = None
    for step in engine.sample(iter(requests)):
        events += step
        after += step if cancelled is not None else []
        if cancelled is None and step:
            cancelled = step[0].lease_id
            engine.cancel(cancelled)
    assert cancelled not in {rollout.lease_id for rollout in after}
    for name, rollout in kit.rollouts_of(events).items():
        assert rollout.completion_ids.tolist() == undisturbed[name].completion_ids.tolist()
    others = {name for name in undisturbed if name[0] != cancelled}
    assert others <= set(kit.rollouts_of(events))


def test_after_an_abandoned_run_the_engine_starts_clean(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(4)
    expected = kit.rollouts_of(run(engine, requests))
    next(iter(engine.sample(iter(requests))))
    again = kit.rollouts_of(run(engine, requests))
    assert {name: r.completion_ids.tolist() for name, r in again.items()} == {
        name: r.completion_ids.tolist() for name, r in expected.items()
    }


def test_an_adapter_for_another_model_is_refused(
    engine: Engine, base_of: Callable[[str], Path], make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    engine.set_policy(None)
    requests = kit.make_requests(3)
    expected = kit.rollouts_of(run(engine, requests))
    # An engine may drop its current adapter before it refuses the new one. The next policy must work anyway.
    with pytest.raises(BackendError):
        engine.set_policy(engine.prepare(make_adapter(base_of("qwen2_wide"), 5)))
    with pytest.raises(CodecError):
        engine.prepare(tmp_path)
    engine.set_policy(None)
    again = kit.rollouts_of(run(engine, requests))
    assert all(np.array_equal(again[name].completion_ids, expected[name].completion_ids) for name in expected)


def test_scores_equal_the_references(engine: Engine, base: Path, make_adapter: Callable[..., Path], kit: Any) -> None:
    """Scoring (recomputing completions) with base model and adapter must leave earlier and later sampling unchanged."""
    rng = np.random.default_rng(5)
    for adapter in (None, make_adapter(base, 1)):
        engine.set_policy(None if adapter is None else engine.prepare(adapter))
        model = kit.load_reference(base, adapter)
        requests = kit.make_requests(2, max_tokens=4)
        assert_same_as_reference(kit, model, requests, kit.rollouts_of(run(engine, requests)))
        for length, first, temperature in ((2, 1, 1.0), (40, 1, 0.7), (kit.max_positions, 200, 1.3), (40, 39, 1.0)):
            ids = rng.integers(0, kit.vocabulary, length).astype(np.int32)
            below, logprobs = engine.score(ids, first, temperature)
            logits = kit.reference_logits(model, ids)[first - 1 : -1]
            true_below, true_logprobs = draws.interval(logits, ids[first:], temperature)
            np.testing.assert_allclose(below, true_below, atol=1e-5)
            np.testing.assert_allclose(logprobs, true_logprobs, atol=1e-4)
        assert_same_as_reference(kit, model, requests, kit.rollouts_of(run(engine, requests)))


def test_an_impossible_score_request_harms_nothing(engine: Engine, kit: Any) -> None:
    engine.set_policy(None)
    for ids in (np.zeros(kit.max_positions + 2, np.int32), np.array([1, kit.vocabulary], np.int32)):
        with pytest.raises(BackendError):
            engine.score(ids, 1, 1.0)
    requests = kit.make_requests(2)
    assert set(kit.rollouts_of(run(engine, requests))) == {(r.lease_id, i) for r in requests for i in r.indices}


@pytest.mark.parametrize("name", NAMES)
def test_unknown_precision_and_missing_model(name: str, base: Path, tmp_path: Path) -> None:
    engine = make_usable(name)
    with pytest.raises(BackendError):
        engine.open(base, tmp_path, EngineSettings(threads=1, precision="q1"))
    with pytest.raises(BackendError):
        engine.open(tmp_path, tmp_path, EngineSettings(threads=1))
