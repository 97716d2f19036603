"""Rewards of reasoning-gym datasets for answers that solve nothing: prints a table for docs/reasoning_gym.md.

    python -m scripts.free_rewards

It also prints the figures of `echo_hub.tasks.free_rewards`. For `PROBLEMS` problems of each dataset, it scores an empty
answer, the copied prompt, each of the prompt's last `LINES` lines (the best one counts), and a random text in the form
of the reference answer (`echo_hub.scoring.trial`). The figures are the mean rewards of these answers. A dataset that
takes more than `MOST_S` seconds is skipped and reported.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from statistics import fmean
from types import FrameType
from typing import Final

from echo_hub.scoring.trial import FREE, free_answers, prompt_lines
from echo_hub.tasks.base import Problem, Task
from echo_hub.tasks.reasoning_gym import make_reasoning_gym
from echo_shared.errors import ConfigError

PROBLEMS: Final = 20
LINES: Final = 24
MOST_S: Final = 20.0
SHOWN_FROM: Final = 0.01


def free(dataset: str, problems: int = PROBLEMS) -> dict[str, float]:
    """Return the mean reward of each kind of answer that solves nothing. If a scorer fails, the reward counts as 0."""
    task = make_reasoning_gym(dataset, {})
    earned: dict[str, list[float]] = {kind: [] for kind in FREE}
    for seed in range(problems):
        problem = task.sample(seed)
        reference = problem.metadata.get("answer")
        answers = free_answers(seed, problem.prompt, None if reference is None else str(reference))
        lines = prompt_lines(problem.prompt)[-LINES:]
        for kind in FREE:
            texts = lines if kind == "line" else [answers[kind]]
            earned[kind].append(max((_paid(task, problem, text) for text in texts), default=0.0))
    return {kind: round(fmean(rewards), 2) for kind, rewards in earned.items()}


def _paid(task: Task, problem: Problem, text: str) -> float:
    try:
        return task.score(problem, text)
    except Exception:  # noqa: BLE001 - A scorer that fails counts as 0.
        return 0.0


def table(found: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table, highest rewards first."""
    lines = ["| dataset | empty | copied prompt | one of its lines | random |", "|---|---|---|---|---|"]
    dearest = sorted(found.items(), key=lambda item: (-max(item[1].values()), item[0]))
    lines += [f"| `{name}` | " + " | ".join(f"{of[kind]:.2f}" for kind in FREE) + " |" for name, of in dearest]
    return "\n".join(lines)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(wanted: Sequence[str]) -> None:
    from reasoning_gym.factory import DATASETS

    signal.signal(signal.SIGALRM, _too_long)
    found, left_out = {}, []
    for dataset in wanted or sorted(DATASETS):
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        try:
            paid = free(dataset)
        except ConfigError:
            continue  # The hub would refuse this dataset as a task.
        except KeyboardInterrupt:
            left_out.append(dataset)
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if max(paid.values()) >= SHOWN_FROM:
            found[dataset] = paid
    print()  # Some datasets print dots; end their line.
    print(table(found))
    print({name: max(paid.values()) for name, paid in sorted(found.items())})
    print("took too long:", ", ".join(left_out) or "none", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
