"""A reward model in a separate process must give the values of a plain call, even if the process is killed
meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_hub.config.judge_section import RewardModelConfig
from echo_hub.judges.asking import Asked
from echo_hub.judges.reward_model import RewardModel
from echo_shared.errors import ScorerError
from tests.echo_hub.judges.tiny_reward_model import make, plainly

pytestmark = pytest.mark.slow  # Each test starts processes that load PyTorch.
ASKED = [Asked(prompt="Say hello.", completion="Hello" + "!" * number) for number in range(20)]


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., RewardModel]:
    def of(directory: Path, *, is_patient: bool = True, **settings: object) -> RewardModel:
        config = RewardModelConfig.model_validate(
            {"kind": "reward_model", "model": str(directory), "device": "cpu", **settings}
        )
        return RewardModel("style", config, log=tmp_path / "logs" / "judge.log", is_patient=is_patient, first_s=0.01)

    return of


async def test_scores_are_those_of_a_plain_call_and_survive_a_kill(
    tmp_path: Path, model: Callable[..., RewardModel]
) -> None:
    directory = make(tmp_path / "model")
    plain = [plainly(directory, asked.prompt, asked.completion) for asked in ASKED]
    assert max(plain) - min(plain) > 0.1
    async with asyncio.timeout(120), model(directory, sigmoid=False, tokens_at_once=100).working() as style:
        first = await style.value(ASKED[0])
        waiting = [asyncio.create_task(style.value(asked)) for asked in ASKED]
        await asyncio.sleep(0)
        dead = style.pid
        assert dead is not None
        os.kill(dead, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        values = await asyncio.gather(*waiting)
        assert style.pid not in (None, dead)
        with pytest.raises(ScorerError, match="more than 256"):
            await style.value(Asked(prompt="Say hello.", completion="Hello " * 100))
    assert [first, *values] == pytest.approx([plain[0], *plain], abs=1e-5)
    assert style.counts.tokens_read > 0 and style.absence.reason == ""


async def test_an_unloadable_model_is_awaited_or_reported(tmp_path: Path, model: Callable[..., RewardModel]) -> None:
    directory = tmp_path / "model"
    async with asyncio.timeout(120), model(directory).working() as style:
        waiting = asyncio.create_task(style.value(ASKED[0]))
        while not style.absence.reason:  # noqa: ASYNC110 - no event signals this.
            await asyncio.sleep(0.01)
        assert "base model does not exist" in style.absence.reason
        assert not waiting.done()
        make(directory)  # From here on, the model can be loaded.
        assert 0 < await waiting < 1  # The request that waited for the model gets its answer.
        assert style.absence.reason == ""
    two = make(tmp_path / "two", labels=2)
    async with asyncio.timeout(120), model(two, is_patient=False).working() as style:
        with pytest.raises(ScorerError, match=r"(?s)does not answer.*has one logit"):
            await style.value(ASKED[0])
