"""The learner process: `python -m echo_hub.learner.worker`, driven by `echo_hub.learner.process`.

One command at a time, in order. Only one learner works in a run directory: it holds RUN/learner.lock, which the system
frees when the process dies. A command that is refused changes nothing (LearnerError); any other failure ends the
process, and the next one starts from the newest checkpoint.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from echo_hub.learner import checkpoint, frames
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.step import make_optimizer, train_step
from echo_shared import torch_sampler
from echo_shared.child import Frame, ParentPipe
from echo_shared.errors import EchoError, LearnerError
from echo_shared.sampling import GroupRequest

log = logging.getLogger(__name__)


class Worker:
    """Made by `open`; holds policy version `policy_version`."""

    def __init__(self, settings: LearnerSettings, run_dir: Path, policy: Policy, lock: FileLock) -> None:
        self._settings = settings
        self._checkpoints = run_dir / "checkpoints"
        self._policy = policy
        self._lock = lock  # Let go of, it would unlock.
        self._optimizer = make_optimizer(policy, settings.training)
        self.policy_version = 0
        self.metrics: Mapping[str, float] = {}

    @classmethod
    def open(cls, frame: Frame) -> Worker:
        """Locks the run directory, loads the base and the newest checkpoint, if there is one."""
        settings = LearnerSettings.model_validate(frame["settings"])
        run_dir = Path(frame["run_dir"])
        if settings.training.threads:
            torch.set_num_threads(settings.training.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        lock = _lock(run_dir, wait_s=settings.lock_wait_s)
        worker = cls(settings, run_dir, Policy.load(settings), lock)
        worker._resume()
        return worker

    def _resume(self) -> None:
        found = checkpoint.complete(self._checkpoints)
        if found:
            checkpoint.restore(found[0], self._policy, self._optimizer)
            self.policy_version, self.metrics = found[0].step, found[0].metrics

    def handle(self, frame: Frame) -> Iterator[Frame]:
        """The answer to a command: items, each of kind "item", and at last the result."""
        if frame["command"] == "train":
            metrics = self._train(frame["step"], frames.unpack_groups(frame["groups"]), frame["export_to"])
            yield {"kind": "result", "metrics": metrics}
        elif frame["command"] == "sample":
            for rollout in self._sample([frames.unpack_request(request) for request in frame["groups"]]):
                yield {"kind": "item", "rollout": rollout}
            yield {"kind": "result"}
        elif frame["command"] == "evaluate":
            yield {"kind": "result", "completions": self._evaluate(frame["prompts"], frame["base"], frame["adapter"])}
        else:
            raise LearnerError("The learner does not know this command.", got=frame["command"])

    def _train(self, step: int, groups: Sequence[TrainingGroup], export_to: str | None) -> dict[str, float]:
        if step != self.policy_version + 1:
            raise LearnerError(
                "This step does not follow the version that the learner holds.",
                got=f"step {step}, version {self.policy_version}",
                do=f"Train step {self.policy_version + 1}.",
            )
        _check_groups(groups)
        training = self._settings.training
        metrics = train_step(self._policy, self._optimizer, groups, training)
        self.policy_version, self.metrics = step, metrics
        # In this order: a step that is in a checkpoint has been exported, so that a crash between the two repeats it.
        if export_to is not None:
            with checkpoint.atomic_directory(Path(export_to)) as directory:
                self._policy.save_adapter(directory)
        if step % training.checkpoint_every == 0 or step == training.steps:
            checkpoint.save(
                self._checkpoints,
                self._policy,
                self._optimizer,
                step=step,
                metrics=metrics,
                kept=training.checkpoints_kept,
            )
        return metrics

    def _sample(self, groups: Sequence[GroupRequest]) -> Iterator[Frame]:
        for group in groups:
            if group.policy_version != self.policy_version:
                raise LearnerError(
                    "The learner samples from the version that it holds, and from no other.",
                    got=f"version {group.policy_version} asked for, {self.policy_version} held",
                )
        sizes = [len(group.indices) * (len(group.prompt_ids) + group.max_tokens) for group in groups]
        for part in _parts(sizes, self._settings.training.micro_batch_tokens):
            with self._policy.autocast():
                for rollout in torch_sampler.sample_groups(self._policy.model, groups[part]):
                    yield frames.pack_rollout(rollout)

    def _evaluate(
        self, prompts: Sequence[NDArray[np.int32]], base: bool, adapter: str | None
    ) -> list[NDArray[np.int32]]:
        if base:
            with self._policy.model.disable_adapter():
                return self._complete(prompts)
        if adapter is not None:
            with self._policy.holding(Path(adapter)):
                return self._complete(prompts)
        return self._complete(prompts)

    def _complete(self, prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        settings = self._settings
        sizes = [len(prompt) + settings.max_tokens for prompt in prompts]
        completions: list[NDArray[np.int32]] = []
        for part in _parts(sizes, settings.training.micro_batch_tokens):
            with self._policy.autocast():
                completions += torch_sampler.greedy(
                    self._policy.model, prompts[part], max_tokens=settings.max_tokens, stop_ids=settings.stop_ids
                )
        return completions


def _lock(run_dir: Path, *, wait_s: float) -> FileLock:
    lock = FileLock(run_dir / "learner.lock")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as error:
        raise LearnerError(
            "Another learner works in this run directory.",
            got=f"{run_dir}, still held after {wait_s:.0f} s",
            do="End that process, or the hub that started it, and start again.",
        ) from error
    return lock


def _check_groups(groups: Sequence[TrainingGroup]) -> None:
    if not groups:
        raise LearnerError("A step needs at least one group.", got="none")
    for position, group in enumerate(groups):
        if not len(group.prompt_ids) or not group.rollouts:
            raise LearnerError("A group needs a prompt and rollouts.", got=f"group {position} of the batch")
        for rollout in group.rollouts:
            tokens, logprobs = len(rollout.completion_ids), len(rollout.behavior_logprobs)
            if not tokens or tokens != logprobs or not np.isfinite([*rollout.behavior_logprobs, rollout.reward]).all():
                raise LearnerError(
                    "A rollout needs tokens, one finite log-probability for each, and a finite reward.",
                    got=f"{tokens} tokens, {logprobs} log-probabilities, reward {rollout.reward} "
                    f"in group {position} of the batch",
                )


def _parts(sizes: Sequence[int], budget: int) -> Iterator[slice]:
    """Slices of neighbours whose sizes add up to `budget` at most; what is larger by itself goes alone."""
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and total + size > budget:
            yield slice(start, position)
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def serve(pipe: ParentPipe) -> int:
    """Answers commands until the parent is gone; the exit status."""
    worker: Worker | None = None
    while (frame := pipe.receive()) is not None:
        call: dict[str, Any] = {"call": frame["call"]}
        try:
            if frame["command"] == "open":
                worker = Worker.open(frame)
                pipe.send(
                    {**call, "kind": "result", "policy_version": worker.policy_version, "metrics": worker.metrics}
                )
                continue
            assert worker is not None, "the parent opens first"
            for answer in worker.handle(frame):
                pipe.send({**call, "policy_version": worker.policy_version, **answer})
        except BrokenPipeError:
            return 0
        except LearnerError as error:
            pipe.send({**call, "kind": "error", **frames.pack_error(error)})
        except EchoError as error:
            log.error("%s", error)
            pipe.send({**call, "kind": "error", **frames.pack_error(error)})
            return 1
        except Exception as error:
            logging.exception("command %s failed", frame["command"])
            failure = LearnerError(
                "The learner failed.", got=f"{type(error).__name__}: {error}", do="See logs/learner.log."
            )
            pipe.send({**call, "kind": "error", **frames.pack_error(failure)})
            return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(serve(ParentPipe()))
