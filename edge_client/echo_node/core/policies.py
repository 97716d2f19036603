"""Which policy versions a node fetches, holds in its engine, and gives up.

One rule each, recomputed whenever anything changes:
- wanted = the newest published version, and every version that a held lease names: what is missing of it is fetched;
  a fetch that is no longer wanted is abandoned;
- loaded = the newest version on disk, and every version that a held lease names;
- kept = the newest `KEPT` versions on disk, and every version that a held lease names: the rest is deleted.
Version 0 is the base itself: it needs no file, and is never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Final

from echo_node.core.backoff import backoff_s
from echo_node.core.effects import AbandonFetch, AddPolicy, DropPolicy, Effect, FetchArtefact, RemoveArtefact
from echo_shared.messages import ArtefactOffer

KEPT: Final = 2
KEPT_OFFERS: Final = 8


class Policies:
    """The state of every version that this node knows of."""

    def __init__(self, *, jitter: Callable[[], float]) -> None:
        self.newest_published = 0
        self._jitter = jitter
        self._offers: dict[int, ArtefactOffer] = {}
        self._on_disk: set[int] = {0}
        self._fetching: set[int] = set()
        self._loaded: set[int] = set()
        self._failures: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}

    @property
    def newest_loaded(self) -> int | None:
        """The newest version that the engine can sample from."""
        return max(self._loaded, default=None)

    def is_loaded(self, version: int) -> bool:
        return version in self._loaded

    def is_hopeless(self, version: int) -> bool:
        """This version is neither here nor offered."""
        return version not in self._on_disk and version not in self._offers

    @property
    def fetching_newest(self) -> bool:
        return self.newest_published in self._fetching

    def published(self, version: int, offer: ArtefactOffer | None) -> list[Effect]:
        """`version` is now the newest. An offer that contradicts an earlier one replaces what that one brought."""
        self.newest_published = version
        return [] if offer is None else self.offered(version, offer)

    def offered(self, version: int, offer: ArtefactOffer) -> list[Effect]:
        """`version`, new or old, can be fetched."""
        known = self._offers.get(version)
        effects = self._forget(version) if known is not None and known.manifest != offer.manifest else []
        self._offers[version] = offer
        return effects

    def fetched(self, version: int) -> None:
        if version not in self._fetching:
            return  # Abandoned a moment ago: its files are being deleted.
        self._fetching.discard(version)
        self._on_disk.add(version)
        self._failures.pop(version, None)

    def fetch_failed(self, version: int, now: float) -> None:
        self._fetching.discard(version)
        failures = self._failures.get(version, 0)
        self._failures[version] = failures + 1
        self._retry_at[version] = now + backoff_s(failures, self._jitter())

    def engine_lost(self) -> None:
        self._loaded.clear()

    def reconcile(self, *, leased: Set[int], engine_up: bool, now: float) -> list[Effect]:
        """What brings reality to the rules above."""
        return [
            *self._fetches(leased, now),
            *(self._loads(leased) if engine_up else ()),
            *self._removals(leased),
        ]

    def _fetches(self, leased: Set[int], now: float) -> list[Effect]:
        wanted = (leased | {self.newest_published}) - self._on_disk
        abandoned = self._fetching - wanted
        due = [v for v in wanted - self._fetching if v in self._offers and self._retry_at.get(v, now) <= now]
        self._fetching = (self._fetching - abandoned) | set(due)
        return [
            *(AbandonFetch(policy_version=v) for v in sorted(abandoned)),
            *(FetchArtefact(policy_version=v, offer=self._offers[v]) for v in sorted(due, reverse=True)),
        ]

    def _loads(self, leased: Set[int]) -> list[Effect]:
        due = ((leased & self._on_disk) | {max(self._on_disk)}) - self._loaded
        self._loaded |= due
        return [AddPolicy(policy_version=v) for v in sorted(due, reverse=True)]

    def _removals(self, leased: Set[int]) -> list[Effect]:
        kept = set(sorted(self._on_disk)[-KEPT:]) | leased | {self.newest_published}
        unloaded = self._loaded - kept
        deleted = self._on_disk - kept - {0}
        self._loaded -= unloaded
        self._on_disk -= deleted
        for version in sorted(self._offers.keys() - kept)[:-KEPT_OFFERS]:
            del self._offers[version]
            self._failures.pop(version, None)
            self._retry_at.pop(version, None)
        return [
            *(DropPolicy(policy_version=v) for v in sorted(unloaded)),
            *(RemoveArtefact(policy_version=v) for v in sorted(deleted)),
        ]

    def _forget(self, version: int) -> list[Effect]:
        effects: list[Effect] = []
        if version in self._fetching:
            effects.append(AbandonFetch(policy_version=version))
        if version in self._loaded:
            effects.append(DropPolicy(policy_version=version))
        if version in self._on_disk:
            effects.append(RemoveArtefact(policy_version=version))
        for versions in (self._fetching, self._loaded, self._on_disk):
            versions.discard(version)
        self._retry_at.pop(version, None)
        return effects
