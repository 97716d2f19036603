from __future__ import annotations

import json
from typing import Any

import pytest

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Message, Observation, ToolTask
from echo_hub.tasks.environments.calculator import calculated, make_calculator
from echo_shared.errors import ConfigError

PROBLEM = Problem(prompt="What is 12 * 34?", metadata={"answer": "408"})


def call(expression: Any, name: str = "calculate") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def test_a_problem_depends_on_its_seed_alone() -> None:
    environment = make_calculator({"digits": 3})
    assert isinstance(environment, ToolTask)
    problems = [environment.sample(seed) for seed in range(100)]
    assert problems == [environment.sample(seed) for seed in range(100)]
    for each in problems:
        left, _, right = each.prompt.removeprefix("What is ").partition("?")[0].split(" ")
        assert len(left) == len(right) == 3 and each.metadata["answer"] == str(int(left) * int(right))


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("408", 1.0), ("It is <answer> 408 </answer>.", 1.0), ("4,08", 1.0), ("407", 0.0), ("", 0.0), ("12 * 34", 0.0)],
)
def test_a_reply_without_a_call_is_the_answer(reply: str, reward: float) -> None:
    assert make_calculator({}).respond(PROBLEM, [reply]) == Ending(reward=reward)


def test_a_call_is_answered_by_the_tool() -> None:
    environment = make_calculator({})
    answer = environment.respond(PROBLEM, [f"Let me see. {call('12 * (30 + 4)')}"])
    assert answer == Observation(text="408", role="tool", name="calculate", tool_call_id="call00000")
    assert environment.respond(PROBLEM, [call("12 * 34"), "<answer>408</answer>"]) == Ending(reward=1.0)


def test_several_calls_are_answered_one_by_one() -> None:
    answer = make_calculator({}).respond(PROBLEM, [call("1") + call("2+") + call("-3")])
    assert isinstance(answer, Observation) and answer.turn_reward == -0.1
    assert [(one.text, one.tool_call_id) for one in (answer, *answer.more)] == [
        ("1", "call00000"),
        ("Error: This is no such expression.", "call00001"),
        ("-3", "call00002"),
    ]
    assert all(type(one) is Message and one.role == "tool" for one in answer.more)


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>",
        call("1", name="open"),
        call(7),
        call("1").replace("expression", "sum"),
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1", "more": 2}}</tool_call>',
    ],
)
def test_a_bad_call_is_answered_as_the_tools_error_and_costs(reply: str) -> None:
    answer = make_calculator({}).respond(PROBLEM, [reply])
    assert isinstance(answer, Observation) and answer.text.startswith("Error: ") and answer.turn_reward == -0.1


def test_an_episode_without_an_answer_is_lost() -> None:
    assert make_calculator({"turns": 2}).respond(PROBLEM, [call("1"), call("408")]) == Ending(reward=0.0)


@pytest.mark.parametrize(
    ("expression", "value"), [("2 + 3*4", 14), (" (2+3) * -4", -20), ("9" * 99 + "*" + "9" * 99, (10**99 - 1) ** 2)]
)
def test_expressions(expression: str, value: int) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 **",
        "9**9**9",
        "1/2",
        "1.5",
        "True",
        "x",
        "f()",
        "'a'*9",
        "[1]",
        "1;2",
        "(" * 150,
        "1*" * 101,
        "\x00",
        "1 if 1 else 2",
        "~1",
    ],
)
def test_other_expressions_have_no_value(expression: str) -> None:
    assert calculated(expression) is None


@pytest.mark.parametrize(("options", "named"), [({"digits": 0}, "digits"), ({"tools": 3}, "tools")])
def test_options_that_do_not_fit_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)environment:calculator.*task\.options\.{named}"):
        make_calculator(options)
