"""ArCHer (arXiv 2402.19446): credit by turn against credit by episode, in games of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final

from benchmarks.papers.cases import Case
from benchmarks.papers.runs import Found
from benchmarks.papers.table import Entry, Headline, Table

GAME: Final[dict[str, Mapping[str, Any]]] = {
    "task": {"name": "environment:guess", "options": {"turns": 4}},
    "sampling": {"max_tokens": 1},
    "evaluation": {"problems": 16},
}
"""Few such games are held out, so the rewards of training tell more."""
BY: Final = {
    credit: Case(
        name=f"credit by {credit}",
        settings={**GAME, "training": {"credit": credit, "learning_rate": 1e-3}},
        runner="episodes",
        evaluate_every=40,
        seconds=9,
    )
    for credit in ("episode", "turn")
}


def mean_reward(found: Found, case: Case) -> float:
    """Mean reward of all steps and seeds: the area under the curve."""
    return fmean(step["mean_reward"] for one in found[case] for step in one.steps)


def _gain(found: Found) -> Headline:
    return {"turn_credit_gain": mean_reward(found, BY["turn"]) - mean_reward(found, BY["episode"])}


TURN_CREDIT: Final = Table(
    name="ArCHer: credit by turn",
    source="arXiv 2402.19446, figures of sample efficiency",
    scale="GPT-2, 100 M and more; text games",
    entries=(
        Entry(case=BY["episode"], reports="policy gradient over whole episodes"),
        Entry(case=BY["turn"], reports="a critic of turns: about 100 times fewer samples"),
    ),
    headline=_gain,
    columns=lambda case, ran: {"mean_reward": fmean(step["mean_reward"] for one in ran for step in one.steps)},
    curves=False,
)
