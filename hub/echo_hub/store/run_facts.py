"""What a model card says about a run's training: its size, its volunteers, and the evaluations of its versions."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from echo_hub.store.credit import RUN
from echo_hub.store.reports import read_evaluations_of
from echo_hub.store.tables import credit
from echo_shared.records.run import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Figures of the whole run so far, and evaluations of two versions."""

    num_nodes: int
    """Nodes of which at least one rollout was trained on or evaluated."""
    rollouts: int
    """Rollouts trained on or evaluated. `tokens` counts their tokens."""
    tokens: int
    evaluations: tuple[Evaluation, ...]
    """Evaluations of the base model, then of the version of the card, on the whole held-out set."""


def read_facts(connection: Connection, policy_version: int) -> RunFacts:
    of_run = connection.execute(select(credit.c.rollouts, credit.c.tokens).where(credit.c.holder == RUN)).first()
    useful = select(func.count()).where(credit.c.kind == "node", credit.c.rollouts > 0)
    return RunFacts(
        num_nodes=connection.scalar(useful) or 0,
        rollouts=of_run.rollouts if of_run else 0,
        tokens=of_run.tokens if of_run else 0,
        evaluations=tuple(one for version in (0, policy_version) for one in read_evaluations_of(connection, version)),
    )
