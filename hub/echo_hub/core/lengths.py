"""How long completions are likely to become: from the prompt's own history, then from the task's.

    long_tokens    what few completions exceed: who takes longer than that is late
    mean_tokens    of the whole task's recent completions
    predict(...)   of one prompt: its own recent mean, drawn towards the task's while few were seen
    longer         times what was predicted that few completions exceed

Memory is bounded: `PROMPTS` prompts are remembered, those that were seen longest ago are forgotten first.
StreamRL (arXiv 2504.15930) predicts lengths by a model of its own; where prompts come again, what they led to before
is known, and nothing needs to be trained for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import sqrt
from typing import Final

PROMPTS: Final = 65_536
RECENT: Final = 512
"""Completions from which the task's figures are taken."""
LONG_SHARE: Final = 0.98
DEVIATIONS: Final = 1.5
"""A completion is rarely longer than predicted by more than so many standard deviations."""
_SORTED_EVERY: Final = 64
_TASK_WEIGHT: Final = 2.0
"""The task's mean counts as so many completions of the prompt."""
_MOST: Final = 32.0
"""Completions of a prompt that its mean goes back over, about."""


class Lengths:
    """In tokens. Until something has come in all figures are 0, but for `longer`, which is 1."""

    def __init__(self) -> None:
        self.mean_tokens = 0.0
        self.long_tokens = 0.0
        self.longer = 1.0
        self._num_off = 0.0
        self._off = 0.0
        """The sum of the squares of how far completions were off, over what was predicted."""
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._sum = 0
        self._until_sorted = 0
        self._prompts: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """(completions, their mean length) of each prompt, by its key."""

    def seen(self, prompt: int | None, num_tokens: int) -> None:
        """A completion of this prompt has come in. `prompt` None: it will not come again."""
        if predicted := self.predict(prompt):
            self._note_error(num_tokens / predicted - 1.0)
        recent = self._recent
        if len(recent) == RECENT:
            self._sum -= recent[0]
        recent.append(num_tokens)
        self._sum += num_tokens
        self.mean_tokens = self._sum / len(recent)
        self._until_sorted -= 1
        if self._until_sorted <= 0 or num_tokens > 2 * self.long_tokens:
            self._until_sorted = min(len(recent), _SORTED_EVERY)
            self.long_tokens = float(sorted(recent)[int(LONG_SHARE * (len(recent) - 1))])
        if prompt is not None:
            self._remember(prompt, num_tokens)

    def predict(self, prompt: int | None) -> float:
        """Tokens that a completion of this prompt is likely to have."""
        known = None if prompt is None else self._prompts.get(prompt)
        if known is None:
            return self.mean_tokens
        count, mean = known
        return (count * mean + _TASK_WEIGHT * self.mean_tokens) / (count + _TASK_WEIGHT)

    def _note_error(self, error: float) -> None:
        """It was longer than predicted by so much, over what was predicted."""
        self._num_off = num_off = self._num_off + 1.0 - self._num_off / RECENT
        self._off = off = self._off + (error**2 - self._off / RECENT)
        self.longer = 1.0 + DEVIATIONS * sqrt(max(0.0, off) / num_off)

    def _remember(self, prompt: int, num_tokens: int) -> None:
        count, mean = self._prompts.get(prompt, (0.0, 0.0))
        count = min(_MOST, count + 1.0)
        self._prompts[prompt] = (count, mean + (num_tokens - mean) / count)
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)
