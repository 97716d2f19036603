"""Echo's side: the learner, step by step."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learner.cases import LEARNING_RATE, LORA_RANK, Case, fill_adapter, make_batch
from benchmarks.learner.side import Questions
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.step import make_optimizer, train_step


def settings_of(case: Case, base: Path) -> LearnerSettings:
    return LearnerSettings(
        base_dir=base,
        seed=0,
        temperature=1.0,
        max_tokens=case.longest,
        stop_ids=(0,),
        training=TrainingConfig(lora_rank=LORA_RANK, lora_alpha=2 * LORA_RANK, learning_rate=LEARNING_RATE),
        objective=ObjectiveConfig(name="grpo", aggregation="token_mean", advantage="mean"),
        learner=LearnerConfig(
            precision=case.precision,
            micro_batch_tokens=case.micro_batch_tokens,
            gradient_checkpointing=case.checkpointing,
        ),
    )


def run(case: Case, base: Path, seed: int, questions: Questions) -> None:
    settings = settings_of(case, base)
    policy = Policy.load(settings)
    fill_adapter(policy.parameters, seed)
    optimizer = make_optimizer(policy, settings.training)
    groups = make_batch(case, seed)
    questions.started()
    while questions.wait():
        metrics = train_step(policy, optimizer, groups, settings)
        questions.done(
            lambda metrics=metrics: metrics["loss"],  # type: ignore[misc]
            lambda: {name: weight.grad.cpu().numpy() for name, weight in policy.parameters.items()},  # type: ignore[union-attr]
        )
