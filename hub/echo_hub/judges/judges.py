"""All judges of a run: opened together, asked together.

A completion has its components of judges once its task has scored it. What waits for them is what was leased and has
come in, so nothing here needs a bound of its own; a completion that is scored is in the store with its components, and
no judge is asked for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import assert_never

from echo_hub.config.judge_section import JudgeConfig, LlmJudgeConfig, RewardModelConfig
from echo_hub.judges.asking import Asked
from echo_hub.judges.base import Judge
from echo_hub.judges.llm import LlmJudge, key_of, session_for
from echo_hub.judges.reward_model import RewardModel


class Judges:
    """Made by `open`."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = tuple(judges)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, settings: Mapping[str, JudgeConfig], *, logs: Path, is_patient: bool = True
    ) -> AsyncIterator[Judges]:
        """Connections and processes are closed with the block. `is_patient`: a judge that stays away is waited for.
        Raises ConfigError where a key is not in the environment."""
        async with contextlib.AsyncExitStack() as stack:
            judges: list[Judge] = []
            for name, config in settings.items():
                match config:
                    case LlmJudgeConfig():
                        key = key_of(name, config)
                        session = await stack.enter_async_context(session_for(config, key))
                        judges.append(LlmJudge(name, config, session, is_patient=is_patient))
                    case RewardModelConfig():
                        model = RewardModel(name, config, log=logs / f"judge-{name}.log", is_patient=is_patient)
                        judges.append(await stack.enter_async_context(model.working()))
                    case _:
                        assert_never(config)
            yield cls(judges)

    async def values(self, asked: Asked) -> dict[str, float]:
        """The components of all judges. Raises ScorerError where one of them has none."""
        found = await asyncio.gather(*(judge.value(asked) for judge in self._judges), return_exceptions=True)
        values = {}
        for judge, value in zip(self._judges, found, strict=True):
            if isinstance(value, BaseException):
                raise value
            values[judge.name] = value
        return values

    @property
    def absent(self) -> dict[str, str]:
        """Why those do not answer that stay away."""
        return {judge.name: judge.absence.reason for judge in self._judges if judge.absence.reason}

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Of each, since they were opened: the fields of `Counts`."""
        return {judge.name: asdict(judge.counts) for judge in self._judges}


def secrets_of(settings: Mapping[str, JudgeConfig]) -> tuple[str, ...]:
    """What no log may hold. Raises ConfigError where a key is not in the environment."""
    return tuple(key_of(name, one) for name, one in settings.items() if isinstance(one, LlmJudgeConfig))
