"""TRL's GRPOTrainer on the problems of a hub's run: TRL generates, scores with the task and trains, in its own
`train()`.

Model, adapter, optimizer, batch, objective, order of problems and evaluation are those of the run. TRL gets its fastest
options: the whole batch in one pass (all prompts have the same length, so nothing is padded), a key-value cache, no
gradient checkpointing, fused AdamW, no logs and no checkpoints.

TRL samples at random; with `same_draws` it starts with the hub's adapter and uses the hub's sampler and seeds. Then its
steps differ from the hub's only where the trainers differ.

`python -m benchmarks.papers.trl_run SEED REPORT` trains with the demo's settings and a thread for each core, for
`time_to`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.engine import group_request
from benchmarks.learner.trl_side import QUIET
from benchmarks.learning.virtual_run import Point, score_of
from benchmarks.papers.runs import Case
from benchmarks.papers.time_to import ACCURACY, EVALUATE_EVERY, MOST_STEPS
from echo_hub.commands.demo_settings import DemoTask, demo_settings
from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.tasks.environments.base import Environment, ReplayedEnvironment
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream
from echo_shared.sampling import torch_sampler


def run_trl(case: Case, seed: int) -> tuple[list[Point], list[Mapping[str, float]]]:
    """Train a case with TRL to its last step. Return the points of its learning curve, and each step's mean reward."""
    curve = Curve(case.config(seed), evaluate_every=case.evaluate_every)
    train(curve, same_draws=case.same_draws)
    return curve.points, curve.steps


class Curve(TrainerCallback):
    """Evaluates the model during training, like a virtual run. `at_s` has the monotonic time of each point."""

    def __init__(self, config: HubConfig, *, evaluate_every: int, until: float = 2.0) -> None:
        """`until` is the held-out accuracy at which the training ends; the default, above 1, is never reached."""
        self.config = config
        self.points: list[Point] = []
        self.steps: list[Mapping[str, float]] = []
        self.at_s: list[float] = []
        self.model: Any = None
        self._evaluate_every = evaluate_every
        self._until = until
        base_dir = resolve_base(config.model.base)
        codec = PromptCodec.load(base_dir)
        self.stop_ids = codec.stop_ids
        self.problems = Problems.of_run(config, codec)

    def reward(self, rewards: Sequence[float]) -> None:
        self.steps.append({"mean_reward": sum(rewards) / len(rewards)})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._evaluate_every == 0 or state.global_step == args.max_steps:
            self._note(state.global_step)
            control.should_training_stop |= self.points[-1].accuracy >= self._until

    def _note(self, step: int) -> None:
        training = self.config.training
        self.model.eval()
        completions = torch_sampler.greedy(
            self.model,
            self.problems.heldout_prompt_ids(),
            max_tokens=self.config.sampling.max_tokens,
            stop_ids=self.stop_ids,
        )
        self.model.train()
        rewards = [score_of(self.problems.heldout_respond(number, [ids])) for number, ids in enumerate(completions)]
        accuracy = sum(map(self.problems.rewards_of(self.problems.sets[0]).is_solved, rewards)) / len(rewards)
        self.points.append(
            Point(
                trained_rollouts=step * training.groups_per_step * training.group_size,
                reward=self.steps[-1]["mean_reward"] if self.steps else None,
                accuracy=accuracy,
                staleness=0.0,
            )
        )
        self.at_s.append(time.monotonic())


def train(curve: Curve, *, same_draws: bool = False) -> None:
    """Train with TRL from the base model to the last step. `same_draws`: sample with the hub's sampler and seeds."""
    config = curve.config
    task = make_task(config.task.name, config.task.options)
    assert not isinstance(task, ReplayedEnvironment | Environment), "a task of one turn"
    stream = ProblemStream(task, run_seed=config.run.seed, heldout_problems=config.evaluation.problems)
    problems = [stream.train(number) for number in range(config.training.steps * config.training.groups_per_step)]

    def score(completions: list[str], number: list[int], **kwargs: Any) -> list[float]:
        rewards = [task.score(problems[n], text) for n, text in zip(number, completions, strict=True)]
        curve.reward(rewards)
        return rewards

    with tempfile.TemporaryDirectory(prefix="echo-trl-") as directory:
        base_dir = str(resolve_base(config.model.base))
        trainer = GRPOTrainer(
            model=base_dir,
            reward_funcs=[score],
            args=arguments(config, directory),
            train_dataset=Dataset.from_dict(
                {"prompt": [problem.prompt for problem in problems], "number": list(range(len(problems)))}
            ),
            processing_class=AutoTokenizer.from_pretrained(base_dir, padding_side="left"),
            peft_config=LoraConfig(
                r=config.training.lora_rank,
                lora_alpha=config.training.lora_alpha,
                target_modules=sorted(config.training.lora_projections),
                use_rslora=config.training.rslora,
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
            ),
            rollout_func=HubsDraws(curve) if same_draws else None,
        )
        if same_draws:
            settings = LearnerSettings.of_run(config, base_dir=Path(base_dir), stop_ids=curve.stop_ids)
            set_peft_model_state_dict(trainer.model, Policy.load(settings).published())
        curve.model = trainer.model
        trainer.add_callback(curve)
        trainer.train()


class HubsDraws:
    """A `rollout_func` of GRPOTrainer that samples every completion as the hub would."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._drawn_groups = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[list[Any]]]:
        """Sample a batch. `prompts` has each prompt once per completion."""
        config, problems = self._curve.config, self._curve.problems
        size = config.training.group_size
        first = self._drawn_groups
        self._drawn_groups += len(prompts) // size
        requests = [
            group_request(
                group_id,
                problems.prompt_ids(group_id),
                indices=range(size),
                seed=problems.seed(group_id),
                temperature=config.sampling.temperature,
                max_tokens=config.sampling.max_tokens,
                stop_ids=self._curve.stop_ids,
            )
            for group_id in range(first, self._drawn_groups)
        ]
        drawn = torch_sampler.sample_groups(trainer.model, requests)
        in_order = sorted(drawn, key=lambda rollout: (rollout.group_id, rollout.index))
        return {
            "prompt_ids": [problems.prompt_ids(rollout.group_id).tolist() for rollout in in_order],
            "completion_ids": [rollout.completion_ids.tolist() for rollout in in_order],
            "logprobs": [rollout.behavior_logprobs.tolist() for rollout in in_order],
        }


def arguments(config: HubConfig, directory: str) -> GRPOConfig:
    """Return the trainer's options. With one on-policy update per step all ratios are 1, so only the objective's token
    aggregation and advantage matter.
    """
    training = config.training
    assert training.updates_per_step == 1 and config.objective.chosen_aggregation == "token_mean"
    scale = {"mean": "none", "mean_std": "group", "batch_std": "batch"}[config.objective.chosen_advantage]
    rollouts = training.groups_per_step * training.group_size
    return GRPOConfig(
        output_dir=directory,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=config.run.seed,
        per_device_train_batch_size=rollouts,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=training.group_size,
        max_completion_length=config.sampling.max_tokens,
        shuffle_dataset=False,
        disable_dropout=True,
        scale_rewards=scale,
        temperature=config.sampling.temperature,
        top_k=0,
        learning_rate=training.learning_rate,
        max_grad_norm=training.max_grad_norm,
        max_steps=training.steps,
        **QUIET,
    )


def main(seed: int, report: Path, *, steps: int = MOST_STEPS) -> None:
    """Train until the accuracy is reached. Write a report with the monotonic time and the accuracy of each point of the
    curve.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    disable_progress_bar()
    changed: dict[str, dict[str, Any]] = {"run": {"seed": seed, "mode": "colocated"}, "training": {"steps": steps}}
    config = load_config(None, demo_settings(DemoTask.ARITHMETIC, changed))
    curve = Curve(config, evaluate_every=EVALUATE_EVERY, until=ACCURACY)
    train(curve)
    points = [(at_s, point.accuracy) for at_s, point in zip(curve.at_s, curve.points, strict=True)]
    report.write_text(json.dumps({"points": points, "steps": len(curve.steps)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
