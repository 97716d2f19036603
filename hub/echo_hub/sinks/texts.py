"""The texts of a few rollouts of a step, for other programs.

Only kept groups have texts. Texts are off by default, because the other program may run on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_hub.config.operation_sections import MetricsConfig
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.store.browsing import BatchReward, read_batch_rewards, read_tokens
from echo_hub.store.bulk import key_of
from echo_hub.store.store import Store

STEPS_APART: Final = 10
"""Only one step in this many gets texts. Readers compare texts over the whole run, and each step with texts costs a
database query."""
MOST_CHARACTERS: Final = 10_000
"""Largest number of characters of a prompt, or of a completion, that is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One rollout as text. A model or a stranger wrote the texts, so they are untrusted."""

    rollout_id: str
    reward: float
    prompt: str
    completion: str


class SampleTexts:
    """Reads the sample texts of a step. Blocks the calling thread."""

    def __init__(self, settings: MetricsConfig, *, store: Store, codec: PromptCodec, problems: Problems) -> None:
        self._settings = settings
        self._store = store
        self._codec = codec
        self._problems = problems

    def of_step(self, step: int) -> list[SampleText]:
        """Return the texts of `metrics.texts` rollouts, spread evenly over the rewards. Empty for most steps."""
        if not self._settings.texts or step % STEPS_APART:
            return []
        kept = [end for end in self._store.read(read_batch_rewards, step) if self._store.keeping.chooses(end.group_id)]
        chosen = _evenly(sorted(kept, key=lambda end: end.reward), self._settings.texts)
        tokens = self._store.read(read_tokens, [key_of(end.rollout_id) for end in chosen])
        return [
            SampleText(
                rollout_id=end.rollout_id,
                reward=end.reward,
                prompt=self._codec.text(self._problems.prompt_ids(end.group_id))[:MOST_CHARACTERS],
                completion=self._codec.text(found.completion_ids)[:MOST_CHARACTERS],
            )
            for end in chosen
            if (found := tokens.get(key_of(end.rollout_id))) is not None
        ]


def _evenly(ends: list[BatchReward], most: int) -> list[BatchReward]:
    if len(ends) <= most:
        return ends
    if most == 1:
        return ends[-1:]
    return [ends[place * (len(ends) - 1) // (most - 1)] for place in range(most)]
