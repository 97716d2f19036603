"""A run trains on a verifiers environment with a tool: the learner gets exactly the tokens that verifiers has
recorded.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from echo_hub.config.file import load_config
from echo_hub.intake.episodes import training_rollout
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.store.reading import read_batch
from echo_hub.store.store import Store
from tests.verifiers_env import DemoEnvironment, make_demo_environment, teach_tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, EPISODES = 2, 4
UNRETURNED = """SELECT count(*) FROM rollouts JOIN nodes USING (node_id)
    WHERE nodes.name = 'lost' AND turn > 0 AND received_at IS NULL"""
"""SQL query for the number of turns after an episode's first one that were leased to the lost node and not returned."""
OPTIONS = '{renderer = "qwen3", bounds = [0.0, 1.5], save_traces = true, "env.taskset.num_tasks" = 6}'


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoEnvironment:
    """Return the environment, whose base model calls the tool in most of its answers."""
    demo = make_demo_environment(tmp_path_factory.mktemp("verifiers"))
    teach_tool(demo)
    return demo


def settings(demo: DemoEnvironment, **more: dict[str, object]) -> dict[str, dict[str, object]]:
    return {
        "task": {"name": "verifiers:demo-env"},
        "model": {"base": str(demo.base)},
        "sessions": {"python": str(demo.python), "most": 16},
        "sampling": {"max_tokens": 96},
        "training": {"steps": STEPS, "groups_per_step": 1, "group_size": EPISODES, "lora_rank": 4},
        "evaluation": {"problems": 1},
        "leases": {"deadline_s": 30},
        "trust": {"verifier": "process", "verifier_device": "cpu", "first_checked": 4096},
        **more,
    }


async def make_run(site: Any, demo: DemoEnvironment, name: str) -> Path:
    run: Path = await site.make_run(name, "--mode", "async", **settings(demo))
    config = run / "config.toml"
    text, count = re.subn(r"(?m)^options = .*$", f"options = {OPTIONS}", config.read_text(), count=1)
    assert count == 1
    config.write_text(text)
    return run


def traces(run: Path) -> list[dict[str, Any]]:
    """Return the traces that verifiers has written: joined token ids, mask, log-probabilities, and the reward."""
    (file,) = run.rglob("traces.jsonl")
    found = []
    for line in file.read_text().splitlines():
        for trace in json.loads(line)["traces"]:
            joined = {
                name: [one for node in trace["nodes"] for one in node[name]]
                for name in ("token_ids", "mask", "logprobs")
            }
            reward = sum(one["score"] * one["weight"] for one in trace["rewards"].values())
            found.append({**joined, "reward": reward})
    return found


def trained(run: Path) -> list[dict[str, Any]]:
    """Return the sequences that the learner got, in the form of `traces`."""
    config = load_config(run / "config.toml", {})
    base = Path(config.model.base)
    problems = Problems.of_run(config, PromptCodec.load(base), base_dir=base, run_dir=run)
    store = Store.open(f"sqlite:///{run / 'echo.db'}")
    found = []
    for step in range(1, STEPS + 1):
        for group in store.read(read_batch, step):
            prompt = problems.prompt_ids(group.group_id).tolist()
            for rollout in map(training_rollout, group.episodes):
                found.append(
                    {
                        "token_ids": [*prompt, *rollout.completion_ids.tolist()],
                        "mask": [False] * len(prompt) + rollout.loss_mask.tolist(),
                        "logprobs": rollout.behavior_logprobs[rollout.loss_mask].tolist(),
                        "reward": rollout.reward,
                    }
                )
    store.close()
    problems.close()
    return found


def check_sequences(run: Path) -> None:
    """Check that each trained sequence is a trace of verifiers, to the bit."""
    known = [json.dumps(trace, sort_keys=True) for trace in traces(run)]
    sequences = trained(run)
    assert len(sequences) == STEPS * EPISODES
    for sequence in sequences:
        assert json.dumps(sequence, sort_keys=True) in known
    turns = [int(np.diff(np.flatnonzero(sequence["mask"])).max()) for sequence in sequences]
    assert max(turns) > 1, "no trained episode has two turns"


def check_books(books: sqlite3.Connection, view: dict[str, Any]) -> None:
    """Check that every token was verified, and that every rollout has exactly one end."""
    accounting = view["accounting"]
    ended = accounting["trained"] + accounting["evaluated"] + sum(accounting["dropped"].values())
    assert accounting["leased"] == ended
    checked = "SELECT DISTINCT checked FROM rollouts WHERE state = 'trained'"
    assert books.execute(checked).fetchall() == [("passed",)]


async def test_traces_of_verifiers_are_trained_though_a_node_is_lost(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection], demo: DemoEnvironment
) -> None:
    run = await make_run(site, demo, "verifiers")
    hub, url = await site.hub(run)
    lost = await site.node(url, "lost", backend="torch")
    written = books(run)
    await until(url, lambda _: written.execute(UNRETURNED).fetchone()[0] > 0)
    await lost.kill()
    await site.node(url, "volunteer", backend="torch")
    view = await until(url, lambda view: view["state"] == "finished", within_s=600)
    check_books(written, view)
    assert written.execute(UNRETURNED).fetchone()[0] > 0, "no turn was lost with the node"
    assert "session_lost" not in view["accounting"]["dropped"], "a session did not wait for another node"
    check_sequences(run)
    status, said = await hub.end()
    assert status == 0, said
    assert not programs_of(demo), "an agent, a tool or a server is left"


def programs_of(demo: DemoEnvironment) -> list[str]:
    """Return the command lines of all processes of the environment's interpreter."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(demo.python.parent) in line and process.status() != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found
