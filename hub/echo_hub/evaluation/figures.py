"""The figures of an evaluation, made of its attempts, whoever drew them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echo_hub.tasks.rewards import RewardBounds
from echo_shared.books import Evaluation, EvaluationKind
from echo_shared.errors import ScorerError
from echo_shared.rewards import components_of, mean_components

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One episode at one held-out problem, when it has ended."""

    number: int
    num_tokens: int = 0
    """Tokens drawn, over all turns."""
    truncated: bool = False
    """Any of its turns was cut off by length."""
    reward: float | None = None
    """None: the scorer failed."""


def pass_at(solved: int, samples: int, k: int) -> float:
    """The probability that one of k completions solves a problem of which `solved` of `samples` did; k <= samples.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al., https://arxiv.org/abs/2107.03374, section 2.1.
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def standard_error(means: Sequence[float]) -> float:
    """The standard error of the mean of `means`, one a problem: problems are the independent draws, their completions
    are not.

    Clustered by problem as in Miller, https://arxiv.org/abs/2411.00640, section 2.2; 0 for a single problem.
    """
    return float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0


def summary(
    attempts: Sequence[Attempt],
    policy_version: int,
    kind: EvaluationKind,
    *,
    samples: int,
    seconds: float,
    rewards: RewardBounds,
) -> Evaluation:
    """The figures of all attempts of one kind. Raises ScorerError when not one of them could be scored."""
    by_problem: dict[int, list[float]] = {}
    for attempt in attempts:
        if attempt.reward is not None:
            by_problem.setdefault(attempt.number, []).append(attempt.reward)
    num_unscored = len(attempts) - sum(map(len, by_problem.values()))
    if not by_problem:
        raise ScorerError(
            "Not one held-out completion could be scored.",
            got=f"{len(attempts)} completions by version {policy_version}",
            do="Mend the task's scorer; see the newest of RUN/logs/scorer-*.log.",
        )
    if num_unscored:
        log.warning(
            "the scorer failed on %d of %d completions by version %d", num_unscored, len(attempts), policy_version
        )
    solved = [(sum(map(rewards.is_solved, earned)), len(earned)) for earned in by_problem.values()]
    means = [count / total for count, total in solved]
    # A problem of which fewer than k completions could be scored says nothing about k.
    ks = sorted({*(2**power for power in range(1, samples.bit_length())), samples} - {1})
    possible = {k: [pass_at(count, total, k) for count, total in solved if total >= k] for k in ks}
    return Evaluation(
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
