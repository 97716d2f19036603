"""Honest and dishonest engines. Each returns rollouts and claims that they were sampled with a certain version."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.harness.engine import SamplingEngine, group_request
from benchmarks.harness.pool import apart
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from echo_hub.tasks.base import Problem, Task
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.delta.tensors import TensorFile
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups

STEPS: Final = 12
GROUPS: Final = 64
GROUP_SIZE: Final = 8
MAX_TOKENS: Final = 16
MICRO_BATCH_TOKENS: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    problem: Problem
    request: GroupRequest


class ShortRun:
    """A training run of a few steps. `train` writes the adapters of its versions; the other methods need no learner."""

    def __init__(
        self,
        root: Path,
        seed: int,
        *,
        base: Path | None = None,
        task: Task | None = None,
        temperature: float = 1.0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """By default, `base` and `task` are the built-in model and its sums. The metadata of each problem must contain
        its `answer`.
        """
        self.directory = RunDirectory(root)
        self.adapters = {version: self.directory.adapter(version) for version in range(1, STEPS + 1)}
        """Directory of each version's adapter. `train` writes the adapters, in this object or in an earlier one with
        the same `root`.
        """
        self.base = base or resolve_base("builtin:tiny")
        self.codec = PromptCodec.load(self.base)
        self._tokenizer = Tokenizer.from_file(str(self.base / "tokenizer.json"))
        self._task = task or ArithmeticTask(ArithmeticOptions())
        self._seed = seed
        self.settings = LearnerSettings(
            base_dir=self.base,
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_ids=self.codec.stop_ids,
            training=TrainingConfig(),
            learner=LearnerConfig(device="cpu", threads=1, micro_batch_tokens=MICRO_BATCH_TOKENS),
        )

    def asked(self, what: str, count: int) -> list[Asked]:
        """Make `count` groups to sample. Their problems and seeds depend only on the run's seed and the text `what`."""
        return [self._asked(draws.derive_seed(self._seed, what, number), number) for number in range(count)]

    def _asked(self, seed: int, number: int) -> Asked:
        problem = self._task.sample(seed)
        request = group_request(
            number,
            self.codec.encode_prompt(problem.prompt),
            seed=draws.derive_seed(seed, "draws"),
            indices=range(GROUP_SIZE),
            max_tokens=self.settings.max_tokens,
            stop_ids=self.codec.stop_ids,
            temperature=self.settings.temperature,
        )
        return Asked(problem=problem, request=request)

    def reward(self, asked: Asked, completion_ids: NDArray[np.int32]) -> float:
        return float(self._task.score(asked.problem, self.codec.decode(completion_ids)))

    def answer(self, asked: Asked) -> NDArray[np.int32]:
        """Return the tokens of the right answer, the stop token included."""
        return np.append(self.ids(asked.problem.metadata["answer"]), self.codec.stop_ids[0]).astype(np.int32)

    def ids(self, text: str) -> NDArray[np.int32]:
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def train(self, groups: int = GROUPS) -> None:
        """Train on-policy, as in co-located mode, with this many groups per step."""
        policy = Policy.load(self.settings)
        optimizer = make_optimizer(policy, self.settings.training)
        for step in range(1, STEPS + 1):
            asked = self.asked(f"step {step}", groups)
            with policy.holding(policy.published()):
                rollouts = list(sample_groups(policy.model, [one.request for one in asked]))
            train_step(policy, optimizer, self.for_training(asked, rollouts), self.settings)
            self.adapters[step].mkdir(parents=True)
            policy.save_adapter(self.adapters[step], policy.published())

    def for_training(self, asked: Sequence[Asked], rollouts: Sequence[FinishedRollout]) -> list[TrainingGroup]:
        drawn: dict[int, list[FinishedRollout]] = {}
        for rollout in rollouts:
            drawn.setdefault(rollout.group_id, []).append(rollout)
        return [
            TrainingGroup(
                prompt_ids=one.request.prompt_ids,
                rollouts=tuple(self._rewarded(one, rollout) for rollout in drawn[one.request.group_id]),
            )
            for one in asked
        ]

    def _rewarded(self, asked: Asked, rollout: FinishedRollout) -> TrainingRollout:
        return TrainingRollout(
            **rollout.content(),
            loss_mask=np.ones(len(rollout.completion_ids), bool),
            reward=self.reward(asked, rollout.completion_ids),
        )


VERSION: Final = 11
"""Version that rollouts claim by default."""
BLOCK: Final = 32

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def to_four_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 16 levels per block of 32, scaled by the block's largest value, as in llama.cpp's q4_0. llama.cpp's
    K-quants need rows of 256 weights. The built-in model lacks such rows, so most of its q4_k_m weights have more than
    4 bits.
    """
    blocks = weight.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = np.where(largest == 0, 1, largest / -8).astype(np.float32)
    rounded: NDArray[np.float32] = (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(weight.shape)
    return rounded


def altered(base: Path, directory: Path, change: Change) -> Path:
    shutil.copytree(base, directory)
    for path in directory.glob("*.safetensors"):
        tensors = {
            name: change(weight) if name.endswith("_proj.weight") else weight
            for name, weight in TensorFile(path).items()
        }
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Backend and precision that a node claims, and a change of the base's weights; None leaves them unchanged."""

    backend: str
    precision: str
    change: Change | None = None


EXACT: Final = Engine(backend="torch", precision="f32")
UNCHANGED: Final = {
    f"{backend} {precision}": Engine(backend=backend, precision=precision)
    for backend, precisions in (("torch", ("f32", "bf16")), ("llama_cpp", ("f32", "f16", "q8_0", "q4_k_m")))
    for precision in precisions
}
"""Engines that use the base's weights without change. The real model is measured with them too."""
HONEST: Final = {
    **UNCHANGED,
    "mlx f32": Engine(backend="mlx", precision="f32"),
    "mlx f16": Engine(backend="mlx", precision="f16"),
    "torch f32, weights of 4 bits": replace(EXACT, change=to_four_bits),
}
WIDTH: Final = 64
_NODES: Final = itertools.count()

Rollouts = list[tuple[Asked, FinishedRollout]]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples rollouts with one engine, like a node."""

    run: ShortRun
    engine: SamplingEngine
    version: int = VERSION

    def draw(self, asked: Sequence[Asked], *, version: int | None = None, hotter: float = 1.0) -> Rollouts:
        """Sample the rollouts. `version` replaces the version that the node claims; `hotter` multiplies the
        temperature.
        """
        version = self.version if version is None else version
        self.engine.set_policy(self.run.directory.adapter(version) if version else None)
        requests = [replace(one.request, temperature=hotter * one.request.temperature) for one in asked]
        by_group = {one.request.group_id: one for one in asked}
        return [(by_group[rollout.group_id], rollout) for rollout in self.engine.sample(requests).rollouts]


@contextmanager
def opened(
    run: ShortRun, engine: Engine, scratch: Path, *, version: int = VERSION, threads: int = 1
) -> Iterator[Sampler]:
    """Open the engine in a separate process. `scratch` is an empty directory for converted files."""
    base = run.base if engine.change is None else altered(run.base, scratch / "base", engine.change)
    (scratch / "derived").mkdir(parents=True)
    with apart(SamplingEngine, engine.backend, base, scratch / "derived", engine.precision) as process:
        process.open(width=WIDTH, threads=threads)
        yield Sampler(run, process, version)


def honest(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    return sampler.draw(asked)


def at_temperature(hotter: float) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Return a function that samples at `hotter` times the temperature, and returns the true log-probabilities at this
    temperature.
    """
    return lambda sampler, asked: sampler.draw(asked, hotter=hotter)


def by_version(version: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    return lambda sampler, asked: sampler.draw(asked, version=version)


def best_of(tries: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Return a function that samples each rollout with several seeds. It returns the first one with the best reward,
    with its true log-probabilities.
    """

    def drawn(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
        best = {(rollout.group_id, rollout.index): (one, rollout) for one, rollout in sampler.draw(asked)}
        for attempt in range(1, tries):
            others = [replace(one, request=replace(one.request, seed=one.request.seed ^ attempt)) for one in asked]
            for one, rollout in sampler.draw(others):
                own, before = best[rollout.group_id, rollout.index]
                if sampler.run.reward(one, rollout.completion_ids) > sampler.run.reward(own, before.completion_ids):
                    best[rollout.group_id, rollout.index] = own, rollout
        return list(best.values())

    return drawn


def written_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """Return the right answer in place of every rollout, and claim that each token was certain."""
    return [
        (one, replace(rollout, completion_ids=ids, behavior_logprobs=np.zeros(len(ids), np.float32)))
        for one, rollout in sampler.draw(asked)
        for ids in [sampler.run.answer(one)]
    ]


def wrong_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """Return the right answer with a wrong last digit, and claim -19.5 nats for each other digit. Training on such
    rollouts ruins a run.
    """
    forged = []
    for one, rollout in sampler.draw(asked):
        ids = sampler.run.answer(one)
        digits = sampler.run.ids("0123456789")
        ids[-2] = digits[(int(np.flatnonzero(digits == ids[-2])[0]) + 1) % 10]
        claims = np.full(len(ids), -19.5, np.float32)
        claims[-2:] = 0.0
        forged.append((one, replace(rollout, completion_ids=ids, behavior_logprobs=claims)))
    return forged


def claiming(
    change: Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.float32]],
) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Return a function that samples honestly and then changes the claimed log-probabilities. `change` gets the true
    log-probabilities [T], and an array [T] that is True for each token that differs from the right answer.
    """

    def drawn(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
        changed = []
        for one, rollout in sampler.draw(asked):
            right, ids = sampler.run.answer(one), rollout.completion_ids
            wrong = np.array([place >= len(right) or ids[place] != right[place] for place in range(len(ids))])
            claims = change(rollout.behavior_logprobs, wrong).astype(np.float32)
            changed.append((one, replace(rollout, behavior_logprobs=claims)))
        return changed

    return drawn


def as_drawn(rollouts: Rollouts, version: int = VERSION) -> list[DrawnRollout]:
    """Return the rollouts, which claim `version`, as the verifier's input. Each call uses a new node and new rollout
    ids, because the verifier remembers what it has examined.
    """
    node = f"node-{next(_NODES)}"
    return [
        DrawnRollout(
            rollout_id=f"{node} {one.request.group_id}-{rollout.index}",
            prompt_ids=one.request.prompt_ids,
            **rollout.content(),
            spans=(DrawnSpan(node_id=node, policy_version=version, num_tokens=len(rollout.completion_ids)),),
            seed=one.request.seed,
            index=rollout.index,
        )
        for one, rollout in rollouts
    ]
