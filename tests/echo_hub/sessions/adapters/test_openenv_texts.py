from __future__ import annotations

import tomllib

import pytest

from echo_hub.config.toml_text import as_toml
from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions
from echo_hub.sessions.adapters.openenv_texts import (
    EMPTY,
    ActionTry,
    attempts,
    mistake_text,
    observation_text,
    prompt_text,
    readable,
    tools_of,
)
from echo_hub.sessions.adapters.openenv_wire import ServerError, StrangeAnswerError

JSON = OpenEnvOptions()
TOOLS = OpenEnvOptions(form="tools")


def test_the_answer_becomes_the_value_of_a_field() -> None:
    options = OpenEnvOptions(action="move.cell", constants={"type": "play"})
    assert attempts("I think <answer> 3 </answer>", options) == [
        ActionTry(action={"type": "play", "move": {"cell": "3"}})
    ]
    assert attempts(" hello\n", OpenEnvOptions(action="message")) == [ActionTry(action={"message": "hello"})]


def test_the_answer_is_the_action_in_json() -> None:
    options = OpenEnvOptions(constants={"type": "play"})
    assert attempts('So: <answer>{"column": 3}</answer>', options) == [ActionTry(action={"column": 3, "type": "play"})]


@pytest.mark.parametrize(
    "reply", ["", "three", "[3]", "3", '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 100_000, '{"a": 1} extra']
)
def test_a_reply_without_an_action_is_the_models_mistake(reply: str) -> None:
    (attempt,) = attempts(reply, JSON)
    assert attempt.action is None
    assert attempt.mistake.startswith("Error: ")
    assert len(attempt.mistake) < 200


def test_each_tool_call_is_an_action() -> None:
    reply = 'Hm. <tool_call>{"name": "guess", "arguments": {"n": 3}}</tool_call><tool_call>nonsense</tool_call>'
    first, second = attempts(reply, TOOLS)
    assert first.action == {"type": "call_tool", "tool_name": "guess", "arguments": {"n": 3}}
    assert first.message("lower").fields == {
        "role": "tool",
        "content": "lower",
        "name": "guess",
        "tool_call_id": "call00000",
    }
    assert second.action is None
    assert second.message(second.mistake).role == "tool"


def test_a_reply_without_tool_calls_has_no_action() -> None:
    assert attempts("It is 7.", TOOLS) == []


def test_an_argument_that_json_cannot_hold_is_a_mistake() -> None:
    (attempt,) = attempts('<tool_call>{"name": "guess", "arguments": {"n": 1e999}}</tool_call>', TOOLS)
    assert attempt.action is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", '{"board": [1, 2], "text": {"said": "hi"}}'),
        ("board", "[1, 2]"),
        ("text.said", "hi"),
        ("text", '{"said": "hi"}'),
    ],
)
def test_a_field_of_the_observation_is_the_text(path: str, text: str) -> None:
    observation = {"board": [1, 2], "text": {"said": "hi"}}
    assert observation_text(observation, OpenEnvOptions(observation=path)) == text


def test_a_missing_field_is_told_with_those_there_are() -> None:
    with pytest.raises(StrangeAnswerError, match=r"no field 'texts' .*its fields: board, text\."):
        observation_text({"board": [], "text": ""}, OpenEnvOptions(observation="texts"))


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"result": {"content": [{"type": "text", "text": "a"}, {"text": "b"}]}, "error": None}, "a\nb"),
        ({"result": {"content": [], "data": [1]}, "error": None}, "[1]"),
        ({"result": "plain", "error": None}, "plain"),
        ({"result": None, "error": {"error_type": "invalid_args", "message": "no n"}}, "Error: no n"),
        ({"board": "x"}, '{"board": "x"}'),
    ],
)
def test_a_tools_answer_is_its_text(observation: dict[str, object], text: str) -> None:
    assert observation_text(observation, TOOLS) == text


def test_the_prompt_shows_the_opening_or_hides_it() -> None:
    options = OpenEnvOptions(prompt="Play.\n{observation}", observation="board")
    assert prompt_text({"board": "..."}, options) == "Play.\n..."
    assert prompt_text(None, OpenEnvOptions(prompt="Play.")) == "Play."


def test_a_text_is_never_empty_and_holds_no_half_characters() -> None:
    assert readable("") == EMPTY
    assert readable("a\ud83d") == "a?"


def test_the_model_reads_what_is_wrong_with_its_action() -> None:
    error = ServerError(code="VALIDATION_ERROR", message="Invalid message", problems=("column: not a number",))
    assert mistake_text(error) == "Error: Invalid message; column: not a number"
    assert mistake_text(ServerError(code="NO", message="")) == "Error: NO"


def test_listed_tools_become_definitions_in_toml() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "default": None}}, "required": ["n"]}
    listed = [{"name": "guess", "description": 'Say "n".', "input_schema": schema}, {"no": "name"}, {"name": "look"}]
    found = tools_of({"tools": listed})
    assert [tool["name"] for tool in found] == ["guess", "look"]
    read = tomllib.loads(f"tools = {as_toml(found)}")["tools"]
    assert read[0]["parameters"] == {**schema, "properties": {"n": {"type": "integer"}}}
    assert OpenEnvOptions(form="tools", tools=read).tools == read
    assert tools_of({}) == []
