"""The process that computes tenants' models: the commands that it takes, and its restarts after it dies."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.requests import AdamStep, ForwardBackward, LoraWish, PassResult, PromptLogprobs, Sample
from echo_shared.errors import EchoError
from echo_shared.process.backoff import backoff_s
from echo_shared.process.child import ChildExited

log = logging.getLogger(__name__)

RESTART_LIMIT_S: Final = 30.0
"""Longest wait before the process is started again, in seconds."""


class ModelComputer(Protocol):
    """A process that holds models, with their gradients and optimizers, in memory. Every call raises ChildExited if the
    process has died, and Refusal or LearnerError if the request fails: see `echo_hub.learner.models.process`."""

    async def stop(self) -> None: ...

    async def create(self, model_id: str, wish: LoraWish) -> None: ...

    async def forget(self, model_id: str) -> None: ...

    def holds(self, model_id: str) -> bool: ...

    async def forward_backward(self, model_id: str, request: ForwardBackward) -> PassResult: ...

    async def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]: ...

    async def drop_gradient(self, model_id: str) -> None: ...

    async def save(self, model_id: str, directory: Path) -> None: ...

    async def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Create the model in the process from `directory`, or replace it. Its gradient is empty."""
        ...

    async def export(self, model_id: str, directory: Path) -> None: ...

    def draw(self, job: DrawJob, adapter: Path | None) -> AsyncIterator[DrawnPiece | Sample]: ...

    async def prompt_logprobs(
        self,
        prompt_ids: NDArray[np.int32],
        adapter: Path | None,
        *,
        top_k: int = 0,
        target_ids: NDArray[np.int32] | None = None,
    ) -> PromptLogprobs: ...


class PromptScorer(Protocol):
    """Nodes that compute the log-probabilities of prompts. Implemented by `echo_hub.verify.scores_by_nodes`."""

    async def logprobs(self, prompt_ids: NDArray[np.int32], policy_version: int) -> NDArray[np.float32] | None:
        """Return the log-probabilities of all prompt tokens but the first, in nats. None: no node can compute them, so
        the hub must."""
        ...


class ComputerStarter(Protocol):
    async def start(self) -> ModelComputer:
        """Start the process. Raises EchoError or ChildExited."""
        ...


class ComputerHost:
    """Starts the process at its first use, and again each time it dies."""

    def __init__(self, starter: ComputerStarter, *, first_wait_s: float = 1.0) -> None:
        self.trouble = ""
        """Why the last start of the process failed; "" = it runs, or was not needed yet."""
        self._starter = starter
        self._first_wait_s = first_wait_s
        self._computer: ModelComputer | None = None
        self._starting: asyncio.Task[ModelComputer] | None = None
        """The newest start. It is a task of its own, so a caller that is cancelled does not end it. Otherwise, clients
        that give up sooner than a large model is loaded would end every start."""

    async def get(self) -> ModelComputer:
        """Return the running process. If none runs, repeat starts until one succeeds. Cancelling stops no start."""
        if self._computer is not None:
            return self._computer
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._started(), name="models-start")
        return await asyncio.shield(self._starting)

    async def _started(self) -> ModelComputer:
        attempt = 0
        while True:
            try:
                self._computer = await self._starter.start()
            except (EchoError, ChildExited, OSError) as error:
                self.trouble = f"The process for models does not start: {error}"
                log.error("%s", self.trouble)
                wait = backoff_s(attempt, random.random(), first_s=self._first_wait_s, limit_s=RESTART_LIMIT_S)
                await asyncio.sleep(wait)
                attempt += 1
            else:
                self.trouble = ""
                return self._computer

    def running(self) -> ModelComputer | None:
        return self._computer

    async def lost(self, computer: ModelComputer) -> None:
        """Note that a call of this process has raised ChildExited."""
        if computer is self._computer:
            log.warning("the process for tenants' models has died and is started again")
            self._computer = None
            await computer.stop()

    async def stop(self) -> None:
        """End the process, or its start. No caller may wait for the process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._computer is not None:
            computer, self._computer = self._computer, None
            await computer.stop()
