from __future__ import annotations

import pytest

from echo_hub.sessions.inside.calls import as_line, failure
from echo_hub.sessions.reading import read_answer
from echo_hub.tasks.environments.base import (
    EnvironmentAway,
    EpisodeRefused,
    Message,
    NoSlot,
    Observation,
    SessionGone,
)
from echo_shared.errors import ConfigError


def test_an_observation_is_read_with_all_its_fields() -> None:
    line = b"""{"observation": {"text": "a", "role": "tool", "name": "sum", "ids": [3, 4],
        "more": [{"text": "b"}], "turn_reward": 1, "reward_if_cut": -0.5}}"""
    assert read_answer(line).observation == Observation(
        text="a", role="tool", name="sum", ids=(3, 4), more=(Message(text="b"),), turn_reward=1.0, reward_if_cut=-0.5
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"observation": {"text": 7}}',
        b'{"observation": {"text": "a", "role": "system"}}',
        b'{"observation": {"text": "a", "ids": ["1"]}}',
        b'{"ending": {"reward": "1"}}',
        b'{"ending": {"reward": NaN}}',
        b'{"ending": {"reward": 1, "components": {"a": "b"}}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_answer_ends_the_session(line: bytes) -> None:
    with pytest.raises(SessionGone, match="no valid answer"):
        read_answer(line)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("environment_away", EnvironmentAway),
        ("no_slot", NoSlot),
        ("episode_refused", EpisodeRefused),
        ("config", ConfigError),
        ("session_gone", SessionGone),
        ("anything", SessionGone),
    ],
)
def test_errors_of_an_adapter_keep_their_kind(code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="what\\?happened"):
        read_answer(f'{{"error": "what\\nhappened", "code": "{code}"}}'.encode())


def test_the_parts_of_an_error_arrive() -> None:
    said = failure(EnvironmentAway("Nobody is there.", got="port 7", do="Start it."))
    with pytest.raises(EnvironmentAway) as caught:
        read_answer(as_line(said))
    assert str(caught.value) == "Nobody is there.\n  got: port 7\n  do:  Start it."


def test_a_full_environment_tells_its_slots() -> None:
    with pytest.raises(NoSlot) as caught:
        read_answer(b'{"error": "full", "code": "no_slot", "most": 3}')
    assert caught.value.most == 3


def test_the_last_line_names_the_cause() -> None:
    with pytest.raises(SessionGone, match="killed"):
        read_answer(b'{"ended": "killed"}')
