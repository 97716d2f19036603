"""Have two nodes compute the log-probabilities of a prompt's tokens, and compare their answers.

    prompt [5 9 2 8]   ──>  a check lease with prompt [5] and completion [9 2 8], at temperature 1
                       <──  the log-probabilities of 9, 2 and 8

The messages are those of checks (`by_nodes`), with ids that no rollout has. So nodes need no further message for this.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.net.live_nodes import NodeSender
from echo_shared.wire.messages import CheckLease, CheckResult, VersionSpan
from echo_shared.wire.messages.fields import MAX_TOKENS

DEADLINE_S: Final = 60.0
"""Longest wait for the answers of both nodes, in seconds."""
NO_LEASE: Final = 0
"""Lease number in the ids of the checks that compute a prompt's log-probabilities. Real leases count from 1."""


class Pairs(Protocol):
    """Chooses two nodes for a prompt, and compares their answers. Implemented by
    `echo_hub.core.trust.scorers.ScoringPairs`.
    """

    def pair(self, lot: str, policy_version: int) -> tuple[str, str] | None: ...

    def agree(
        self, nodes: tuple[str, str], one_N: NDArray[np.float64], other_N: NDArray[np.float64], *, warmth: float
    ) -> bool: ...


class NodeScores:
    """Prompt log-probabilities by nodes. `temperature`: the run's sampling temperature, for which rounding scales
    hold."""

    def __init__(
        self, *, pairs: Pairs, connections: NodeSender, temperature: float, deadline_s: float = DEADLINE_S
    ) -> None:
        self._pairs = pairs
        self._connections = connections
        self._temperature = temperature
        self._deadline_s = deadline_s
        self._numbers = count()
        self._open: dict[tuple[str, str], asyncio.Future[CheckResult]] = {}
        self.num_agreed = self.num_unlike = 0
        """Number of prompts for which the log-probabilities of two nodes agreed up to rounding, and number of prompts
        with a contradiction.
        """

    async def logprobs(self, prompt_ids: NDArray[np.int32], policy_version: int) -> NDArray[np.float32] | None:
        """Return the log-probabilities of the tokens after the first, in nats at temperature 1. None: no two nodes can
        compute them now, or they disagree."""
        if not 2 <= len(prompt_ids) <= MAX_TOKENS:
            return None
        rollout_id = f"{NO_LEASE}-{next(self._numbers)}"
        nodes = self._pairs.pair(rollout_id, policy_version)
        if nodes is None:
            return None
        lease = CheckLease(
            rollout_id=rollout_id,
            prompt_ids=prompt_ids[:1],
            completion_ids=prompt_ids[1:],
            versions=(VersionSpan(policy_version=policy_version, num_tokens=len(prompt_ids) - 1),),
            temperature=1.0,
            deadline_s=self._deadline_s,
        )
        keys = [(node_id, rollout_id) for node_id in nodes]
        loop = asyncio.get_running_loop()
        waiting = [self._open.setdefault(key, loop.create_future()) for key in keys]
        try:
            for node_id in nodes:
                self._connections.send(node_id, lease)
            async with asyncio.timeout(self._deadline_s):
                one, other = await asyncio.gather(*waiting)
        except TimeoutError:
            return None
        finally:
            for key in keys:
                del self._open[key]
        return self._agreed(nodes, one, other, len(prompt_ids))

    def answered(self, node_id: str, result: CheckResult) -> bool:
        """Take a node's answer to a check. Return False if this object did not send that check."""
        waiting = self._open.get((node_id, result.rollout_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(result)
        return waiting is not None

    def _agreed(
        self, nodes: tuple[str, str], one: CheckResult, other: CheckResult, num_tokens: int
    ) -> NDArray[np.float32] | None:
        if {len(one.logprobs), len(other.logprobs)} != {num_tokens - 1}:
            return None  # A node declined: it lacks the version, or has too much to do.
        one_N, other_N = (result.logprobs.astype(np.float64).clip(max=0.0) for result in (one, other))
        if not self._pairs.agree(nodes, one_N, other_N, warmth=1.0 / self._temperature):
            self.num_unlike += 1
            return None
        self.num_agreed += 1
        mean: NDArray[np.float32] = ((one_N + other_N) / 2.0).astype(np.float32)
        return mean
