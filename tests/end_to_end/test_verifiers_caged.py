"""An agent with a shell attacks the hub: verifiers' bash harness, in its subprocess runtime.

The model's turns ask for the run's key, a connection, a fork bomb, 8 GB of memory, more disk space than allowed, and an
endless loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Reply, Response, SessionGone
from echo_shared.cage import session_cage
from echo_shared.cage.session_terms import SessionTerms
from tests.verifiers_env import DemoEnvironment, make_demo_environment

if why := session_cage.unsupported(SessionTerms(directory="/", children="programs")):
    pytest.skip(why, allow_module_level=True)
# Slow: the env server, six agents and their tools are processes that import verifiers.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STOP_IDS = (100, 101)
ATTACKS = {
    "key": ("cat {run}/hub.key; echo read $?", "read 1"),
    "connection": ("exec 3<>/dev/tcp/127.0.0.1/{port}; echo connected $?", "connected 1"),
    "bomb": ("bomb() {{ bomb | bomb & }}; bomb; sleep 60", "processes: it had "),
    "memory": ("{python} -c 'x = b\"a\" * (8 << 30); input()'", "memory: it used "),
    "disk": ("for n in 1 2 3; do head -c 30M /dev/zero > file-$n; done; sleep 60", "disk: its files are larger"),
    "loop": ("while :; do :; done", "time: it used "),
}
"""For each attack, the model's command, and the output that the agent must get, or the reason why the session
must end.
"""


def reply(text: str, tokenizer: Tokenizer) -> Reply:
    ids = (*tokenizer.encode(text, add_special_tokens=False).ids, STOP_IDS[1])
    return Reply(text=text, ids=ids, logprobs=(-0.1,) * len(ids))


async def run_command(
    environment: ProcessEnvironment, problem: Problem, command: str, tokenizer: Tokenizer
) -> Response | SessionGone:
    """Run a command in a new session. Return the output that the agent gets, or the reason for the session's end."""
    session = await environment.open(problem, 1)
    try:
        await session.reset()
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return await session.step(reply(f"<tool_call>\n{call}\n</tool_call>", tokenizer))
    except SessionGone as gone:
        return gone
    finally:
        await session.close()


async def attacked(environment: ProcessEnvironment, demo: DemoEnvironment, run: Path, port: int) -> dict[str, str]:
    """Run all attacks at the same time, next to an honest episode. Return the result of each."""
    tokenizer = Tokenizer.from_file(str(demo.base / "tokenizer.json"))
    problem = await asyncio.to_thread(environment.sample, 1)
    bystander = await environment.open(problem, 1)
    await bystander.reset()
    values = {"run": run, "port": port, "python": demo.python}
    commands = [command.format(**values) for command, _ in ATTACKS.values()]
    answers = await asyncio.gather(*(run_command(environment, problem, one, tokenizer) for one in commands))
    ending = await bystander.step(reply("2", tokenizer))
    assert isinstance(ending, Ending)
    await bystander.close()
    return {
        name: tokenizer.decode(answer.ids) if isinstance(answer, Observation) else str(answer)
        for name, answer in zip(ATTACKS, answers, strict=True)
    }


def test_an_agent_with_a_shell_harms_only_its_own_session(tmp_path: Path) -> None:
    demo = make_demo_environment(tmp_path)
    run = tmp_path / "run"
    (run / "sessions").mkdir(parents=True)
    (run / "hub.key").write_text("the key")
    config = SessionsConfig(python=str(demo.python), memory_mb=700, disk_mb=64, step_cpu_s=10.0, processes=64)
    place = SessionPlace(
        config=config,
        run_dir=run,
        base_dir=demo.base,
        context_tokens=4_096,
        stop_ids=STOP_IDS,
        max_tokens=512,
        vocabulary=2**20,
    )
    options = {"renderer": "qwen3", "bounds": [0.0, 1.5], "harness": "bash"}
    environment = make_any_task("verifiers:demo-env", options, place)
    assert isinstance(environment, ProcessEnvironment)
    try:
        with socket.create_server(("127.0.0.1", 0)) as other:
            found = asyncio.run(attacked(environment, demo, run, other.getsockname()[1]))
    finally:
        environment.stop()
    assert "the key" not in found["key"]
    assert {name for name, (_, expected) in ATTACKS.items() if expected not in found[name]} == set(), found
