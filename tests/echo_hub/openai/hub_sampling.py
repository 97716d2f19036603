"""A tenants' service that samples at once with the hub's own sampler and the built-in base, without a store or nodes.

`run@1` is a random adapter. Tests can delay the drawing (`hold`), and see which requests were made and cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.stop_strings import StopStrings
from echo_hub.talking.settings import talking_settings
from echo_hub.tenants.drawing import DrawnPiece
from echo_hub.tenants.outcomes import OfferedModel, TenantCheckpoint
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Sample, SampleResult, SamplingWish
from echo_hub.tenants.service import TenantService
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_draws import draw, most_likely
from echo_shared.sampling.torch_sampler import Batch

CONFIG = HubConfig(learner=LearnerConfig(threads=1), training=TrainingConfig(lora_rank=2))
BASE = resolve_base("builtin:tiny")
UNCHOSEN = 7
"""Seed that the service uses for requests without a seed."""
_ONE_AT_A_TIME = threading.Lock()
"""All requests share one model, which computes with one adapter at a time."""


@dataclass(eq=False)
class HubSampling(TenantService):
    codec: PromptCodec
    policy: Policy
    adapter: Path
    refusal: Exception | None = None
    """Error that every request raises; None = none."""
    refusal_after_tokens: int = 0
    """Number of tokens after which `refusal` is raised; 0 = at once."""
    hold: asyncio.Event | None = None
    """Event that must be set before drawing begins; None = drawing begins at once."""
    reason: str = ""
    """Why samples wait, as the service would tell a client."""
    asked: list[tuple[str, str, NDArray[np.int32], SamplingWish]] = field(default_factory=list)
    num_cancelled: int = 0

    @classmethod
    def open(cls, directory: Path) -> HubSampling:
        codec = PromptCodec.load(BASE)
        policy = Policy.load(talking_settings(CONFIG, base_dir=BASE, codec=codec, device="cpu"))
        torch.manual_seed(1)
        weights = {name: 0.3 * torch.randn_like(weight) for name, weight in policy.parameters.items()}
        policy.save_adapter(directory, weights)
        return cls(codec=codec, policy=policy, adapter=directory)

    def offered(self) -> tuple[OfferedModel, ...]:
        return (OfferedModel(name="Qwen/Qwen3-8B", max_context_length=self.codec.context_tokens, trainable=True),)

    async def checkpoints(self, tenant_id: str, model_id: str | None = None) -> tuple[TenantCheckpoint, ...]:
        return ()

    def waiting_reason(self) -> str:
        return self.reason

    async def resolve(self, tenant_id: str, model: str) -> str:
        match model:
            case "run" | "run@latest" | "run@1":
                return "run@1"
            case "base" | "Qwen/Qwen3-8B":
                return "base"
        raise Refusal(RefusalKind.NOT_FOUND, "There is no such model.", got=model, param="model")

    async def sample_at_once(
        self, tenant_id: str, *, model: str, prompt_ids: NDArray[np.int32], wish: SamplingWish
    ) -> AsyncGenerator[DrawnPiece | Sample | SampleResult]:
        self.asked.append((tenant_id, model, prompt_ids, wish))
        if self.refusal is not None and not self.refusal_after_tokens:
            raise self.refusal
        queue, loop, stopped = (
            asyncio.Queue[DrawnPiece | Sample | None](),
            asyncio.get_running_loop(),
            threading.Event(),
        )

        def work() -> None:
            with _ONE_AT_A_TIME:
                for item in self._drawn(model, prompt_ids, wish):
                    if stopped.is_set():
                        break
                    loop.call_soon_threadsafe(queue.put_nowait, item)
            loop.call_soon_threadsafe(queue.put_nowait, None)

        samples: list[Sample] = []
        try:
            if self.hold is not None:
                await self.hold.wait()
            drawing = loop.run_in_executor(None, work)
            num_tokens = 0
            while (item := await queue.get()) is not None:
                yield item
                samples += [item] if isinstance(item, Sample) else []
                num_tokens += len(item.token_ids) if isinstance(item, DrawnPiece) else 0
                if self.refusal is not None and num_tokens >= self.refusal_after_tokens:
                    raise self.refusal
            await drawing
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            stopped.set()
        yield SampleResult(samples=tuple(sorted(samples, key=lambda sample: sample.index)))

    def _drawn(self, model: str, prompt_ids: NDArray[np.int32], wish: SamplingWish) -> Iterator[DrawnPiece | Sample]:
        """Draw as the hub does: a piece for each token, then the sample. Stop strings cut a sample."""
        ends = self.codec.stop_ids
        stop_ids = ends if wish.stop_ids is None else (*ends, *wish.stop_ids) if wish.stop_ids else ()
        request = GroupRequest(
            lease_id=0,
            group_id=0,
            indices=tuple(range(wish.num_samples)),
            prompt_ids=prompt_ids,
            seed=UNCHOSEN if wish.seed is None else wish.seed,
            policy_version=0,
            temperature=wish.temperature or 1.0,
            max_tokens=wish.max_tokens or self.codec.context_tokens - len(prompt_ids),
            stop_ids=stop_ids,
        )
        batch = Batch(self.policy.model, width=wish.num_samples, choose=draw if wish.temperature else most_likely)
        strings, done = StopStrings(wish.stop_strings, self.codec), dict[int, FinishedRollout]()
        grown = {index: np.zeros(0, dtype=np.int32) for index in request.indices}
        holding = (
            self.policy.model.disable_adapter()
            if model == "base"
            else self.policy.holding(self.policy.read_adapter(self.adapter))
        )
        with holding, self.policy.autocast():
            for finished in batch.sample(iter([request])):
                for part in batch.news():
                    grown[part.index] = np.concatenate([grown[part.index], part.ids])
                    if strings.end(grown[part.index]) is None:
                        yield DrawnPiece(index=part.index, start=part.start, token_ids=part.ids, logprobs=part.logprobs)
                done |= {rollout.index: strings.finished(rollout) for rollout in finished}
                for rollout in finished:
                    yield _sample(done[rollout.index])


def _sample(rollout: FinishedRollout) -> Sample:
    return Sample(
        sequence_id=f"seq-{rollout.index}",
        token_ids=rollout.completion_ids,
        logprobs=rollout.behavior_logprobs,
        finish=rollout.finish_reason.value,
        index=rollout.index,
    )
