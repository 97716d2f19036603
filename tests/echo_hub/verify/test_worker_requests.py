"""A node answers tenants' requests, and the verifier and the coordinator judge it. Forgers must be found, and a tenant
that wants only checked samples must get no forged one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from echo_hub.core.accounting.effects import CheckRollout, DeliverAnswer, SendLease, TrustDecided
from echo_hub.core.accounting.events import (
    AnswerWanted,
    NodeConnected,
    NodeReported,
    RolloutChecked,
    RolloutScored,
)
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember, is_answer
from echo_hub.core.trust.standing import Decision
from echo_hub.learner.policy import Policy
from echo_hub.verify.drawn import unpack_spans
from echo_hub.verify.worker import Examiner
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from tests.echo_hub.core.conftest import Bench
from tests.echo_hub.core.trust.checked_run import F32, SETTINGS
from tests.echo_hub.verify.conftest import Versions, as_drawn

NUM_REQUESTS = 6
SAMPLES = 8
VERSION = 1
Draw = Callable[[Versions, GroupRequest], Sequence[FinishedRollout]]


def honest(versions: Versions, request: GroupRequest) -> Sequence[FinishedRollout]:
    return versions.draw(VERSION, [request])


def at_another_temperature(versions: Versions, request: GroupRequest) -> Sequence[FinishedRollout]:
    return versions.draw(VERSION, [replace(request, temperature=0.6)])


def by_another_version(versions: Versions, request: GroupRequest) -> Sequence[FinishedRollout]:
    return versions.draw(2, [request])


def by_hand(versions: Versions, request: GroupRequest) -> Sequence[FinishedRollout]:
    """Replace every token but the last by one that was not drawn, and claim a plausible log-probability."""
    return [
        replace(
            one,
            completion_ids=np.append((one.completion_ids[:-1] + 5) % 30 + 2, one.completion_ids[-1:]).astype(np.int32),
            behavior_logprobs=np.full(len(one.completion_ids), -1.5, np.float32),
        )
        for one in versions.draw(VERSION, [request])
    ]


def drawn_again(versions: Versions, request: GroupRequest) -> Sequence[FinishedRollout]:
    return versions.draw(VERSION, [replace(request, seed=request.seed + 1)])


class Requests:
    """A coordinator with one node, which answers tenants' requests with the result of `draw`."""

    def __init__(self, versions: Versions, draw: Draw, temperature: float) -> None:
        self.bench = Bench(trust=replace(SETTINGS, first_checked=16), group_size=1)
        self.delivered: list[str] = []
        self.decisions: list[Decision] = []
        self._versions = versions
        self._draw = draw
        self._temperature = temperature
        self._examiner = Examiner(Policy.load(versions.settings), versions.settings, kept=3)
        self._prompts: dict[int, np.ndarray] = {}

    def answer_all(self) -> None:
        self._take(NodeConnected(node_id="a", numerics=F32))
        self._take(NodeReported(node_id="a", capacity=200, policy_version=VERSION))
        for number in range(NUM_REQUESTS):
            self._ask(number)
            while leases := [each for each in self.bench.leases.values() if is_answer(each.group_id)]:
                self._return(self.bench.leases.pop(leases[0].lease_id))

    def _ask(self, number: int) -> None:
        group = AnswerGroup(
            group_id=FIRST_ANSWER_ID + number,
            tenant_id="t",
            prompt_ids=self._versions.request(number).prompt_ids,
            policy_version=VERSION,
            seed=90 + number,
            sampling=SamplingParameters(temperature=self._temperature, max_tokens=12, stop_ids=(1,)),
            is_checked=True,
            members=(AnswerMember(request_id=str(number), num_samples=SAMPLES),),
        )
        self._prompts[group.group_id] = group.prompt_ids
        self._take(AnswerWanted(group=group))

    def _return(self, lease: SendLease) -> None:
        sampling = lease.sampling
        assert sampling is not None
        request = GroupRequest(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            indices=lease.indices,
            prompt_ids=self._prompts[lease.group_id],
            seed=lease.seed,
            policy_version=lease.policy_version,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_ids=sampling.stop_ids,
        )
        span = DrawnSpan(node_id=lease.node_id, policy_version=lease.policy_version, num_tokens=0)
        for one in self._draw(self._versions, request):
            self._take(self.bench.arrival(lease, one.index, payload=RolloutPayload.of(one)))
            checked = [action.rollout_id for action in self.bench.of(CheckRollout)]
            drawn = replace(
                as_drawn(one, request, span),
                temperature=sampling.temperature,
                is_greedy=sampling.is_greedy,
            )
            self._take(RolloutScored(rollout_id=drawn.rollout_id, reward=0.0))
            if checked:
                for answer in self._examiner.examine([drawn], self._versions.adapters):
                    self._take(RolloutChecked(rollout_id=drawn.rollout_id, spans=unpack_spans(answer["spans"])))

    def _take(self, *events: object) -> None:
        self.bench.tell(*events)  # type: ignore[arg-type]
        self.delivered += [answer.rollout_id for answer in self.bench.of(DeliverAnswer)]
        self.decisions += [decided.decision for decided in self.bench.of(TrustDecided)]


@pytest.mark.parametrize("temperature", [0.3, 1.3, 1e-9])
def test_all_samples_of_an_honest_node_are_delivered(versions: Versions, temperature: float) -> None:
    requests = Requests(versions, honest, temperature)
    requests.answer_all()
    assert len(set(requests.delivered)) == NUM_REQUESTS * SAMPLES
    assert Decision.QUARANTINED not in requests.decisions


@pytest.mark.parametrize("draw", [at_another_temperature, by_another_version, by_hand, drawn_again])
def test_a_forger_is_found_and_its_forgeries_are_not_delivered(versions: Versions, draw: Draw) -> None:
    requests = Requests(versions, draw, temperature=1.3)
    requests.answer_all()
    assert requests.decisions == [Decision.QUARANTINED]
    assert len(requests.delivered) <= 1, "one may look like an honest sample"


@pytest.mark.parametrize("draw", [at_another_temperature, by_another_version, by_hand])
def test_a_forger_of_greedy_samples_is_found(versions: Versions, draw: Draw) -> None:
    requests = Requests(versions, draw, temperature=1e-9)
    requests.answer_all()
    assert requests.decisions == [Decision.QUARANTINED]
