"""Pairs of nodes that compute log-probabilities of given tokens for a tenant.

One node's figures prove nothing: no random number fixes them. So two proven nodes without a common owner compute the
same log-probabilities. Their figures count if they agree up to the rounding of both engines, as two checks of one
rollout must (`pairs`), and if no single token's figures are far apart. Otherwise the hub computes them itself. Then no
node is blamed: the hub does not know which node is wrong. Log-probabilities below `pairs.FLOOR` are compared as if they
were equal to it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence, log_odds
from echo_hub.core.trust.judging import CLAIMS_DISPERSION, weigh
from echo_hub.core.trust.likelihood import SCALES
from echo_hub.core.trust.pairs import FLOOR
from echo_hub.core.trust.standing import Standings
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

FAR: Final = 20.0
"""Largest allowed difference of one token's log-odds between two nodes, in rounding scales of both engines together. If
two results differ more, which honest engines rarely do, the hub computes the log-probabilities itself.
"""
LOOKED_AT: Final = 256
"""Largest number of nodes that a search for a pair looks at."""


class ScoringPairs:
    """Chooses two nodes for each check that nodes do: both compute the rollout's log-probabilities, and the hub
    compares them. It chooses among the connected nodes that offer checks. `alarm`: evidence, in nats, from which the
    two results contradict each other."""

    def __init__(self, standings: Standings, *, alarm: float) -> None:
        self._standings = standings
        self._alarm = alarm
        self._newest: dict[str, int] = {}
        """Newest version of each connected node that offers checks, by node id."""

    def reported(self, node_id: str, room: int, policy_version: int | None) -> None:
        """Store if the node offers to compute (`room` above 0), and its newest version."""
        if room > 0:
            self._newest[node_id] = -1 if policy_version is None else policy_version
        else:
            self._newest.pop(node_id, None)

    def disconnected(self, node_id: str) -> None:
        self._newest.pop(node_id, None)

    def pair(self, lot: str, policy_version: int) -> tuple[str, str] | None:
        """Return two proven nodes without a common owner that may have this version; None if there are none. Different
        texts `lot` give different pairs. A node that lacks a tenant's version declines."""
        nodes = list(self._newest)
        start = int.from_bytes(blake2b(lot.encode(), digest_size=8).digest())
        first: str | None = None
        for place in range(start, start + min(LOOKED_AT, len(nodes))):
            node_id = nodes[place % len(nodes)]
            has_it = policy_version >= FIRST_TENANT_VERSION or self._newest[node_id] >= policy_version
            standing = self._standings.of(node_id)
            if not (has_it and standing.is_proven):
                continue
            if first is None:
                first = node_id
            elif not standing.kin & self._standings.of(first).kin:
                return first, node_id
        return None

    def agree(
        self, nodes: tuple[str, str], one_N: NDArray[np.float64], other_N: NDArray[np.float64], *, warmth: float
    ) -> bool:
        """Return True if two nodes' log-probabilities of the same tokens, in nats, differ by no more than both engines
        round. `warmth`: temperature at which they hold, divided by the run's."""
        numerics = self._standings.numerics
        first, second = (numerics.honest(self._standings.of(node_id).numerics) for node_id in nodes)
        honest = first.together(second)
        likely = (log_odds(np.maximum(logprobs_N, FLOOR)) for logprobs_N in (one_N, other_N))
        differences_N = warmth * np.subtract(*likely)
        if np.abs(differences_N).max(initial=0.0) > FAR * SCALES[honest.claims]:
            return False
        return CLAIMS_DISPERSION * max(weigh(Evidence.of_differences(differences_N), honest)) < self._alarm
