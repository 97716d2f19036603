"""Predicted completion lengths, from the prompt's own history and from the whole task's.

    long_tokens    98th percentile of recent lengths; decides when a rollout counts as late
    mean_tokens    mean of the task's recent completions
    predict(...)   for one prompt: its own recent mean, drawn towards the task's mean while few completions are known
    longer         safety factor: few completions are longer than their prediction times this factor

Memory is bounded: `PROMPTS` prompts are remembered, and the longest unseen ones are forgotten first. StreamRL (arXiv
2504.15930) trains a separate model to predict lengths. Where prompts repeat, their history replaces such a model.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import sqrt
from typing import Final

PROMPTS: Final = 65_536
"""Number of prompts whose completion lengths are remembered."""
RECENT: Final = 512
"""Number of recent completions from which the figures of the whole task are computed."""
LONG_SHARE: Final = 0.98
"""Quantile of recent lengths that defines `long_tokens`."""
DEVIATIONS: Final = 1.5
"""Standard deviations of the prediction error that the safety factor `longer` covers."""
_SORTED_EVERY: Final = 64
"""Arrivals between two computations of `long_tokens`."""
_TASK_WEIGHT: Final = 2.0
"""Weight of the task's mean in the prediction for a prompt, in completions of this prompt."""
_MOST: Final = 32.0
"""Number of completions that a prompt's mean is averaged over, approximately."""


class CompletionLengths:
    """Lengths in tokens. Before the first completion all figures are 0, except `longer`, which is 1."""

    def __init__(self) -> None:
        self.mean_tokens = 0.0
        self.long_tokens = 0.0
        self.longer = 1.0
        self._num_off = 0.0
        self._off = 0.0
        """Decayed sum of squared relative prediction errors."""
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._sum = 0
        self._until_sorted = 0
        self._prompts: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Number of completions and their mean length, by prompt key."""

    def seen(self, prompt: int | None, num_tokens: int) -> None:
        """Add an arrived completion. `prompt` None: the prompt does not repeat."""
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
        """Return the expected length of a completion of this prompt."""
        known = None if prompt is None else self._prompts.get(prompt)
        if known is None:
            return self.mean_tokens
        count, mean = known
        return (count * mean + _TASK_WEIGHT * self.mean_tokens) / (count + _TASK_WEIGHT)

    def _note_error(self, error: float) -> None:
        """Add a relative prediction error: (actual - predicted) / predicted."""
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
