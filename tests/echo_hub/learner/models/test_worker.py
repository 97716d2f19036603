"""The worker's commands, without a pipe: order, fairness, and models that do not influence each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks.harness.plain_losses import ModelsBench, make_datum
from echo_hub.learner.batch import PackedInputs
from echo_hub.learner.models import frames, prompts
from echo_hub.learner.models import worker as worker_module
from echo_hub.learner.models.data import PackedRows
from echo_hub.learner.models.prompts import PromptJob
from echo_hub.learner.models.training import TrainedModel
from echo_hub.learner.models.worker import DRAW, TRAIN, ModelWorker
from echo_hub.learner.policy import Policy
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, ForwardBackward, LoraWish, LossFunction, PromptLogprobs
from echo_shared.process.child import Frame
from tests.echo_hub.learner.models.conftest import Answers, read_bytes, run

MakeWorker = Callable[[], tuple[ModelWorker, Answers]]
STEP = asdict(AdamStep(learning_rate=1e-2))


def a_pass(
    seed: int, *, loss: LossFunction = LossFunction.CROSS_ENTROPY, count: int = 4, vocab_size: int = 99
) -> Frame:
    rng = np.random.default_rng(seed)
    data = tuple(make_datum(rng, int(rng.integers(4, 40)), loss, vocab_size=vocab_size) for _ in range(count))
    return frames.pack_pass(ForwardBackward(data=data, loss=loss))


def a_draw(call: int, *, adapter: Path | None = None, **changes: Any) -> Frame:
    job = {
        "prompt_ids": np.array([3, 4, 5], np.int32),
        "num_samples": 2,
        "first_index": 0,
        "adapter": None if adapter is None else str(adapter),
        "temperature": 1.0,
        "max_tokens": 6,
        "stop_ids": [1],
        "stop_strings": [],
        "seed": 4,
    }
    return {"call": call, "command": "draw", **job, **changes}


def create(worker: ModelWorker, model_id: str, **wish: Any) -> None:
    worker.take({"call": 1, "command": "create", "model_id": model_id, "wish": asdict(LoraWish(**wish))})


def training(model_id: str, steps: int, *, seed: int = 0) -> list[Frame]:
    """Return the commands for `steps` training steps of this model, with two passes (`forward_backward`) before each
    step.
    """
    found: list[Frame] = []
    for step in range(steps):
        for number in range(2):
            found.append({"command": "forward_backward", "model_id": model_id, **a_pass(seed + 2 * step + number)})
        found.append({"command": "optim_step", "model_id": model_id, "step": STEP})
    return [{"call": 10 + number, **frame} for number, frame in enumerate(found)]


def save(worker: ModelWorker, model_id: str, directory: Path) -> dict[str, bytes]:
    worker.take({"call": 2, "command": "save", "model_id": model_id, "directory": str(directory)})
    run(worker)
    return read_bytes(directory)


def test_a_model_has_the_same_bits_alone_and_among_others(make_worker: MakeWorker, tmp_path: Path) -> None:
    """The models of two tenants, with adapters of different ranks, train by turns, one micro-batch each, while the same
    process samples. Each ends with the bits that it has after training alone."""
    alone = {}
    for model_id, rank in (("a", 4), ("b", 7)):
        worker, answers = make_worker()
        create(worker, model_id, rank=rank, seed=rank)
        for frame in training(model_id, 3, seed=100 * rank):
            worker.take(frame)
        run(worker)
        assert not [frame for frame in answers.frames if frame["kind"] == "error"]
        alone[model_id] = save(worker, model_id, tmp_path / f"{model_id}-alone")
    worker, answers = make_worker()
    create(worker, "a", rank=4, seed=4)
    create(worker, "b", rank=7, seed=7)
    for of_a, of_b in zip(training("a", 3, seed=400), training("b", 3, seed=700), strict=True):
        worker.take(of_a)
        worker.take(of_b)
        worker.take(a_draw(1_000 + of_a["call"]))
        worker.work()
    run(worker)
    assert sum(frame["kind"] == "sample" for frame in answers.frames) == 2 * 9
    for model_id, files in alone.items():
        assert save(worker, model_id, tmp_path / model_id) == files


def test_a_model_without_a_seed_follows_from_its_id(make_worker: MakeWorker, tmp_path: Path) -> None:
    saved = []
    for number, model_id in enumerate(("a", "a", "b")):
        worker, _ = make_worker()
        create(worker, model_id, rank=2)
        saved.append(save(worker, model_id, tmp_path / str(number))["adapter_model.safetensors"])
    assert saved[0] == saved[1] != saved[2]


class Clock:
    """A scripted clock that advances only with each unit of work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent = {TRAIN: 0.0, DRAW: 0.0}

    def perf_counter(self) -> float:
        return self.now

    def takes(self, kind: str, seconds: float, work: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            self.now += seconds
            self.spent[kind] += seconds
            return work()

        return timed


def test_drawing_and_training_share_the_time(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test one micro-batch takes thirty times as long as one token of all completions."""
    worker, answers = make_worker()
    create(worker, "a", rank=2, seed=0)
    run(worker)
    for frame in training("a", 5):
        worker.take(frame)
    for call in range(1_000, 1_020):
        worker.take(a_draw(call, num_samples=1, max_tokens=60, stop_ids=[]))
    clock = Clock()
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(worker, "_train", clock.takes(TRAIN, 3.0, worker._train))
    monkeypatch.setattr(worker._sampler, "step", clock.takes(DRAW, 0.1, worker._sampler.step))
    while worker._queues and worker._sampler.has_work:
        worker.work()
        assert abs(clock.spent[TRAIN] - clock.spent[DRAW]) < 3.2
    assert min(clock.spent.values()) > 4
    run(worker)
    assert len(answers.of(10)) == 1 and [frame["kind"] for frame in answers.of(1_000)] == ["sample", "result"]


def test_a_short_request_does_not_wait_for_another_models_long_pass(make_worker: MakeWorker) -> None:
    worker, answers = make_worker()
    create(worker, "long", rank=2, seed=0)
    create(worker, "short", rank=2, seed=0)
    run(worker)
    worker.take({"call": 5, "command": "forward_backward", "model_id": "long", **a_pass(0, count=60)})
    for _ in range(3):
        worker.work()
    worker.take({"call": 6, "command": "forward_backward", "model_id": "short", **a_pass(1, count=1)})
    run(worker)
    assert [frame["call"] for frame in answers.frames[-2:]] == [6, 5]


def test_a_failed_command_changes_nothing_and_the_next_ones_run(make_worker: MakeWorker, tmp_path: Path) -> None:
    worker, answers = make_worker()
    create(worker, "a", rank=2, seed=0)
    before = save(worker, "a", tmp_path / "before")
    bad = a_pass(0, loss=LossFunction.PPO)
    del bad["data"][0]["loss_inputs"]["advantages"]
    commands: list[Frame] = [
        {"command": "forward_backward", "model_id": "a", **bad},
        {"command": "forward_backward", "model_id": "a", **a_pass(0), "config": {"beta": 1.0}},
        {"command": "optim_step", "model_id": "a", "step": {**STEP, "beta1": 1.5}},
        {"command": "optim_step", "model_id": "unknown", "step": STEP},
        {"command": "load", "model_id": "a", "directory": str(tmp_path / "nothing"), "optimizer": True},
        {"command": "create", "model_id": "b", "wish": asdict(LoraWish(attention=False, mlp=False, seed=0))},
        {"command": "create", "model_id": "b", "wish": asdict(LoraWish(rank=0, seed=0))},
        {"command": "dance", "model_id": "a"},
    ]
    for number, frame in enumerate(commands, 10):
        worker.take({"call": number, **frame})
    changed: list[dict[str, Any]] = [{"max_tokens": 10**6}, {"prompt_ids": np.array([10**6], np.int32)}]
    for number, changes in enumerate(changed, 30):
        worker.take(a_draw(number, **changes))
    run(worker)
    for number in (*range(10, 18), 30, 31):
        (answer,) = answers.of(number)
        assert answer["kind"] == "error", number
    refused = frames.unpack_error(answers.of(10)[0])
    assert isinstance(refused, Refusal) and refused.param == "advantages"
    assert save(worker, "a", tmp_path / "after") == before


def test_weights_of_another_rank_are_refused_by_a_model(make_worker: MakeWorker, tmp_path: Path) -> None:
    worker, answers = make_worker()
    create(worker, "a", rank=2, seed=0)
    create(worker, "b", rank=3, seed=0)
    saved = save(worker, "a", tmp_path / "a")
    for call, model_id in ((20, "b"), (21, "new")):
        load = {"model_id": model_id, "directory": str(tmp_path / "a"), "optimizer": True}
        worker.take({"call": call, "command": "load", **load})
    run(worker)
    assert [answers.of(call)[0]["kind"] for call in (20, 21)] == ["error", "result"]
    assert save(worker, "new", tmp_path / "new") == saved


def test_a_dropped_gradient_is_not_used(make_worker: MakeWorker, tmp_path: Path) -> None:
    saved = []
    for number, spoilt in enumerate((False, True)):
        worker, _ = make_worker()
        create(worker, "a", rank=2, seed=0)
        if spoilt:
            worker.take({"call": 3, "command": "forward_backward", "model_id": "a", **a_pass(9)})
            worker.take({"call": 4, "command": "drop_gradient", "model_id": "a"})
        for frame in training("a", 1):
            worker.take(frame)
        saved.append(save(worker, "a", tmp_path / str(number)))
    assert saved[0] == saved[1]


def test_forgotten_models_are_gone(make_worker: MakeWorker) -> None:
    worker, answers = make_worker()
    create(worker, "a", rank=2, seed=0)
    for call, command in ((5, "forget"), (6, "forget"), (7, "drop_gradient")):
        worker.take({"call": call, "command": command, "model_id": "a"})
    run(worker)
    assert [answers.of(call)[0]["kind"] for call in (5, 6, 7)] == ["result", "result", "error"]


def test_prompts_of_one_adapter_are_computed_together(
    make_worker: MakeWorker, bench: ModelsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, answers = make_worker()
    passes: list[int] = []
    states = bench.policy.predicting_states

    def counted(batch: PackedInputs) -> Tensor:
        assert isinstance(batch, PackedRows)
        passes.append(len(batch.lengths))
        return states(batch)

    monkeypatch.setattr(bench.policy, "predicting_states", counted)
    question = {"command": "prompt_logprobs", "adapter": None, "top_k": 0, "target_ids": None}
    for call in range(10, 16):
        worker.take({"call": call, **question, "prompt_ids": np.arange(20, dtype=np.int32)})
    worker.take({"call": 0, "command": "cancel", "of": 15})
    run(worker)
    assert passes == [3, 2] and not answers.of(15)
    assert all(len(answers.of(call)[0]["logprobs"]) == 20 for call in range(10, 15))
    wrong = {"target_ids": np.zeros((3, 2), np.int32), "prompt_ids": np.arange(20, dtype=np.int32)}
    worker.take({"call": 20, **question, **wrong})
    worker.take({"call": 21, **question, "top_k": 10**9, "prompt_ids": np.arange(20, dtype=np.int32)})
    worker.take({"call": 22, **question, "adapter": "/nowhere", "prompt_ids": np.arange(20, dtype=np.int32)})
    run(worker)
    assert [answers.of(call)[0]["kind"] for call in (20, 21, 22)] == ["error"] * 3


def test_too_little_memory_fails_only_its_own_request(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that do not fit together are computed in smaller parts."""
    worker, answers = make_worker()
    compute, sizes = prompts.prompt_logprobs, list[int]()

    def limited(policy: Policy, jobs: Sequence[PromptJob]) -> list[PromptLogprobs]:
        sizes.append(sum(len(job.prompt_ids) for job in jobs))
        if sizes[-1] > 20:
            raise MemoryError("20 tokens fit")
        return compute(policy, jobs)

    monkeypatch.setattr(worker_module, "prompt_logprobs", limited)
    question = {"command": "prompt_logprobs", "adapter": None, "top_k": 0, "target_ids": None}
    for call, count in enumerate((10, 10, 10, 10, 30), 10):
        worker.take({"call": call, **question, "prompt_ids": np.arange(count, dtype=np.int32)})
    run(worker)
    assert [answers.of(call)[0]["kind"] for call in range(10, 15)] == ["result"] * 4 + ["error"]
    assert sizes == [40, 20, 20, 30]

    def full(_model: TrainedModel, _step: AdamStep) -> dict[str, float]:
        raise MemoryError("no space for moments")

    create(worker, "a", rank=2, seed=0)
    monkeypatch.setattr(TrainedModel, "step", full)
    worker.take({"call": 20, "command": "optim_step", "model_id": "a", "step": STEP})
    worker.take({"call": 21, "command": "drop_gradient", "model_id": "a"})
    run(worker)
    assert "too little memory" in answers.of(20)[0]["what"] and answers.of(21)[0]["kind"] == "result"
