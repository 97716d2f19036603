"""The work of the learner's process (`serve`): steps, evaluations and, in co-located mode (no nodes), sampling.

A step is answered twice: after its computation, and after its adapter and checkpoint are on disk. Adapter and
checkpoint are copied at the step's end and written in parallel to the next command. The next step's result never comes
before this step's. If the process is killed, only steps without a checkpoint are lost: two at most if every step is
checkpointed. The hub sends those steps again. When the hub closes the pipe or ends, commands that have not started are
dropped.

A step may arrive before its batch is in the hub's database. Until the hub confirms that the batch is stored, the step's
results are not written and no other step starts. So if the hub crashes before it has stored the batch, the step leaves
no trace.

Only one learner works in a run directory: it holds RUN/learner.lock, which the system releases when the process dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.learner import checkpoint, determinism, frames
from echo_hub.learner.cuts import Cuts
from echo_hub.learner.drawing import Drawing
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.offload import Offload
from echo_hub.learner.policy import Policy
from echo_hub.learner.probe import first_cut, place
from echo_hub.learner.ranks import ALONE, TrainingRanks
from echo_hub.learner.settings import LearnerSettings, StepTold, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer
from echo_hub.learner.within_memory import step_within_memory
from echo_hub.learner.writer import CheckpointWriter
from echo_shared.errors import LearnerError
from echo_shared.files.atomic import atomic_directory
from echo_shared.files.full_disk import Room
from echo_shared.process.child import Frame
from echo_shared.process.heartbeat import Heartbeat
from echo_shared.records.step_figures import EVAL_S, GAP_S, LEARNING_RATE
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_draws import Choose, draw, most_likely


class Answers(Protocol):
    """Receiver of the answers to one command."""

    def send(self, answer: Frame) -> None:
        """Send an answer to the hub. Callable from any thread."""


class LearnerWorker:
    """Executes the hub's commands, and holds policy version `policy_version`. Create it with `open`, end it with
    `close`.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        run_dir: Path,
        policy: Policy,
        lock: FileLock | None,
        heartbeat: Heartbeat | None,
        room: Room,
    ) -> None:
        """`heartbeat`: object with which rank 0 shows the hub that it still works; None at the other ranks."""
        self._settings = settings
        self._heartbeat = heartbeat
        self._checkpoints = run_dir / "checkpoints"
        self._policy = policy
        self._ranks = policy.ranks
        self._held: dict[int, Frame] = {}
        """Groups that the hub has sent for later steps, by group id."""
        self._lock = lock  # Keep a reference: the lock is released when the object is collected.
        self._optimizer = make_optimizer(policy, settings.training)
        self._offload = Offload(self._optimizer, policy.device)
        self._writer = CheckpointWriter()
        self._room = room
        self._unconfirmed: Callable[[], None] | None = None
        """Function that writes the results of the computed step that waits for the hub's confirmation; None if no step
        waits."""
        self.failed = False
        """True after a write has failed; the error has been reported to the hub."""
        self._eval_s = 0.0
        """Seconds spent on evaluations since the last step."""
        self._ended: float | None = None
        """Time at which this process finished its last step; None before its first step."""
        self.policy_version = 0
        self.told: Mapping[int, StepTold] = {}
        """Results, by step number, of the step that made this policy version and of the step before; empty if unknown.
        """
        self._history = NO_HISTORY
        self._cuts = Cuts(self._checkpoints)
        kv_cache_bytes = settings.learner.kv_cache_bytes
        self._drawing = Drawing(policy, kv_cache_bytes=kv_cache_bytes, multi_turn=settings.multi_turn)

    @classmethod
    def open(
        cls,
        frame: Frame,
        ranks: TrainingRanks = ALONE,
        heartbeat: Heartbeat | None = None,
        room: Room | None = None,
    ) -> LearnerWorker:
        """Lock the run directory, and load the base and the newest checkpoint, if there is one. Writing waits for space
        in `room`.
        """
        given = LearnerSettings.model_validate(frame["settings"])
        with ranks.agreement():
            settings = ranks.place(given)
        run_dir = Path(frame["run_dir"])
        if settings.learner.threads:
            torch.set_num_threads(settings.learner.threads)
        determinism.choose(deterministic=settings.learner.deterministic)
        with ranks.agreement():
            lock = None if ranks.rank else _lock(run_dir, wait_s=settings.lock_wait_s)
        worker = cls(settings, run_dir, Policy.load(settings, ranks), lock, heartbeat, room or Room())
        if heartbeat is not None:
            worker._policy.computed = heartbeat.step
        worker._resume()
        if settings.objective.reference == "start":
            worker._policy.reference = worker._start(run_dir)
        worker._take_cuts()
        return worker

    def _start(self, run_dir: Path) -> dict[str, Tensor]:
        """Return, at every rank, the adapter that the run started with, as nodes got it; rank 0 reads the file."""
        policy, ranks = self._policy, self._ranks
        with ranks.agreement():
            read = {} if ranks.rank else policy.read_adapter(run_dir / "start" / "adapter")
        return {name: weight.to(policy.device) for name, weight in ranks.tell_tensors(read).items()}

    def _resume(self) -> None:
        found = checkpoint.complete(self._checkpoints)[:1] if self._ranks.rank == 0 else []
        with self._ranks.agreement():
            tensors = checkpoint.read(found[0], self._policy) if found else {}
        newest = found[0] if found else checkpoint.NONE
        state = {"step": newest.step, "told": frames.pack_told(newest.told), "history": newest.history.frame()}
        told = self._ranks.tell(state if self._ranks.rank == 0 else None)
        tensors = self._ranks.tell_tensors(tensors)
        if tensors:
            checkpoint.restore(tensors, self._policy, self._optimizer)
            self.policy_version, self.told = told["step"], frames.unpack_told(told["told"])
            self._history = History.of_frame(told["history"])

    def _take_cuts(self) -> None:
        """Use the memory settings that rank 0 finds in the run directory. If it finds none, choose settings for the
        first step.
        """
        if self._ranks.rank == 0:
            self._cuts = Cuts.read(self._checkpoints, place=place(self._policy, self._settings.learner))
        self._cuts.take(self._ranks.tell(self._cuts.frame() if self._ranks.rank == 0 else None))
        step = self.policy_version + 1
        if self._cuts.at(step) is None:
            self._cuts.put(step, first_cut(self._policy, self._settings), write=self._policy.device.type == "cuda")

    def hold(self, groups: Mapping[int, Frame]) -> None:
        """Keep groups that the hub sends for later steps, until a step trains on them or discards them."""
        self._held.update(groups)

    def admitted(self, frame: Frame) -> Frame:
        """Check a command. Return it with the data that ranks on other hosts need, such as the contents of groups.
        Raises LearnerError for a command that cannot be executed.
        """
        if frame["command"] in ("train", "begin"):
            return self._admitted_step(frame)
        if frame["command"] == "sample":
            for request in frame["groups"]:
                if request["policy_version"] != self.policy_version:
                    raise LearnerError(
                        "The learner can sample only from the version that it holds.",
                        got=f"version {request['policy_version']} asked for, {self.policy_version} held",
                    )
        elif frame["command"] == "evaluate":
            if frame["adapter"] is not None:
                weights = self._policy.read_adapter(Path(frame["adapter"]))
                return {**frame, "adapter": {name: weight.numpy() for name, weight in weights.items()}}
        else:
            raise LearnerError("The learner does not know this command.", got=frame["command"])
        return frame

    def _admitted_step(self, frame: Frame) -> Frame:
        """Return the frame with the contents of the groups that it names. Raises LearnerError
        for a step out of order.
        """
        if self._unconfirmed is not None:
            raise LearnerError("The step before this one is not confirmed yet.", got=f"step {frame['step']}")
        if frame["step"] != self.policy_version + 1:
            raise LearnerError(
                "This step does not follow the version that the learner holds.",
                got=f"step {frame['step']}, version {self.policy_version}",
                do=f"Train step {self.policy_version + 1}.",
            )
        if frame["command"] == "train":
            check_groups(frames.unpack_groups(frame["groups"]))
            return {**frame, "confirmed": True}
        groups = [_rewarded(self._held[group_id], rewards) for group_id, rewards in frame["rewards"]]
        check_groups(frames.unpack_groups(groups))
        for group_id in (*(group_id for group_id, _ in frame["rewards"]), *frame["let_go"]):
            del self._held[group_id]
        step = {key: frame.get(key) for key in ("step", "export_to", "learning_rate", "objective")}
        return {"command": "train", **step, "groups": groups, "confirmed": False}

    def handle(self, frame: Frame, answers: Answers) -> None:
        """Execute an admitted command and answer it: frames of kind "item", then the result.

        A step's result is sent from another thread, perhaps after answers to later commands. Raises the error of an
        earlier step's write.
        """
        if frame["command"] == "train":
            groups = frames.unpack_groups(frame["groups"])
            self._train(frame["step"], groups, frame.get("learning_rate"), frame.get("objective"))
            keep = partial(self._keep, frame["export_to"], answers)
            answers.send({"kind": "item", "computed": frame["step"]})
            if frame["confirmed"]:
                keep()
            else:
                self._unconfirmed = keep
            return
        began = time.perf_counter()
        requests = [frames.unpack_request(request) for request in frame["groups"]]
        if frame["command"] == "sample":
            rollouts = self._sample(requests)
        else:
            rollouts = self._evaluate(requests, frame["adapter"], greedy=frame["greedy"])
        for rollout in rollouts:
            answers.send({"kind": "item", "policy_version": self.policy_version, "rollout": rollout})
        seconds = time.perf_counter() - began
        self._eval_s += seconds if frame["command"] == "evaluate" else 0.0
        answers.send({"kind": "result", "policy_version": self.policy_version, "at_work_s": seconds})

    def close(self) -> None:
        """Write the results that wait for the disk, as far as space allows. Raises the error of a write."""
        self._room.give_up()
        self._writer.wait()

    def confirm(self, step: int) -> None:
        """Write the results of the computed step that waits for the hub's confirmation. Does nothing if that step was
        refused.

        Raises the error of an earlier step's write.
        """
        keep, self._unconfirmed = self._unconfirmed, None
        if keep is not None and step == self.policy_version:
            keep()

    def _train(
        self, step: int, groups: Sequence[TrainingGroup], learning_rate: float | None, objective: str | None
    ) -> None:
        self._drawing.forget()
        self._offload.take_back()
        rate = self._settings.training.learning_rate if learning_rate is None else learning_rate
        for of_group in self._optimizer.param_groups:
            of_group["lr"] = rate
        settings = self._settings
        if objective is not None:
            settings = settings.model_copy(update={"objective": ObjectiveConfig.model_validate_json(objective)})
        began = time.perf_counter()
        outcome = step_within_memory(
            self._policy,
            self._optimizer,
            groups,
            settings,
            cuts=self._cuts,
            learner_version=self.policy_version,
            history=self._history,
        )
        metrics = outcome.metrics
        metrics[LEARNING_RATE.key] = rate
        metrics[EVAL_S.key], self._eval_s = self._eval_s, 0.0
        if self._ended is not None:
            metrics[GAP_S.key] = began - self._ended
        self._ended = time.perf_counter()
        before = {number: of_step for number, of_step in self.told.items() if number == step - 1}
        self.policy_version, self._history = step, outcome.history
        self.told = {**before, step: StepTold(metrics=metrics, screen=outcome.screen)}

    def _keep(self, export_to: str | None, answers: Answers) -> None:
        """Start writing the results of the last step on the writer's thread. Does nothing at ranks above 0."""
        if self._ranks.rank:
            return
        step, training, learner = self.policy_version, self._settings.training, self._settings.learner
        with nullcontext() if self._heartbeat is None else self._heartbeat.at_work(expects_steps=False):
            self._writer.wait()  # Waits as long as the disk is full.
        checkpointed = step % learner.checkpoint_every == 0 or step == training.steps
        tensors = checkpoint.take(self._policy, self._optimizer if checkpointed else None)
        state = checkpoint.CheckpointState(step=step, told=self.told, history=self._history)
        self._writer.start(partial(self._finish, state, tensors, export_to, checkpointed=checkpointed, answers=answers))

    def _finish(
        self,
        state: checkpoint.CheckpointState,
        tensors: Mapping[str, Tensor],
        export_to: str | None,
        *,
        checkpointed: bool,
        answers: Answers,
    ) -> None:
        """Write the results of a step and answer the hub; runs on the writer's thread."""
        try:
            self._check_finite(state.step, tensors)
            # Export before the checkpoint: if a crash separates the two, the learner repeats step and export.
            if export_to is not None:
                self._room.until(partial(self._export, tensors, Path(export_to)))
            if checkpointed:
                kept = self._settings.learner
                self._room.until(partial(checkpoint.save, self._checkpoints, self._policy, tensors, state))
                checkpoint.prune(self._checkpoints, kept=kept.checkpoints_kept, milestones=kept.checkpoint_milestones)
        except Exception as error:
            self.failed = True
            answers.send(frames.failure(error))
            raise
        told = frames.pack_told({state.step: state.told[state.step]})
        answers.send({"kind": "result", "policy_version": state.step, "told": told})

    def _check_finite(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise LearnerError if the step's weights are not finite. Called before any of its results is written."""
        published = self._policy.published(checkpoint.adapter_in(tensors))
        lost = [name for name, weight in published.items() if not weight.isfinite().all()]
        if lost:
            raise LearnerError(
                "A step produced weights that are not finite; it was discarded.",
                got=f"step {step}: {len(lost)} of {len(published)} tensors, the first {lost[0]}",
                do="Start the hub again: the learner repeats the step from its newest checkpoint. If it fails again, "
                "lower training.learning_rate.",
            )

    def _export(self, tensors: Mapping[str, Tensor], export_to: Path) -> None:
        with atomic_directory(export_to) as directory:
            self._policy.save_adapter(directory, self._policy.published(checkpoint.adapter_in(tensors)))

    def _sample(self, groups: Sequence[GroupRequest]) -> Iterator[Frame]:
        """Sample with exactly the weights that nodes get: the published ones, not those in training."""
        if self._policy.device.type == "cuda":
            self._offload.make_room()
        with self._policy.holding(self._policy.published()):
            yield from self._draw(groups, draw)

    def _evaluate(
        self, groups: Sequence[GroupRequest], adapter: Mapping[str, NDArray[np.float32]] | None, *, greedy: bool
    ) -> Iterator[Frame]:
        """Sample with the given adapter, or with the base model alone if `adapter` is None. The learner's current
        weights are not used.
        """
        if adapter is None:
            held: AbstractContextManager[Any] = self._policy.model.disable_adapter()
        else:
            held = self._policy.holding({name: torch.tensor(weight) for name, weight in adapter.items()})
        with held:
            yield from self._draw(groups, most_likely if greedy else draw)

    def _draw(self, groups: Sequence[GroupRequest], choose: Choose) -> Iterator[Frame]:
        """Draw this rank's share of the groups; rank 0 yields the rollouts of all ranks."""
        with self._ranks.whole(self._policy.model):
            own = self._draw_own(self._ranks.share(groups), choose)
            if self._ranks.rank == 0:
                yield from own
            others = self._ranks.gather({"rollouts": list(own)})
        for frame in others:
            yield from frame["rollouts"]

    def _draw_own(self, groups: Sequence[GroupRequest], choose: Choose) -> Iterator[Frame]:
        for rollout in self._drawing.draw(groups, choose):
            self._policy.computed()
            yield frames.pack_rollout(rollout)


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


def check_groups(groups: Sequence[TrainingGroup]) -> None:
    """Raise LearnerError unless a step can be trained on `groups`."""
    if not groups:
        raise LearnerError("A step needs at least one group.", got="none")
    for position, group in enumerate(groups):
        if not len(group.prompt_ids) or not group.rollouts:
            raise LearnerError("A group needs a prompt and rollouts.", got=f"group {position} of the batch")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not all(map(_is_whole, rollouts)) or not _are_finite(rollouts):
        position = next(
            number
            for number, group in enumerate(groups)
            if not all(map(_is_whole, group.rollouts)) or not _are_finite(group.rollouts)
        )
        raise LearnerError(
            "A rollout is invalid. It needs tokens, of which the last is drawn, a finite log-probability for each, and "
            "a finite reward. Draws, if known, must cover its drawn tokens; turn rewards, if any, all turns but the "
            "last.",
            got=f"group {position} of the batch",
        )


def _rewarded(group: Frame, rewards: Sequence[float]) -> Frame:
    rollouts = [{**rollout, "reward": reward} for rollout, reward in zip(group["rollouts"], rewards, strict=True)]
    return {**group, "rollouts": rollouts}


def _is_whole(rollout: TrainingRollout) -> bool:
    tokens = len(rollout.completion_ids)
    drawn = int(rollout.draws[:, 2].sum()) if len(rollout.draws) else None
    return (
        len(rollout.turn_rewards) in (0, len(rollout.draws) - 1)
        and tokens == len(rollout.behavior_logprobs) == len(rollout.loss_mask) > 0
        and bool(rollout.loss_mask[-1])
        and drawn in (None, int(rollout.loss_mask.sum()))
    )


def _are_finite(rollouts: Sequence[TrainingRollout]) -> bool:
    logprobs = np.concatenate([rollout.behavior_logprobs for rollout in rollouts])
    rewards = np.concatenate([np.append(rollout.turn_rewards, rollout.reward) for rollout in rollouts])
    return bool(np.isfinite(logprobs).all() and np.isfinite(rewards).all())
