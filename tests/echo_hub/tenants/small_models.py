"""A process for models that needs no torch: each model is a vector of eight weights.

It keeps the rules of `ModelComputer`: gradients add up, a step consumes them, and everything in memory is gone when it
dies. Only requests decide its numbers, so tests can compare two histories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, ForwardBackward, LoraWish, PassResult, PromptLogprobs, Sample
from echo_shared.process.child import ChildExited
from echo_shared.sampling.draws import uniforms

WIDTH = 8
BAD_TOKEN = 666
"""Token that makes a forward_backward pass fail: the process refuses it."""
SLOW_TOKEN = 665
"""Token that makes a forward_backward pass wait until `passes_go_on` is set."""
DEADLY_TOKEN = 667
"""Token that makes a forward_backward pass kill the process."""
HELD_TOKEN = 668
"""Token in a prompt whose sample is never drawn: the job ends when it is cancelled."""
TOP_TOKEN = 50


def exited() -> ChildExited:
    return ChildExited("models", returncode=-9, log=Path("models.log"))


@dataclass
class SmallModel:
    weights: NDArray[np.float64]
    gradient: NDArray[np.float64] = field(default_factory=lambda: np.zeros(WIDTH))
    moment: NDArray[np.float64] = field(default_factory=lambda: np.zeros(WIDTH))
    steps: int = 0


class SmallModels:
    """One life of the process, from its start to its death."""

    def __init__(self) -> None:
        self.models: dict[str, SmallModel] = {}
        self.calls: list[tuple[str, str]] = []
        self.is_dead = False
        self.dies_before: str = ""
        """Name of the call at which the process dies."""
        self.dies_after: str = ""
        self.draws_go_on = asyncio.Event()
        self.draws_go_on.set()
        self.passes_go_on = asyncio.Event()
        self.num_held = 0
        """Number of jobs with HELD_TOKEN that are being drawn now."""

    async def stop(self) -> None:
        self.is_dead = True

    def holds(self, model_id: str) -> bool:
        return not self.is_dead and model_id in self.models

    async def create(self, model_id: str, wish: LoraWish) -> None:
        self._call("create", model_id)
        assert wish.seed is not None
        self.models[model_id] = SmallModel(np.arange(WIDTH) + float(wish.seed % 97))

    async def forget(self, model_id: str) -> None:
        self._call("forget", model_id)
        del self.models[model_id]

    async def forward_backward(self, model_id: str, request: ForwardBackward) -> PassResult:
        self._call("forward_backward", model_id)
        model = self.models[model_id]
        ids = np.concatenate([datum.input_ids for datum in request.data])
        if DEADLY_TOKEN in ids:
            self._die()
        if SLOW_TOKEN in ids:
            await self.passes_go_on.wait()
            if self.is_dead:
                raise exited()
        logprobs = tuple((-0.01 * datum.input_ids * model.weights[0]).astype(np.float32) for datum in request.data)
        if not request.forward_only:
            model.gradient += np.bincount(ids % WIDTH, minlength=WIDTH) * (1.0 + model.weights / 7.0)
        if BAD_TOKEN in ids:
            raise Refusal(RefusalKind.INVALID, "This token is unknown.", got=str(BAD_TOKEN), do="Use another.")
        await asyncio.sleep(0)
        self._after("forward_backward")
        return PassResult(logprobs=logprobs, metrics={"loss:sum": float(model.gradient.sum())})

    async def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]:
        self._call("optim_step", model_id)
        model = self.models[model_id]
        model.moment = step.beta1 * model.moment + model.gradient
        model.weights = model.weights - step.learning_rate * model.moment
        model.gradient = np.zeros(WIDTH)
        model.steps += 1
        self._after("optim_step")
        return {"step:sum": float(model.steps)}

    async def drop_gradient(self, model_id: str) -> None:
        self._call("drop_gradient", model_id)
        self.models[model_id].gradient = np.zeros(WIDTH)

    async def save(self, model_id: str, directory: Path) -> None:
        self._call("save", model_id)
        model = self.models[model_id]
        directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
        np.savez(directory / "model.npz", weights=model.weights, moment=model.moment, steps=model.steps)
        self._after("save")

    async def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        self._call("load", model_id)
        with np.load(directory / "model.npz") as saved:
            model = self.models[model_id] = SmallModel(saved["weights"])
            if optimizer:
                model.moment, model.steps = saved["moment"], int(saved["steps"])

    async def export(self, model_id: str, directory: Path) -> None:
        self._call("export", model_id)
        directory.mkdir(parents=True)  # noqa: ASYNC240
        np.save(directory / "adapter.npy", self.models[model_id].weights)
        self._after("export")

    async def draw(self, job: DrawJob, adapter: Path | None) -> AsyncIterator[DrawnPiece | Sample]:
        self._call("draw", job.request_id)
        shift = 0 if adapter is None else int(abs(np.load(adapter / "adapter.npy")).sum())
        await asyncio.sleep(0)
        await self.draws_go_on.wait()
        if HELD_TOKEN in job.prompt_ids:
            self.num_held += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_held -= 1
        for place, sequence_id in enumerate(job.sequence_ids):
            if self.is_dead:
                raise exited()
            u = uniforms(job.seed, job.first_index + place, job.max_tokens)
            ids = ((u * TOP_TOKEN).astype(np.int32) + shift) % TOP_TOKEN
            logprobs = -u.astype(np.float32)
            yield DrawnPiece(index=place, start=0, token_ids=ids[:1], logprobs=logprobs[:1])
            yield Sample(sequence_id=sequence_id, token_ids=ids, logprobs=logprobs, finish="length")

    async def prompt_logprobs(
        self,
        prompt_ids: NDArray[np.int32],
        adapter: Path | None,
        *,
        top_k: int = 0,
        target_ids: NDArray[np.int32] | None = None,
    ) -> PromptLogprobs:
        self._call("prompt_logprobs", "")
        logprobs = -prompt_ids.astype(np.float32)
        logprobs[0] = np.nan
        return PromptLogprobs(logprobs=logprobs)

    def _call(self, name: str, model_id: str) -> None:
        if self.is_dead:
            raise exited()
        if name == self.dies_before:
            self._die()
        self.calls.append((name, model_id))

    def _after(self, name: str) -> None:
        if name == self.dies_after:
            self._die()

    def _die(self) -> None:
        self.is_dead = True
        raise exited()


class SmallStarter:
    """Starts such processes, and keeps them so that a test can inspect them."""

    def __init__(self) -> None:
        self.lives: list[SmallModels] = []

    async def start(self) -> SmallModels:
        self.lives.append(SmallModels())
        return self.lives[-1]

    @property
    def current(self) -> SmallModels:
        return self.lives[-1]
