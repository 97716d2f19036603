from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.virtual_run import Learning, go_through
from echo_hub.config.sections import HubConfig


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_curriculum_seldom_repeats_hopeless_problems(tmp_path: Path) -> None:
    """Two of three problems are unsolvable. A curriculum that skips these problems must earn more than 1.3 times the
    reward.
    """
    problems = tmp_path / "problems.jsonl"
    sums = [(101 + 37 * number, 113 + 53 * number) for number in range(16)]
    lines = [
        {"prompt": f"{left}+{right}=", "answer": "never" if number % 3 else str(left + right)}
        for number, (left, right) in enumerate(sums)
    ]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))

    plain, chosen = (_rewards(problems, **curriculum) for curriculum in ({}, {"curriculum": "skip"}))
    assert sum(chosen) > 1.3 * sum(plain)


def _rewards(problems: Path, **training: Any) -> list[float]:
    config = HubConfig.model_validate(
        {
            "run": {"mode": "colocated"},
            "task": {"name": "jsonl", "options": {"path": str(problems)}},
            "sampling": {"max_tokens": 6},
            "training": {"steps": 10, "groups_per_step": 6, "group_size": 4, **training},
            "learner": {"threads": 1, "device": "cpu"},
            "evaluation": {"problems": 2},
            "trust": {"verifier": "off"},
        }
    )
    learning = Learning(config, evaluate_every=100)
    go_through(learning)
    return [metrics["mean_reward"] for metrics in learning.metrics]
