"""The fetch of the base model: it starts at the hub's first offer, is retried after a failure, and is reported on every
connection to the hub.

A hub may offer the base model in two forms: as weights, and as a GGUF file for llama.cpp. Each fetch names both; the
node's engine at that moment decides.
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
        """Report of the successful fetch, for the hub; None before."""
        self._offers: tuple[ArtefactOffer, ArtefactOffer | None] | None = None
        """Newest offers: the weights, and the GGUF file if there is one."""
        self._failures = 0
        self._retry_at: float | None = None

    def offered(self, offer: ArtefactOffer, gguf: ArtefactOffer | None = None) -> list[FetchArtefact]:
        """Store the hub's offers: the weights, and perhaps a GGUF file. After the first offers, return the fetch to
        start.
        """
        first, self._offers = self._offers is None, (offer, gguf)
        return self._fetch() if first else []

    def arrived(self, fetched: Fetched) -> bool:
        """Store the report of a successful fetch, and return True. Return False if a report is already stored."""
        first = self.fetched is None
        if first:
            self.fetched = fetched
        return first

    def lacks_weights(self) -> list[FetchArtefact]:
        """Fetch the base model again: the engine needs weights that were deleted after their conversion for another
        engine, or that the node has not fetched because another engine read the GGUF file.
        """
        self.fetched = None
        return self._fetch()

    def fetch_failed(self, now: float, jitter: float) -> None:
        """Schedule a retry, with a wait that grows with each failure. `jitter`: see `backoff_s`."""
        self._retry_at = now + backoff_s(self._failures, jitter)
        self._failures += 1

    def due(self, now: float) -> list[FetchArtefact]:
        """Return the fetch to start if a retry is due at `now`."""
        if self._retry_at is None or self._retry_at > now:
            return []
        self._retry_at = None
        return self._fetch()

    def _fetch(self) -> list[FetchArtefact]:
        if self._offers is None:
            return []
        offer, gguf = self._offers
        return [FetchArtefact(policy_version=None, offer=offer, gguf=gguf)]
