from __future__ import annotations

import random

import torch

from echo_hub.tasks.registry import make_task
from scripts.small_base.__main__ import build_model
from scripts.small_base.lessons import SOKOBAN, worked_sum
from scripts.small_base.measuring import measure
from scripts.small_base.tokenizer import build_tokenizer


def test_whole_episodes_are_played_and_lengths_are_those_of_single_completions() -> None:
    rng = random.Random(0)
    tokenizer = build_tokenizer(
        lesson.prompt + lesson.completion for lesson in (worked_sum(rng, 0.0) for _ in range(9))
    )
    torch.manual_seed(0)
    model = build_model(tokenizer)
    environment = make_task("environment:sokoban", dict(SOKOBAN))
    problems = [environment.sample(seed) for seed in range(4)]
    found = measure(model, tokenizer, "environment:sokoban", problems, options=dict(SOKOBAN), max_tokens=6)
    assert 0 <= found.accuracy < 1 and 1 <= found.shortest <= found.mean_tokens <= found.longest == 6
    assert str(found).startswith(f"{found.accuracy:.3f} right, {found.shortest} to 6 tokens")
    # An untrained model's completions contain no answer.
    task = make_task("worked", {})
    assert measure(model, tokenizer, "worked", [task.sample(1)], options={}, max_tokens=4).accuracy == 0.0
