"""The table of intended verdicts, `math_verdicts.toml`: more than three hundred of them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from echo_hub.tasks.math_answers import is_equal
from echo_hub.tasks.math_forms import Form

TABLE = tomllib.loads(Path(__file__).with_name("math_verdicts.toml").read_text())["group"]


def verdicts(group: dict[str, Any]) -> dict[str, bool]:
    """Of all answers of a group."""
    form = Form(group["form"]) if "form" in group else None
    written = (lambda text: text) if group.get("as_is") else "<answer>{}</answer>".format
    answers = [*group["right"], *group["wrong"]]
    question = group.get("question", "")
    return {text: is_equal(written(text), group["expected"], question=question, form=form) for text in answers}


@pytest.mark.parametrize("group", TABLE, ids=lambda group: f"{group['expected']} {group['why']}")
def test_every_verdict_is_the_intended_one(group: dict[str, Any]) -> None:
    found = verdicts(group)
    assert {text for text, is_right in found.items() if is_right} == set(group["right"])


def test_there_are_more_than_three_hundred() -> None:
    assert sum(len(group["right"]) + len(group["wrong"]) for group in TABLE) > 300


def test_no_answer_is_right_and_wrong() -> None:
    assert [group["why"] for group in TABLE if set(group["right"]) & set(group["wrong"])] == []
