"""Runs the trials of the page "Try it", one at a time, in a separate process.

The first trial starts the process, which loads the base model. After `IDLE_S` without a trial, the process is ended to
free its memory. A trial that takes longer than `LIMIT_S` is stopped together with the process, because a
forward pass cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.try_page import MOST_TOKENS, PromptTrial, TrialRunningError, TriedReply, TryRequest
from echo_hub.learner import unquantized
from echo_hub.learner.environment import environment
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.talking.conversation import Conversation, TextStream
from echo_hub.talking.settings import adapter_for, newest_version, talking_settings
from echo_shared.errors import EchoError, LearnerError
from echo_shared.process.supervised import NO_HEARTBEAT, Command, SupervisedChild

log = logging.getLogger(__name__)

LIMIT_S: Final = 120.0
"""Longest time in seconds that one trial may sample."""
LOADING_S: Final = 900.0
"""Longest time in seconds for loading the base model."""
IDLE_S: Final = 300.0
KEPT: Final = 20
"""Number of newest trials that pages can still show."""
OFF: Final = "off"
STOPPED: Final = "Stopped by the operator."
_WORKER: Final = "echo_hub.talking.worker"


class Trials:
    """Begins, shows and stops the trials. `close` ends the process that samples."""

    def __init__(
        self,
        config: HubConfig,
        directory: RunDirectory,
        codec: PromptCodec,
        base_dir: Path,
        *,
        limit_s: float = LIMIT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._config = config
        self._directory = directory
        self._codec = codec
        self._base_dir = base_dir
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._trials: dict[int, PromptTrial] = {}
        self._running: tuple[PromptTrial, asyncio.Task[None]] | None = None
        self._child: SupervisedChild | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def off(self) -> str:
        is_off = self._config.server.try_device == OFF
        return 'This page is off: server.try_device = "off" in config.toml.' if is_off else ""

    @property
    def versions(self) -> Sequence[int]:
        return [0, *self._directory.adapter_versions()]

    @property
    def usual(self) -> TryRequest:
        newest = newest_version(self._directory)
        return TryRequest(
            prompt="",
            versions=(newest, 0) if newest else (0,),
            samples=2,
            temperature=self._config.sampling.temperature,
            max_tokens=min(self._config.sampling.max_tokens, MOST_TOKENS),
        )

    def find(self, number: int) -> PromptTrial | None:
        return self._trials.get(number)

    def begin(self, asked: TryRequest) -> PromptTrial:
        """Begin a trial. Raises TrialRunningError during another trial, and ConfigError for an unknown version or a
        prompt longer than the model's context.
        """
        if self._running is not None:
            raise TrialRunningError(
                f"Trial {self._running[0].number} is running, and only one can. It ends within {self._limit_s:.0f} s "
                "of sampling; you can stop it on its page."
            )
        adapters = {version: adapter_for(self._directory, version) for version in asked.versions}
        conversation = Conversation(self._codec)
        prompt_ids = conversation.prompt(asked.prompt)
        trial = PromptTrial(number=max(self._trials, default=0) + 1, request=asked)
        self._trials[trial.number] = trial
        for old in list(self._trials)[:-KEPT]:
            del self._trials[old]
        requests = {
            version: {
                "prompt_ids": prompt_ids,
                "adapter": "" if adapter is None else str(adapter),
                "samples": asked.samples,
                "temperature": asked.temperature,
                "max_tokens": conversation.room(prompt_ids, asked.max_tokens),
                "seed": secrets.randbelow(2**32),
            }
            for version, adapter in adapters.items()
        }
        if self._ending is not None:
            self._ending.cancel()
        task = asyncio.create_task(self._run(trial, requests), name=f"trial-{trial.number}")
        task.add_done_callback(partial(self._over, trial))
        self._running = trial, task
        return trial

    def stop(self, number: int) -> None:
        if self._running is not None and self._running[0].number == number:
            self._running[1].cancel()

    async def close(self) -> None:
        """End the process and the running trial, if any."""
        if self._running is not None:
            self._running[1].cancel()
            await asyncio.wait([self._running[1]])
        await self._end_process()
        if self._ending is not None:
            self._ending.cancel()

    async def _run(self, trial: PromptTrial, requests: dict[int, dict[str, object]]) -> None:
        """Carry out a trial. If an EchoError occurs, record it in the trial; raise all other errors."""
        try:
            child = await self._process()
            trial.state = "sampling"
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._limit_s):
                    for version, request in requests.items():
                        await self._sample(child, trial, version, request, began)
                trial.state = "done"
            except TimeoutError:
                await self._end_process()
                trial.state = "stopped"
                trial.detail = f"Stopped after {self._limit_s:.0f} s. Ask for fewer tokens or samples."
            trial.seconds = time.monotonic() - began
        except asyncio.CancelledError:
            await self._end_process()
            trial.state, trial.detail = "stopped", STOPPED
            raise
        except EchoError as error:
            log.warning("a trial failed: %s", error)
            await self._end_process()
            trial.state, trial.detail = "failed", str(error)

    def _over(self, trial: PromptTrial, task: asyncio.Task[None]) -> None:
        """Allow the next trial to begin. Runs also if the task was cancelled before it began."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a trial failed", exc_info=error)
            trial.state, trial.detail = "failed", "The hub's program failed; its log says how."
        elif not trial.is_over:
            trial.state, trial.detail = "stopped", STOPPED
        self._running = None
        self._ending = asyncio.get_running_loop().call_later(self._idle_s, self._end_when_idle)

    async def _sample(
        self, child: SupervisedChild, trial: PromptTrial, version: int, request: dict[str, object], began: float
    ) -> None:
        replies = [TriedReply() for _ in range(trial.request.samples)]
        streams = [TextStream(self._codec) for _ in replies]
        trial.replies[version] = replies
        await child.send(request)
        while not all(reply.finish for reply in replies):
            part = await child.receive(within_s=self._limit_s)
            reply, stream = replies[part["index"]], streams[part["index"]]
            stream.more(part["ids"], is_end=bool(part["finish"]))
            reply.text, reply.finish = stream.text, part["finish"]
            reply.num_tokens += len(part["ids"])
            trial.seconds = time.monotonic() - began

    async def _process(self) -> SupervisedChild:
        if self._child is not None:
            return self._child
        settings = talking_settings(
            self._config, base_dir=self._base_dir, codec=self._codec, device=self._config.server.try_device
        )
        module = (_WORKER,) if settings.learner.base_bits else unquantized.command(_WORKER)
        command = Command(
            module=module[0],
            arguments=tuple(module[1:]),
            name="trying",
            log=self._directory.root / "logs" / "trying.log",
            env={"HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment(settings.learner)},
        )
        child = await SupervisedChild.spawn(command, replace(NO_HEARTBEAT, ready_s=LOADING_S))
        self._child = child
        await child.open({"settings": settings.model_dump(mode="json")})
        if "failed" in child.ready:
            raise LearnerError("The base model cannot be loaded for a trial.", got=str(child.ready["failed"]))
        return child

    async def _end_process(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.stop()

    def _end_when_idle(self) -> None:
        if self._running is None:
            task = asyncio.create_task(self._end_process())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
