from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from echo_hub.learner.models.process import TenantModels
from echo_hub.learner.settings import LearnerSettings
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, Datum, ForwardBackward, LoraWish, LossFunction, Sample
from echo_shared.process.child import ChildExited
from tests.echo_hub.learner.models.conftest import read_bytes


def a_pass(seed: int, loss: LossFunction = LossFunction.CROSS_ENTROPY) -> ForwardBackward:
    rng = np.random.default_rng(seed)
    data = []
    for length in (7, 12, 5):
        ids = rng.integers(0, 40, length).astype(np.int32)
        data.append(
            Datum(
                input_ids=ids,
                loss_inputs={
                    "target_tokens": rng.integers(0, 40, length),
                    "weights": rng.normal(size=length).astype(np.float32),
                },
            )
        )
    return ForwardBackward(data=tuple(data), loss=loss)


def a_job(samples: int, *, max_tokens: int = 8, seed: int = 5) -> DrawJob:
    return DrawJob(
        request_id="r",
        tenant_id="t",
        prompt_ids=np.array([3, 4, 5], dtype=np.int32),
        sequence_ids=tuple(f"s{index}" for index in range(samples)),
        policy_version=0,
        temperature=1.0,
        max_tokens=max_tokens,
        stop_ids=(1,),
        stop_strings=(),
        seed=seed,
        checked=False,
    )


async def first_item(stream: AsyncIterator[DrawnPiece | Sample]) -> DrawnPiece | Sample:
    return await anext(stream)


async def test_a_model_trains_and_is_drawn_from(settings: LearnerSettings, tmp_path: Path) -> None:
    process = await TenantModels.start(settings, tmp_path)
    try:
        assert not process.holds("a")
        await process.create("a", LoraWish(rank=4, seed=1))
        assert process.holds("a")
        passed, metrics = await asyncio.gather(
            process.forward_backward("a", a_pass(1)), process.optim_step("a", AdamStep(learning_rate=1e-2))
        )
        assert [len(part) for part in passed.logprobs] == [7, 12, 5]
        assert metrics["grad_norm:mean"] > 0
        again = await process.forward_backward("a", a_pass(1))
        assert again.metrics["loss:sum"] < passed.metrics["loss:sum"]
        await process.export("a", tmp_path / "v1")
        drawn = [item async for item in process.draw(a_job(4), tmp_path / "v1") if isinstance(item, Sample)]
        assert sorted(sample.sequence_id for sample in drawn) == ["s0", "s1", "s2", "s3"]
        found = await process.prompt_logprobs(np.array([3, 4, 5], dtype=np.int32), tmp_path / "v1", top_k=2)
        assert np.isnan(found.logprobs[0]) and found.topk_ids is not None and found.topk_ids.shape == (3, 2)
        with pytest.raises(Refusal) as refused:
            await process.forward_backward("a", a_pass(1, LossFunction.PPO))
        assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, "logprobs")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ChildExited):
            await process.forward_backward("a", a_pass(1))
        with pytest.raises(ChildExited):
            await process.optim_step("a", AdamStep())
        assert not process.holds("a")
    finally:
        await process.stop()


async def test_after_a_kill_the_same_requests_give_the_same_bits(settings: LearnerSettings, tmp_path: Path) -> None:
    """The first process is killed within its third step; the second process resumes from the checkpoint of the
    first.
    """
    step = AdamStep(learning_rate=1e-2)
    first = await TenantModels.start(settings, tmp_path)
    try:
        for model_id in ("whole", "killed"):
            await first.create(model_id, LoraWish(rank=4, seed=1))
        for number in range(3):
            await first.forward_backward("whole", a_pass(number))
            await first.optim_step("whole", step)
        await first.save("whole", tmp_path / "whole")
        await first.forward_backward("killed", a_pass(0))
        await first.optim_step("killed", step)
        await first.save("killed", tmp_path / "checkpoint")
        await first.forward_backward("killed", a_pass(1))
        waiting = [asyncio.create_task(first.forward_backward("killed", a_pass(number))) for number in range(3)]
        drawing = asyncio.create_task(first_item(first.draw(a_job(2, max_tokens=100), None)))
        await asyncio.sleep(0)
        os.kill(first.pid, signal.SIGKILL)
        ends = await asyncio.gather(*waiting, drawing, return_exceptions=True)
        assert sum(isinstance(end, ChildExited) for end in ends) >= 1
        assert first.ended is not None
    finally:
        await first.stop()
    second = await TenantModels.start(settings, tmp_path)
    try:
        await second.load("killed", tmp_path / "checkpoint", optimizer=True)
        for number in (1, 2):
            await second.forward_backward("killed", a_pass(number))
            await second.optim_step("killed", step)
        await second.save("killed", tmp_path / "killed")
        whole, killed = (read_bytes(tmp_path / name) for name in ("whole", "killed"))
        assert whole == killed
        taken = [item async for item in second.draw(a_job(1, max_tokens=4), None)]
        assert isinstance(taken[-1], Sample) and len(taken[-1].token_ids) <= 4
        stream = second.draw(a_job(8, max_tokens=200), None)
        await anext(aiter(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await second.forward_backward("killed", a_pass(1))).metrics["loss:sum"] != 0
    finally:
        await second.stop()
