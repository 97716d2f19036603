"""Sample replies of a version token by token, with the learner's own policy and sampler. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_cache import row_bytes, spare_bytes
from echo_shared.sampling.torch_draws import draw, most_likely
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.sampling.torch_sampler import Batch

_GREEDY_TEMPERATURE = 1.0
"""Greedy replies ignore the temperature, but requests need a temperature above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """New tokens of reply number `index`. `finish` is "" while the reply continues, then "stop" or "length"."""

    index: int
    ids: NDArray[np.int32]
    finish: str = ""


class Talker:
    """Samples with the loaded base model; create a talker with `open`. It keeps the keys and values of the newest
    conversation."""

    def __init__(self, policy: Policy, settings: LearnerSettings) -> None:
        self._policy = policy
        self._stop_ids = settings.stop_ids
        with policy.autocast():
            self._row = row_bytes(policy.model)
        room = settings.learner.kv_cache_bytes or spare_bytes(policy.device)
        self._cells = max(2, room // self._row.per_token)
        self._kept: tuple[Path | None, TorchPrefixCache] | None = None

    @classmethod
    def open(cls, settings: LearnerSettings) -> Talker:
        """Load the base model. Raises LearnerError if that fails."""
        return cls(Policy.load(settings), settings)

    def reply(
        self,
        prompt_ids: NDArray[np.int32],
        *,
        adapter: Path | None,
        samples: int = 1,
        temperature: float,
        max_tokens: int,
        seed: int,
    ) -> Iterator[ReplyPart]:
        """Yield parts of `samples` replies, as they are drawn. If `adapter` is None, the bare base model is used. A
        temperature of 0 draws the likeliest tokens.

        Raises LearnerError if the adapter cannot be read.
        """
        request = GroupRequest(
            lease_id=0,
            group_id=0,
            indices=tuple(range(samples)),
            prompt_ids=prompt_ids,
            seed=seed,
            policy_version=0,
            temperature=temperature or _GREEDY_TEMPERATURE,
            max_tokens=max_tokens,
            stop_ids=self._stop_ids,
        )
        if self._kept is None or self._kept[0] != adapter:
            self._kept = adapter, TorchPrefixCache(self._cells // 2)
        batch = Batch(
            self._policy.model,
            width=samples,
            max_cells=self._cells // 2,
            state_cells=self._row.state_tokens,
            choose=draw if temperature else most_likely,
            prefixes=self._kept[1],
        )
        told = dict.fromkeys(request.indices, 0)
        with self._holding(adapter), self._policy.autocast():
            for finished in batch.sample(iter([request])):
                for part in batch.news():
                    told[part.index] += len(part.ids)
                    yield ReplyPart(index=part.index, ids=part.ids)
                for rollout in finished:
                    left = rollout.completion_ids[told[rollout.index] :]
                    yield ReplyPart(index=rollout.index, ids=left, finish=rollout.finish_reason.value)

    def _holding(self, adapter: Path | None) -> AbstractContextManager[Any]:
        if adapter is None:
            held: AbstractContextManager[Any] = self._policy.model.disable_adapter()
            return held
        return self._policy.holding(self._policy.read_adapter(adapter))
