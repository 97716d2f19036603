"""Supervised fine-tuning has the same cross-entropy as TRL, whatever its micro-batches, and resumes exactly after an
interruption.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from echo_hub.learner import sft as sft_module
from echo_hub.learner.cuts import ChunkSizes
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.sft import Finetuning, SftProgress, accumulate_gradient, mean_loss
from echo_hub.learner.sft_plan import SftPlan, SftSettings, make_plan
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.demonstrations import Demonstration
from tests.echo_hub.learner.conftest import VOCABULARY
from tests.echo_hub.learner.limited_memory import LimitedMemory

MakeSettings = Callable[..., LearnerSettings]
PLENTY = ChunkSizes(micro_batch_tokens=100_000, gradient_checkpointing=False)
BASE = resolve_base("builtin:tiny")


def demonstrations(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Demonstration]:
    """Return demonstrations. Every third one has two replies of the model, with four tokens of the environment between
    them."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        lengths = rng.integers(2, 7, 2)
        mask = np.ones(int(lengths[0]), bool)
        if number % 3 == 0:
            mask = np.concatenate([mask, np.zeros(4, bool), np.ones(int(lengths[1]), bool)])
        ids = rng.integers(0, vocabulary, len(mask) + 5).astype(np.int32)
        found.append(Demonstration(prompt_ids=ids[:5], completion_ids=ids[5:], loss_mask=mask))
    return found


def stirred(policy: Policy) -> Policy:
    """Return the policy with random weights in its adapter, so that every weight has a gradient."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def gradient(
    policy: Policy, examples: list[Demonstration], cut: ChunkSizes = PLENTY
) -> tuple[float, dict[str, Tensor]]:
    tokens = sum(int(one.loss_mask.sum()) for one in examples)
    loss = accumulate_gradient(policy, sft_module._groups(examples, tokens), cut)
    gradients = {name: one.grad for name, one in policy.parameters.items() if one.grad is not None}
    assert len(gradients) == len(policy.parameters)
    return loss, gradients


# TRL, PEFT and transformers warn about deprecated calls that they make of each other.
@pytest.mark.filterwarnings("ignore")
def test_a_batch_has_the_loss_and_the_gradient_of_trls_trainer(make_settings: MakeSettings, tmp_path: Path) -> None:
    peft, datasets, trl = (pytest.importorskip(name) for name in ("peft", "datasets", "trl"))
    settings = make_settings().model_copy(update={"base_dir": BASE, "temperature": 1.0})
    policy = stirred(Policy.load(settings))
    codec = PromptCodec.load(BASE)
    examples = [
        Demonstration(prompt_ids=codec.encode_prompt(prompt), completion_ids=ids, loss_mask=np.ones(len(ids), bool))
        for prompt, ids in (("123+456=", codec.encode_reply("579")), ("9+1=", codec.encode_reply("10")))
    ] + demonstrations(4, vocabulary=90)
    policy.save_adapter(tmp_path)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), tmp_path, is_trainable=True)
    rows = [
        {
            "input_ids": [*one.prompt_ids.tolist(), *one.completion_ids.tolist()],
            "completion_mask": [*[0] * len(one.prompt_ids), *one.loss_mask.astype(int).tolist()],
        }
        for one in examples
    ]
    expected: dict[str, Tensor] = {}

    class Gradients(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    expected[name.replace(".default.", ".")] = parameter.grad.clone()

    trainer = trl.SFTTrainer(
        model=theirs,
        processing_class=AutoTokenizer.from_pretrained(BASE),
        train_dataset=datasets.Dataset.from_list(rows),
        callbacks=[Gradients()],
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(rows),
            max_steps=1,
            max_length=None,
            loss_type="nll",
            completion_only_loss=True,
            max_grad_norm=0.0,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    loss, found = gradient(policy, examples)
    assert loss == pytest.approx(trainer.state.log_history[0]["loss"], abs=1e-5)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_micro_batches_of_any_size_come_to_the_same(make_settings: MakeSettings) -> None:
    policy, examples = stirred(Policy.load(make_settings())), demonstrations(9)
    whole_loss, whole = gradient(policy, examples)
    whole = {name: one.clone() for name, one in whole.items()}
    for parameter in policy.parameters.values():
        parameter.grad = None
    small = ChunkSizes(micro_batch_tokens=20, gradient_checkpointing=False)
    loss, found = gradient(policy, examples, small)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for name, value in found.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-6)
    assert mean_loss(policy, examples, small) == pytest.approx(whole_loss, rel=1e-5)


def test_tokens_outside_replies_are_only_context(make_settings: MakeSettings) -> None:
    """Prompts and answers between replies are read but not trained on: the loss is the mean over the tokens of
    replies.
    """
    policy = Policy.load(make_settings().model_copy(update={"temperature": 1.0}))
    (example,) = demonstrations(1)
    assert not example.loss_mask.all()
    ids = torch.from_numpy(np.concatenate([example.prompt_ids, example.completion_ids])).long()
    base = AutoModelForCausalLM.from_pretrained(policy.model.config._name_or_path)
    with torch.no_grad():
        logprobs = base(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[4:, 0]
    expected = -float(logprobs[torch.from_numpy(example.loss_mask)].mean())
    assert mean_loss(policy, [example], PLENTY) == pytest.approx(expected, rel=1e-5)


def plan_of(settings: LearnerSettings, **options: Any) -> tuple[LearnerSettings, SftPlan]:
    chosen = SftSettings(**{"epochs": 2, "batch_tokens": 60, "learning_rate": 1e-2, "heldout": 0.2, **options})
    plan = make_plan(demonstrations(20), chosen)
    return settings.model_copy(update={"training": plan.training(chosen, settings.training)}), plan


def run(settings: LearnerSettings, plan: SftPlan, folder: Path, *, updates: int | None = None) -> Finetuning:
    training = Finetuning.open(settings, plan, folder, start_from=None)
    stop = threading.Event()

    class Stopping:
        def tell(self, progress: SftProgress) -> None:
            if updates is not None and progress.update >= updates:
                stop.set()

    ended = training.run(watcher=Stopping(), stop=stop)
    assert ended == (updates is None)
    return training


@pytest.mark.parametrize("every", [1, 4])
def test_resumed_training_gives_the_same_bits(make_settings: MakeSettings, tmp_path: Path, every: int) -> None:
    settings, plan = plan_of(make_settings(learner={"checkpoint_every": every}))
    whole = run(settings, plan, tmp_path / "whole")
    assert len(whole.progress.heldout_losses) == 3 and len(whole.progress.training_losses) == 2
    for updates in (3, plan.epoch_ends[0]):
        run(settings, plan, tmp_path / "parts", updates=updates)
    parts = run(settings, plan, tmp_path / "parts")
    assert parts.progress == whole.progress
    for name, weight in whole.policy.parameters.items():
        assert parts.policy.parameters[name].equal(weight), name
    again = run(settings, plan, tmp_path / "parts")
    assert again.progress == whole.progress, "nothing is left to do"
    assert [path.name for path in (tmp_path / "parts").glob("step-*")] == [f"step-{plan.epoch_ends[-1]:06d}"]


def test_fine_tuning_lowers_its_reported_loss(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings, plan = plan_of(make_settings(), epochs=8, heldout=0)
    progress = run(settings, plan, tmp_path).progress
    assert progress.heldout_losses == ()
    assert progress.training_losses[-1] < 0.8 * progress.training_losses[0]


def test_fine_tuning_starts_with_the_given_adapter(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings, plan = plan_of(make_settings())
    given = stirred(Policy.load(settings))
    given.save_adapter(tmp_path)
    training = Finetuning.open(settings, plan, tmp_path / "checkpoints", start_from=tmp_path)
    assert all(training.policy.parameters[name].equal(weight) for name, weight in given.parameters.items())


def test_an_update_that_does_not_fit_is_cut(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings, plan = plan_of(make_settings(), epochs=1)
    memory = LimitedMemory()
    with memory.measuring():
        whole = run(settings, plan, tmp_path / "whole")
    little = LimitedMemory(0.7 * memory.peak_bytes)
    with little.measuring():
        halves = run(settings, plan, tmp_path / "halves")
    assert little.refused
    for name, weight in whole.policy.parameters.items():
        torch.testing.assert_close(halves.policy.parameters[name], weight, rtol=0, atol=1e-4)


def test_an_update_of_an_outlying_gradient_is_not_applied(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings, plan = plan_of(make_settings())
    training = Finetuning.open(settings, plan, tmp_path, start_from=None)
    training.progress = SftProgress(norms=(1e-6,) * 8)
    before = {name: weight.detach().clone() for name, weight in training.policy.parameters.items()}
    training._update(1)
    assert training.progress.outliers == 1 and len(training.progress.norms) == 9
    assert all(training.policy.parameters[name].equal(weight) for name, weight in before.items())


def test_a_checkpoint_has_the_figures(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings, plan = plan_of(make_settings())
    progress = run(settings, plan, tmp_path, updates=2).progress
    marker = json.loads((tmp_path / "step-000002" / "checkpoint.json").read_text())
    assert marker["told"][0]["metrics"]["heldout.0"] == progress.heldout_losses[0]
    assert Finetuning.open(settings, plan, tmp_path, start_from=None).progress == progress
