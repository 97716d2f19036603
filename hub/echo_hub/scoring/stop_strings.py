"""Cut completions after the token that completes one of the texts in `sampling.stop`.

Nodes know only token ids, so they draw up to a stop token or sampling.max_tokens. The hub cuts every received
completion before it is stored. The tokens before the cut are still an honest draw, because no token depends on later
tokens. So nodes need not report that they stopped at a text, all engines behave alike, and completions can still be
resumed and checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import RolloutArrived
from echo_hub.run.base_model import PromptCodec
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.sampling.interface import FinishedRollout
from echo_shared.wire.messages import FinishReason
from echo_shared.wire.routes import routes_of

Ids = NDArray[np.int32]
_MARGIN: Final = 8
"""Number of extra tokens that are decoded before the longest possible stop string, because tokenizers treat the first
tokens of a text specially."""


class StopStrings:
    """The texts at which completions are cut (stop strings)."""

    def __init__(self, strings: Sequence[str], codec: PromptCodec | None) -> None:
        self._strings = tuple(strings)
        self._codec = codec

    @classmethod
    def of_run(cls, config: HubConfig, codec: PromptCodec) -> StopStrings:
        return cls(config.sampling.stop, codec)

    def of_request(self, strings: Sequence[str]) -> StopStrings:
        """Return the stop strings of a tenant's request. They use the same tokenizer."""
        return StopStrings(strings, self._codec)

    def end(self, ids: Ids) -> int | None:
        """Return the number of tokens up to and including the first token that completes a stop string; None if no stop
        string occurs.

        The search is binary, so that even for a long completion only a few texts are decoded.
        """
        if not self._strings or not self._holds(ids):
            return None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if self._holds(ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return high

    def may_end(self, ids: Ids, since: int) -> bool:
        """Return False if no token from position `since` on can complete a stop string. To find out, decode also as
        many earlier tokens as the longest stop string can have."""
        if not self._strings:
            return False
        return self._holds(ids[max(0, since - max(len(string.encode()) for string in self._strings) - _MARGIN) :])

    def arrived(self, event: RolloutArrived) -> RolloutArrived:
        """Return the event with its completion cut after the first stop string. A malformed payload is left unchanged,
        because it is refused later."""
        payload = event.payload
        if event.problem or len(payload.completion_ids) != len(payload.behavior_logprobs):
            return event
        count = self.end(payload.completion_ids)
        return event if count is None else replace(event, payload=_cut(payload, count))

    def finished(self, rollout: FinishedRollout) -> FinishedRollout:
        """Return a rollout of the hub's own learner, cut after the first stop string."""
        count = self.end(rollout.completion_ids)
        if count is None:
            return rollout
        return replace(
            rollout,
            completion_ids=rollout.completion_ids[:count],
            behavior_logprobs=rollout.behavior_logprobs[:count],
            finish_reason=FinishReason.STOP,
            routes=routes_of(rollout, count),
        )

    def _holds(self, ids: Ids) -> bool:
        assert self._codec is not None, "only without stop strings"
        # A hostile node may send ids that the tokenizer does not have.
        text = self._codec.text(ids[(ids >= 0) & (ids < self._codec.num_ids)])
        return any(string in text for string in self._strings)


NO_STRINGS: Final = StopStrings((), None)


def _cut(payload: RolloutPayload, count: int) -> RolloutPayload:
    spans, left = list[DrawnSpan](), count
    for span in payload.spans:
        if left > 0:
            spans.append(replace(span, num_tokens=min(span.num_tokens, left)))
            left -= span.num_tokens
    return replace(
        payload,
        completion_ids=payload.completion_ids[:count],
        behavior_logprobs=payload.behavior_logprobs[:count],
        finish_reason=FinishReason.STOP,
        routes=routes_of(payload, count),
        spans=tuple(spans),
    )
