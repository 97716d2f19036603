"""A real node plays the same episodes of several turns as the hub itself, and training on them raises the reward."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.intake.episodes import training_rollout
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.store.reading import read_batch
from echo_hub.store.store import Store
from tests.end_to_end.test_node_evaluation import measured, same

pytestmark = pytest.mark.timeout(600)

GAME: dict[str, dict[str, object]] = {
    "task": {"name": "environment:guess"},
    "sampling": {"max_tokens": 1},
    "evaluation": {"problems": 8},
}


async def finished_run(
    site: Any, until: Any, mode: str, *, game: dict[str, dict[str, object]] = GAME, **training: object
) -> Path:
    run: Path = await site.make_run(mode, "--mode", mode, "--seed", "7", **game, training=training)
    hub, url = await site.hub(run)
    if mode != "colocated":
        await site.node(url, "volunteer", backend="torch")
    view = await until(url, lambda view: view["state"] == "finished")
    books = view["accounting"]
    assert books["leased"] == books["trained"] + books["evaluated"] + sum(books["dropped"].values())
    status, said = await hub.end()
    assert status == 0, said
    return run


def consumed(database: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Return every trained turn in training order: step, group, index, turn, tokens of both sides, reward."""
    return database.execute(
        """SELECT groups.step, rollouts.group_id, rollouts."index", rollouts.turn,
                  payloads.completion_ids, payloads.observation_ids, rollouts.reward
           FROM rollouts JOIN groups USING (group_id) JOIN payloads USING (lease_id, "index")
           WHERE rollouts.state = 'trained' ORDER BY groups.step, rollouts.group_id, rollouts."index", rollouts.turn"""
    ).fetchall()


def check_trained_tokens(run: Path) -> None:
    """Check the batch of step 1: the base gives sampled tokens the log-probabilities that the node claimed, and all
    other tokens are masked.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from echo_hub.config.file import load_config

    config, base = load_config(run / "config.toml", {}), resolve_base("builtin:tiny")
    codec = PromptCodec.load(base)
    problems = Problems.of_run(config, codec)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    store = Store.open(f"sqlite:///{run / 'echo.db'}")
    groups = store.read(read_batch, 1)
    store.close()
    turns = [len(episode.turns) for group in groups for episode in group.episodes]
    assert len(set(turns)) > 1 and max(turns) == 3
    for group in groups:
        prompt = problems.prompt_ids(group.group_id)
        for episode in group.episodes:
            rollout = training_rollout(episode)
            said = codec.decode(rollout.completion_ids[~rollout.loss_mask])
            assert said in {"".join(hints) for hints in _hints(len(episode.turns) - 1)}
            assert rollout.loss_mask[-1] and rollout.loss_mask.sum() == len(episode.turns)
            ids = torch.from_numpy(np.concatenate([prompt, rollout.completion_ids]).astype(np.int64))
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1].float(), -1)
            drawn = logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            np.testing.assert_allclose(
                drawn[rollout.loss_mask], rollout.behavior_logprobs[rollout.loss_mask], atol=1e-4
            )


def _hints(count: int) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for _ in range(count):
        found = [(*before, hint) for before in found for hint in (">=", "<=", "?=")]
    return found


@pytest.mark.slow
async def test_a_node_plays_the_episodes_that_the_hub_plays_itself(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    """A node's episodes equal those that the hub samples itself, while batch sizes vary, groups are replaced, policies
    are float32, and the node also evaluates. `test_odd_scorers` has bfloat16, single turns and failing scorers.
    """
    settings = {"steps": 3, "groups_per_step": 8, "dynamic_sampling": True, "tokens_per_step": 48}
    evaluated = {"problems": 8, "every": 0, "samples": 2}
    game = {**GAME, "dissemination": {"precision": "float32"}, "evaluation": evaluated}
    colocated = await finished_run(site, until, "colocated", game=game, **settings)
    game["evaluation"] = {**evaluated, "by": "nodes"}
    sequential = await finished_run(site, until, "sequential", game=game, **settings)
    for by_hub, by_node in zip(measured(colocated).items(), measured(sequential).items(), strict=True):
        assert by_hub[0] == by_node[0]
        for one, other in zip(by_hub[1], by_node[1], strict=True):
            same(one, other)
    turns = "SELECT DISTINCT turn FROM rollouts WHERE state = 'evaluated' ORDER BY turn"
    assert books(sequential).execute(turns).fetchall() == [(0,), (1,), (2,)]
    check_trained_tokens(sequential)
    expected, got = consumed(books(colocated)), consumed(books(sequential))
    assert got == expected
    assert {row[3] for row in got} == {0, 1, 2}
    assert len({row[6] for row in got}) > 1, "all rewards equal: the comparison shows nothing"
    rewards = "SELECT step, mean_reward FROM steps ORDER BY step"
    assert books(sequential).execute(rewards).fetchall() == books(colocated).execute(rewards).fetchall()
    who = "SELECT DISTINCT node_id = 'hub' FROM rollouts"
    assert [books(run).execute(who).fetchall() for run in (colocated, sequential)] == [[(1,)], [(0,)]]
    sizes = books(sequential).execute("SELECT num_groups, num_tokens FROM steps ORDER BY step").fetchall()
    assert all(tokens >= 48 or groups == 8 for groups, tokens in sizes)
    dropped = books(sequential).execute("SELECT DISTINCT drop_reason FROM groups WHERE drop_reason IS NOT NULL")
    assert {reason for (reason,) in dropped} <= {"no_advantage", "stale", "run_ended"}


@pytest.mark.slow
async def test_the_tiny_model_learns_to_play(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection]
) -> None:
    run = await finished_run(
        site,
        until,
        "colocated",
        steps=25,
        groups_per_step=24,
        group_size=8,
        learning_rate=2e-3,
        lora_rank=16,
    )
    rewards = [reward for (reward,) in books(run).execute("SELECT mean_reward FROM steps ORDER BY step")]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:2]) + 0.15


@pytest.mark.slow
async def test_sokoban_in_four_rounds_with_credit_by_turn(
    site: Any,
    until: Any,
    books: Callable[[Path], sqlite3.Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ECHO_HUB_TASK__OPTIONS", json.dumps({"size": 4}))
    game: dict[str, dict[str, object]] = {
        "task": {"name": "environment:sokoban"},
        "sampling": {"max_tokens": 8},
        "evaluation": {"problems": 4},
    }
    run = await finished_run(
        site, until, "colocated", game=game, steps=2, groups_per_step=4, group_size=4, credit="turn", discount=0.9
    )
    from echo_hub.config.file import load_config

    config, codec = load_config(run / "config.toml", {}), PromptCodec.load(resolve_base("builtin:tiny"))
    problems = Problems.of_run(config, codec)
    rows = books(run).execute(
        """SELECT group_id, "index", turn, completion_ids, reward, turn_reward
           FROM rollouts JOIN payloads USING (lease_id, "index")
           WHERE state = 'trained' ORDER BY group_id, "index", turn"""
    )
    said: dict[tuple[int, int], list[np.ndarray]] = {}
    observed: dict[tuple[int, int], int] = {}
    seen = set()
    for group_id, index, turn, drawn, reward, turn_reward in rows:
        seen.add(turn)
        episode = (group_id, index)
        said.setdefault(episode, []).append(np.frombuffer(drawn, "<i4"))
        answer = problems.respond(group_id, said[episode], observed.get(episode, 0))
        if isinstance(answer, EnvironmentReply):
            assert (reward, turn_reward) == (None, answer.turn_reward)
            observed[episode] = observed.get(episode, 0) + len(answer.observation_ids)
        else:
            assert (reward, turn_reward) == (answer, None)
    assert seen == {0, 1, 2, 3} and len(said) == 32
    trained = books(run).execute("SELECT count(*) FROM steps WHERE trained_at IS NOT NULL").fetchone()
    assert trained == (2,)
