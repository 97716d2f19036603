"""Products of long numbers, with a calculator as a tool. The environment answers each call with the tool's message.

If a reply contains no tool call, it is the answer. Needs a base model whose chat template supports tools.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from echo_hub.tasks.answers import extract_answer
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Message, Observation, Response
from echo_hub.tasks.options import TaskOptions
from echo_hub.tasks.tool_calls import BadCall, ToolCall, tool_calls

TOOL: Final = "calculate"
MOST_CHARACTERS: Final = 200
"""Largest length of an expression, in characters."""
BAD_CALL: Final = -0.1
"""Reward of a turn with an invalid call."""
_DEFINITION: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "The exact value of an expression of whole numbers with +, -, * and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 12 * (3 + 4)."}},
            "required": ["expression"],
        },
    },
}


class CalculatorOptions(TaskOptions):
    """Options that set the difficulty."""

    digits: Annotated[int, Field(ge=1, le=18)] = 5
    """Number of digits of each of the two factors."""
    turns: Annotated[int, Field(ge=1, le=16)] = 4
    """Largest number of the model's turns. If none of them is an answer, the reward is 0."""


class CalculatorEnvironment:
    """Multiplication with a calculator. The reward is 1 for the product, as a bare number or in `<answer>` tags. A tool
    call is not required."""

    name = "environment:calculator"

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (_DEFINITION,)

    def sample(self, seed: int) -> Problem:
        """Return the multiplication that `seed` selects. Its metadata holds the `answer`."""
        rng = random.Random(seed)
        low, high = 10 ** (self._options.digits - 1), 10**self._options.digits - 1
        left, right = rng.randint(low, high), rng.randint(low, high)
        prompt = f"What is {left} * {right}? Give the number alone as <answer>...</answer>."
        return Problem(prompt=prompt, metadata={"answer": str(left * right)})

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """Return the tool's answers to the last reply's calls, or the episode's ending."""
        calls = tool_calls(replies[-1])
        if not calls:
            right = extract_answer(replies[-1]).replace(",", "") == problem.metadata["answer"]
            return Ending(reward=float(right))
        if len(replies) == self._options.turns:
            return Ending(reward=0.0)
        values = [_value(call) for call in calls]
        first, *more = [
            Message(text=text, role="tool", name=TOOL, tool_call_id=f"call{n:05}") for n, (text, _) in enumerate(values)
        ]
        earned = 0.0 if all(fits for _, fits in values) else BAD_CALL
        return Observation(
            text=first.text,
            role="tool",
            name=TOOL,
            tool_call_id=first.tool_call_id,
            more=tuple(more),
            turn_reward=earned,
        )


def _value(call: ToolCall | BadCall) -> tuple[str, bool]:
    """Return the tool's answer to a call, and True if the call was valid."""
    if isinstance(call, BadCall):
        return f"Error: {call.problem}", False
    expression = call.arguments.get("expression")
    if call.name != TOOL or not isinstance(expression, str) or set(call.arguments) != {"expression"}:
        return f"Error: The only tool is {TOOL}(expression), with text.", False
    value = calculated(expression)
    return ("Error: This is no such expression.", False) if value is None else (str(value), True)


def calculated(expression: str) -> int | None:
    """Evaluate an expression of whole numbers with +, - and *. Return None for other expressions and for long ones."""
    if len(expression) > MOST_CHARACTERS:
        return None
    try:
        return _evaluated(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left) + _evaluated(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _evaluated(left) - _evaluated(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluated(left) * _evaluated(right)
    raise ValueError("Only whole numbers with +, - and * are evaluated.")


def make_calculator(options: Mapping[str, Any]) -> CalculatorEnvironment:
    """Create the environment. Raises ConfigError for an unknown or invalid option."""
    return CalculatorEnvironment(CalculatorOptions.read("environment:calculator", options))
