"""Read the facts about a run's training for its model card: its size, its volunteers, and evaluations of its
versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, distinct, func, select

from echo_hub.store.credit import RUN
from echo_hub.store.reports import read_evaluations_of
from echo_hub.store.tables import credit, nodes
from echo_shared.records.run import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The size of the whole run so far, and the evaluations of the base model and of the version on the model card."""

    num_nodes: int
    """Number of nodes whose rollouts (at least one) were used for training or evaluation."""
    num_owners: int
    """Number of different owners of the `num_nodes` nodes. A node without an owner counts as an owner itself."""
    rollouts: int
    """Rollouts trained on or evaluated. `tokens` counts their tokens."""
    tokens: int
    evaluations: tuple[Evaluation, ...]
    """Evaluations of the base model, then of the version of the card, on the whole held-out set."""


def read_facts(connection: Connection, policy_version: int) -> RunFacts:
    of_run = connection.execute(select(credit.c.rollouts, credit.c.tokens).where(credit.c.holder == RUN)).first()
    useful = select(func.count()).where(credit.c.kind == "node", credit.c.rollouts > 0)
    owner = func.coalesce(nodes.c.owner_key, credit.c.holder)
    owners = useful.with_only_columns(func.count(distinct(owner))).select_from(
        credit.outerjoin(nodes, nodes.c.node_id == credit.c.holder)
    )
    return RunFacts(
        num_nodes=connection.scalar(useful) or 0,
        num_owners=connection.scalar(owners) or 0,
        rollouts=of_run.rollouts if of_run else 0,
        tokens=of_run.tokens if of_run else 0,
        evaluations=tuple(one for version in (0, policy_version) for one in read_evaluations_of(connection, version)),
    )
