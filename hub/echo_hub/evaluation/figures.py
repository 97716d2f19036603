"""Compute the metrics of an evaluation from its attempts (finished episodes on held-out problems), which nodes or the
hub have sampled."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.rewards import components_of, mean_components
from echo_shared.records.run import Evaluation, EvaluationKind

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A finished episode on a held-out problem."""

    number: int
    num_tokens: int = 0
    """Number of sampled tokens, over all turns."""
    truncated: bool = False
    """True if a turn was cut off at its length limit."""
    reward: float | None = None
    """Reward of the episode; None if the scorer failed."""


def pass_at(solved: int, samples: int, k: int) -> float:
    """Estimate the probability that at least one of k completions solves a problem, if `solved` of `samples`
    completions did.

    With n samples and c solved: 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al.,
    https://arxiv.org/abs/2107.03374, section 2.1. Requires k <= samples.
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def standard_error(means: Sequence[float]) -> float:
    """Return the standard error of the mean of `means`, which has one mean per problem; 0 for a single problem.

    Problems are independent draws, but the completions of one problem are not. So the error is computed over problems,
    as in Miller, https://arxiv.org/abs/2411.00640, section 2.2.
    """
    return float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


def rewards_by_problem(attempts: Sequence[Attempt]) -> dict[int, list[float]]:
    """Return the rewards of each problem that has a scored attempt, by the problem's number."""
    by_problem: dict[int, list[float]] = {}
    for attempt in attempts:
        if attempt.reward is not None:
            by_problem.setdefault(attempt.number, []).append(attempt.reward)
    return by_problem


def summary(
    attempts: Sequence[Attempt],
    policy_version: int,
    kind: EvaluationKind,
    *,
    samples: int,
    seconds: float,
    rewards: RewardBounds,
    name: str = "",
) -> Evaluation:
    """Return the figures of all attempts of one kind. Raises ScorerError if no attempt could be scored."""
    by_problem = rewards_by_problem(attempts)
    num_unscored = len(attempts) - sum(map(len, by_problem.values()))
    if not by_problem:
        raise ScorerError(
            "None of the held-out completions could be scored.",
            got=f"{len(attempts)} completions by version {policy_version}",
            do="Fix the task's scorer; see the newest RUN/logs/scorer-*.log.",
        )
    if num_unscored:
        log.warning(
            "the scorer failed on %d of %d completions by version %d", num_unscored, len(attempts), policy_version
        )
    solved = [(sum(map(rewards.is_solved, earned)), len(earned)) for earned in by_problem.values()]
    means = [count / total for count, total in solved]
    # A problem with fewer than k scored completions gives no estimate for that k.
    ks = sorted({*(2**power for power in range(1, samples.bit_length())), samples} - {1})
    possible = {k: [pass_at(count, total, k) for count, total in solved if total >= k] for k in ks}
    return Evaluation(
        name=name,
        policy_version=policy_version,
        kind=kind,
        num_problems=len(by_problem),
        samples=samples,
        num_unscored=num_unscored,
        accuracy=float(np.mean(means)),
        accuracy_error=standard_error(means),
        pass_at={k: float(np.mean(shares)) for k, shares in possible.items() if shares},
        mean_reward=float(np.mean([np.mean(earned) for earned in by_problem.values()])),
        mean_tokens=float(np.mean([attempt.num_tokens for attempt in attempts])),
        share_truncated=float(np.mean([attempt.truncated for attempt in attempts])),
        seconds=seconds,
        evaluated_at=time.time(),
        components=mean_components(components_of(attempt.reward) for attempt in attempts if attempt.reward is not None)
        or {},
    )


def with_headline(measured: Sequence[Evaluation], weights: Mapping[str, float]) -> list[Evaluation]:
    """Put the run's own figures, one `Evaluation` for each kind (greedy, sampled), before the figures of the single
    evaluation sets of one version.

    The run's own figures are weighted means over the sets; their standard error assumes independent sets. With a single
    set, the set's figures are the run's own.
    """
    if len(weights) == 1:
        return list(measured)
    headlines = []
    for kind in EvaluationKind:
        of_kind = [one for one in measured if one.kind is kind and weights[one.name]]
        if of_kind:
            headlines.append(_mean(of_kind, [weights[one.name] for one in of_kind]))
    return [*headlines, *measured]


def _mean(sets: Sequence[Evaluation], weights: Sequence[float]) -> Evaluation:
    total = sum(weights)

    def mean(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total

    errors = [one.accuracy_error for one in sets]
    common = set.intersection(*(set(one.pass_at) for one in sets))
    named = set.intersection(*(set(one.components) for one in sets))
    return Evaluation(
        policy_version=sets[0].policy_version,
        kind=sets[0].kind,
        num_problems=sum(one.num_problems for one in sets),
        samples=min(one.samples for one in sets),
        num_unscored=sum(one.num_unscored for one in sets),
        accuracy=mean(one.accuracy for one in sets),
        accuracy_error=math.sqrt(sum((w * error) ** 2 for w, error in zip(weights, errors, strict=True))) / total,
        pass_at={k: mean(one.pass_at[k] for one in sets) for k in sorted(common)},
        mean_reward=mean(one.mean_reward for one in sets),
        mean_tokens=mean(one.mean_tokens for one in sets),
        share_truncated=mean(one.share_truncated for one in sets),
        seconds=sum(one.seconds for one in sets),
        evaluated_at=max(one.evaluated_at for one in sets),
        components={name: mean(one.components[name] for one in sets) for name in sorted(named)},
    )
