"""Every dataset of reasoning-gym by name, with its own scorer.

For each problem, a dataset of size 1 is created with a hashed seed. The reason is that one dataset uses `seed + index`,
so its items for adjacent seeds would overlap.

Completions are untrusted, and some of reasoning-gym's scorers evaluate them as Python. Such scorers get only answers
that are plain data or plain sums. If a dataset's scorer cannot be restricted in this way, the dataset is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from echo_hub.tasks.answers import announced_answer, tagged_answer
from echo_hub.tasks.base import Problem
from echo_shared.errors import ConfigError
from echo_shared.sampling.draws import derive_seed

_SUM: Final = re.compile(r"[\d\s+\-*/().]*")
_CAPITALS: Final = re.compile(r"[A-Z]+")
_PRODUCT: Final = re.compile(r"\s*\d+\s*(×\s*\d+\s*)*")
_PLAIN_DATA: Final = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)


def _is_plain_data(answer: str) -> bool:
    """Return True if Python's `eval` of `answer` can only build lists of constants, or fail.

    Names must consist of capital letters. Otherwise an answer could name the scorer's own variables, which hold the
    right answer.
    """
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        return True
    except (ValueError, MemoryError, RecursionError):
        return False
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return all(isinstance(node, _PLAIN_DATA) for node in nodes) and all(map(_CAPITALS.fullmatch, names))


def _is_plain_sum(answer: str) -> bool:
    """Return True if `answer` contains only numbers, the four operations and brackets. Powers could run forever."""
    return _SUM.fullmatch(answer) is not None and "**" not in answer


def _is_product(answer: str) -> bool:
    return _PRODUCT.fullmatch(answer) is not None


def _is_json_object(answer: str) -> bool:
    try:
        return isinstance(json.loads(answer), dict)
    except (ValueError, RecursionError):
        return False


_GUARDS: Final[Mapping[str, Callable[[str], bool]]] = {
    "binary_matrix": _is_plain_data,
    "n_queens": _is_plain_data,
    "spiral_matrix": _is_plain_data,
    "string_insertion": _is_plain_data,
    "countdown": _is_plain_sum,
    "puzzle24": _is_plain_sum,
    "prime_factorization": _is_product,
    "boxnet": _is_json_object,
}
"""For each dataset whose scorer evaluates the answer as code or fails on unexpected text: the check that an answer must
pass before this scorer sees it. No other scorer of reasoning-gym evaluates any part of an answer."""

_REFUSED: Final[Mapping[str, str]] = {
    "composite": "it is a mixture of other datasets",
    "game_of_life_halting": "its scorer takes any answer but an empty one for yes",
    "intermediate_integration": "its scorer would run completions as code",
    "polynomial_multiplication": "its scorer would run completions as code",
    "simple_integration": "its scorer would run completions as code",
}


class ReasoningGymTask:
    """One dataset of reasoning-gym. A problem's metadata is the dataset's entry."""

    def __init__(self, dataset: str, options: Mapping[str, Any]) -> None:
        self.name = f"reasoning-gym:{dataset}"
        self._dataset = dataset
        self._options = options
        self._scorer = self._build(0)
        self._guard = _GUARDS.get(dataset)

    def sample(self, seed: int) -> Problem:
        entry = self._build(derive_seed(self.name, seed) >> 32)[0]
        return Problem(prompt=entry["question"], metadata=entry)

    def _build(self, seed: int) -> Any:
        """Create the dataset with one item from a 32-bit seed."""
        from reasoning_gym.factory import create_dataset

        return create_dataset(self._dataset, seed=seed, size=1, **self._options)

    def score(self, problem: Problem, completion: str) -> float:
        """Return the dataset's reward for the last `<answer>...</answer>`. Without tags, the whole completion is the
        answer.

        Without tags, an answer announced in words, such as `The answer is 20.`, also counts, but only if it is fully
        right. An answer that is unsafe to evaluate never reaches the dataset's scorer, and gets the reward 0.
        """
        tagged = tagged_answer(completion)
        if tagged is not None:
            return self._reward(problem, tagged)
        reward = self._reward(problem, completion.strip())
        if reward < 1.0:
            reference = str(problem.metadata.get("answer"))
            for answer in announced_answer(completion, reference):
                if self._reward(problem, answer) >= 1.0:
                    return 1.0
        return reward

    def _reward(self, problem: Problem, answer: str) -> float:
        if self._guard is not None and not self._guard(answer):
            return 0.0
        return float(self._scorer.score_answer(answer, dict(problem.metadata)))


def make_reasoning_gym(dataset: str, options: Mapping[str, Any]) -> ReasoningGymTask:
    """Create the task of a dataset. Raises ConfigError for an unknown or refused dataset, and for invalid options."""
    from reasoning_gym.factory import DATASETS

    if dataset in _REFUSED:
        raise ConfigError(
            "This reasoning-gym dataset cannot be a task of its own.",
            got=f"task.name = 'reasoning-gym:{dataset}': {_REFUSED[dataset]}",
            do="Use another dataset.",
        )
    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS.keys() - _REFUSED.keys(), n=5, cutoff=0.5)
        raise ConfigError(
            "There is no such reasoning-gym dataset.",
            got=f"task.name = 'reasoning-gym:{dataset}'",
            do=f"Did you mean {' or '.join(close)}?" if close else "See reasoning-gym's gallery for all names.",
        )
    known = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {"seed", "size"}
    for option in options:
        if option not in known:
            raise ConfigError(
                f"The reasoning-gym dataset {dataset} has no such option.",
                got=f"task.options.{option}",
                do=f"Its options are {', '.join(sorted(known))}.",
            )

    try:
        return ReasoningGymTask(dataset, options)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:  # Raised by the datasets' own checks.
        raise ConfigError(
            f"The options do not fit the reasoning-gym dataset {dataset}.",
            got=f"task.options = {dict(options)}: {error}",
            do="See the dataset's configuration class in reasoning-gym for what fits.",
        ) from error
