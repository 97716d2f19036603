"""Weights of tokens that a node draws again after the same tokens.

Samples of one request begin alike, and at a low temperature many are equal to the end. An engine rounds equal contexts
equally, so repeated tokens tell nothing new about its rounding. Without weights, one large rounding error would count
in each of 128 equal samples, and convict an honest node. Measured on SmolLM2-135M-Instruct with a trained adapter: of
13 prompts with 32 samples at temperature 0.2, two convicted an honest bfloat16 engine, and one an honest Q8_0 engine.

After training, a policy may be so sure of its tokens that nodes draw near copies in the run's own groups, too. There,
the claims of 24 groups of 16 convicted an honest Q8_0 engine in 8 of 40 orders.

So the n-th occurrence of a token after the same prompt and tokens, by the same node and version, has weight 1 / n. The
highest sum of evidence against these engines is then 5.4 nats, of 16.3 that convict. Draws of the run's own prompts
keep weight 1: their groups are small, and the random number of each draw is new. With weights, forgers among near
copies would be found half as fast.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo_hub.verify.drawn import DrawnRollout

MOST_TOKENS: Final = 2**18
"""Number of tokens that are remembered, the newest ones. They take about 40 MB."""
MOST_ROLLOUTS: Final = 1_024
"""Number of rollouts whose weights are remembered, so that a second check of a rollout gives it equal weights."""


class TokenWeights(NamedTuple):
    """Weights of a rollout's tokens [T] as evidence: 1 counts in full, 0 not at all."""

    draws: NDArray[np.float64]
    claims: NDArray[np.float64]


class RepeatedTokens:
    """Counts how often each node has drawn each token after the same tokens. Thread-safe."""

    def __init__(self, *, most_tokens: int = MOST_TOKENS, most_rollouts: int = MOST_ROLLOUTS) -> None:
        self._most_tokens = most_tokens
        self._most_rollouts = most_rollouts
        self._times: OrderedDict[bytes, int] = OrderedDict()
        self._weights: OrderedDict[str, TokenWeights] = OrderedDict()
        self._lock = Lock()

    def weights(self, drawn: DrawnRollout) -> TokenWeights:
        """Return the weights of the rollout's tokens as evidence. Count the tokens as drawn, unless the rollout was
        counted before.
        """
        with self._lock:
            known = self._weights.get(drawn.rollout_id)
            if known is None:
                claims_T = self._counted(drawn)
                is_of_run = drawn.temperature is None
                known = TokenWeights(draws=np.ones(len(claims_T)) if is_of_run else claims_T, claims=claims_T)
                self._weights[drawn.rollout_id] = known
                if len(self._weights) > self._most_rollouts:
                    self._weights.popitem(last=False)
            return known

    def _counted(self, drawn: DrawnRollout) -> NDArray[np.float64]:
        so_far = blake2b(drawn.prompt_ids.astype("<i4").tobytes(), digest_size=12)
        tokens = drawn.completion_ids.astype("<i4")
        weights_T = np.ones(len(tokens))
        end = 0
        for span in drawn.spans:
            begin, end = end, end + span.num_tokens
            drawn_by = f"{span.policy_version} {drawn.temperature} {span.node_id}".encode()
            for place in range(begin, end):
                so_far.update(tokens[place].tobytes())
                key = so_far.copy()
                key.update(drawn_by)
                weights_T[place] = 1.0 / self._note(key.digest())
        return weights_T

    def _note(self, key: bytes) -> int:
        """Count one more occurrence of the token that `key` names. Return the number of its occurrences so far."""
        times = self._times[key] = self._times.pop(key, 0) + 1
        if len(self._times) > self._most_tokens:
            self._times.popitem(last=False)
        return times
