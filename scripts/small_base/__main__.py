"""Trains `builtin:small`, a built-in base model with long completions: 3.2 M parameters, four times the tiny model's.

    python -m scripts.small_base          from the repository's root; about forty minutes on one free core

Training has two phases. First the model learns from correct solutions: sums and products column by column, Knights &
Knaves case by case, complete and in parts, and Sokoban. Then, for a short time, it learns from solutions with mistakes.
The result suits reinforcement learning: it solves the tasks unreliably, with completions of 2 to about 300 tokens.
Neither phase uses the problems that `echo_hub.tasks.stream` holds out for evaluation.

The same seed, thread count and versions of PyTorch and its CPU kernels give the same weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo_hub.tasks.base import Problem
from echo_hub.tasks.registry import make_task
from echo_hub.tasks.stream import ProblemStream
from scripts.small_base.lessons import (
    FACTOR_DIGITS,
    KNIGHTS,
    SOKOBAN,
    TERM_DIGITS,
    Knights,
    Sokoban,
    Statements,
    reminders,
    worked_product,
    worked_sum,
)
from scripts.small_base.measuring import measure
from scripts.small_base.teaching import Lessons, Phase, Teacher, teach
from scripts.small_base.tokenizer import CONTEXT, build_tokenizer

DEFAULT_OUT: Final = Path(__file__).parents[2] / "hub" / "echo_hub" / "assets" / "small_base"
HELD_OUT: Final = 1_024
"""Number of held-out problems of each task that are excluded from the lessons."""
MEASURED: Final = 64
"""Number of held-out problems of each task with which the model's accuracy is measured during training."""
MEASURE_EVERY: Final = 800_000
"""Number of trained tokens between two measurements."""
TOKENIZER_LESSONS: Final = 2_000
MAX_TOKENS: Final = 320

TASKS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "worked_sum": ("worked", {"operations": ("+",), "longest": TERM_DIGITS}),
    "worked_product": ("worked", {"operations": ("*",), "longest_factor": FACTOR_DIGITS}),
    "knights": ("reasoning-gym:knights_knaves", dict(KNIGHTS)),
    "sokoban": ("environment:sokoban", dict(SOKOBAN)),
}
"""For each teacher (a function that makes lessons), the task and its options whose problems measure what the lessons
have taught.
"""
RIGHT: Final = Phase(
    tokens=4_000_000,
    shares={
        "worked_sum": 0.31,
        "worked_product": 0.11,
        "knights": 0.13,
        "statements": 0.22,
        "reminders": 0.08,
        "sokoban": 0.15,
    },
    slips={},
    learning_rate=3e-3,
)
CARELESS: Final = Phase(
    tokens=200_000,
    shares={"worked_sum": 0.38, "worked_product": 0.12, "knights": 0.30, "sokoban": 0.20},
    slips={"worked_sum": 0.15, "worked_product": 0.1, "knights": 0.08, "sokoban": 0.15},
    learning_rate=1e-3,
)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model from torch's global random generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def held_out_problems() -> dict[str, list[Problem]]:
    """Return the first held-out problems of each task."""
    found = {}
    for kind, (name, options) in TASKS.items():
        stream = ProblemStream(make_task(name, options), run_seed=0, heldout_problems=HELD_OUT)
        found[kind] = [stream.heldout(number) for number in range(HELD_OUT)]
    return found


def main(
    out: Annotated[Path, typer.Option(help="Directory to write, made if missing.")] = DEFAULT_OUT,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the lessons.")] = 0,
    scale: Annotated[float, typer.Option(min=0, help="Factor on the length of both phases.")] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Make the small base model."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    teachers: dict[str, Teacher] = {
        "worked_sum": worked_sum,
        "worked_product": worked_product,
        "knights": Knights(),
        "statements": Statements(),
        "reminders": reminders,
        "sokoban": Sokoban(),
    }
    first = (teacher(rng, 0.0) for teacher in teachers.values() for _ in range(TOKENIZER_LESSONS))
    tokenizer = build_tokenizer(lesson.prompt + lesson.completion for lesson in first)
    tokenizer.save_pretrained(out)
    model = build_model(tokenizer)
    problems = held_out_problems()
    held_out = frozenset(problem.prompt for of_task in problems.values() for problem in of_task)
    lessons = Lessons(tokenizer, teachers, held_out=held_out, rng=rng)
    began = time.monotonic()
    for phase in (RIGHT, CARELESS):
        before = 0
        for read, loss in teach(model, lessons, replace(phase, tokens=round(scale * phase.tokens))):
            if read // MEASURE_EVERY > before // MEASURE_EVERY:
                typer.echo(f"{read:,} tokens, {time.monotonic() - began:.0f} s, loss {loss:.3f}")
                tell(model, tokenizer, problems)
                model.save_pretrained(out)
            before = read
    tell(model, tokenizer, problems)
    model.bfloat16().save_pretrained(out)
    typer.echo(f"{model.num_parameters():,} parameters in {out}")


def tell(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Mapping[str, list[Problem]]) -> None:
    """Print the model's results on the first held-out problems of each task."""
    model.eval()
    for kind, (name, options) in TASKS.items():
        found = measure(model, tokenizer, name, problems[kind][:MEASURED], options=options, max_tokens=MAX_TOKENS)
        typer.echo(f"  {kind}: {found}")
    model.train()


if __name__ == "__main__":
    typer.run(main)
