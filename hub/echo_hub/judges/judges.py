"""All judges of a run. They are opened together, and all score each completion.

A task scores a completion first; then the judges add their components. Only received rollouts wait here. The number of
leases limits them, so the queue needs no limit. A scored completion is stored with its components, so no judge gets it
a second time.
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
    """The judges of a run; create it with `open`."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = tuple(judges)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, settings: Mapping[str, JudgeConfig], *, logs: Path, is_patient: bool = True
    ) -> AsyncIterator[Judges]:
        """Open all judges. At the end of the block, their connections and processes are closed.

        If `is_patient`, calls wait for judges that do not answer. Raises ConfigError if a judge's key is not in the
        environment.
        """
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
        """Return the components that all judges give to a completion, by judge. Raises ScorerError if a judge gives no
        value."""
        found = await asyncio.gather(*(judge.value(asked) for judge in self._judges), return_exceptions=True)
        values = {}
        for judge, value in zip(self._judges, found, strict=True):
            if isinstance(value, BaseException):
                raise value
            values[judge.name] = value
        return values

    @property
    def absent(self) -> dict[str, str]:
        """Return why judges do not answer, by the judge's name. Empty if all judges answer."""
        return {judge.name: judge.absence.reason for judge in self._judges if judge.absence.reason}

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Counters of each judge since it was opened, by the judge's name, then by the field names of `Counts`."""
        return {judge.name: asdict(judge.counts) for judge in self._judges}


def secrets_of(settings: Mapping[str, JudgeConfig]) -> tuple[str, ...]:
    """Return the judges' API keys, which no log may contain. Raises ConfigError if a key is not in the environment."""
    return tuple(key_of(name, one) for name, one in settings.items() if isinstance(one, LlmJudgeConfig))
