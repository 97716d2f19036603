"""Length in tokens of each rollout: drawn once per index of a group, whichever node samples it and however often.

    log tokens = log median + sigma (sqrt(p) z_prompt + sqrt(1 - p) z_rollout),     sigma = log(ratio) / 4

p is the share of the variance that belongs to the prompt; both z are standard normal. The sum is cut off at two sigma,
so that the longest rollout has `ratio` times the tokens of the shortest. Group g has prompt g modulo the number of
prompts. Leasing a rollout again, even with another version, keeps its length.
"""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import NormalDist, fmean
from typing import Final

import numpy as np

from echo_hub.simulator.scenario import SimulatedLengths

_BLOCK: Final = 256
"""Number of groups whose lengths are drawn together."""
_KEPT_BLOCKS: Final = 64
_QUANTILES: Final = 1_000


class LengthModel:
    def __init__(self, settings: SimulatedLengths, *, group_size: int, seed: int) -> None:
        self._settings = settings
        self._group_size = group_size
        self._seed = seed
        self._sigma = log(settings.ratio) / 4
        self._of_prompt = np.random.default_rng([seed, 0]).standard_normal(settings.prompts)
        self._blocks: dict[int, list[list[int]]] = {}

    @property
    def mean(self) -> float:
        normal = NormalDist()
        cut = [normal.inv_cdf((number + 0.5) / _QUANTILES) for number in range(_QUANTILES)]
        return fmean(self._settings.tokens * exp(self._sigma * max(-2.0, min(2.0, z))) for z in cut)

    @property
    def longest(self) -> int:
        return round(self._settings.tokens * exp(2.0 * self._sigma))

    def of_group(self, group_id: int) -> list[int]:
        """Return the number of tokens of each of the group's rollouts, by index."""
        number, place = divmod(group_id, _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._draw(number)
            if len(self._blocks) > _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return block[place]

    def _draw(self, number: int) -> list[list[int]]:
        groups = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
        share = self._settings.prompt_share
        own = np.random.default_rng([self._seed, 1, number]).standard_normal((_BLOCK, self._group_size))
        z = sqrt(share) * self._of_prompt[groups % self._settings.prompts, None] + sqrt(1 - share) * own
        tokens = self._settings.tokens * np.exp(self._sigma * np.clip(z, -2, 2))
        drawn: list[list[int]] = np.maximum(1, np.rint(tokens)).astype(int).tolist()
        return drawn
