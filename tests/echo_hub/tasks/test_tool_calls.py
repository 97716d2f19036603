from __future__ import annotations

import pytest

from echo_hub.tasks.tool_calls import MOST_CALLS, MOST_CHARACTERS, BadCall, ToolCall, tool_calls


def test_calls_are_read_in_order_between_other_text() -> None:
    text = (
        'First <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>, then '
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "say", "arguments": "{\\"x\\": 1}"}</tool_call>'
    )
    assert tool_calls(text) == [
        ToolCall(name="add", arguments={"a": 1, "b": [2]}),
        ToolCall(name="now", arguments={}),
        ToolCall(name="say", arguments={"x": 1}),
    ]
    assert tool_calls("no call, not even </tool_call>") == []


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("", "not JSON"),
        ("{'name': 'add'}", "not JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a number"),
        ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is not a number"),
        ('{"name": "add", "arguments": "{"}', "not JSON"),
        ("[" * 30_000, "not JSON"),
        ('{"a":' * 10_000, "not JSON"),
        ("9" * 10_000, "not JSON"),
        ('["add"]', 'A call is {"name"'),
        ("7", 'A call is {"name"'),
        ('{"arguments": {}}', 'A call is {"name"'),
        ('{"name": 7, "arguments": {}}', 'A call is {"name"'),
        ('{"name": "add", "arguments": [1]}', 'A call is {"name"'),
        ('{"name": "add", "arguments": null}', 'A call is {"name"'),
        ('{"name": "add", "arguments": "[1]"}', 'A call is {"name"'),
        (" " * (MOST_CHARACTERS + 1), "longer than"),
    ],
)
def test_an_invalid_call_is_reported(inside: str, problem: str) -> None:
    (found,) = tool_calls(f"<tool_call>{inside}</tool_call>")
    assert isinstance(found, BadCall) and problem in found.problem
    assert len(found.problem) < 300


def test_an_unclosed_call_does_not_count() -> None:
    good = '<tool_call>{"name": "now"}</tool_call>'
    assert tool_calls(f'{good} <tool_call>{{"name": "now"}}') == [
        ToolCall(name="now", arguments={}),
        BadCall(problem="The call is not closed by </tool_call>."),
    ]


def test_the_number_of_tool_calls_is_limited() -> None:
    found = tool_calls("<tool_call></tool_call>" * 100_000)
    assert len(found) == MOST_CALLS + 1 and all(isinstance(one, BadCall) for one in found)
    assert len(tool_calls("<tool_call>" * 200_000)) == 1
