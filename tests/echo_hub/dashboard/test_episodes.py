from __future__ import annotations

from typing import Any

from echo_hub.dashboard.episodes import episodes_of
from echo_shared.records.rollout import EpisodeLosses, GroupView, RolloutSummary, RolloutView, SessionEvent


def rollout(lease: int, turn: int, state: str = "trained", *, index: int = 0, **fields: Any) -> RolloutView:
    summary = {
        "rollout_id": f"{lease}-{index}",
        "group_id": 0,
        "index": index,
        "turn": turn,
        "step": 1,
        "evaluation": "",
        "node_id": "ada",
        "node_name": "ada",
        "policy_version": 3,
        "state": state,
        "drop_reason": None,
        "detail": "",
        "checked": "no",
        "reward": None,
        "components": None,
        "num_tokens": 5,
        "leased_at": float(lease),
        "received_at": None,
        "scored_at": None,
        "final_at": 100.0 + lease,
        "not_kept": "",
    }
    return RolloutView(summary=RolloutSummary(**{**summary, **fields}), advantage=None, drawn=None)


def group(*rollouts: RolloutView, **fields: Any) -> GroupView:
    whole = {
        "group_id": 0,
        "step": 1,
        "opened_at": 1.0,
        "drop_reason": None,
        "staleness": 0,
        "planned_at": 2.0,
        "trained_at": 3.0,
        "published_at": 4.0,
        "evaluation": "",
        "prompt": "?",
        "rollouts": rollouts,
    }
    return GroupView(**{**whole, **fields})


def test_single_turns_are_no_episodes() -> None:
    assert episodes_of(group(rollout(1, 0, reward=1.0), rollout(1, 0, index=1, reward=0.0))) == ()


def test_turns_stand_in_order_and_the_last_one_earned_the_rest() -> None:
    turns = [rollout(1, 0, turn_reward=0.25), rollout(4, 1, turn_reward=-0.5), rollout(9, 2, reward=1.0)]
    other = [rollout(1, 0, index=1, reward=0.0)]
    first, second = episodes_of(group(*turns, *other))
    assert [turn.number for turn in first.turns] == [1, 2, 3]
    assert [turn.earned for turn in first.turns] == [0.25, -0.5, 1.25] and first.reward == 1.0
    assert first.num_tokens == 15 and first.losses is None and first.events == ()
    assert second.index == 1 and [turn.earned for turn in second.turns] == [0.0]


def test_an_episode_under_way_has_no_reward_for_its_last_turn() -> None:
    (episode,) = episodes_of(group(rollout(1, 0, "scored", turn_reward=0.5), rollout(2, 1, "leased", num_tokens=None)))
    assert [turn.earned for turn in episode.turns] == [0.5, None] and episode.reward is None


def test_a_turn_that_was_leased_again_shows_the_rollout_that_counts() -> None:
    expired = rollout(2, 1, "dropped", drop_reason="expired")
    late = rollout(4, 1, "dropped", drop_reason="duplicate")
    (episode,) = episodes_of(group(rollout(1, 0, turn_reward=0.0), expired, rollout(3, 1, reward=1.0), late))
    assert episode.turns[1].shown.summary.rollout_id == "3-0"
    assert [each.summary.rollout_id for each in episode.turns[1].others] == ["2-0", "4-0"]


def test_turns_of_a_lost_session_are_no_turns_of_the_episode() -> None:
    lost = [
        rollout(lease, lease - 1, "dropped", drop_reason="session_lost", detail="killed", final_at=50.0)
        for lease in (2, 3)
    ]
    again = [rollout(1, 0, turn_reward=0.0), rollout(4, 1, reward=0.5)]
    losses = EpisodeLosses(index=0, attempt=0, losses=1, replaced=1)
    (episode,) = episodes_of(group(*again, *lost, losses=(losses,)))
    assert [turn.shown.summary.rollout_id for turn in episode.turns] == ["1-0", "4-0"]
    assert [each.summary.rollout_id for each in episode.lost] == ["2-0", "3-0"] and episode.losses == losses
    (line,) = episode.events
    assert (line.at, line.words, line.detail) == (50.0, "Session lost: turns 2, 3 were dropped", "killed")


def test_an_episode_whose_turns_are_all_lost_still_shows_them() -> None:
    (episode,) = episodes_of(group(rollout(1, 0, "dropped", drop_reason="session_lost")))
    assert [turn.number for turn in episode.turns] == [1] and episode.lost == ()


def test_the_history_is_told_in_words() -> None:
    events = (
        SessionEvent(at=1.0, index=0, attempt=0, kind="opened"),
        SessionEvent(at=2.0, index=0, attempt=0, kind="lost", turn=3, detail="out of memory"),
        SessionEvent(at=3.0, index=0, attempt=0, kind="rebuilt", turn=2),
        SessionEvent(at=4.0, index=0, attempt=0, kind="diverged", turn=1),
        SessionEvent(at=5.0, index=0, attempt=1, kind="opened"),
        SessionEvent(at=6.0, index=0, attempt=1, kind="closed"),
        SessionEvent(at=7.0, index=1, attempt=0, kind="opened"),
    )
    episode, _ = episodes_of(group(rollout(1, 0, reward=1.0), rollout(1, 0, index=1), sessions=events))
    assert [line.words for line in episode.events] == [
        "Session opened",
        "Session lost at turn 4",
        "Session rebuilt up to turn 3",
        "Another answer at turn 2 after the rebuild",
        "Session opened, attempt 2",
        "Session closed",
    ]
    assert episode.events[1].detail == "out of memory"
