from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.sessions.adapters.openenv_program import make
from echo_hub.tasks.environments.base import SessionGone
from tests.agents import agents_python
from tests.openenv_servers import FAIL, WORLDS

OPTIONS = {"action": "number", "observation": "text", "reward_bounds": [-2, 1], "turns": 2, "directory": str(WORLDS)}


async def test_a_module_is_played_in_plain_values(tmp_path: Path) -> None:
    sessions = SessionsConfig(python=str(agents_python())).model_dump()
    place = {"task": "openenv:guessing:app", "directory": str(tmp_path), "hidden": [], "sessions": sessions}
    adapter = make(OPTIONS, place)
    try:
        problem = await adapter.sample(7)
        assert problem == {"prompt": "A number from 1 to 100.", "metadata": {"seed": 7}, "prompt_ids": []}
        session = await adapter.open(json.loads(json.dumps(problem)), 1)
        assert await session.reset() == {"text": problem["prompt"], "ids": []}
        told = await session.step({"text": "0", "ids": [], "logprobs": [], "finish_reason": "stop"})
        assert told["observation"]["text"] == "higher"
        assert told["observation"]["turn_reward"] == -0.25
        ended = {"ending": {"reward": -0.5, "components": {"unclipped": -0.5}}}
        assert await session.step({"text": "0"}) == await session.score() == ended
        await session.close()
        again = await adapter.open(problem, 1)
        await again.reset()
        with pytest.raises(SessionGone) as raised:
            await again.step({"text": str(FAIL)})
        assert raised.value.code == "session_gone"
        await again.close()
    finally:
        await adapter.aclose()


def test_the_adapter_loads_nothing_heavy() -> None:
    heavy = "torch", "transformers", "aiohttp"
    code = f"import sys, echo_hub.sessions.adapters.openenv_program; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
