"""Read rollouts for people: database rows with texts, log-probabilities of the tokens, and advantages.

Texts are decoded on request and never stored. A text search decodes about `TOKENS_READ` tokens for one answer; if more
rollouts are left, the answer says where to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.policy.mixture import Mixture
from echo_hub.learner.credit import EpisodeRewards, turn_advantages
from echo_hub.learner.weighting import overlong_penalty
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.store.browsing import (
    NEWEST,
    BatchReward,
    Key,
    evaluation_text,
    find_rollouts,
    read_batch_rewards,
    read_group,
    read_tokens,
    summaries_of_groups,
)
from echo_hub.store.bulk import key_of
from echo_hub.store.keeping import read_kept_totals
from echo_hub.store.store import Store
from echo_shared.records.rollout import (
    GroupRecord,
    GroupView,
    RolloutFilter,
    RolloutPayload,
    RolloutRow,
    RolloutsPage,
    RolloutSummary,
    RolloutText,
    RolloutView,
    TextPiece,
)
from echo_shared.wire.messages import rollout_id

TOKENS_READ: Final = 400_000
"""Largest number of tokens, approximately, that are decoded for one answer."""
ROW_TOKENS: Final = 20
"""Tokens counted for each rollout in addition to its own, because reading its row takes time too."""
ROWS_READ: Final = 200
"""Number of rollouts read at a time in a search for a text."""


GROUPS_READ: Final = 32
STEPS_REMEMBERED: Final = 8
_PARTS: Final = ("scored", "trained")
"""States of the rollouts that are in a step's batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRollout:
    """One exported rollout with its texts."""

    summary: RolloutSummary
    advantage: float | None
    """Advantage of the rollout's turn, as in `RolloutView`; None for a rollout without advantage."""
    prompt: str
    drawn: RolloutText | None
    """The rollout's texts; None if its tokens are not kept. `pieces` is empty, because its decoding would take most of
    the time.
    """


class _Gains:
    """Advantages of rollouts by step. Each step's batch is computed once."""

    def __init__(self, reader: RolloutReader) -> None:
        self._of_step = lru_cache(STEPS_REMEMBERED)(reader.advantages)

    def of(self, one: RolloutSummary) -> float | None:
        if one.step is None:
            return None
        return self._of_step(one.step).get(one.group_id, {}).get((one.index, one.turn))


class Prompts(Protocol):
    """Supplies the prompts of groups: `echo_hub.scoring.problems.Problems` or `ProblemsOnDemand`."""

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]: ...


class ProblemsOnDemand:
    """The run's problems. They are prepared when the first prompt is requested, because this takes some seconds."""

    def __init__(self, config: HubConfig, codec: PromptCodec) -> None:
        self._config = config
        self._codec = codec

    @cached_property
    def _problems(self) -> Problems:
        return Problems.of_run(self._config, self._codec)

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]:
        """Return the token ids of a group's prompt. Raises the errors of preparing the problems."""
        return self._problems.prompt_ids(group_id)


class RolloutReader:
    """Reads rollouts with texts and advantages. Thread-safe. Every method may raise StorageError, and errors of
    preparing the problems.
    """

    def __init__(self, config: HubConfig, *, store: Store, codec: PromptCodec, problems: Prompts) -> None:
        self._objective = config.objective.resolved()
        self._training = config.training
        self._max_tokens = config.sampling.max_tokens
        self._mixture = Mixture.of(config.run.seed, [task.weight for task in config.task.members.values()])
        self._keys = tuple(config.task.members)
        self._sets = config.evaluation_sets
        self._store = store
        self._codec = codec
        self._problems = problems

    def page(self, wanted: RolloutFilter, *, before: str, limit: int) -> RolloutsPage:
        """Return at most `limit` rollouts that were leased before the rollout with the id `before`, newest lease first.
        "" starts with the newest.
        """
        rows, last = self._matching(wanted, key_of(before) if before else NEWEST, limit)
        totals = self._store.read(read_kept_totals)
        return RolloutsPage(
            rollouts=tuple(rows),
            before="" if last is None else rollout_id(*last),
            kept_rollouts=totals.rollouts,
            kept_bytes=totals.bytes,
            left_out_by_share=totals.rollouts_by_share,
            deleted_by_bytes=totals.rollouts_by_bytes,
            retired_rollouts=totals.rollouts_retired,
            retired_step=totals.retired_step,
        )

    def group(self, group_id: int) -> GroupView | None:
        """Return a group with everything known about it; None if no rollout of the group was ever leased."""
        group = self._store.read(read_group, group_id)
        if group is None:
            return None
        gains = {} if group.step is None else self.advantages(group.step).get(group_id, {})
        tokens = self._store.read(read_tokens, [key_of(each.rollout_id) for each in group.rollouts])
        prompt_ids = self._problems.prompt_ids(group_id)
        return GroupView(
            **{each.name: getattr(group, each.name) for each in fields(GroupRecord)},
            evaluation=evaluation_text(group_id, self._sets),
            task=self._task(group_id),
            prompt=self._codec.text(prompt_ids),
            rollouts=tuple(self._view(self._told(each), tokens, gains) for each in group.rollouts),
        )

    def export(self, wanted: RolloutFilter) -> Iterator[WholeRollout]:
        before: Key | None = NEWEST
        gains = _Gains(self)
        while before is not None:
            rows, before = self._matching(wanted, before, ROWS_READ)
            yield from self._whole([row.summary for row in rows], gains)

    def of_groups(self, group_ids: Sequence[int], keys: Collection[Key]) -> Iterator[WholeRollout]:
        """Yield those rollouts of these groups that are in `keys`, group by group, in the database's order."""
        gains = _Gains(self)
        for start in range(0, len(group_ids), GROUPS_READ):
            found = self._store.read(summaries_of_groups, group_ids[start : start + GROUPS_READ])
            there = [self._told(each) for each in found if key_of(each.rollout_id) in keys]
            yield from self._whole(there, gains)

    def _whole(self, summaries: Sequence[RolloutSummary], gains: _Gains) -> Iterator[WholeRollout]:
        tokens = self._store.read(read_tokens, [key_of(each.rollout_id) for each in summaries])
        prompts: dict[int, str] = {}
        for each in summaries:
            if each.group_id not in prompts:
                prompts[each.group_id] = self._codec.text(self._problems.prompt_ids(each.group_id))
            found = tokens.get(key_of(each.rollout_id))
            yield WholeRollout(
                summary=each,
                advantage=gains.of(each) if each.state in _PARTS else None,
                prompt=prompts[each.group_id],
                drawn=None if found is None else self._drawn(each, found),
            )

    def _matching(self, wanted: RolloutFilter, before: Key, limit: int) -> tuple[list[RolloutRow], Key | None]:
        """Return at most `limit` matching rows, and the key at which the search continues; None if there are
        no more.
        """
        looked_for, rows, read = wanted.text.casefold(), list[RolloutRow](), 0
        last: Key | None = before
        while last is not None:
            found = self._store.read(find_rollouts, wanted, last, ROWS_READ if looked_for else limit)
            keys = [key_of(each.rollout_id) for each in found.rollouts]
            tokens = self._store.read(read_tokens, keys)
            for key, each in zip(keys, found.rollouts, strict=True):
                drawn = tokens.get(key)
                text = None if drawn is None else self._codec.text(drawn.completion_ids)
                read += ROW_TOKENS + (0 if drawn is None else len(drawn.completion_ids))
                if not looked_for or (text is not None and looked_for in text.casefold()):
                    rows.append(RolloutRow(summary=self._told(each), text=text))
                if looked_for and (len(rows) == limit or read >= TOKENS_READ):
                    is_end = found.before is None and key == keys[-1]
                    return rows, None if is_end else key
            last = found.before
            if not looked_for or not keys:
                break
        return rows, last

    def _told(self, summary: RolloutSummary) -> RolloutSummary:
        """Return the summary with its task and evaluation set. These are not stored, but follow from the group's id."""
        if len(self._keys) == len(self._sets) == 1:
            return summary
        evaluation = evaluation_text(summary.group_id, self._sets)
        return replace(summary, task=self._task(summary.group_id), evaluation=evaluation)

    def _task(self, group_id: int) -> str:
        about = EvaluationGroup.of(group_id)
        if about is None:
            return self._keys[self._mixture.place(group_id).task]
        return next((one.task for one in self._sets if about.number in one.numbers), "")

    def _view(
        self, summary: RolloutSummary, tokens: Mapping[Key, RolloutPayload], gains: Mapping[tuple[int, int], float]
    ) -> RolloutView:
        found = tokens.get(key_of(summary.rollout_id))
        drawn = None if found is None else self._drawn(summary, found)
        is_part = summary.state in _PARTS
        return RolloutView(
            summary=summary,
            advantage=gains.get((summary.index, summary.turn)) if is_part else None,
            drawn=None if drawn is None else replace(drawn, pieces=self._pieces(drawn.payload)),
        )

    def _drawn(self, summary: RolloutSummary, stored: RolloutPayload) -> RolloutText:
        return RolloutText(
            text=self._codec.text(stored.completion_ids),
            pieces=(),
            payload=stored.attributed(summary.node_id, summary.policy_version),
            observation=self._codec.text(stored.observation_ids),
        )

    def _pieces(self, payload: RolloutPayload) -> tuple[TextPiece, ...]:
        spans = payload.spans
        versions = np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans])
        pieces, end = [], 0
        for text, count in self._codec.pieces(payload.completion_ids):
            logprob = float(payload.behavior_logprobs[end : end + count].sum(dtype=np.float64))
            end += count
            pieces.append(TextPiece(text=text, num_tokens=count, logprob=logprob, version=int(versions[end - 1])))
        return tuple(pieces)

    def advantages(self, step: int) -> dict[int, dict[tuple[int, int], float]]:
        """Return the advantages of a step's batch, by group, then by (index, turn)."""
        ends: dict[int, list[BatchReward]] = {}
        for end in self._store.read(read_batch_rewards, step):
            ends.setdefault(end.group_id, []).append(end)
        rewards = [[self._rewards(end) for end in group] for group in ends.values()]
        kind = self._objective.chosen_advantage
        gains = turn_advantages(rewards, self._training, kind)
        return {
            group_id: {
                (end.index, turn): float(gain)
                for end, of_turns in zip(of_group, of_episodes, strict=True)
                for turn, gain in enumerate(of_turns)
            }
            for (group_id, of_group), of_episodes in zip(ends.items(), gains, strict=True)
        }

    def _rewards(self, end: BatchReward) -> EpisodeRewards:
        penalty = overlong_penalty(end.num_tokens, self._objective, max_tokens=self._max_tokens)
        return EpisodeRewards(reward=end.reward + penalty, turn_rewards=end.turn_rewards)


class HubRollouts:
    """The hub's `RolloutsSource`. It answers one request at a time, on a thread."""

    def __init__(self, reader: RolloutReader) -> None:
        self._reader = reader
        self._lock = asyncio.Lock()

    async def page(self, wanted: RolloutFilter, *, before: str, limit: int) -> RolloutsPage:
        async with self._lock:
            return await asyncio.to_thread(self._reader.page, wanted, before=before, limit=limit)

    async def group(self, group_id: int) -> GroupView | None:
        async with self._lock:
            return await asyncio.to_thread(self._reader.group, group_id)
