"""Nodes evaluate policy versions during training. The results must equal those of the hub's own evaluation, also after
a kill -9 or when nodes leave.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, EvaluationGroup
from echo_hub.lifecycle.export import evaluate_versions
from echo_hub.run.directory import RunDirectory
from echo_hub.store.reports import read_evaluations, read_leaderboard
from echo_hub.store.store import Store
from echo_shared.records.run import Evaluation, EvaluationKind

pytestmark = pytest.mark.timeout(600)

NODES: dict[str, dict[str, object]] = {
    "run": {"seed": 3},
    "evaluation": {"problems": 64, "every": 8, "samples": 8, "by": "nodes"},
    "leases": {"deadline_s": 5.0},
}
EVALUATED = [0, 8, 16, 24]
OF_EVALUATIONS = f"group_id >= {FIRST_EVALUATION_ID}"


def measured(run: Path) -> dict[int, list[Evaluation]]:
    store = Store.open(f"sqlite:///{run / 'echo.db'}")
    found: dict[int, list[Evaluation]] = {}
    for evaluation in store.read(read_evaluations):
        found.setdefault(evaluation.policy_version, []).append(evaluation)
    store.close()
    return found


def check_books(view: dict[str, Any], database: sqlite3.Connection) -> None:
    """Check that each episode of an evaluation counts once, was drawn with the evaluated version only, and was never
    used for training.
    """
    books = view["accounting"]
    assert books["leased"] == books["trained"] + books["evaluated"] + sum(books["dropped"].values())
    rows = database.execute(
        f"SELECT group_id, \"index\", turn, policy_version FROM rollouts WHERE state = 'evaluated' AND {OF_EVALUATIONS}"
    ).fetchall()
    assert len(rows) == len({row[:3] for row in rows}) == books["evaluated"] > 0
    for group_id, _, _, version in rows:
        about = EvaluationGroup.of(group_id)
        assert about is not None and about.policy_version == version
    trained = database.execute(f"SELECT count(*) FROM rollouts WHERE state = 'trained' AND {OF_EVALUATIONS}")
    assert trained.fetchone() == (0,)
    kept = 'SELECT count(*) FROM payloads JOIN rollouts USING (lease_id, "index") WHERE ' + OF_EVALUATIONS
    assert database.execute(kept).fetchone() == (0,), "evaluation payloads are deleted"


async def check_figures(run: Path, *versions: int) -> None:
    """Check that accuracy, mean reward and the other figures of evaluations by nodes equal those of `echo-hub eval`, in
    which the learner samples the completions of the same versions."""
    config = load_config(run / "config.toml", {})
    found = measured(run)
    by_nodes = [one for version in versions for one in found[version]]
    here = await evaluate_versions(config, RunDirectory(run), policy_versions=versions)
    for one, other in zip(by_nodes, here.evaluations, strict=True):
        same(one, other)


def same(by_nodes: Evaluation, here: Evaluation) -> None:
    for name in ("policy_version", "kind", "num_problems", "samples", "num_unscored"):
        assert getattr(by_nodes, name) == getattr(here, name)
    for name in ("accuracy", "accuracy_error", "mean_reward", "mean_tokens", "share_truncated"):
        assert getattr(by_nodes, name) == pytest.approx(getattr(here, name)), (name, by_nodes, here)
    assert by_nodes.pass_at == pytest.approx(here.pass_at)


@pytest.mark.slow
async def test_a_node_evaluates_as_the_hub_does_and_survives_kill_9(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await site.make_run("run", "--mode", "async", **NODES, training={"steps": EVALUATED[-1]})
    hub, url = await site.hub(run)
    port = url.rpartition(":")[2]
    node = await site.node(url, "volunteer", backend="torch")
    # Wait for version 10 or later: version 8 is being evaluated or has just been. A busy node skips some versions.
    await node.printed(r"Policy version [12]\d is here")
    await hub.kill()
    hub, url = await site.hub(run, "--port", port)
    view = await until(url, lambda view: view["state"] == "finished")
    check_books(view, books(run))
    meanwhile = books(run).execute(
        f"""SELECT count(*) FROM rollouts JOIN versions ON versions.policy_version = rollouts.policy_version + 1
            WHERE rollouts.state = 'evaluated' AND {OF_EVALUATIONS} AND leased_at > published_at"""
    )
    assert meanwhile.fetchone()[0] > 0, "training went on"
    found = measured(run)
    assert sorted(found) == EVALUATED
    assert [one.kind for one in found[8]] == [EvaluationKind.GREEDY, EvaluationKind.SAMPLED]
    await check_figures(run, 0, 8, 24)
    board = Store.open(f"sqlite:///{run / 'echo.db'}").read(read_leaderboard)
    (volunteer,) = board
    # A node may drop a version halfway through its evaluation; then the hub evaluates the remaining episodes.
    assert 3 * 64 * 9 <= volunteer.evaluated_rollouts <= 4 * 64 * 9
    assert (await hub.end())[0] == 0


@pytest.mark.slow
async def test_the_hub_evaluates_the_last_version_itself_when_every_node_has_left(
    site: Any, until: Any, reached: Any
) -> None:
    many = {"problems": 1024, "every": 0, "samples": 0, "by": "nodes"}
    run = await site.make_run(
        "run", "--mode", "sequential", evaluation=many, leases={"deadline_s": 2.0}, training={"steps": 2}
    )
    hub, url = await site.hub(run)
    node = await site.node(url, "volunteer")
    await reached(run, 2, "SELECT coalesce(max(policy_version), 0) FROM versions")
    await node.kill()
    view = await until(url, lambda view: view["state"] == "finished")
    books_now = view["accounting"]
    assert books_now["leased"] == books_now["trained"] + books_now["evaluated"] + sum(books_now["dropped"].values())
    assert books_now["evaluated"] < 2 * 1024, "the node left before it finished"
    assert sorted(measured(run)) == [0, 2]
    assert (await hub.end())[0] == 0
