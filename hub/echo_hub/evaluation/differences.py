"""Compare two versions on the same held-out problems.

The difference is taken per problem. So its standard error does not include how much problems differ in difficulty,
which affects both versions alike: Miller, https://arxiv.org/abs/2411.00640, on paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echo_hub.evaluation.by_hub import Episode, HeldOut
from echo_hub.evaluation.figures import rewards_by_problem, standard_error
from echo_shared.records.run import EvaluationKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedShares:
    """For one version, evaluation set and kind (greedy, sampled): the share of solved completions and the mean reward
    of each problem."""

    policy_version: int
    name: str
    """Name of the evaluation set; "" if the run has only one set."""
    weight: float
    """Weight of the set in the run's accuracy, the weighted mean over all sets."""
    kind: EvaluationKind
    samples: int
    shares: Mapping[int, float]
    """For each problem number, the share. A problem without a scored completion is missing."""
    rewards: Mapping[int, float]
    """For each problem number, the mean reward. A problem without a scored completion is missing."""


@dataclass(frozen=True, slots=True)
class NotingShares:
    """A watcher for `evaluate_sets` that appends the solved shares of each set and kind to the list `into`."""

    policy_version: int
    into: list[SolvedShares]

    def finished(self, heldout: HeldOut, kind: EvaluationKind, episodes: Sequence[Episode]) -> None:
        earned = rewards_by_problem(episodes)
        self.into.append(
            SolvedShares(
                policy_version=self.policy_version,
                name=heldout.name,
                weight=heldout.weight,
                kind=kind,
                samples=1 if kind is EvaluationKind.GREEDY else heldout.samples,
                shares={
                    number: float(np.mean([heldout.rewards.is_solved(reward) for reward in rewards]))
                    for number, rewards in earned.items()
                },
                rewards={number: float(np.mean(rewards)) for number, rewards in earned.items()},
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracy of a version minus the accuracy of an earlier one, over the problems that both versions answered."""

    name: str
    """Name of the evaluation set; "" for the whole run."""
    policy_version: int
    earlier_version: int
    kind: EvaluationKind
    samples: int
    difference: float
    error: float
    """Standard error of `difference`, from the differences of the problems."""
    reward_difference: float
    """Mean reward of the version minus that of the earlier one, which also counts partial rewards."""
    reward_error: float
    """Standard error of `reward_difference`."""
    num_better: int
    """Number of problems for which the later version has a larger share of solved completions."""
    num_worse: int
    num_equal: int

    @property
    def label(self) -> str:
        how = "greedy" if self.kind is EvaluationKind.GREEDY else f"mean@{self.samples}"
        return f"{self.name}, {how}" if self.name else how

    @property
    def text(self) -> str:
        points = f"{abs(self.difference):.1%}".removesuffix("%")
        if points == "0.0":
            solves = "as much as"
        else:
            solves = f"{points} percentage points {'more' if self.difference > 0 else 'less'} than"
        earlier = f"version {self.earlier_version}" if self.earlier_version else "the base"
        better = f"{self.num_better} {'problem' if self.num_better == 1 else 'problems'} better"
        return (
            f"Version {self.policy_version} solves {solves} {earlier} (± {100 * self.error:.1f}; {better}, "
            f"{self.num_worse} worse, {self.num_equal} equal)."
        )


def differences(solved: Sequence[SolvedShares]) -> list[Difference]:
    """Compare the last version with the first: over the whole run, then for each of several sets. Return [] if there is
    only one version."""
    first, last = min(one.policy_version for one in solved), max(one.policy_version for one in solved)
    if first == last:
        return []
    of_first = {(one.name, one.kind): one for one in solved if one.policy_version == first}
    pairs = [(of_first[one.name, one.kind], one) for one in solved if one.policy_version == last]
    pairs = [(earlier, later) for earlier, later in pairs if earlier.shares.keys() & later.shares.keys()]
    found = [_difference([pair], name=pair[1].name) for pair in pairs]
    if len({later.name for _, later in pairs}) < 2:
        return found
    of_kinds = [[pair for pair in pairs if pair[1].kind is kind and pair[1].weight] for kind in EvaluationKind]
    return [*(_difference(of_kind, name="") for of_kind in of_kinds if of_kind), *found]


def _difference(pairs: Sequence[tuple[SolvedShares, SolvedShares]], *, name: str) -> Difference:
    """Return the difference over all sets. The sets count as independent samples. Each set has its weight in the run's
    accuracy."""
    one, other = pairs[0]
    weights = [later.weight if len(pairs) > 1 else 1.0 for _, later in pairs]
    of_sets = [_changes(earlier.shares, later.shares) for earlier, later in pairs]
    difference, error = _weighted_mean(of_sets, weights)
    of_rewards = [_changes(earlier.rewards, later.rewards) for earlier, later in pairs]
    reward_difference, reward_error = _weighted_mean(of_rewards, weights)
    every = [change for of_set in of_sets for change in of_set]
    return Difference(
        name=name,
        policy_version=other.policy_version,
        earlier_version=one.policy_version,
        kind=other.kind,
        samples=min(later.samples for _, later in pairs),
        difference=difference,
        error=error,
        reward_difference=reward_difference,
        reward_error=reward_error,
        num_better=sum(change > 0 for change in every),
        num_worse=sum(change < 0 for change in every),
        num_equal=sum(change == 0 for change in every),
    )


def _changes(earlier: Mapping[int, float], later: Mapping[int, float]) -> list[float]:
    return [later[number] - earlier[number] for number in sorted(later.keys() & earlier.keys())]


def _weighted_mean(of_sets: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, float]:
    """Return the weighted mean of the means of independent sets, and its standard error."""
    errors = [weight * standard_error(of_set) for weight, of_set in zip(weights, of_sets, strict=True)]
    mean = float(np.average([np.mean(of_set) for of_set in of_sets], weights=weights))
    return mean, math.hypot(*errors) / sum(weights)
