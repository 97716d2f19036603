"""Convert the episodes of a bundle's groups to the inputs of the verifier, the scorer and the learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.bundles.blocks import NO_PLACE, BundledGroup, BundledRollout
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.intake.episodes import conversation, training_rollout
from echo_hub.learner.settings import TrainingGroup
from echo_hub.store.reading import AnsweredTurn, BatchEpisode, BatchTurn
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason, ReceiptState

_ANSWERED: Final = frozenset({ReceiptState.SCORED, ReceiptState.TRAINED, ReceiptState.EVALUATED})


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledTurn:
    """A bundled rollout that has tokens, with the earlier turns and the seed that the verifier and the scorer need."""

    group: BundledGroup
    rollout: BundledRollout
    payload: RolloutPayload
    earlier: tuple[AnsweredTurn, ...]
    """Earlier turns of the same episode, with the environment's answers."""
    seed: int

    @property
    def drawn(self) -> DrawnRollout:
        about = EvaluationGroup.of(self.group.group_id)
        return DrawnRollout(
            rollout_id=self.rollout.rollout_id,
            prompt_ids=conversation(self.group.prompt_ids, self.earlier),
            **self.payload.content(),
            spans=self.payload.spans,
            seed=self.seed,
            index=self.rollout.index,
            is_greedy=about is not None and about.greedy,
        )

    @property
    def scoring(self) -> tuple[int, list[NDArray[np.int32]], int]:
        """Return the arguments for `echo_hub.scoring.problems.Problems.training_respond`."""
        completions = [turn.completion_ids for turn in self.earlier]
        observed = sum(len(turn.observation_ids) for turn in self.earlier)
        return self.group.group_id, [*completions, self.payload.completion_ids], observed


def turns_of(group: BundledGroup) -> Iterator[BundledTurn]:
    """Yield the rollouts of a group that have tokens. Turns after a turn without tokens are left out."""
    for episode in group.episodes():
        answered: dict[int, AnsweredTurn] = {}
        for one in episode:
            if one.payload is not None and one.state in _ANSWERED and len(one.payload.observation_ids):
                answered[one.turn] = AnsweredTurn(
                    completion_ids=one.payload.completion_ids, observation_ids=one.payload.observation_ids
                )
        for one in episode:
            # The number of a turn is the bundle's claim, and may be huge.
            earlier = [answered[turn] for turn in sorted(answered) if turn < one.turn]
            if one.payload is None or len(earlier) < one.turn:
                continue
            yield BundledTurn(
                group=group,
                rollout=one,
                payload=one.payload,
                earlier=tuple(earlier),
                seed=turn_seed(group.seed, one.turn, _failures(episode, one)),
            )


def _failures(episode: Sequence[BundledRollout], one: BundledRollout) -> int:
    """Return how often scoring had failed on this turn before the rollout was leased: each failure changes the seed."""
    return sum(
        other.turn == one.turn and other.lease_id < one.lease_id and other.drop_reason is DropReason.SCORER_FAILED
        for other in episode
    )


class BatchOfStep:
    """Collects the batch of one step from a bundle's groups."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._turns: dict[int, BundledTurn] = {}
        self._missing = 0

    def take(self, group: BundledGroup) -> None:
        if group.step != self._step:
            return
        there = {turn.rollout.rollout_id: turn for turn in turns_of(group)}
        for one in group.rollouts:
            if one.place == NO_PLACE:
                continue
            turn = there.get(one.rollout_id)
            if turn is None:
                self._missing += 1
            else:
                self._turns[one.place] = turn

    def groups(self) -> list[TrainingGroup] | str:
        """Return the batch in training order. If rollouts are missing, return the reason as text."""
        places = sorted(self._turns)
        if self._missing or places != list(range(len(places))) or not places:
            return f"{self._missing} of its rollouts have no tokens in the bundle, {len(places)} have"
        found = []
        for prompt_ids, turns in _by_group(self._turns[place] for place in places):
            episodes = _by_index(turns)
            rollouts = tuple(training_rollout(_episode(of_index)) for of_index in episodes)
            found.append(TrainingGroup(prompt_ids=prompt_ids, rollouts=rollouts))
        return found


def _by_group(turns: Iterable[BundledTurn]) -> Iterator[tuple[NDArray[np.int32], list[BundledTurn]]]:
    held: list[BundledTurn] = []
    for turn in turns:
        if held and held[-1].group.group_id != turn.group.group_id:
            yield held[0].group.prompt_ids, held
            held = []
        held.append(turn)
    if held:
        yield held[0].group.prompt_ids, held


def _by_index(turns: Sequence[BundledTurn]) -> list[list[BundledTurn]]:
    episodes: list[list[BundledTurn]] = []
    for turn in turns:
        if not episodes or episodes[-1][-1].rollout.index != turn.rollout.index:
            episodes.append([])
        episodes[-1].append(turn)
    return episodes


def _episode(turns: Sequence[BundledTurn]) -> BatchEpisode:
    batch = tuple(
        BatchTurn(
            rollout_id=turn.rollout.rollout_id,
            seed=turn.seed,
            index=turn.rollout.index,
            payload=turn.payload,
            turn_reward=turn.rollout.turn_reward or 0.0,
        )
        for turn in turns
    )
    return BatchEpisode(turns=batch, reward=turns[-1].rollout.reward)
