"""Trains `builtin:tiny`, a built-in base model: a Qwen3 of 0.8 M parameters that adds numbers, and often forgets to
carry.

Training has two phases. First the model learns three-digit additions from right answers until it masters them. Then,
for a short time, it learns from answers in which half of the carries are dropped. The result suits reinforcement
learning: it can solve the task, but not reliably. Neither phase uses the problems that `echo_hub.tasks.stream` holds
out for evaluation.

The same seed, thread count and versions of PyTorch and its CPU kernels give the same weights. Run it from the
repository's root: `python scripts/make_tiny_base.py` (about ten minutes on one free core).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream

DEFAULT_OUT: Final = Path(__file__).parents[1] / "hub" / "echo_hub" / "assets" / "tiny_base"
SPECIAL_TOKENS: Final = ("<pad>", "<eos>", "<unk>")
CHARACTERS: Final = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

DIGITS: Final = 3
EXCLUDED_PROBLEMS: Final = 4_096
"""Number of the task's held-out problems that are excluded from the lessons."""
FORGETTING: Final = 0.5
"""Probability that the teacher of the second phase drops a carry."""
BATCH_SIZE: Final = 256
LEARNING_RATES: Final = (2e-3, 1e-3)
"""Peak learning rate of each of the two phases of training."""
WARMUP_STEPS: Final = 50

IGNORED: Final = -100
"""Label of tokens without a loss: prompt and padding."""

Teacher = Callable[[int, int], int]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of printable ASCII, and newline; any other character is <unk>."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model from torch's global random generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def forgetful_sum(left: int, right: int, forgetting: float, rng: random.Random) -> int:
    """Return the sum of two numbers, added column by column. Each carry is dropped with probability `forgetting`."""
    total, carry, place = 0, 0, 1
    while left or right or carry:
        carry, digit = divmod(left % 10 + right % 10 + carry, 10)
        total += digit * place
        if carry and rng.random() < forgetting:
            carry = 0
        left, right, place = left // 10, right // 10, place * 10
    return total


class Lessons:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        stream = ProblemStream(
            make_task("arithmetic", {"digits": DIGITS}), run_seed=0, heldout_problems=EXCLUDED_PROBLEMS
        )
        self._excluded = {stream.heldout(i).prompt for i in range(EXCLUDED_PROBLEMS)}
        self._tokenizer = tokenizer
        self._rng = rng

    def batch(self, teacher: Teacher) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of token ids and labels from this teacher, both [BATCH_SIZE, T]."""
        width = 3 * DIGITS + 4  # Two operands, "+", "=", a sum of at most one more digit, and <eos>.
        ids_BT = torch.full((BATCH_SIZE, width), self._tokenizer.pad_token_id)
        labels_BT = torch.full((BATCH_SIZE, width), IGNORED)
        for row in range(BATCH_SIZE):
            left, right = self._operands()
            prompt = self._tokenizer.encode(f"{left}+{right}=")
            answer = [*self._tokenizer.encode(str(teacher(left, right))), self._tokenizer.eos_token_id]
            end = len(prompt) + len(answer)
            ids_BT[row, :end] = torch.tensor(prompt + answer)
            labels_BT[row, len(prompt) : end] = torch.tensor(answer)
        return ids_BT, labels_BT

    def _operands(self) -> tuple[int, int]:
        while True:
            left, right = (self._rng.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
            if f"{left}+{right}=" not in self._excluded:
                return left, right


def teach(model: Qwen3ForCausalLM, lessons: Lessons, teacher: Teacher, *, steps: int, learning_rate: float) -> None:
    """Train for `steps` steps of AdamW, with a warm-up and a cosine decay to a twentieth of the peak."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1.0, (i + 1) / WARMUP_STEPS) * max(0.05, 0.5 * (1 + math.cos(math.pi * i / steps))),
    )
    model.train()
    for step in range(1, steps + 1):
        ids_BT, labels_BT = lessons.batch(teacher)
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            typer.echo(f"step {step}/{steps}  loss {loss.item():.3f}")


def main(
    out: Annotated[Path, typer.Option(help="Directory to write, made if missing.")] = DEFAULT_OUT,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the lessons.")] = 0,
    learn_steps: Annotated[int, typer.Option(min=0, help="Steps with right answers.")] = 1_200,
    forget_steps: Annotated[int, typer.Option(min=0, help="Steps with the forgetful teacher.")] = 500,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Make the tiny base model."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    lessons = Lessons(tokenizer, rng)
    learning_rate, forgetting_rate = LEARNING_RATES
    teach(model, lessons, lambda left, right: left + right, steps=learn_steps, learning_rate=learning_rate)
    teach(
        model,
        lessons,
        lambda left, right: forgetful_sum(left, right, FORGETTING, rng),
        steps=forget_steps,
        learning_rate=forgetting_rate,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    typer.echo(f"{model.num_parameters():,} parameters in {out}")


if __name__ == "__main__":
    typer.run(main)
