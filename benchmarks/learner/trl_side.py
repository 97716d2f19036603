"""TRL's side of the comparison: GRPOTrainer on prepared completions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.models import LORA_RANK
from benchmarks.learner import LEARNING_RATE, Case, Questions, fill_adapter, make_batch
from echo_hub.learner.settings import TrainingGroup
from echo_shared.delta.adapter import PROJECTIONS

_MANY_STEPS = 10_000
QUIET: Final[dict[str, Any]] = {
    "loss_type": "dapo",
    "beta": 0.0,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Options of TRL's trainer in every comparison: Echo's optimizer and loss, without logs and checkpoints."""


class _Trainer(GRPOTrainer):  # type: ignore[misc]
    """Trains on `batch` without sampling or scoring; records the gradient."""

    batch: dict[str, Tensor]
    gradient: dict[str, NDArray[np.float32]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Tensor]:
        return dict(self.batch)


class _Turns(TrainerCallback):
    """Starts a step when the parent process requests it, and ends the training when the pipe is closed."""

    def __init__(self, trainer: _Trainer, questions: Questions) -> None:
        self._trainer = trainer
        self._questions = questions

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._questions.started()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._questions.wait():
            raise KeyboardInterrupt

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._trainer.gradient = {
                name: weight.grad.cpu().numpy().copy() for name, weight in adapter(self._trainer.model).items()
            }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._questions.done(lambda: self._trainer.gradient)


def adapter(model: Any) -> dict[str, Any]:
    """Return the trained weights by their names in PEFT's files."""
    named = model.named_parameters()
    return {name.replace(".default.", "."): weight for name, weight in named if weight.requires_grad}


def padded_batch(groups: list[TrainingGroup]) -> dict[str, Tensor]:
    """Return the batch as TRL's generation would return it: completions padded to the longest one of the batch."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    longest = max(len(rollout.completion_ids) for _, rollout in rollouts)

    def padded(rows: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
        return torch.stack([torch.tensor(np.pad(row, (0, longest - len(row))), dtype=dtype) for row in rows])

    means = {id(group): float(np.mean([rollout.reward for rollout in group.rollouts])) for group in groups}
    prompts = torch.tensor(np.stack([group.prompt_ids for group, _ in rollouts]), dtype=torch.int64)
    completions = [rollout.completion_ids for _, rollout in rollouts]
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded(completions, torch.int64),
        "completion_mask": padded([np.ones(len(ids)) for ids in completions], torch.int64),
        "advantages": torch.tensor([rollout.reward - means[id(group)] for group, rollout in rollouts]),
        "old_per_token_logps": padded([rollout.behavior_logprobs for _, rollout in rollouts], torch.float32),
        "num_items_in_batch": torch.tensor(float(sum(len(ids) for ids in completions))),
    }


def run(case: Case, base: Path, seed: int, questions: Questions) -> None:
    with tempfile.TemporaryDirectory(prefix="echo-trl-") as directory:
        trainer = _Trainer(
            model=str(base),
            reward_funcs=[_no_reward],
            args=_arguments(case, directory),
            train_dataset=Dataset.from_dict({"prompt": ["0"] * case.groups * 4}),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(
                r=LORA_RANK,
                lora_alpha=2 * LORA_RANK,
                target_modules=sorted(PROJECTIONS),
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
            ),
        )
        batch = padded_batch(make_batch(case, seed))
        trainer.batch = {name: values.to(trainer.args.device) for name, values in batch.items()}
        fill_adapter(adapter(trainer.model), seed)
        trainer.add_callback(_Turns(trainer, questions))
        try:
            trainer.train()
        except KeyboardInterrupt:
            return


def _arguments(case: Case, directory: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        model_init_kwargs={"dtype": case.precision, "attn_implementation": "sdpa"},
        use_cpu=not torch.cuda.is_available(),
        bf16=case.precision == "bfloat16",
        gradient_checkpointing=case.checkpointing,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.groups * case.group_size // case.micro_batch,
        num_generations=case.group_size,
        max_completion_length=case.longest,
        epsilon=0.2,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        max_steps=_MANY_STEPS,
        **QUIET,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"0": 0}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0", unk_token="0")


def _no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    raise RuntimeError("nothing is generated, so nothing is scored")
