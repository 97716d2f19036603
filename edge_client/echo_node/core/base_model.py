"""The base model's way to this node: fetched, tried again after a failure, told to every hub connection."""

from __future__ import annotations

from collections.abc import Callable

from echo_node.core.effects import FetchArtefact
from echo_shared.process.backoff import backoff_s
from echo_shared.wire.messages import ArtefactOffer, Fetched


class BaseModel:
    """State of the base model. Each Welcome offers it, and the newest offer counts. One successful fetch ends the
    task.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` in [0, 1) spreads the waits, as in `backoff_s`."""
        self.fetched: Fetched | None = None
        """Report of the successful fetch; None before."""
        self._jitter = jitter
        self._offer: ArtefactOffer | None = None
        self._failures = 0
        self._retry_at: float | None = None

    def offered(self, offer: ArtefactOffer) -> list[FetchArtefact]:
        """Store the offer. Return the fetch to start, for the first offer."""
        first, self._offer = self._offer is None, offer
        return [FetchArtefact(policy_version=None, offer=offer)] if first else []

    def arrived(self, fetched: Fetched) -> bool:
        """Store the report. Return True if it is the first one."""
        first = self.fetched is None
        if first:
            self.fetched = fetched
        return first

    def lacks_weights(self) -> list[FetchArtefact]:
        """Fetch the base model again, because the engine reads files that were deleted."""
        self.fetched = None
        return [] if self._offer is None else [FetchArtefact(policy_version=None, offer=self._offer)]

    def fetch_failed(self, now: float) -> None:
        """Schedule a retry, with growing waits."""
        self._retry_at = now + backoff_s(self._failures, self._jitter())
        self._failures += 1

    def due(self, now: float) -> list[FetchArtefact]:
        """Return the fetch to start now, if a retry is due."""
        if self._retry_at is None or self._retry_at > now or self._offer is None:
            return []
        self._retry_at = None
        return [FetchArtefact(policy_version=None, offer=self._offer)]
