"""Runs of environments that replay all turns must leave exactly the rows and messages that were recorded once.

The recorded digests come from `recorded_run`, at a time when environments with sessions did not exist.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import EvaluationConfig, TaskConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from tests.echo_hub.run.test_chat_template import QWEN3, codec_of, tokenizer_of
from tests.echo_hub.scoring.recorded_run import RecordedRun

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%d*3"}}</tool_call>'


def recorded(name: str) -> list[str]:
    """Return the rows and messages that a run of this environment leaves."""
    config = HubConfig(task=TaskConfig(name=name), evaluation=EvaluationConfig(problems=2))
    if name == "environment:calculator":
        codec = codec_of(QWEN3, strip_thinking=True)
        tokenizer = tokenizer_of(QWEN3)

        def calls(number: int) -> Any:
            said = CALL % (number % 1000) if number % 3 else f"<answer>{number % 1000}</answer>"
            return np.array([*tokenizer.encode(said).ids, *codec.stop_ids], np.int32)

        return RecordedRun(config, codec, calls).record()
    codec = PromptCodec.load(resolve_base("builtin:small" if name == "environment:sokoban" else "builtin:tiny"))

    def plays(number: int) -> Any:
        said = "".join("UDLR"[number >> shift & 3] for shift in (0, 2, 4)) if "sokoban" in name else str(number % 10)
        return np.append(codec.encode_raw(said), codec.stop_ids[0]).astype(np.int32)

    return RecordedRun(config, codec, plays).record()


DIGESTS = {
    "environment:guess": "03b7041fb2e2153d4cfe88e9fac4206e",
    "environment:sokoban": "6938265116e8cfc68b654d8f7d0f85b2",
    "environment:calculator": "398e9912d15986472e42bc55e9f01bc6",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_run_leaves_what_it_left_before_sessions(name: str) -> None:
    lines = recorded(name)
    assert {turn for turn in range(4) if any(f'"turn": {turn}' in line for line in lines)} >= {0, 1, 2}
    assert any(line.startswith("evaluated") for line in lines) and any("scorer_failed" in line for line in lines)
    said = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    assert said == DIGESTS[name], f"{len(lines)} lines; compare them with those of the commit before"
