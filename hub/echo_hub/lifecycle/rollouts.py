"""Read rollouts for display and export: database rows with texts, log-probabilities of the tokens, and advantages.

Texts are decoded on request and never stored. A text search decodes about `TOKENS_READ` tokens for one answer. If more
rollouts are left, the answer says where to continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.policy.mixture import Mixture
from echo_hub.learner.credit import EpisodeRewards, turn_advantages
from echo_hub.learner.weighting import overlong_penalty
from echo_hub.run.answer_frames import AnswerFrames
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
from echo_hub.store.sessions import read_session_losses
from echo_hub.store.store import Store
from echo_hub.tasks.tool_calls import calls_made
from echo_shared.records.rollout import (
    EpisodeLosses,
    GroupRecord,
    GroupView,
    RolloutFilter,
    RolloutPayload,
    RolloutRow,
    RolloutsPage,
    RolloutSummary,
    RolloutText,
    RolloutView,
    SessionEvent,
    TextPiece,
)
from echo_shared.wire.messages import rollout_id

TOKENS_READ: Final = 400_000
"""About the largest number of tokens that are decoded for one answer."""
ROW_TOKENS: Final = 20
"""Each rollout counts as this number of tokens more than it has, because reading its row takes time too."""
ROWS_READ: Final = 200
"""Number of rollouts that a text search reads at a time."""


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
    """The rollout's texts; None if its tokens are not kept. `pieces` is empty, because decoding all pieces would
    dominate the export's time.
    """


class _Gains:
    """Advantages of rollouts, by step. They are computed once for each step's batch."""

    def __init__(self, reader: RolloutReader) -> None:
        self._of_step = lru_cache(STEPS_REMEMBERED)(reader.advantages)

    def of(self, one: RolloutSummary) -> float | None:
        if one.step is None:
            return None
        return self._of_step(one.step).get(one.group_id, {}).get((one.index, one.turn))


class Prompts(Protocol):
    """Supplies the prompts of groups. Implemented by `echo_hub.scoring.problems.Problems` and by `ProblemsOnDemand`."""

    def prompt_ids(self, group_id: int) -> NDArray[np.int32]: ...


class ProblemsOnDemand:
    """The run's problems. They are prepared only when the first prompt is requested, because the preparation takes some
    seconds."""

    def __init__(self, config: HubConfig, codec: PromptCodec, *, run_dir: Path) -> None:
        self._config = config
        self._codec = codec
        self._run_dir = run_dir

    @cached_property
    def _problems(self) -> Problems:
        return Problems.of_run(self._config, self._codec, run_dir=self._run_dir)

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
        self._frames = AnswerFrames(codec)
        self._problems = problems

    def page(self, wanted: RolloutFilter, *, before: str, limit: int) -> RolloutsPage:
        """Return at most `limit` rollouts that were leased before the rollout with the id `before`, newest lease first.
        `before` "" starts with the newest.
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

    def group(self, group_id: int, *, episode: int | None = None, most: int | None = None) -> GroupView | None:
        """Return a group with everything known about it; None if no rollout of the group was ever leased.

        If a multi-turn group has more than `most` rollouts, only one episode gets texts: the one with index `episode`,
        by default the first. Reading 512 turns would take seconds.
        """
        group = self._store.read(read_group, group_id)
        if group is None:
            return None
        gains = {} if group.step is None else self.advantages(group.step).get(group_id, {})
        is_long = most is not None and len(group.rollouts) > most and any(each.turn for each in group.rollouts)
        indices = sorted({each.index for each in group.rollouts})
        shown = None if not is_long else episode if episode in indices else indices[0]
        tokens = self._tokens([each for each in group.rollouts if shown is None or each.index == shown])
        return GroupView(
            **{each.name: getattr(group, each.name) for each in fields(GroupRecord)},
            evaluation=evaluation_text(group_id, self._sets),
            task=self._task(group_id),
            prompt=self._prompt(group_id),
            rollouts=tuple(self._view(self._told(each), tokens, gains) for each in group.rollouts),
            episode=shown,
            losses=self._losses(group_id),
        )

    def _losses(self, group_id: int) -> tuple[EpisodeLosses, ...]:
        return tuple(
            EpisodeLosses(index=row.index, attempt=row.attempt, losses=row.losses, replaced=row.replaced)
            for row in self._store.read(read_session_losses, [group_id])
        )

    def export(self, wanted: RolloutFilter) -> Iterator[WholeRollout]:
        before: Key | None = NEWEST
        gains = _Gains(self)
        while before is not None:
            rows, before = self._matching(wanted, before, ROWS_READ)
            yield from self._whole([row.summary for row in rows], gains)

    def of_groups(self, group_ids: Sequence[int], keys: Collection[Key]) -> Iterator[WholeRollout]:
        """Yield the rollouts of these groups whose keys are in `keys`, group by group, in the database's order."""
        gains = _Gains(self)
        for start in range(0, len(group_ids), GROUPS_READ):
            found = self._store.read(summaries_of_groups, group_ids[start : start + GROUPS_READ])
            there = [self._told(each) for each in found if key_of(each.rollout_id) in keys]
            yield from self._whole(there, gains)

    def _whole(self, summaries: Sequence[RolloutSummary], gains: _Gains) -> Iterator[WholeRollout]:
        tokens = self._tokens(summaries)
        prompts: dict[int, str] = {}
        for each in summaries:
            if each.group_id not in prompts:
                prompts[each.group_id] = self._prompt(each.group_id)
            found = tokens.get(key_of(each.rollout_id))
            yield WholeRollout(
                summary=each,
                advantage=gains.of(each) if each.state in _PARTS else None,
                prompt=prompts[each.group_id],
                drawn=None if found is None else self._drawn(each, found),
            )

    def _matching(self, wanted: RolloutFilter, before: Key, limit: int) -> tuple[list[RolloutRow], Key | None]:
        """Return at most `limit` matching rows, and the key at which the search continues (None if there are no more
        rows)."""
        looked_for, rows, read = wanted.text.casefold(), list[RolloutRow](), 0
        last: Key | None = before
        while last is not None:
            found = self._store.read(find_rollouts, wanted, last, ROWS_READ if looked_for else limit)
            keys = [key_of(each.rollout_id) for each in found.rollouts]
            tokens = self._tokens(found.rollouts)
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

    def _tokens(self, summaries: Sequence[RolloutSummary]) -> dict[Key, RolloutPayload]:
        """Return the stored tokens of rollouts. Tenants' samples are left out, because the operator must not
        read them."""
        keys = [key_of(each.rollout_id) for each in summaries if not is_answer(each.group_id)]
        return dict(self._store.read(read_tokens, keys)) if keys else {}

    def _prompt(self, group_id: int) -> str:
        """Return a group's prompt; "" for a tenant's request."""
        return "" if is_answer(group_id) else self._codec.text(self._problems.prompt_ids(group_id))

    def _told(self, summary: RolloutSummary) -> RolloutSummary:
        """Return the summary with its task and evaluation set. These are not stored, but follow from the group's id."""
        if len(self._keys) == len(self._sets) == 1:
            return summary
        evaluation = evaluation_text(summary.group_id, self._sets)
        return replace(summary, task=self._task(summary.group_id), evaluation=evaluation)

    def _task(self, group_id: int) -> str:
        about = EvaluationGroup.of(group_id)
        if is_answer(group_id):
            return ""
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
            drawn=None if drawn is None else self._in_full(drawn),
        )

    def _in_full(self, drawn: RolloutText) -> RolloutText:
        payload = drawn.payload
        calls = calls_made(self._codec.reply(payload.completion_ids))
        messages = self._frames.messages(payload.observation_ids)
        return replace(drawn, pieces=self._pieces(payload), calls=calls, messages=messages)

    def _drawn(self, summary: RolloutSummary, stored: RolloutPayload) -> RolloutText:
        return RolloutText(
            text=self._codec.text(stored.completion_ids),
            pieces=(),
            payload=replace(stored.attributed(summary.node_id, summary.policy_version), routes=b""),
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


class SessionHistory(Protocol):
    """Knows the history of sessions. Implemented by `echo_hub.sessions.host.SessionHost`."""

    def history(self, group_id: int) -> Sequence[SessionEvent]:
        """Return the events of the sessions of a group's episodes, oldest first. Call it on the event loop."""


class HubRollouts:
    """The hub's `RolloutsSource`. It answers one request at a time, on a thread."""

    def __init__(self, reader: RolloutReader, sessions: SessionHistory | None = None) -> None:
        """`sessions` is the run's session host, if it has one."""
        self._reader = reader
        self._sessions = sessions
        self._lock = asyncio.Lock()

    async def page(self, wanted: RolloutFilter, *, before: str, limit: int) -> RolloutsPage:
        async with self._lock:
            return await asyncio.to_thread(self._reader.page, wanted, before=before, limit=limit)

    async def group(self, group_id: int, *, episode: int | None = None, most: int | None = None) -> GroupView | None:
        async with self._lock:
            found = await asyncio.to_thread(self._reader.group, group_id, episode=episode, most=most)
        if found is None or self._sessions is None:
            return found
        return replace(found, sessions=tuple(self._sessions.history(group_id)))
