"""Data from the hub to its learner process: the settings at its start, and the batch of one step. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.section import Precision, Section
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason


class LearnerSettings(Section):
    """Everything that the learner needs to know about the run."""

    base_dir: Path
    """Directory of the base model in Hugging Face layout."""
    base_name: str = "base"
    """Name of the base model in published adapters; never a path of this machine."""
    seed: Annotated[int, Field(ge=0)]
    """Seed of the run: run.seed."""
    temperature: Annotated[float, Field(gt=0)]
    """Sampling temperature of the rollouts, at which the learner computes its log-probabilities too."""
    max_tokens: Annotated[int, Field(ge=1)]
    """Token limit of a completion, including the stop token."""
    stop_ids: tuple[int, ...]
    """Token ids that end a completion in an evaluation."""
    multi_turn: bool = False
    """True if the prompts of later turns contain tokens sampled in earlier turns."""
    training: TrainingConfig
    """Settings of the optimizer, the steps and the adapter."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss that a step minimises."""
    learner: LearnerConfig = LearnerConfig()
    """How a step is computed, and which checkpoints are kept."""
    publish_precision: Precision = "auto"
    """Precision of exported adapters: the setting dissemination.precision."""
    lock_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds to wait for a former learner that still finishes its step in the same run directory."""

    @classmethod
    def of_run(
        cls, config: HubConfig, *, base_dir: Path, stop_ids: tuple[int, ...], multi_turn: bool = False
    ) -> LearnerSettings:
        """Return the learner's settings from the run's configuration."""
        base = config.model.base
        return cls(
            base_dir=base_dir,
            base_name=Path(base).name if Path(base).exists() else base,
            seed=config.run.seed,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            stop_ids=stop_ids,
            multi_turn=multi_turn,
            training=config.training,
            objective=config.objective,
            learner=config.learner,
            publish_precision=config.dissemination.precision,
        )


def no_draws() -> NDArray[np.uint64]:
    """Return the empty `TrainingRollout.draws`. It means that the random numbers with which the tokens were drawn are
    unknown."""
    return np.empty((0, 3), np.uint64)


def no_turn_rewards() -> NDArray[np.float64]:
    """Return the empty `TrainingRollout.turn_rewards`. It means that only the last turn earned a reward."""
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRollout(RolloutPayload):
    """A rollout for training, with all [T] tokens after the prompt: one completion, or the completions of several turns
    with the environment's answers between them.

    Log-probabilities are 0 at tokens of the environment. `finish_reason` is LENGTH if any turn was cut off at
    sampling.max_tokens, `sampling_s` is the sum over turns. `spans` (which node and version drew which tokens) cover
    the drawn tokens of all turns, or are empty.
    """

    loss_mask: NDArray[np.bool_]
    """[T]; true where the policy drew the token. The last entry is always true."""
    reward: float
    """Reward of the episode; NaN if not known yet."""
    draws: NDArray[np.uint64] = field(default_factory=no_draws)
    """[turns, 3], one row for each turn in order: seed, index, and number of drawn tokens. Seed and index determine the
    random numbers that drew the turn's tokens (`echo_shared.sampling.draws.uniforms`). Without rows, these numbers are
    unknown and all tokens count as one turn.
    """
    turn_rewards: NDArray[np.float64] = field(default_factory=no_turn_rewards)
    """[turns - 1]: the part of `reward` that each turn except the last earned. The last turn earned the rest. Empty if
    only the last turn earned a reward."""

    @property
    def truncated(self) -> bool:
        """True if any turn was cut off at sampling.max_tokens."""
        return self.finish_reason is FinishReason.LENGTH

    @property
    def mean_version(self) -> float:
        """Mean policy version over the drawn tokens; 0 if the versions are unknown, because `spans` is empty."""
        num_tokens = sum(span.num_tokens for span in self.spans)
        return sum(span.policy_version * span.num_tokens for span in self.spans) / max(1, num_tokens)

    @property
    def num_versions(self) -> int:
        """Number of policy versions that drew tokens; 0 if the versions are unknown, because `spans` is empty."""
        return len({span.policy_version for span in self.spans})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """All completions of one prompt. `prompt_ids` has shape [P], with P at least 1."""

    prompt_ids: NDArray[np.int32]
    rollouts: tuple[TrainingRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTold:
    """The learner's report of a finished step."""

    metrics: Mapping[str, float]
    """Metrics of the step, as `echo_hub.learner.step.screened_step` returns them, and the seconds since the previous
    step.
    """
    screen: Mapping[str, Any] = field(default_factory=dict)
    """Findings of the test for forged rollouts, as `echo_hub.learner.screen.ScreenFindings.frame` returns them; empty
    if read from a checkpoint without such results.
    """
