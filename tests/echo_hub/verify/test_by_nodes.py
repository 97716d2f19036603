"""The request to a node to check a rollout, and the evidence in the node's answer, computed by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import SendCheck
from echo_hub.core.accounting.events import CheckAbandoned, CheckReturned, Event
from echo_hub.core.trust.evidence import NO_EVIDENCE
from echo_hub.core.trust.judging import weigh
from echo_hub.core.trust.numerics import DEFAULTS
from echo_hub.core.trust.pairs import apart
from echo_hub.driving.event_queue import EventQueue
from echo_hub.verify.by_nodes import MOST_OUT, NodeChecks, finding_of
from echo_hub.verify.drawn import DrawnRollout
from echo_hub.verify.repeats import RepeatedTokens
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling import draws
from echo_shared.wire.messages import CheckLease, CheckResult, FinishReason, VersionSpan

DRAWN = DrawnRollout(
    rollout_id="1-0",
    prompt_ids=np.array([7, 8], np.int32),
    completion_ids=np.array([1, 2, 3], np.int32),
    behavior_logprobs=np.array([-0.5, -0.5, -1.5], np.float32),
    spans=(
        DrawnSpan(node_id="x", policy_version=4, num_tokens=1),
        DrawnSpan(node_id="y", policy_version=4, num_tokens=1),
        DrawnSpan(node_id="y", policy_version=5, num_tokens=1),
    ),
    finish_reason=FinishReason.STOP,
    sampling_s=0.5,
    seed=7,
    index=3,
)
U = draws.uniforms(7, 3, 3)
"""The uniforms u of the three tokens: 0.482, 0.724 and 0.050."""


def result(below: list[float], logprobs: list[float], rollout_id: str = "1-0") -> CheckResult:
    return CheckResult(
        rollout_id=rollout_id, below=np.array(below, np.float32), logprobs=np.array(logprobs, np.float32)
    )


def test_each_sampler_gets_the_evidence_of_its_tokens() -> None:
    """The interval of cumulative probability that draws token 1 contains the token's u. Token 2's interval ends at 0.7,
    below u by 0.024, or .12 in log-odds. Token 3's begins 0.25 above u, or 2.1 in log-odds. Token 3's claim is one nat
    off: its odds go from ln(.607 / .393) to ln(.223 / .777).
    """
    found = finding_of(DRAWN, result([0.4, 0.7 - np.exp(-0.5), 0.3], [-0.5, -0.5, -0.5]), RepeatedTokens())
    assert found.below == pytest.approx([0.4, 0.7 - np.exp(-0.5), 0.3], abs=1e-6)
    assert found.logprobs == pytest.approx([-0.5, -0.5, -0.5])
    (x, first), (y, second), (also_y, third) = found.spans
    assert (x, y, also_y) == ("x", "y", "y") and found.num_tokens == 5
    assert (first.draws, first.claims) == ((1, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0))
    assert second.draws == (0, 0, 1, 0, 0, 0)
    assert third.draws == (0, 0, 0, 0, 0, 1) and third.claims == (0, 0, 0, 0, 0, 1)
    assert third.mismatch_kl == pytest.approx(np.e - 2)


def test_the_gaps_of_greedy_choices_are_read_from_their_log_probabilities() -> None:
    """At temperature 1e-9, the likeliest token has log-probability 0. One that is 0.3 nats less likely at temperature 1
    has -3e8, and 0.6 nats at the run's temperature of 0.5.
    """
    greedy = replace(DRAWN, is_greedy=True, temperature=1e-9)
    found = finding_of(greedy, result([0.0, 0.0, 1.0], [0.0, -3e8, LOWEST]), RepeatedTokens(), warmth=1e-9 / 0.5)
    (x, first), (y, second), (also_y, third) = found.spans
    assert (x, y, also_y) == ("x", "y", "y") and found.is_greedy
    assert found.below[:2] == pytest.approx([0.0, 0.6]) and found.below[2] > 1e20
    assert first.draws == (1, 0, 0, 0, 0, 0) and second.draws == (0, 0, 0, 0, 1, 0)
    assert third.draws == (0, 0, 0, 0, 0, 1) and not (first.num_claims or second.num_claims or third.num_claims)
    other = finding_of(greedy, result([0.0, 0.0, 1.0], [0.0, -4e8, LOWEST]), RepeatedTokens(), warmth=1e-9 / 0.5)
    assert apart(found, other).claims == (2, 0, 1, 0, 0, 0), "0.6 and 0.8 differ by 0.2"


LOWEST, HIGHEST = (float(bound) for bound in (np.finfo(np.float32).min, np.finfo(np.float32).max))


@pytest.mark.parametrize(
    ("below", "logprobs"),
    [
        ([1.0, 0.0, 0.5], [0.0, -1e4, -1e4]),
        ([1.0, 1.0, 1.0], [LOWEST, LOWEST, LOWEST]),
        ([0.0, 0.0, 0.0], [0.0, 1e-30, 5.0]),
        ([0.5, 0.5, 0.5], [HIGHEST, 710.0, 1e3]),
    ],
)
def test_any_answer_gives_finite_evidence(below: list[float], logprobs: list[float]) -> None:
    """Messages may contain any finite number, and any share from 0 to 1. None may lead to NaN or inf."""
    wild = replace(DRAWN, behavior_logprobs=np.array([-1e30, 0.0, -5.0], np.float32))
    found = finding_of(wild, result(below, logprobs), RepeatedTokens())
    total = sum((evidence for _, evidence in found.spans), NO_EVIDENCE)
    assert np.isfinite(total.draws_CS).all() and np.isfinite(total.claims_CS).all()
    assert np.isfinite([total.mismatch_kl, total.bias]).all() and total.num_tokens == 3
    other = apart(found, finding_of(DRAWN, result([0.4, 0.2, 0.3], [-0.5, -0.5, -0.5]), RepeatedTokens()))
    assert np.isfinite(other.claims_CS).all() and other.num_claims == 6
    for honest in DEFAULTS.values():
        assert all(np.isfinite(weigh(evidence, honest)).all() for evidence in (total, other))


class Reports(EventQueue):
    def __init__(self, reported: asyncio.Queue[Any]) -> None:
        super().__init__()
        self._reported = reported

    async def put(self, event: Event) -> None:
        await self._reported.put(event)


class World:
    def __init__(self) -> None:
        self.found: dict[str, DrawnRollout | str] = {"1-0": DRAWN}
        self.sent: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.reported: asyncio.Queue[Any] = asyncio.Queue()
        self.checks = NodeChecks(
            rollouts=self,
            connections=self,
            queue=Reports(self.reported),
            temperature=0.7,
        )

    def send(self, node_id: str, message: Any) -> bool:
        self.sent.put_nowait((node_id, message))
        return True

    def prompts(self) -> list[Any]:
        return []

    async def load(self, rollout_ids: Sequence[str]) -> Mapping[str, DrawnRollout | str]:
        return {rollout_id: self.found[rollout_id] for rollout_id in rollout_ids if rollout_id in self.found}

    async def ask(self, node_id: str = "a", rollout_id: str = "1-0") -> CheckLease:
        self.checks.submit(SendCheck(node_id=node_id, rollout_id=rollout_id, deadline_s=9.0))
        to, lease = await self.sent.get()
        assert to == node_id and isinstance(lease, CheckLease)
        return lease


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    running = asyncio.create_task(made.checks.run())
    yield made
    running.cancel()


async def test_a_request_is_checked_at_its_own_temperature(world: World) -> None:
    world.found["1-0"] = replace(DRAWN, temperature=1.4)
    lease = await world.ask()
    assert lease.temperature == 1.4
    await world.checks.answered("a", result([0.4, 0.2, 0.3], [-0.5, -0.5, -0.5]))
    event = await world.reported.get()
    assert event.finding.warmth == pytest.approx(2.0)


async def test_a_checking_node_gets_only_tokens_and_spans(world: World) -> None:
    lease = await world.ask()
    assert lease.versions == (
        VersionSpan(policy_version=4, num_tokens=2),
        VersionSpan(policy_version=5, num_tokens=1),
    )
    assert (lease.prompt_ids.tolist(), lease.completion_ids.tolist()) == ([7, 8], [1, 2, 3])
    assert (lease.temperature, lease.deadline_s) == (0.7, 9.0)
    said = set(lease.model_dump()) - {"type", "rollout_id", "temperature", "deadline_s"}
    assert said == {"prompt_ids", "completion_ids", "versions"}


async def test_an_answer_counts_once_and_only_from_the_asked_node(world: World) -> None:
    await world.ask()
    answer = result([0.4, 0.2, 0.3], [-0.5, -0.5, -0.5])
    await world.checks.answered("b", answer)
    await world.checks.answered("a", answer)
    await world.checks.answered("a", answer)
    event = world.reported.get_nowait()
    assert isinstance(event, CheckReturned) and event.node_id == "a" and event.finding is not None
    assert world.reported.empty()


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_an_answer_of_another_length_does_not_count(world: World, count: int) -> None:
    await world.ask()
    await world.checks.answered("a", result([0.1] * count, [-1.0] * count))
    assert world.reported.get_nowait() == CheckReturned(node_id="a", rollout_id="1-0", finding=None)


@pytest.mark.parametrize(
    "found",
    [
        None,
        "It was drawn greedily.",
        replace(DRAWN, completion_ids=np.zeros(2, np.int32)),
        replace(DRAWN, prompt_ids=np.zeros(0, np.int32)),
        replace(DRAWN, prompt_ids=np.zeros(131_073, np.int32)),
    ],
)
async def test_a_rollout_that_no_node_can_check_is_reported_at_once(world: World, found: Any) -> None:
    world.found = {} if found is None else {"1-0": found}
    world.checks.submit(SendCheck(node_id="a", rollout_id="1-0", deadline_s=9.0))
    async with asyncio.timeout(5.0):
        assert await world.reported.get() == CheckAbandoned(rollout_id="1-0")
    assert world.sent.empty()


async def test_checkers_that_left_or_never_answer_are_forgotten(world: World) -> None:
    names = [f"{number}-0" for number in range(1, MOST_OUT + 3)]
    world.found = {name: replace(DRAWN, rollout_id=name) for name in names}
    for name in names:
        await world.ask(rollout_id=name)
    nothing = [result([], [], name) for name in (names[0], names[1], names[2], names[-1])]
    for one in nothing[:3]:
        await world.checks.answered("a", one)
    assert world.reported.get_nowait().rollout_id == names[2] and world.reported.empty()
    world.checks.left("a")
    await world.checks.answered("a", nothing[3])
    assert world.reported.empty()
