"""The base model's way to this node: fetched, tried again after a failure, told to every hub connection."""

from __future__ import annotations

from collections.abc import Callable

from echo_node.core.effects import FetchArtefact
from echo_shared.backoff import backoff_s
from echo_shared.messages import ArtefactOffer, Fetched


class BaseModel:
    """Offered by each Welcome, the newest offer being the one that counts; here as soon as one fetch succeeded."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        """`jitter` in [0, 1) spreads waits, as in `backoff_s`."""
        self.fetched: Fetched | None = None
        """How it came; None while it is not here."""
        self._jitter = jitter
        self._offer: ArtefactOffer | None = None
        self._failures = 0
        self._retry_at: float | None = None

    def offered(self, offer: ArtefactOffer) -> list[FetchArtefact]:
        """The first offer begins the fetch."""
        first, self._offer = self._offer is None, offer
        return [FetchArtefact(policy_version=None, offer=offer)] if first else []

    def arrived(self, fetched: Fetched) -> bool:
        """Whether it was not here before."""
        first = self.fetched is None
        if first:
            self.fetched = fetched
        return first

    def lacks_weights(self) -> list[FetchArtefact]:
        """The base model has to come again: the engine reads files that were deleted."""
        self.fetched = None
        return [] if self._offer is None else [FetchArtefact(policy_version=None, offer=self._offer)]

    def fetch_failed(self, now: float) -> None:
        """It is tried again after a while, longer each time."""
        self._retry_at = now + backoff_s(self._failures, self._jitter())
        self._failures += 1

    def due(self, now: float) -> list[FetchArtefact]:
        """The fetch to begin now, if one is to be tried again."""
        if self._retry_at is None or self._retry_at > now or self._offer is None:
            return []
        self._retry_at = None
        return [FetchArtefact(policy_version=None, offer=self._offer)]
