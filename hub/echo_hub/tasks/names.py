"""Valid values of `task.name`. This module imports no task, so that settings can be checked without the tasks."""

from __future__ import annotations

import difflib
import re
from typing import Final

FORMS: Final = {
    "arithmetic": r"arithmetic",
    "jsonl": r"jsonl",
    "worked": r"worked",
    "sums": r"sums",
    "environment:guess": r"environment:guess",
    "environment:sokoban": r"environment:sokoban",
    "environment:calculator": r"environment:calculator",
    "reasoning-gym:DATASET": r"reasoning-gym:[a-z0-9_]+",
    "textarena:GAME": r"textarena:[A-Za-z0-9][A-Za-z0-9_.-]*",
    "openenv:ws://HOST:PORT/ws": r"openenv:wss?://\S+",
    "openenv:MODULE:APP": r"openenv:[A-Za-z_][\w.]*:[A-Za-z_]\w*",
    "verifiers:TASKSET": r"verifiers:[A-Za-z0-9][A-Za-z0-9_./@+-]*",
    "python:MODULE:FUNCTION": r"python:[\w.]+:\w+",
}
"""Maps each form of a task name, as people see it, to the regular expression of such names."""

NO_TASK: Final = "none"
"""Value of `task.name` for a hub without training: its nodes work only for tenants."""

_FIXED: Final = tuple(form for form, pattern in FORMS.items() if form == pattern)
_KINDS: Final = tuple(form.partition(":")[0] for form in FORMS if form not in _FIXED)
_LONGEST_GUESSED: Final = 200


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError for an unknown form. The error text lists all forms and the nearest name."""
    if name == NO_TASK or _is_name(name):
        return name
    nearest = nearest_name(name)
    hint = f"; did you mean {nearest}?" if nearest else "."
    raise ValueError(f"there is no such task{hint} Tasks are {', '.join(FORMS)}, {NO_TASK}")


def nearest_name(name: str) -> str | None:
    """Return the task name that was probably meant. Return None if no name is similar."""
    wanted = name.strip()[:_LONGEST_GUESSED]
    if fixed := difflib.get_close_matches(wanted.lower(), _FIXED, n=1):
        return fixed[0]
    kind, _, rest = wanted.partition(":")
    guesses = (f"{close}:{rest}" for close in difflib.get_close_matches(kind.lower(), _KINDS, n=1))
    return next(filter(_is_name, guesses), None)


def _is_name(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in FORMS.values())
