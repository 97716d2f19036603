"""Check that the records of a bundle fit together: seeds, leases, batches and totals. Needs neither model nor task.

A hub trains only on whole groups. So a batch has each episode of its groups once, with all turns and a reward. Without
this check, a forger could train on the best of many draws, or on one good draw several times.

Works in one pass over the groups. Memory: 24 bytes for each lease, and a few numbers for each step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose
from typing import Final

import numpy as np

from echo_hub.bundles.blocks import NO_PLACE, BundledGroup, BundledRollout
from echo_hub.bundles.discrepancies import Discrepancies, DiscrepancyKind
from echo_hub.bundles.reading import BundledRun, BundledStep
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import MAX_GROUP_SIZE, ReceiptState

_CLOSE: Final = 1e-9
_IN_A_BATCH: Final = frozenset({ReceiptState.SCORED, ReceiptState.TRAINED})
_IN_FLIGHT: Final = frozenset({ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.SCORED})
_WITHOUT_TOKENS: Final = frozenset({ReceiptState.LEASED, ReceiptState.DROPPED})
"""States in which the hub may have received no tokens."""


def draw_seed(run_seed: int, group_id: int) -> int:
    """Return the seed that the draws of a group must have."""
    about = EvaluationGroup.of(group_id)
    if about is not None:
        return evaluation_seed(run_seed, about.number)
    return derive_seed(run_seed, "draws", group_id)


@dataclass(slots=True)
class _Batch:
    """Sums over the bundled rollouts of one step's batch."""

    rollouts: int = 0
    groups: int = 0
    tokens: int = 0
    rewards: int = 0
    reward_sum: float = 0.0
    place_sum: int = 0
    trained: int = 0
    oldest: int | None = None
    """Lowest policy version that drew a token."""
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Faults of the batch's groups: place and text. They count only if the batch is whole."""


class RecordCheck:
    """Takes all groups first, then all steps. Adds each contradiction to `discrepancies`."""

    def __init__(self, run: BundledRun, *, run_seed: int, group_size: int, discrepancies: Discrepancies) -> None:
        self._run = run
        self._run_seed = run_seed
        self._group_size = group_size
        self._discrepancies = discrepancies
        self._keys = array("q")
        self._batches: dict[int, _Batch] = {}
        self._last_group = -1
        self._last_step: int | None = None
        self._missing = 0
        """Number of rollouts that are missing in batches of retired steps."""
        self._episodes: dict[int, list[tuple[int, bool]]] = {}
        """Rollouts of the last group that are in a step's batch, by index: turn, and True if it has a reward."""
        self.states: dict[str, int] = {}
        """Number of leases by state; dropped leases are counted by drop reason."""
        self.num_rollouts = 0
        self.num_groups = 0
        self.num_steps = 0
        self.retired_steps = 0
        """Number of retired steps that were not compared, because their batches are not whole."""

    def take(self, group: BundledGroup) -> None:
        place = f"group {group.group_id}"
        if group.group_id != self._last_group:
            self._end_group()
            self.num_groups += 1
            if group.group_id < self._last_group:
                self._wrong(place, "it comes after a group with a higher id")
            if group.step is not None:
                self._batches.setdefault(group.step, _Batch()).groups += 1
        elif group.step != self._last_step:
            self._wrong(place, f"one part of it is in the batch of step {self._last_step}, another of {group.step}")
        self._last_group, self._last_step = group.group_id, group.step
        if group.seed != draw_seed(self._run_seed, group.group_id):
            self._discrepancies.add(
                DiscrepancyKind.RECORD, place, "its seed does not follow from run.seed and the group's id"
            )
        for one in group.rollouts:
            self._take_rollout(group, one)

    def _take_rollout(self, group: BundledGroup, one: BundledRollout) -> None:
        self.num_rollouts += 1
        self._keys.append(one.lease_id * MAX_GROUP_SIZE + one.index if one.lease_id < 2**52 else -1)
        name = one.drop_reason or one.state
        self.states[name] = self.states.get(name, 0) + 1
        fault = _fault(group, one)
        if fault:
            self._wrong(f"rollout {one.rollout_id}", fault)
        if one.place == NO_PLACE or group.step is None:
            return
        self._episodes.setdefault(one.index, []).append((one.turn, one.reward is not None))
        batch = self._batches.setdefault(group.step, _Batch())
        batch.rollouts += 1
        batch.place_sum += one.place
        batch.trained += one.state is ReceiptState.TRAINED
        batch.tokens += one.num_tokens or 0
        if one.reward is not None:
            batch.rewards += 1
            batch.reward_sum += one.reward
        if one.payload is not None:
            oldest = min(span.policy_version for span in one.payload.spans)
            batch.oldest = oldest if batch.oldest is None else min(batch.oldest, oldest)

    def _end_group(self) -> None:
        """Check the episodes of the last group that are in a step's batch: each once, with all turns."""
        episodes, self._episodes = self._episodes, {}
        if not episodes or self._last_step is None:
            return
        place, faults = f"group {self._last_group}", list[str]()
        if sorted(episodes) != list(range(self._group_size)):
            text = f"its batch has the indices {_first(episodes)}, and the group has the indices 0 to"
            faults.append(f"{text} {self._group_size - 1}")
        for index, rollouts in sorted(episodes.items()):
            turns = sorted(turn for turn, _ in rollouts)
            if turns != list(range(len(turns))):
                text = f"of index {index}, the turns {_first(turns)} are in the batch, instead of each turn once"
                faults.append(text)
            elif [turn for turn, has_reward in rollouts if has_reward] != turns[-1:]:
                faults.append(f"index {index} must have a reward after its last turn, and no other reward")
        if self._is_retired(self._last_step):
            batch = self._batches.setdefault(self._last_step, _Batch())
            batch.faults += [(place, text) for text in faults]
        else:
            for text in faults:
                self._wrong(place, text)

    def take_step(self, step: BundledStep) -> None:
        """Compare a step's record with the rollouts of its batch. Retired steps whose batches are not whole are only
        counted: the hub has deleted their rollouts, or was deleting them while it made the bundle."""
        self.num_steps += 1
        batch = self._batches.pop(step.step, _Batch())
        if self._is_retired(step.step) and batch.rollouts < step.num_rollouts:
            self.retired_steps += 1
            self._missing += step.num_rollouts - batch.rollouts
            return
        if not batch.rollouts:
            self._wrong(f"step {step.step}", "the bundle has no rollout of its batch")
            return
        for place, text in batch.faults:
            self._wrong(place, text)
        for what, said, found in (
            ("groups", step.num_groups, batch.groups),
            ("rollouts", step.num_rollouts, batch.rollouts),
            ("tokens", step.num_tokens, batch.tokens),
        ):
            if said != found:
                text = f"it records {said} {what}, its batch has {found}"
                self._wrong(f"step {step.step}", text)
        if batch.place_sum != batch.rollouts * (batch.rollouts - 1) // 2:
            self._discrepancies.add(
                DiscrepancyKind.RECORD, f"step {step.step}", "the places in its batch are not 0, 1, 2, ..."
            )
        mean = batch.reward_sum / batch.rewards if batch.rewards else float("nan")
        if not isclose(mean, step.mean_reward, rel_tol=_CLOSE, abs_tol=_CLOSE):
            text = f"it records the mean reward {step.mean_reward:.9g}, its batch has {mean:.9g}"
            self._wrong(f"step {step.step}", text)
        stale = 0 if batch.oldest is None else step.step - 1 - batch.oldest
        if stale > step.staleness:
            text = f"it records a staleness of at most {step.staleness}, a token of its batch has {stale}"
            self._wrong(f"step {step.step}", text)

    def _wrong(self, place: str, text: str) -> None:
        self._discrepancies.add(DiscrepancyKind.RECORD, place, text)

    def end(self) -> None:
        """Compare the totals of the records with the totals that the hub states."""
        self._end_group()
        keys = np.frombuffer(self._keys, np.int64)
        repeated = len(keys) - len(np.unique(keys))
        if repeated:
            self._wrong("leases", f"{repeated} of {len(keys)} rollouts occur twice")
        if self.num_rollouts != self._run.rollouts:
            text = f"{self.num_rollouts} instead of {self._run.rollouts}"
            self._wrong("rollouts in the bundle", text)
        for step, batch in sorted(self._batches.items()):
            if batch.trained:
                self._wrong(f"step {step}", f"{batch.trained} rollouts are trained on in it, but it has no record")
        retired = self._run.retired.get("rollouts", 0)
        if self._missing > retired:
            self._wrong("retired rollouts", f"{self._missing} are missing in batches, the hub counts {retired}")
        if not retired:
            self._compare_totals()

    def _compare_totals(self) -> None:
        counted = self._run.accounting
        dropped = counted.get("dropped")
        said = {
            ReceiptState.TRAINED.value: counted.get("trained", 0),
            ReceiptState.EVALUATED.value: counted.get("evaluated", 0),
            **(dropped if isinstance(dropped, dict) else {}),
        }
        found = {name: number for name, number in self.states.items() if name not in _IN_FLIGHT}
        for name in sorted({*said, *found}):
            if said.get(name, 0) != found.get(name, 0):
                text = f"the hub counts {said.get(name, 0)}, the bundle has {found.get(name, 0)}"
                self._wrong(f"{name} rollouts", text)

    def _is_retired(self, step: int) -> bool:
        return step <= self._run.retired.get("through_step", 0)


def _first(numbers: Iterable[int]) -> str:
    """Return these numbers in order as text, at most eight of them."""
    ordered = sorted(numbers)
    return f"[{', '.join(map(str, ordered[:8]))}{', ...' if len(ordered) > 8 else ''}]"


def _fault(group: BundledGroup, one: BundledRollout) -> str:
    """Return what is wrong with the record of one lease; "" if nothing is wrong."""
    if not one.num_tokens and one.state not in _WITHOUT_TOKENS:
        return f"it is {one.state}, but records no tokens"
    if one.payload is not None and one.num_tokens != len(one.payload.completion_ids):
        return f"it records {one.num_tokens} tokens and has {len(one.payload.completion_ids)}"
    if (one.drop_reason is not None) != (one.state is ReceiptState.DROPPED):
        return f"it is {one.state}, and its drop reason is {one.drop_reason}"
    if one.state is ReceiptState.TRAINED and (one.place == NO_PLACE or group.step is None):
        return "it is trained on, but in no step's batch"
    if one.place != NO_PLACE and one.state not in _IN_A_BATCH:
        return f"it is in a step's batch, but {one.state}"
    if one.place != NO_PLACE and group.step is not None and one.payload is not None:
        newest = max(span.policy_version for span in one.payload.spans)
        if newest >= group.step:
            return f"version {newest} drew it for step {group.step}, which began with version {group.step - 1}"
    return ""
