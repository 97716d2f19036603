from __future__ import annotations

import json

import pytest

from echo_hub.sessions.adapters.openenv_wire import (
    ServerError,
    ServerState,
    Stepped,
    StrangeAnswerError,
    read_answer,
    read_stepped,
    reset_message,
    shortened,
    step_message,
)


def observed(**data: object) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "hi"}, **data}})


def test_a_step_is_read() -> None:
    assert read_answer(observed(reward=0.5, done=True)) == Stepped(observation={"text": "hi"}, reward=0.5, done=True)


@pytest.mark.parametrize(("given", "reward"), [(None, 0.0), (True, 1.0), (3, 3.0), (-2.5, -2.5)])
def test_a_reward_is_a_number_or_nothing(given: object, reward: float) -> None:
    answer = read_answer(observed(reward=given))
    assert isinstance(answer, Stepped)
    assert answer.reward == reward


def test_a_step_without_reward_and_done_goes_on() -> None:
    assert read_answer(observed()) == Stepped(observation={"text": "hi"}, reward=0.0, done=False)


def test_a_state_tells_the_number_of_steps() -> None:
    text = json.dumps({"type": "state", "data": {"step_count": 3, "episode_id": "a", "more": 1}})
    assert read_answer(text) == ServerState(step_count=3, episode_id="a")


@pytest.mark.parametrize("steps", [None, "3", True, -1])
def test_a_state_without_a_count_does_not_tell_it(steps: object) -> None:
    assert read_answer(json.dumps({"type": "state", "data": {"step_count": steps}})) == ServerState(step_count=None)


def test_an_error_tells_what_is_wrong_with_an_action() -> None:
    errors = [{"loc": ["message"], "msg": "Field required", "type": "missing", "input": {}}]
    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
    answer = read_answer(json.dumps({"type": "error", "data": data}))
    assert answer == ServerError(
        code="VALIDATION_ERROR", message="Invalid message", problems=("message: Field required",)
    )
    assert answer.text == "VALIDATION_ERROR: Invalid message; message: Field required"


def test_a_full_server_tells_its_number_of_sessions() -> None:
    data = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 4, "max_sessions": 4}
    answer = read_answer(json.dumps({"type": "error", "data": data}))
    assert isinstance(answer, ServerError)
    assert answer.most_sessions == 4


@pytest.mark.parametrize("data", [{}, {"code": 7, "message": 8, "errors": 9, "max_sessions": 0}])
def test_an_error_of_a_strange_form_is_still_an_error(data: dict[str, object]) -> None:
    answer = read_answer(json.dumps({"type": "error", "data": data}))
    assert isinstance(answer, ServerError)
    assert answer.text == "an error without a code: no message"
    assert answer.most_sessions is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("<html>", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "not an observation, state or error"),
        ('{"type": "observation"}', "not an observation, state or error"),
        ('{"type": "mcp", "data": {}}', "not an observation, state or error"),
        ('{"type": "observation", "data": {}}', "The observation is not a JSON object: None"),
        ('{"type": "observation", "data": {"observation": "hi"}}', "The observation is not a JSON object: 'hi'"),
        (observed(reward="1"), "The reward is not a number: '1'"),
        (observed(reward=float("nan")), "The reward is not a finite number: nan"),
        (observed(reward=float("-inf")), "The reward is not a finite number: -inf"),
        (observed(reward=10**400), "The reward is not a finite number: 1000"),
        (observed(done="no"), "`done` is not true or false: 'no'"),
    ],
)
def test_a_strange_answer_is_told_in_a_short_sentence(text: str | bytes, said: str) -> None:
    with pytest.raises(StrangeAnswerError) as raised:
        read_answer(text)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 600


def test_the_body_of_a_reset_is_read_like_an_observation() -> None:
    assert read_stepped({"observation": {"a": 1}, "reward": None, "done": False}).observation == {"a": 1}
    with pytest.raises(StrangeAnswerError, match="not an observation"):
        read_stepped([1])


def test_messages_are_those_of_the_protocol() -> None:
    assert json.loads(reset_message({"seed": 7})) == {"type": "reset", "data": {"seed": 7}}
    assert json.loads(step_message({"message": "ä\ud83d"})) == {"type": "step", "data": {"message": "ä\ud83d"}}


def test_a_long_text_loses_its_middle() -> None:
    assert shortened("a\n b") == "a b"
    assert len(shortened("x" * 10_000)) < 320
