"""Arrange a group's rollouts as episodes with turns and their rewards, for the page of one group.

A turn may be leased several times, for example after an expired lease or a failed check. The page shows the rollout
that counts, and lists other rollouts under the same turn. Rollouts that were dropped with a lost session are listed at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from echo_shared.records.rollout import EpisodeLosses, GroupView, RolloutSummary, RolloutView, SessionEvent
from echo_shared.wire.messages import ReceiptState

_LATE: Final = (ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.SCORED, ReceiptState.RECEIVED)
"""States of rollouts that count in their episode, the state that is furthest in its processing first."""
SESSION_LOST: Final = "session_lost"
"""Drop reason of turns whose session was rebuilt and then gave another answer than before: these turns followed the old
answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """One turn of an episode."""

    number: int
    """Number of the turn, from 1."""
    shown: RolloutView
    """The turn's rollout that counts in the episode; if none counts, the newest one."""
    others: tuple[RolloutView, ...]
    """Other rollouts that were leased for this turn, oldest first."""
    earned: float | None
    """Part of the episode's reward that this turn earned; None if it is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One line of the history of an episode's session."""

    at: float | None
    kind: str
    """CSS class of the line."""
    words: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeShown:
    """One episode of a group."""

    index: int
    turns: tuple[EpisodeTurn, ...]
    lost: tuple[RolloutView, ...]
    """Rollouts that were dropped because the session was lost."""
    losses: EpisodeLosses | None
    """The stored losses of the episode's sessions; None if no session was lost."""
    events: tuple[HistoryLine, ...]

    @property
    def end(self) -> RolloutView:
        return self.turns[-1].shown

    @property
    def reward(self) -> float | None:
        return self.end.summary.reward

    @property
    def num_tokens(self) -> int:
        return sum(turn.shown.summary.num_tokens or 0 for turn in self.turns)


def episodes_of(group: GroupView) -> tuple[EpisodeShown, ...]:
    """Return the group's episodes by index; () if the group's task has a single turn."""
    if not group.sessions and not any(_is_part(each.summary) for each in group.rollouts):
        return ()
    of_index: dict[int, list[RolloutView]] = {}
    for each in group.rollouts:
        of_index.setdefault(each.summary.index, []).append(each)
    losses = {each.index: each for each in group.losses}
    return tuple(
        _episode(rollouts, losses.get(index), [event for event in group.sessions if event.index == index])
        for index, rollouts in sorted(of_index.items())
    )


def _is_part(said: RolloutSummary) -> bool:
    """Return True if the rollout belongs to an episode of several turns."""
    return said.turn > 0 or said.turn_reward is not None or said.drop_reason == SESSION_LOST


def _episode(
    rollouts: Sequence[RolloutView], losses: EpisodeLosses | None, events: Sequence[SessionEvent]
) -> EpisodeShown:
    lost = [each for each in rollouts if each.summary.drop_reason == SESSION_LOST]
    of_turn: dict[int, list[RolloutView]] = {}
    for each in rollouts:
        if each.summary.drop_reason != SESSION_LOST or len(lost) == len(rollouts):
            of_turn.setdefault(each.summary.turn, []).append(each)
    chosen = {turn: _chosen(leased) for turn, leased in sorted(of_turn.items())}
    earned = _earned(chosen)
    return EpisodeShown(
        index=rollouts[0].summary.index,
        turns=tuple(
            EpisodeTurn(
                number=turn + 1,
                shown=shown,
                others=tuple(each for each in of_turn[turn] if each is not shown),
                earned=earned[turn],
            )
            for turn, shown in chosen.items()
        ),
        lost=() if len(lost) == len(rollouts) else tuple(lost),
        losses=losses,
        events=tuple(map(_line, events)) or _from_rollouts(lost),
    )


def _line(event: SessionEvent) -> HistoryLine:
    return HistoryLine(at=event.at, kind=event.kind, words=_words(event), detail=event.detail)


def _words(event: SessionEvent) -> str:
    at = "" if event.turn is None else f" at turn {event.turn + 1}"
    match event.kind:
        case "opened":
            return "Session opened" + (f", attempt {event.attempt + 1}" if event.attempt else "")
        case "lost":
            return f"Session lost{at}"
        case "rebuilt":
            return f"Session rebuilt{'' if event.turn is None else f' up to turn {event.turn + 1}'}"
        case "diverged":
            return f"Another answer{at} after the rebuild"
        case "closed":
            return "Session closed"
        case _:
            assert_never(event.kind)


def _from_rollouts(lost: Sequence[RolloutView]) -> tuple[HistoryLine, ...]:
    """Return the events of the session's history that can be read from the database: when turns were dropped because
    their session was lost. After a restart, the hub does not know the other events."""
    of_time: dict[float | None, list[RolloutView]] = {}
    for each in lost:
        of_time.setdefault(each.summary.final_at, []).append(each)
    return tuple(
        HistoryLine(
            at=at,
            kind="lost",
            words=f"Session lost: {'turns' if len(dropped) > 1 else 'turn'} "
            + ", ".join(str(each.summary.turn + 1) for each in dropped)
            + (" were dropped" if len(dropped) > 1 else " was dropped"),
            detail=dropped[0].summary.detail,
        )
        for at, dropped in of_time.items()
    )


def _chosen(leased: Sequence[RolloutView]) -> RolloutView:
    for state in _LATE:
        found = [each for each in leased if each.summary.state == state]
        if found:
            return found[-1]
    return leased[-1]


def _earned(chosen: Mapping[int, RolloutView]) -> dict[int, float | None]:
    """Return what each turn earned. The last turn earned the episode's reward minus the parts that earlier turns
    earned."""
    found = {turn: shown.summary.turn_reward for turn, shown in chosen.items()}
    last = max(chosen)
    reward = chosen[last].summary.reward
    if reward is not None:
        found[last] = reward - sum(value or 0.0 for turn, value in found.items() if turn != last)
    return found
