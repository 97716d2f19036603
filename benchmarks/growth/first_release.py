"""Migration of a database of the first release: its time, and a check that nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from echo_hub.store import database
from echo_hub.store.database import connect, migrate
from echo_hub.store.store import Store

NODES: Final = 1_000
VERSIONS: Final = 64
FIRST: Final = "0001"
GROUP_SIZE: Final = 8
GROUPS_A_STEP: Final = 64


def measure_migration(path: Path, *, rollouts: int, seed: int) -> dict[str, Any]:
    """Make an SQLite file at `path`, and migrate it."""
    url = f"sqlite:///{path}"
    engine = connect(url)
    config = Config(attributes={})
    config.set_main_option("script_location", str(database.MIGRATIONS))
    with engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, FIRST)
        _fill(connection, rollouts, np.random.default_rng(seed))
    size_bytes = path.stat().st_size
    began_at, began_s = time.monotonic(), time.process_time()
    migrate(engine)
    took = {"migrate_s": time.process_time() - began_s, "migrate_clock_s": time.monotonic() - began_at}
    engine.dispose()
    store = Store.open(url)
    accounting, newest = store.accounting(), store.newest_step()
    steps = -(-rollouts // (GROUP_SIZE * GROUPS_A_STEP))
    whole = accounting.balanced and accounting.trained == rollouts and newest is not None and newest.step == steps
    store.close()
    return {**took, "rollouts": rollouts, "migrated": whole, "bytes_before": size_bytes}


def _fill(connection: Connection, rollouts: int, rng: np.random.Generator) -> None:
    """Fill in a run of the first release: nodes, groups, trained rollouts, steps, versions and fetches."""
    ids = [rng.bytes(32).hex() for _ in range(NODES)]
    numbers = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :count) "
    groups, steps = -(-rollouts // GROUP_SIZE), -(-rollouts // (GROUP_SIZE * GROUPS_A_STEP))
    connection.execute(
        text("INSERT INTO nodes VALUES (:node_id, :node_id, :name, 'torch', 'cpu', 1, 2)"),
        [{"node_id": node_id, "name": f"machine-{place}"} for place, node_id in enumerate(ids)],
    )
    connection.execute(text("CREATE TEMPORARY TABLE ranks (place INTEGER PRIMARY KEY, node_id TEXT)"))
    ranks = [{"place": place, "node_id": node_id} for place, node_id in enumerate(ids)]
    connection.execute(text("INSERT INTO ranks VALUES (:place, :node_id)"), ranks)

    def make(statement: str, count: int) -> None:
        connection.execute(text(f"{statement.format(numbers=numbers)}"), {"count": count})

    step = f"n / {GROUP_SIZE} / {GROUPS_A_STEP}"
    make(f"INSERT INTO groups {{numbers}}SELECT n, n, 1.0, 1 + n / {GROUPS_A_STEP}, NULL FROM numbers", groups)
    make(
        'INSERT INTO rollouts (lease_id, "index", node_id, group_id, policy_version, leased_at, deadline, state,'
        f" reward, num_tokens, received_at) {{numbers}}SELECT 1 + n / {GROUP_SIZE}, n % {GROUP_SIZE}, node_id,"
        f" n / {GROUP_SIZE}, {step}, n, n + 60.0, 'trained', 1.0, 5, n + 2.0"
        f" FROM numbers JOIN ranks ON ranks.place = n * 7919 % {NODES} ORDER BY n",
        rollouts,
    )
    make(
        "INSERT INTO steps {numbers}SELECT 1 + n, '[]', '[]', '[2]', 64, 512, 2560, 0.5, n * 512.0, n * 512.0 + 9,"
        " '{{\"loss\": 0.5}}', 1 FROM numbers",
        steps,
    )
    make("INSERT INTO versions {numbers}SELECT 1 + n, n * 512.0 + 10 FROM numbers", steps)
    make(
        f"INSERT INTO fetches {{numbers}}SELECT node_id, printf('%040x', n), {steps} - n, 1.5, 400000, 0, n"
        " FROM numbers CROSS JOIN ranks",
        min(VERSIONS, steps),
    )
    connection.execute(text("DROP TABLE ranks"))
