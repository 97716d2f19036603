"""The routes (experts chosen for each token) that the sampler records equal those of one forward pass over each whole
sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo_shared.sampling import torch_routes
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.torch_cache import cache_of
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.sampling.torch_routes import Routers
from echo_shared.sampling.torch_sampler import Batch
from echo_shared.wire.messages import NO_ROUTE
from tests.families import make_tiny


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def routers(model: Any) -> Routers:
    found = Routers.of(model)
    assert found is not None
    return found


def group(number: int, **changes: Any) -> GroupRequest:
    rng = np.random.default_rng(number)
    request = GroupRequest(
        lease_id=number,
        group_id=number,
        indices=tuple(range(3)),
        prompt_ids=rng.integers(0, 128, 3 + number).astype(np.int32),
        seed=number,
        policy_version=0,
        temperature=1.0,
        max_tokens=4 + 3 * number,
        stop_ids=(5, 9, 11),
        returns_routes=True,
    )
    return replace(request, **changes)


def draw(
    model: Any,
    routers: Routers | None,
    *groups: GroupRequest,
    width: int = 5,
    fixed: bool = False,
    prefixes: TorchPrefixCache | None = None,
) -> dict[tuple[int, int], FinishedRollout]:
    batch = Batch(model, width=width, routers=routers, fixed=fixed, prefixes=prefixes)
    finished = [rollout for step in batch.sample(iter(groups)) for rollout in step]
    return {(rollout.group_id, rollout.index): rollout for rollout in finished}


def routes_of(rollout: FinishedRollout) -> np.ndarray:
    tokens = len(rollout.completion_ids)
    return np.sort(np.frombuffer(rollout.routes, np.uint8).reshape(tokens, 2, 2), axis=-1)


def in_one_pass(model: Any, routers: Routers, request: GroupRequest, rollout: FinishedRollout) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, rollout.completion_ids]).astype(np.int64))
    with torch.no_grad(), routers.recording() as recorded:
        model(input_ids=ids[None, :-1])
    found = torch_routes.packed(recorded)
    assert found is not None
    return np.sort(found[len(request.prompt_ids) :].reshape(-1, 2, 2), axis=-1)


@pytest.mark.parametrize("fixed", [False, True], ids=["any shape", "fixed shapes"])
def test_the_routes_are_those_of_the_tokens_that_were_computed(model: Any, routers: Routers, fixed: bool) -> None:
    """Rollouts join and leave the batch: nine rollouts of three lengths share five rows."""
    if fixed and model.config.model_type == "gpt_oss":
        pytest.skip("layers with a window are not computed at fixed shapes")
    requests = [group(number) for number in range(3)]
    drawn = draw(model, routers, *requests, fixed=fixed)
    assert len(drawn) == 9 and len({len(rollout.completion_ids) for rollout in drawn.values()}) > 3
    for (number, _), rollout in drawn.items():
        count = len(rollout.completion_ids)
        if count == 1:
            assert rollout.routes == b"", "no token was computed"
            continue
        found = routes_of(rollout)
        assert (found[-1] == NO_ROUTE).all()
        assert (found[:-1] == in_one_pass(model, routers, requests[number], rollout)).all()


def test_recording_changes_no_draw(model: Any, routers: Routers) -> None:
    requests = [group(number) for number in range(3)]
    plain = draw(model, None, *requests)
    for key, rollout in draw(model, routers, *requests).items():
        assert np.array_equal(rollout.completion_ids, plain[key].completion_ids)
        assert np.array_equal(rollout.behavior_logprobs, plain[key].behavior_logprobs)
        assert plain[key].routes == b""


def test_only_leases_that_ask_for_routes_get_them(model: Any, routers: Routers) -> None:
    drawn = draw(model, routers, group(2), group(1, returns_routes=False), width=9)
    assert all(bool(rollout.routes) == (number == 2) for (number, _), rollout in drawn.items())


@pytest.mark.parametrize("given", [1, 4, 9])
def test_a_resumed_rollout_has_the_routes_of_its_prefix_too(model: Any, routers: Routers, given: int) -> None:
    """The prefix is computed again in the prefill. Other rollouts start with it, some with longer prompts."""
    request = group(2, stop_ids=(), indices=(0, 1))
    whole = draw(model, routers, request)
    assert len(whole[2, 0].completion_ids) == 10
    prefix = Prefix(index=0, ids=whole[2, 0].completion_ids[:given], logprobs=whole[2, 0].behavior_logprobs[:given])
    resumed = draw(model, routers, replace(request, prefixes=(prefix,)), group(3), width=9)
    for index in (0, 1):
        assert np.array_equal(resumed[2, index].completion_ids, whole[2, index].completion_ids)
        assert (routes_of(resumed[2, index]) == routes_of(whole[2, index])).all()


def test_a_prefix_whose_computation_is_cached_has_no_routes(model: Any, routers: Routers) -> None:
    request = group(2, stop_ids=(), indices=(0,))
    if model.config.model_type == "gpt_oss":
        pytest.skip("layers with a window keep no prefixes")
    cache = TorchPrefixCache(1_000)
    whole = draw(model, routers, request, prefixes=cache)[2, 0]
    given = Prefix(index=0, ids=whole.completion_ids[:4], logprobs=whole.behavior_logprobs[:4])
    cache.keep(np.concatenate([request.prompt_ids, given.ids[:3]]), _states(model, request, given))
    resumed = draw(model, routers, replace(request, prefixes=(given,)), prefixes=cache)[2, 0]
    found = routes_of(resumed)
    assert (found[:4] == NO_ROUTE).all() and (found[4:] == routes_of(whole)[4:]).all()


def _states(model: Any, request: GroupRequest, given: Prefix) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, given.ids[:3]]).astype(np.int64))
    with torch.no_grad():
        layers = cache_of(model(input_ids=ids[None], use_cache=True)).layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]


def test_routes_that_fit_no_message_are_left_out(model: Any, routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    request = group(2, stop_ids=(), indices=(0,))
    assert len(draw(model, routers, request)[2, 0].routes) == 40
    monkeypatch.setattr("echo_shared.sampling.rollout_table.MAX_ROUTES_BYTES", 39)
    assert draw(model, routers, request)[2, 0].routes == b""
