"""Compare two versions on the same held-out problems.

The difference is taken per problem. So its standard error does not include how much problems differ in difficulty,
which affects both versions alike: Miller, https://arxiv.org/abs/2411.00640, on paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echo_hub.evaluation.by_hub import Episode, HeldOut, Watch
from echo_hub.evaluation.figures import rewards_by_problem, standard_error
from echo_shared.records.run import EvaluationKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedShares:
    """Share of solved completions of each problem, for one version, evaluation set and kind."""

    policy_version: int
    name: str
    """Name of the evaluation set; "" if the run has only one set."""
    weight: float
    """Weight of the set in the run's own accuracy, which is a mean over all sets."""
    kind: EvaluationKind
    samples: int
    shares: Mapping[int, float]
    """Problem number -> share. A problem without a scored completion is missing."""


def noting_shares(policy_version: int, into: list[SolvedShares]) -> Watch:
    """Return a watcher for `evaluate_sets` that appends the solved shares of each set and kind to the list `into`."""

    def watch(heldout: HeldOut, kind: EvaluationKind, episodes: Sequence[Episode]) -> None:
        into.append(
            SolvedShares(
                policy_version=policy_version,
                name=heldout.name,
                weight=heldout.weight,
                kind=kind,
                samples=1 if kind is EvaluationKind.GREEDY else heldout.samples,
                shares={
                    number: float(np.mean([heldout.rewards.is_solved(reward) for reward in rewards]))
                    for number, rewards in rewards_by_problem(episodes).items()
                },
            )
        )

    return watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracy of a version minus the accuracy of an earlier one, over the problems that both have."""

    name: str
    """Name of the evaluation set; "" for the whole run."""
    policy_version: int
    earlier_version: int
    kind: EvaluationKind
    samples: int
    difference: float
    error: float
    """Standard error of `difference`, from the differences of the problems."""
    num_better: int
    """Number of problems of which the later version solves a larger share."""
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
    """Compare the last version with the first: the whole run, then each set if there are several. Return nothing for a
    single version.
    """
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
    """Return the difference over all sets of `pairs`, which are independent, weighted like the run's own accuracy."""
    one, other = pairs[0]
    of_sets = [
        [later.shares[number] - earlier.shares[number] for number in later.shares.keys() & earlier.shares.keys()]
        for earlier, later in pairs
    ]
    weights = [later.weight if len(pairs) > 1 else 1.0 for _, later in pairs]
    errors = [weight * standard_error(of_set) for weight, of_set in zip(weights, of_sets, strict=True)]
    every = [difference for of_set in of_sets for difference in of_set]
    return Difference(
        name=name,
        policy_version=other.policy_version,
        earlier_version=one.policy_version,
        kind=other.kind,
        samples=min(later.samples for _, later in pairs),
        difference=float(np.average([np.mean(of_set) for of_set in of_sets], weights=weights)),
        error=math.hypot(*errors) / sum(weights),
        num_better=sum(difference > 0 for difference in every),
        num_worse=sum(difference < 0 for difference in every),
        num_equal=sum(difference == 0 for difference in every),
    )
