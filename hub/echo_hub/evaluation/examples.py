"""Collect a few answers of an evaluation as examples for users: figures do not show what a model does wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo_hub.evaluation.by_hub import Episode, HeldOut
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_shared.records.run import EvaluationKind

EXAMPLES: Final = 3
"""Number of examples per version and evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerExample:
    """A greedy answer to a held-out problem."""

    policy_version: int
    """Version that drew the answer; 0 = the base."""
    name: str
    """Name of the evaluation set; "" if the run has only one set."""
    prompt: str
    completion: str
    num_tokens: int
    reward: float | None
    """Reward of the answer; None if the scorer failed, and `error` then says why."""
    is_solved: bool
    is_cut: bool
    error: str


@dataclass(frozen=True, slots=True)
class ChoosingExamples:
    """A watcher for `evaluate_sets` that appends examples to the list `into`.

    The examples are the first solved and the first unsolved answer, and then the next ones in problem order. So
    versions that solve the same problems show the same problems.
    """

    policy_version: int
    problems: Problems
    into: list[AnswerExample]

    def finished(self, heldout: HeldOut, kind: EvaluationKind, episodes: Sequence[Episode]) -> None:
        if kind is not EvaluationKind.GREEDY:
            return
        solved = [episode.reward is not None and heldout.rewards.is_solved(episode.reward) for episode in episodes]
        firsts = {solved.index(value) for value in (True, False) if value in solved}
        others = [place for place in range(len(episodes)) if place not in firsts]
        for place in sorted([*firsts, *others[: EXAMPLES - len(firsts)]]):
            episode = episodes[place]
            problem, codec = self.problems.heldout_problem(episode.number)
            self.into.append(
                AnswerExample(
                    policy_version=self.policy_version,
                    name=heldout.name,
                    prompt=problem.prompt,
                    completion=transcript(episode, codec),
                    num_tokens=episode.num_tokens,
                    reward=episode.reward,
                    is_solved=solved[place],
                    is_cut=episode.truncated,
                    error=episode.error,
                )
            )


def transcript(episode: Episode, codec: PromptCodec) -> str:
    """Return the text of an episode: the model's turns, and the environment's answers between them."""
    parts = [codec.decode(episode.turns[0])]
    for observed, turn in zip(episode.observations, episode.turns[1:], strict=False):
        parts += [f"[answered: {codec.decode(observed).strip()}]", codec.decode(turn)]
    return "\n".join(parts)
