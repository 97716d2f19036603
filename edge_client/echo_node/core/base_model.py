"""The fetch of the base model: started at the hub's first offer, retried after a failure, and reported on every hub
connection.
"""

from __future__ import annotations

from echo_node.core.effects import FetchArtefact
from echo_shared.process.backoff import backoff_s
from echo_shared.wire.messages import ArtefactOffer, Fetched


class BaseModel:
    """State of the base model's fetch. Every Welcome offers the base model; a retry uses the newest offer. After a
    successful fetch, only `lacks_weights` starts another one.
    """

    def __init__(self) -> None:
        self.fetched: Fetched | None = None
        """Report of the successful fetch; None before."""
        self._offer: ArtefactOffer | None = None
        self._failures = 0
        self._retry_at: float | None = None

    def offered(self, offer: ArtefactOffer) -> list[FetchArtefact]:
        """Store the offer. Return the fetch to start, for the first offer."""
        first, self._offer = self._offer is None, offer
        return [FetchArtefact(policy_version=None, offer=offer)] if first else []

    def arrived(self, fetched: Fetched) -> bool:
        """Store the report of a successful fetch. Return False, and keep the stored report, if there is one already."""
        first = self.fetched is None
        if first:
            self.fetched = fetched
        return first

    def lacks_weights(self) -> list[FetchArtefact]:
        """Fetch the base model again, because the engine reads files that were deleted."""
        self.fetched = None
        return [] if self._offer is None else [FetchArtefact(policy_version=None, offer=self._offer)]

    def fetch_failed(self, now: float, jitter: float) -> None:
        """Schedule a retry, with growing waits. `jitter`: see `backoff_s`."""
        self._retry_at = now + backoff_s(self._failures, jitter)
        self._failures += 1

    def due(self, now: float) -> list[FetchArtefact]:
        """Return the fetch to start now, if a retry is due at `now`."""
        if self._retry_at is None or self._retry_at > now or self._offer is None:
            return []
        self._retry_at = None
        return [FetchArtefact(policy_version=None, offer=self._offer)]
