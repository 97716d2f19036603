"""Neighbour shopping: the gain of a node that samples exactly, claims an engine that rounds, and chooses among
neighbours.

A token's interval is the range of cumulative probability within which the uniform u gives this token. If u lies near an
edge of the interval, an engine that rounds may draw the neighbouring token instead. A node can exploit this tolerance.
In every rollout without the best reward it puts the neighbour in the token's place, continues from there as leased, and
returns the rollout with the higher reward. Only one token of a rollout is replaced.

The node claims the true log-probabilities; with `claims_round` it adds noise to them, as rough as in the claimed class.
`takes` names the chances that the node uses: "all", "half", or "and equals". The last name means all chances, plus half
of the neighbours with an equal reward as a disguise.

A row has the mean reward with and without shopping. It also has the number of checked rollouts until the hub's own
tests (`core.trust.judging`, `core.trust.shopping`), with the hub's measured rounding, convict the node: the median over
`ORDERS` random sequences of groups. `UNDETECTED` means that they never do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.honesty.samplers import VERSION, Asked, Rollouts, ShortRun, as_drawn
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, added, alarm, judged
from echo_hub.core.trust.likelihood import SCALES, bounded_log_odds
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.shopping import LatestRewards, edges, weigh
from echo_hub.core.trust.standing import Standing
from echo_hub.learner.policy import Policy
from echo_hub.verify.drawn import unpack_evidence, unpack_spans
from echo_hub.verify.worker import Examiner
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.torch_sampler import sample_groups
from echo_shared.wire.messages import FinishReason

CLAIMED: Final = ("f32", "bf16", "q8_0", "q4_k_m", "q4_0")
"""Precisions that the node claims, one per case."""
REACHES: Final = (1.0, 2.0, 4.0)
"""Largest distances between u and the edge of two tokens' intervals at which the node tries the neighbouring token. The
unit is the scale of rounding errors in draws of the claimed class.
"""
LEAST_PROBABILITY: Final = 1e-6
"""Minimum probability of a neighbouring token that is tried in place of the drawn one."""
ORDERS: Final = 5
UNDETECTED: Final = 10_000
ALL: Final = "all"
HALF: Final = "half"
EQUALS: Final = "and equals"


@dataclass(frozen=True, slots=True)
class _Candidate:
    place: int
    """Index, among all rollouts of the case, of the rollout that contains the token."""
    token: int
    """Index of the token in the completion."""
    neighbour: int
    apart: float
    """Distance from u to the edge between the drawn token and its neighbour, in nats of log-odds."""


def case(precision: str) -> str:
    return f"neighbours, as {precision}"


def measure(run: ShortRun, examiner: Examiner, precision: str, groups: int) -> list[dict[str, Any]]:
    """Return rows for each of REACHES, for a node that claims the true log-probabilities, and for one that adds noise
    to them. The node claims this `precision`.
    """
    asked = run.asked(case(precision), groups)
    policy = Policy.load(run.settings)
    policy.set_adapter(policy.read_adapter(run.directory.adapter(VERSION)))
    numerics, told = Numerics(), NumericsClass("torch", precision, "cpu")
    prompts = [one.request.prompt_ids for one in run.asked("to measure", groups)]
    answer = examiner.measure(told.rounding, VERSION, run.adapters, prompts)
    numerics.measured(told.rounding, unpack_evidence(answer["evidence"]))
    honest = numerics.honest(numerics.known(told))
    by_group = {one.request.group_id: one for one in asked}
    drawn = list(sample_groups(policy.model, [one.request for one in asked]))
    rollouts = [(by_group[rollout.group_id], rollout) for rollout in drawn]
    farthest = max(REACHES) * float(SCALES[honest.draws])
    candidates = [
        candidate
        for place, (one, rollout) in enumerate(rollouts)
        if run.reward(one, rollout.completion_ids) < 1.0
        for candidate in _near(policy, one, rollout, place, farthest)
    ]
    rows = []
    for reach in REACHES:
        near = [candidate for candidate in candidates if candidate.apart < reach * float(SCALES[honest.draws])]
        tried = _tried(policy, rollouts, near)
        for takes, claims_round in ((ALL, False), (ALL, True), (HALF, True), (EQUALS, True)):
            shopped = _shopped(run, policy, rollouts, tried, takes)
            said = _rounded(shopped, float(SCALES[honest.claims]) / 2) if claims_round else shopped
            after = [_to_detection(order, numerics, told) for order in _orders(examiner, run, said)]
            rows.append(
                {
                    "case": case(precision),
                    "reach": reach,
                    "claims_round": claims_round,
                    "takes": takes,
                    "reward": _reward(run, rollouts),
                    "reward_shopped": _reward(run, shopped),
                    "to_detection": median(after),
                    "rollouts": len(said),
                }
            )
    return rows


def _reward(run: ShortRun, rollouts: Rollouts) -> float:
    return fmean(run.reward(one, rollout.completion_ids) for one, rollout in rollouts)


def _tried(policy: Policy, rollouts: Rollouts, candidates: Sequence[_Candidate]) -> dict[int, list[FinishedRollout]]:
    """Return, by index of the sampled rollout, the rollouts that result when a candidate's neighbour replaces one
    token.
    """
    tried: dict[int, list[FinishedRollout]] = {}
    requests: list[GroupRequest] = []
    for number, candidate in enumerate(candidates):
        one, rollout = rollouts[candidate.place]
        ids = np.append(rollout.completion_ids[: candidate.token], candidate.neighbour).astype(np.int32)
        logprobs = np.append(rollout.behavior_logprobs[: candidate.token], 0.0).astype(np.float32)
        if candidate.neighbour in one.request.stop_ids or len(ids) == one.request.max_tokens:
            reason = FinishReason.STOP if candidate.neighbour in one.request.stop_ids else FinishReason.LENGTH
            whole = replace(rollout, completion_ids=ids, behavior_logprobs=logprobs, finish_reason=reason)
            tried.setdefault(candidate.place, []).append(whole)
        else:
            prefix = Prefix(index=rollout.index, ids=ids, logprobs=logprobs)
            request = replace(one.request, lease_id=number, indices=(rollout.index,), prefixes=(prefix,))
            requests.append(request)
    for rollout in sample_groups(policy.model, requests) if requests else ():
        tried.setdefault(candidates[rollout.lease_id].place, []).append(rollout)
    return tried


def _shopped(
    run: ShortRun, policy: Policy, rollouts: Rollouts, tried: Mapping[int, Sequence[FinishedRollout]], takes: str
) -> Rollouts:
    """Replace each rollout by its variant in `tried` with the best reward, if this reward is higher. `takes` limits the
    replacements to a half of these rollouts, or adds some with an equal reward (see the module's docstring).
    """
    chance, found = random.Random(0), list(rollouts)
    for place, others in tried.items():
        one, own = rollouts[place]
        rewards = [run.reward(one, other.completion_ids) for other in others]
        best, earned = others[int(np.argmax(rewards))], run.reward(one, own.completion_ids)
        is_taken = chance.random() < 0.5
        if (max(rewards) > earned and (is_taken or takes != HALF)) or (
            max(rewards) == earned and is_taken and takes == EQUALS
        ):
            found[place] = one, _with_true_claims(policy, one, best)
    return found


def _near(policy: Policy, one: Asked, rollout: FinishedRollout, place: int, reach: float) -> list[_Candidate]:
    probabilities_TV = _probabilities(policy, one, rollout)
    uniforms_T = draws.uniforms(one.request.seed, rollout.index, len(rollout.completion_ids))
    candidates = []
    for token, (row_V, u) in enumerate(zip(probabilities_TV, uniforms_T, strict=True)):
        edges_V, drawn = np.cumsum(row_V), int(rollout.completion_ids[token])
        likely = np.flatnonzero(row_V > LEAST_PROBABILITY)
        beside = (likely[likely < drawn][-1:], likely[likely > drawn][:1])
        at = (edges_V[drawn] - row_V[drawn], edges_V[drawn])
        for neighbour, edge in zip(beside, at, strict=True):
            apart = np.ptp(bounded_log_odds(np.array([u, edge]))) if len(neighbour) else np.inf
            if apart < reach:
                candidates.append(_Candidate(place, token, int(neighbour[0]), float(apart)))
    return candidates


def _probabilities(policy: Policy, one: Asked, rollout: FinishedRollout) -> NDArray[np.float64]:
    """Return the probability [T, V] of every token at each place of the completion."""
    prompt, ids = one.request.prompt_ids, rollout.completion_ids
    with torch.no_grad():
        logits = policy.model(torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]).logits[0]
    scaled = logits[len(prompt) - 1 : -1].double() / one.request.temperature
    found: NDArray[np.float64] = scaled.softmax(dim=-1).numpy()
    return found


def _with_true_claims(policy: Policy, one: Asked, rollout: FinishedRollout) -> FinishedRollout:
    of_tokens = np.take_along_axis(_probabilities(policy, one, rollout), rollout.completion_ids[:, None], axis=1)
    return replace(rollout, behavior_logprobs=np.log(of_tokens[:, 0]).astype(np.float32))


def _rounded(rollouts: Rollouts, scale: float) -> Rollouts:
    chance = np.random.default_rng(0)
    found = []
    for one, rollout in rollouts:
        probabilities = np.exp(rollout.behavior_logprobs.astype(np.float64)).clip(1e-9, 1 - 1e-9)
        odds = np.log(probabilities / (1 - probabilities)) + scale * chance.standard_t(4, len(probabilities))
        claims = -np.logaddexp(0.0, -odds)
        found.append((one, replace(rollout, behavior_logprobs=claims.astype(np.float32))))
    return found


def _orders(examiner: Examiner, run: ShortRun, rollouts: Rollouts) -> list[list[tuple[Evidence, float]]]:
    """Return several random sequences of groups, each as the evidence and the reward of `UNDETECTED` (10,000)
    rollouts.
    """
    drawn = as_drawn(rollouts)
    shown = {
        answer["rollout_id"]: unpack_spans(answer["spans"])[0][1] for answer in examiner.examine(drawn, run.adapters)
    }
    groups: dict[int, list[tuple[Evidence, float]]] = {}
    for (one, rollout), as_checked in zip(rollouts, drawn, strict=True):
        found = shown[as_checked.rollout_id], run.reward(one, rollout.completion_ids)
        groups.setdefault(one.request.group_id, []).append(found)
    orders = []
    for number in range(ORDERS):
        chosen = random.Random(number).choices(sorted(groups), k=UNDETECTED)
        orders.append([found for group_id in chosen for found in groups[group_id]][:UNDETECTED])
    return orders


def _to_detection(order: Sequence[tuple[Evidence, float]], numerics: Numerics, told: NumericsClass) -> int:
    standing, ranks, enough = Standing("node", numerics=told), LatestRewards(), alarm(TrustSettings().false_alarm)
    sums = NOTHING
    for number, (evidence, reward) in enumerate(order, start=1):
        honest = numerics.honest(told, shown=standing.recent)
        sums = judged(sums, evidence, standing.recent, honest, enough)
        standing.show(evidence)
        found = edges("node", evidence, honest)
        sums = added(sums, weigh(found, standing.usual_rank.excess(ranks.rank(reward), found)))
        if max(sums) >= enough:
            return number
    return UNDETECTED


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest gain in reward of a node that was never convicted: when it claims true log-probabilities, and
    when it adds noise to them.
    """
    found = {}
    for name, claims_round in (("most_earned_unfound", False), ("most_earned_unfound_with_noise", True)):
        unfound = [row for row in rows if row["claims_round"] == claims_round and row["to_detection"] == UNDETECTED]
        found[name] = max((row["reward_shopped"] - row["reward"] for row in unfound), default=0.0)
    return found
