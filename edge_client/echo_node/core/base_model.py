"""The fetch of the base model: it starts at the hub's first offer, is retried after a failure, and is reported on every
connection to the hub.
"""

from __future__ import annotations

from echo_node.core.effects import FetchArtefact
from echo_shared.process.backoff import backoff_s
from echo_shared.wire.messages import ArtefactOffer, Fetched


class BaseModel:
    """State of the base model's fetch. Every Welcome offers the base model; a retry uses the newest offer.

    After a successful fetch, only `lacks_weights` starts another one.
    """

    def __init__(self) -> None:
        self.fetched: Fetched | None = None
        """Report of the successful fetch; None before."""
        self._offer: ArtefactOffer | None = None
        self._failures = 0
        self._retry_at: float | None = None

    def offered(self, offer: ArtefactOffer) -> list[FetchArtefact]:
        """Store the offer. If it is the first offer, return the fetch to start."""
        first, self._offer = self._offer is None, offer
        return [FetchArtefact(policy_version=None, offer=offer)] if first else []

    def arrived(self, fetched: Fetched) -> bool:
        """Store the report of a successful fetch, and return True. Return False if a report is already stored."""
        first = self.fetched is None
        if first:
            self.fetched = fetched
        return first

    def lacks_weights(self) -> list[FetchArtefact]:
        """Fetch the base model again: the engine needs files that were deleted after their conversion for another
        engine.
        """
        self.fetched = None
        return [] if self._offer is None else [FetchArtefact(policy_version=None, offer=self._offer)]

    def fetch_failed(self, now: float, jitter: float) -> None:
        """Schedule a retry, with a wait that grows with each failure. `jitter`: see `backoff_s`."""
        self._retry_at = now + backoff_s(self._failures, jitter)
        self._failures += 1

    def due(self, now: float) -> list[FetchArtefact]:
        """Return the fetch to start if a retry is due at `now`."""
        if self._retry_at is None or self._retry_at > now or self._offer is None:
            return []
        self._retry_at = None
        return [FetchArtefact(policy_version=None, offer=self._offer)]
