"""Turns of a verifiers episode: requests and their answers, branches, unsupported parameters, and the final
comparison.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from echo_hub.sessions.inside.verifiers_episode import (
    NAME_LENGTH,
    ContextFull,
    DrawRules,
    RunLost,
    TraceFacts,
    Untrainable,
    VerifiersEpisode,
)

STOP = 9
RULES = DrawRules(stop_ids=frozenset({STOP, 8}), max_tokens=4, temperature=0.5, vocabulary=10)
SAMPLING = {
    "temperature": 0.5,
    "max_tokens": 4,
    "stop_token_ids": [STOP],
    "logprobs": 1,
    "skip_special_tokens": False,
    "routed_experts_prompt_start": 3,
}
PROMPT, FIRST, ADDED, SECOND = [1, 2], [3, STOP], [4, 5, 6], [7]
DRAWN = [-0.5, -1.25]


def body(ids: list[Any], **sampling: object) -> dict[str, Any]:
    return {"model": "policy", "token_ids": ids, "sampling_params": {**SAMPLING, **sampling}}


async def ask(episode: VerifiersEpisode, ids: list[Any], **sampling: object) -> asyncio.Task[dict[str, Any]]:
    """Post a request, and let the episode see it."""
    task = asyncio.create_task(episode.asked(body(ids, **sampling)))
    await asyncio.sleep(0)
    return task


async def played() -> VerifiersEpisode:
    """Return an episode after its second turn."""
    episode = VerifiersEpisode(RULES)
    first = await ask(episode, PROMPT)
    assert await episode.next() == PROMPT
    episode.answer(FIRST, DRAWN, "stop")
    assert (await first)["choices"] == [
        {
            "index": 0,
            "token_ids": FIRST,
            "finish_reason": "stop",
            "logprobs": {
                "content": [{"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:9", "logprob": -1.25}]
            },
        }
    ]
    second = await ask(episode, [*PROMPT, *FIRST, *ADDED])
    assert await episode.next() == ADDED
    episode.answer(SECOND, [-2.0], "length")
    assert (await second)["choices"][0]["finish_reason"] == "length"
    return episode


def facts(**changes: Any) -> TraceFacts:
    told: dict[str, Any] = {
        "ids": [*PROMPT, *FIRST, *ADDED, *SECOND],
        "mask": [False] * 2 + [True] * 2 + [False] * 3 + [True],
        "logprobs": [0.0] * 2 + DRAWN + [0.0] * 3 + [-2.0],
        "reward": 0.75,
        "rewards": {"right": 1.0, "short": 0.5},
        "metrics": {"calls": 2.0},
    }
    return TraceFacts(**{**told, **changes})


async def test_two_turns_give_what_was_added_and_the_ending() -> None:
    episode = await played()
    episode.finished(facts())
    assert await episode.next() == {"reward": 0.75, "components": {"right": 1.0, "short": 0.5, "calls": 2.0}}


async def test_a_request_posted_twice_gets_the_same_answer() -> None:
    episode = VerifiersEpisode(RULES)
    once, again = await ask(episode, PROMPT), await ask(episode, PROMPT)
    assert await episode.next() == PROMPT
    once.cancel()  # The connection of the first one broke.
    episode.answer(FIRST, DRAWN, "stop")
    late = await ask(episode, PROMPT)
    assert await again == await late
    following = await ask(episode, [*PROMPT, *FIRST, 5])
    assert await episode.next() == [5], "the repeated requests were no news"
    following.cancel()


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([1, 2, 3, 8, 4], "differs from the episode's token ids at place 3 of 4"),
        ([1, 2, 3], "differs from the episode's token ids at place 3 of 4"),
        ([4], "differs from the episode's token ids at place 0 of 4"),
        ([*PROMPT, *FIRST], "adds no token id"),
        ([*PROMPT, *FIRST, 10], "the token id 10, but the base model has 10 ids"),
        ([], "has no token ids"),
        ([1, "2"], "has no token ids"),
        ([True], "has no token ids"),
        ([2**70], "the base model has 10 ids"),
    ],
)
async def test_a_request_that_does_not_continue_is_refused(ids: list[Any], why: str) -> None:
    episode = VerifiersEpisode(RULES)
    first = await ask(episode, PROMPT)
    await episode.next()
    episode.answer(FIRST, DRAWN, "stop")
    await first
    with pytest.raises(Untrainable, match=why):
        await episode.asked(body(ids))
    with pytest.raises(Untrainable, match=why):
        await episode.next()
    with pytest.raises(Untrainable, match=why):  # Nothing that the agent asks afterwards is drawn.
        await episode.asked(body([*PROMPT, *FIRST, 5]))


async def test_two_requests_at_the_same_time_are_a_branch() -> None:
    episode = VerifiersEpisode(RULES)
    first = await ask(episode, PROMPT)
    await episode.next()
    with pytest.raises(Untrainable, match="two turns at the same time"):
        await episode.asked(body([*PROMPT, 3]))
    with pytest.raises(Untrainable, match="two turns at the same time"):
        await first
    with pytest.raises(Untrainable, match="two turns at the same time"):
        episode.answer(FIRST, DRAWN, "stop")


async def test_a_closed_episode_answers_nothing_any_more() -> None:
    episode = VerifiersEpisode(RULES)
    first = await ask(episode, PROMPT)
    episode.close()
    with pytest.raises(Untrainable, match="was closed"):
        await first
    with pytest.raises(Untrainable, match="was closed"):
        await episode.asked(body(PROMPT))


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"temperature": 0.7}, "temperature 0.7, but the run draws with 0.5"),
        ({"max_tokens": 3}, "at most 3 tokens, but the run draws at most 4"),
        ({"stop_token_ids": [STOP, 7]}, r"stop at the token ids \[7\], but the run stops at \[8, 9\]"),
        ({"top_p": 0.9}, "wants top_p = 0.9"),
        ({"guided_json": {"type": "object"}}, "wants guided_json"),
    ],
)
async def test_a_wish_that_the_run_cannot_fulfil_is_refused(wish: dict[str, Any], why: str) -> None:
    with pytest.raises(Untrainable, match=why):
        await VerifiersEpisode(RULES).asked(body(PROMPT, **wish))


async def test_wishes_without_effect_are_taken() -> None:
    episode = VerifiersEpisode(RULES)
    task = await ask(episode, PROMPT, top_p=1.0, top_k=-1, min_p=0, n=1, seed=5, stop_token_ids=[8])
    assert await episode.next() == PROMPT
    task.cancel()


async def test_images_are_refused() -> None:
    with pytest.raises(Untrainable, match="images are not supported"):
        await VerifiersEpisode(RULES).asked({**body(PROMPT), "features": {}})


async def test_seats_that_cannot_be_trained_are_refused() -> None:
    several = VerifiersEpisode(RULES)
    several.traced("a", seat="solver", is_trained=True)
    several.traced("b", seat="solver", is_trained=True)
    with pytest.raises(Untrainable, match="Several agents play in one episode"):
        await several.next()
    untrained = VerifiersEpisode(RULES)
    untrained.traced("a", seat="user", is_trained=False)
    with pytest.raises(Untrainable, match="The seat user is not trained"):
        await untrained.next()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ids": [1, 2, 3, STOP, 4, 5, 6, 6]}, "token ids of the trace"),
        ({"mask": [False] * 8}, "another mask"),
        ({"logprobs": [0.0] * 8}, "another mask or other log-probabilities"),
        ({"branches": 2}, "has 2 branches"),
    ],
)
async def test_a_trace_that_differs_from_the_turns_is_refused(change: dict[str, Any], why: str) -> None:
    episode = await played()
    episode.finished(facts(**change))
    with pytest.raises(Untrainable, match=why):
        await episode.next()


@pytest.mark.parametrize(
    "end", [lambda one: one.failed("The worker has ended."), lambda one: one.finished(facts(error="TaskError: x"))]
)
async def test_a_failed_run_is_lost(end: Callable[[VerifiersEpisode], None]) -> None:
    episode = await played()
    end(episode)
    with pytest.raises(RunLost, match=r"has ended|TaskError"):
        await episode.next()


async def test_a_run_without_a_turn_is_lost() -> None:
    episode = VerifiersEpisode(RULES)
    episode.finished(facts())
    with pytest.raises(RunLost, match="before it asked for a turn"):
        await episode.next()
    with pytest.raises(RunLost, match="waits for no turn"):
        episode.answer(FIRST, DRAWN, "stop")


async def test_a_full_context_ends_the_run_without_a_turn() -> None:
    episode = await played()
    third = await ask(episode, [*PROMPT, *FIRST, *ADDED, *SECOND, 4])
    assert await episode.next() == [4]
    episode.cut()
    with pytest.raises(ContextFull):
        await third
    with pytest.raises(ContextFull):
        await episode.asked(body([1]))
    episode.finished(facts())
    ending = await episode.next()
    assert isinstance(ending, dict) and ending["reward"] == 0.75, "the last request has no turn in the trace"


async def test_components_have_valid_names() -> None:
    episode = await played()
    names = {"score": 0.5, "répons é": 0.25, "0th": 1.0, "x" * 40: 2.0, "nan": math.nan}
    episode.finished(facts(rewards=names, metrics={"x" * 40: 3.0}))
    ending = await episode.next()
    assert isinstance(ending, dict)
    assert ending["components"] == {
        "score_2": 0.5,
        "r_pons__": 0.25,
        "m_0th": 1.0,
        "x" * NAME_LENGTH: 2.0,
        "x" * (NAME_LENGTH - 3) + "_2": 3.0,
    }
