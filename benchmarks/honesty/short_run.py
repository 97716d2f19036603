"""A short real run of the learner on a small model: its versions, as they are published, and its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from echo_hub.tasks.base import Problem, Task
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
    """Problem and request of a group."""

    problem: Problem
    request: GroupRequest


class ShortRun:
    """`train` makes RUN/adapters; the rest needs no learner."""

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
        """`base` and `task` are the built-in model and its sums by default. The metadata of a problem has its
        `answer`."""
        self.directory = RunDirectory(root)
        self.adapters: dict[int, Path] = {}
        """Directories of the versions' adapters."""
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
        """Make `count` groups. Each `what` has groups of its own."""
        return [self._asked(draws.derive_seed(self._seed, what, number), number) for number in range(count)]

    def _asked(self, seed: int, number: int) -> Asked:
        problem = self._task.sample(seed)
        request = GroupRequest(
            lease_id=number,
            group_id=number,
            indices=tuple(range(GROUP_SIZE)),
            prompt_ids=self.codec.encode_prompt(problem.prompt),
            seed=draws.derive_seed(seed, "draws"),
            policy_version=0,
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            stop_ids=self.codec.stop_ids,
        )
        return Asked(problem=problem, request=request)

    def reward(self, asked: Asked, completion_ids: NDArray[np.int32]) -> float:
        return float(self._task.score(asked.problem, self.codec.decode(completion_ids)))

    def answer(self, asked: Asked) -> NDArray[np.int32]:
        """Return the tokens of the right answer, with the stop token."""
        return np.append(self.ids(asked.problem.metadata["answer"]), self.codec.stop_ids[0]).astype(np.int32)

    def ids(self, text: str) -> NDArray[np.int32]:
        """Tokenise a text without a chat template."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def train(self, groups: int = GROUPS) -> None:
        """Train on-policy, as in co-located mode, with this many groups a step."""
        policy = Policy.load(self.settings)
        optimizer = make_optimizer(policy, self.settings.training)
        for step in range(1, STEPS + 1):
            asked = self.asked(f"step {step}", groups)
            with policy.holding(policy.published()):
                rollouts = list(sample_groups(policy.model, [one.request for one in asked]))
            train_step(policy, optimizer, self.for_training(asked, rollouts), self.settings)
            directory = self.adapters[step] = self.directory.adapter(step)
            directory.mkdir(parents=True)
            policy.save_adapter(directory, policy.published())

    def for_training(self, asked: Sequence[Asked], rollouts: Sequence[FinishedRollout]) -> list[TrainingGroup]:
        """Group the rollouts of `asked`, with their rewards."""
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
