"""The hub's side of the process that trains tenants' models and draws from their adapters. Loads no torch.

Calls may overlap. The process executes calls of one model in sending order. Every await may be cancelled: the process
still executes the command, but a cancelled `draw` ends the drawing.

If the process ends, every call raises ChildExited and all models are lost. Start a new process and load the models.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.learner import unquantized
from echo_hub.learner.environment import environment
from echo_hub.learner.models import frames
from echo_hub.learner.process import LIMITS
from echo_hub.learner.settings import LearnerSettings
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.requests import AdamStep, ForwardBackward, LoraWish, PassResult, PromptLogprobs, Sample
from echo_shared.process.child import ChildExited, Frame
from echo_shared.process.supervised import Command, SupervisedChild

log = logging.getLogger(__name__)

WORKER: Final = "echo_hub.learner.models.serve"


class TenantModels:
    """The process that holds tenants' models; create it with `start`.

    Every call raises Refusal (the request is wrong), LearnerError or StorageError (it failed) or ChildExited (the
    process has ended).
    """

    def __init__(self, child: SupervisedChild, opened: Frame) -> None:
        self.vocab_size: int = opened["vocab_size"]
        self.context_tokens: int = opened["context_tokens"]
        """Largest number of tokens of a datum, or of a prompt and its completion."""
        self._child = child
        self._held: set[str] = set()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Frame | ChildExited]] = {}
        """For each call, the queue of its answers. It has no size limit, because a sample's answers hold little more
        than its tokens.
        """
        self._ended: ChildExited | None = None
        self._reader = asyncio.create_task(self._read(), name="models-reader")

    @classmethod
    async def start(cls, settings: LearnerSettings, run_dir: Path) -> TenantModels:
        """Start the process with the run's base; its log is `run_dir`/logs/models.log.

        `settings` are the run's. Adapter, temperature and optimizer follow from the tenants' requests instead.
        """
        module = (WORKER,) if settings.learner.base_bits else tuple(unquantized.command(WORKER))
        env = {**environment(settings.learner), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        log = run_dir / "logs" / "models.log"
        command = Command(module=module[0], arguments=module[1:], name="models", log=log, env=env)
        child = await SupervisedChild.spawn(command, LIMITS)
        await child.open({"settings": settings.model_dump(mode="json"), "beat_s": LIMITS.beat_s})
        if child.ready["kind"] == "error":
            await child.stop()
            raise frames.unpack_error(child.ready)
        return cls(child, child.ready)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> ChildExited | None:
        """Why the process has ended; None while it runs."""
        return self._ended

    def holds(self, model_id: str) -> bool:
        """Return True if the process runs and holds the model."""
        return self._ended is None and model_id in self._held

    async def create(self, model_id: str, wish: LoraWish) -> None:
        """Make a model. Without a seed, the adapter follows from the model's id. A model of that id is replaced."""
        await self._ask("create", model_id=model_id, wish=asdict(wish))
        self._held.add(model_id)

    async def forget(self, model_id: str) -> None:
        """Free a model's memory. Does nothing if the process does not hold the model."""
        self._held.discard(model_id)
        await self._ask("forget", model_id=model_id)

    async def forward_backward(self, model_id: str, request: ForwardBackward) -> PassResult:
        """Compute a pass. A failed pass leaves the model unchanged; `drop_gradient` drops the gradient of earlier
        passes.
        """
        return frames.unpack_result(await self._ask("forward_backward", model_id=model_id, **frames.pack_pass(request)))

    async def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]:
        answer = await self._ask("optim_step", model_id=model_id, step=asdict(step))
        metrics: Mapping[str, float] = answer["metrics"]
        return metrics

    async def drop_gradient(self, model_id: str) -> None:
        """Clear the gradient, without a step."""
        await self._ask("drop_gradient", model_id=model_id)

    async def save(self, model_id: str, directory: Path) -> None:
        """Write the model's files into `directory`: all of them or none. An existing directory is replaced."""
        await self._ask("save", model_id=model_id, directory=str(directory))

    async def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Create the model, or replace it, from the files that `save` wrote. Raises LearnerError if the files are
        damaged or belong to another base.
        """
        await self._ask("load", model_id=model_id, directory=str(directory), optimizer=optimizer)
        self._held.add(model_id)

    async def export(self, model_id: str, directory: Path) -> None:
        """Write the adapter in PEFT's layout, in the precision of published versions."""
        await self._ask("export", model_id=model_id, directory=str(directory))

    async def draw(self, job: DrawJob, adapter: Path | None) -> AsyncIterator[DrawnPiece | Sample]:
        """Draw all samples of a job with a published adapter, or with the base. Closing the iterator ends the drawing.

        Indices of pieces count the job's samples from 0.
        """
        fields = {
            "prompt_ids": job.prompt_ids,
            "num_samples": len(job.sequence_ids),
            "first_index": job.first_index,
            "adapter": None if adapter is None else str(adapter),
            "temperature": job.temperature,
            "max_tokens": job.max_tokens,
            "stop_ids": list(job.stop_ids),
            "stop_strings": list(job.stop_strings),
            "seed": job.seed,
        }
        number = await self._send("draw", **fields)
        over = False
        try:
            while True:
                frame = await self._next(number)
                if frame["kind"] == "result":
                    over = True
                    return
                index = frame["index"] - job.first_index
                if frame["kind"] == "piece":
                    yield DrawnPiece(
                        index=index, start=frame["start"], token_ids=frame["ids"], logprobs=frame["logprobs"]
                    )
                else:
                    yield Sample(
                        sequence_id=job.sequence_ids[index],
                        token_ids=frame["ids"],
                        logprobs=frame["logprobs"],
                        finish=frame["finish"],
                    )
        finally:
            del self._answers[number]
            if not over and self._ended is None:
                with suppress(ChildExited):
                    await self._child.send({"call": 0, "command": "cancel", "of": number})

    async def prompt_logprobs(
        self,
        prompt_ids: NDArray[np.int32],
        adapter: Path | None,
        *,
        top_k: int = 0,
        target_ids: NDArray[np.int32] | None = None,
    ) -> PromptLogprobs:
        """Return log-probabilities of a prompt at temperature 1: of its tokens, of the `top_k` likeliest tokens of each
        position, and of `target_ids` [N, K], whose row i is predicted from the tokens before i.
        """
        fields = {"prompt_ids": prompt_ids, "top_k": top_k, "target_ids": target_ids}
        answer = await self._ask("prompt_logprobs", adapter=None if adapter is None else str(adapter), **fields)
        return frames.unpack_logprobs(answer)

    async def stop(self) -> None:
        """End the process. Does nothing if the process has already ended."""
        await self._child.stop()
        await self._reader

    async def _ask(self, command: str, **fields: Any) -> Frame:
        number = await self._send(command, **fields)
        try:
            return await self._next(number)
        finally:
            del self._answers[number]

    async def _send(self, command: str, **fields: Any) -> int:
        if self._ended is not None:
            raise self._ended
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        try:
            await self._child.send({"call": number, "command": command, **fields})
        except BaseException:
            del self._answers[number]
            raise
        return number

    async def _next(self, number: int) -> Frame:
        frame = await self._answers[number].get()
        if isinstance(frame, ChildExited):
            raise frame
        if frame["kind"] == "error":
            raise frames.unpack_error(frame)
        return frame

    async def _read(self) -> None:
        """Read the child's frames until it ends. No other task reads them."""
        try:
            while True:
                frame = await self._child.receive()
                if frame["kind"] == "pieces":
                    for piece in frame["pieces"]:
                        self._give(piece["of"], {**piece, "kind": "piece"})
                elif frame["call"] == 0:
                    log.error("%s", frames.unpack_error(frame))
                else:
                    self._give(frame["call"], frame)
        except ChildExited as error:
            self._ended = error
            self._held.clear()
            for answers in self._answers.values():
                answers.put_nowait(error)

    def _give(self, number: int, frame: Frame) -> None:
        answers = self._answers.get(number)
        if answers is not None:
            answers.put_nowait(frame)
