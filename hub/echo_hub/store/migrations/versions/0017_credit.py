"""Credit: running totals of what counted, by node, day and step, and what other hubs' exports say.

What counted before is counted here once: totals as the tallies have them, days and steps from the receipts that say
when they became final. Of those, tokens are put down to the node that the rollout was leased to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import exp2, log, log2

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_HALF_LIFE_S = 7 * 86_400.0
_RUN = "/run"


def upgrade() -> None:
    credit = op.create_table(
        "credit",
        sa.Column("holder", sa.String(80), primary_key=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("recent", sa.Double),
        sa.Column("streak_days", sa.Integer, nullable=False),
        sa.Column("longest_streak", sa.Integer, nullable=False),
        sa.Column("first_day", sa.Integer),
        sa.Column("last_day", sa.Integer),
        sa.Column("elsewhere_rollouts", sa.BigInteger, nullable=False),
        sa.Column("elsewhere_tokens", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_credit_rollouts", "credit", ["kind", "rollouts"])
    days, steps = (_parts(name, column) for name, column in (("credit_days", "day"), ("credit_steps", "step")))
    op.create_table(
        "runs_elsewhere",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("run_name", sa.String(64), nullable=False),
        sa.Column("hub_key", sa.String(64), nullable=False),
        sa.Column("issued_at", sa.String(20), nullable=False),
        sa.Column("imported_at", sa.Double, nullable=False),
    )
    op.create_table(
        "credit_elsewhere",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("node_name", sa.String(64), nullable=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_credit_elsewhere_node", "credit_elsewhere", ["node_id"])
    _count(op.get_bind(), credit, days, steps)


def _parts(name: str, column: str) -> sa.Table:
    kind = sa.Integer if column == "day" else sa.BigInteger
    return op.create_table(
        name,
        sa.Column("holder", sa.String(80), primary_key=True),
        sa.Column(column, kind, primary_key=True, autoincrement=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )


def _count(bind: sa.Connection, credit: sa.Table, days: sa.Table, steps: sa.Table) -> None:
    """One pass over the receipts: under a minute for a million."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    counted = "SELECT node_id, rollouts, tokens FROM tallies WHERE outcome IN ('trained', 'evaluated')"
    for node_id, rollouts, tokens in bind.execute(sa.text(counted)):
        for holder in (node_id, _RUN):
            totals[holder].update(rollouts=int(rollouts), tokens=int(tokens))
    by_day: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    by_step: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    work: dict[str, float] = defaultdict(float)
    receipts = (
        "SELECT r.node_id, r.num_tokens, r.final_at, r.state, g.step FROM rollouts r LEFT JOIN groups g"
        " ON g.group_id = r.group_id WHERE r.state IN ('trained', 'evaluated') AND r.num_tokens IS NOT NULL"
    )
    began_at = None
    for node_id, num_tokens, final_at, state, step in bind.execute(sa.text(receipts)):
        if state == "trained" and step is not None:
            _add(by_step[node_id, step], 1, num_tokens)
        if final_at is not None:
            began_at = final_at if began_at is None else began_at
            _add(by_day[node_id, int(final_at // 86_400)], 1, num_tokens)
            work[node_id] += num_tokens * exp2((final_at - began_at) / _HALF_LIFE_S)
    for sums in (by_day, by_step):
        for (_, number), (rollouts, tokens) in list(sums.items()):
            _add(sums[_RUN, number], rollouts, tokens)
    work[_RUN] = sum(work.values())
    recent = {
        holder: log2(sum_of * log(2) / 7) + (began_at or 0.0) / _HALF_LIFE_S
        for holder, sum_of in work.items()
        if sum_of > 0
    }
    of_holder: dict[str, list[int]] = defaultdict(list)
    for holder, day in sorted(by_day):
        of_holder[holder].append(day)
    taken_part = Counter(holder for holder, _ in by_step)
    rows = [
        {
            "holder": holder,
            "kind": "run" if holder == _RUN else "node",
            "rollouts": total["rollouts"],
            "tokens": total["tokens"],
            "steps": taken_part[holder],
            "recent": recent.get(holder),
            "elsewhere_rollouts": 0,
            "elsewhere_tokens": 0,
            **_streaks(of_holder[holder]),
        }
        for holder, total in totals.items()
        if total["rollouts"] or total["tokens"]
    ]
    _insert(bind, credit, rows)
    for table, name, found in ((days, "day", by_day), (steps, "step", by_step)):
        parts = ({"holder": key[0], name: key[1], "rollouts": n[0], "tokens": n[1]} for key, n in found.items())
        _insert(bind, table, parts)


def _add(sums: list[int], rollouts: int, num_tokens: int) -> None:
    sums[0] += rollouts
    sums[1] += num_tokens


def _streaks(days: list[int]) -> dict[str, int | None]:
    streak = longest = 0
    before = None
    for day in days:
        streak = streak + 1 if before is not None and day == before + 1 else 1
        longest, before = max(longest, streak), day
    first = days[0] if days else None
    return {"streak_days": streak, "longest_streak": longest, "first_day": first, "last_day": before}


def _insert(bind: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, object]]) -> None:
    waiting = list(rows)
    for start in range(0, len(waiting), 1_000):
        bind.execute(sa.insert(table), waiting[start : start + 1_000])
