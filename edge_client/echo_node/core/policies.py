"""Policy versions that a node fetches, holds in its engines, and removes.

These rules are applied again after every change:
- wanted = the newest published version, and every version that a held lease needs. Missing ones are fetched, the newest
  first;
- the fetch of an unwanted version continues if it misses no more bytes than the fetch of the newest version, or if the
  newest version is a delta against it; otherwise it is abandoned. At most `MOST_SURPLUS` such fetches continue;
- a delta's fetch needs its parent on disk or in an ongoing fetch. An unreadable delta is not fetched again: the node
  asks the hub for the keyframe, with growing waits, until the hub offers something else;
- a push (pieces that the hub sends unasked) is declined if no fetch of its version runs, because the version is
  unwanted, already on disk, or waits for a retry;
- loaded = the newest version on disk, and every version that a held lease needs, in every engine. An engine drops other
  versions older than the newest `LOADED` on disk;
- kept = the newest `KEPT` versions on disk, every version that a held lease needs, and the parents of current fetches.
  All others are deleted.

Versions of tenants (other people's adapters, numbered from `FIRST_TENANT_VERSION`) follow their own rules, because
their numbers say nothing about which is needed next. They are never "the newest". `KEPT_OF_TENANTS` of them stay on
disk, and `LOADED_OF_TENANTS` stay loaded: those that leases named last. So neither kind of version drives out the
other.

Version 0 is the base model without adapter: it needs no file, and is never deleted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    DropPolicy,
    Effect,
    FetchArtefact,
    RemoveArtefact,
    SendMessage,
)
from echo_shared.artefacts.manifest import DELTA_REACH, Manifest
from echo_shared.process.backoff import backoff_s
from echo_shared.wire.messages import ArtefactOffer, Fetched, Have, KeyframeWanted, Lease, Way
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

KEPT: Final = DELTA_REACH
"""Number of newest versions kept on disk, because the hub may publish a delta against any of them."""
LOADED: Final = 2
"""Number of newest versions on disk that the engine may keep loaded."""
KEPT_OF_TENANTS: Final = 8
"""Number of tenants' versions kept on disk besides those that held leases need. Set by hand."""
LOADED_OF_TENANTS: Final = 2
"""Number of tenants' versions that the engine may keep loaded besides those that held leases need. Set by hand."""
KEPT_OFFERS: Final = 8
MOST_SURPLUS: Final = 8
"""Maximum number of fetches that continue although no lease and no delta needs their version, and a newer version is
published. Those that miss the fewest bytes continue."""
_PUSHED: Final = (Way.INLINE, Way.BROADCAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """A verified version on disk."""

    content: str
    """Content hash, see `Manifest.content`."""
    fetched: Fetched
    """Report of the fetch that brought the version."""


@dataclass(slots=True)
class _InEngine:
    """Versions that one engine holds."""

    loaded: set[int] = field(default_factory=set)
    prepared: set[int] = field(default_factory=set)
    """Loaded versions to which the engine can switch without a wait."""

    def drop(self, versions: Set[int]) -> None:
        self.loaded -= versions
        self.prepared -= versions


class PolicyVersions:
    """State of every version that this node knows. Engines are named by their devices."""

    def __init__(self, on_disk: Mapping[int, OnDisk]) -> None:
        """`on_disk`: versions from before a restart. For the `jitter` of methods, see `backoff_s`."""
        self.newest_published = 0
        self._offers: dict[int, ArtefactOffer] = {}
        self._contents = {version: one.content for version, one in on_disk.items()}
        self._on_disk: dict[int, Fetched | None] = {0: None, **{v: one.fetched for v, one in on_disk.items()}}
        self._fetching: dict[int, ArtefactOffer] = {}
        self._open: list[ArtefactOffer] = []
        """Offers for which `declined` must still decide whether the hub should stop pushing: new offers, and offers
        whose fetch has just failed or ended.
        """
        self._missing_bytes: dict[int, int] = {}
        """Bytes that each running fetch still misses, as last reported."""
        self._unreadable: dict[int, bytes] = {}
        """Manifest of the unreadable offer, by version."""
        self._engines: defaultdict[str, _InEngine] = defaultdict(_InEngine)
        self._used: dict[int, None] = dict.fromkeys(version for version in sorted(on_disk) if _is_of_tenant(version))
        """Tenants' versions on disk or leased, the last used one last."""
        self._replaced: set[int] = set()
        self._failures: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}

    @property
    def newest_loaded(self) -> int | None:
        """Newest version of the run that any engine holds."""
        loaded = (version for engine in self._engines.values() for version in engine.loaded)
        return max((version for version in loaded if not _is_of_tenant(version)), default=None)

    def newest_prepared(self, device: str = "") -> int | None:
        """Return the newest published version to which the engine can switch without a wait."""
        engine = self._engines[device]
        return self._newest(engine.prepared & engine.loaded)

    def loaded(self, device: str = "") -> frozenset[int]:
        return frozenset(self._engines[device].loaded)

    @property
    def on_disk(self) -> frozenset[int]:
        return frozenset(self._on_disk)

    def version_for(self, lease: Lease, device: str = "") -> int | None:
        """Return the version with which the engine may start this lease now; None = no such version is loaded.

        This is the lease's own version. For an interruptible lease, it is the newest loaded version that the hub has
        published, unless that version is older than the lease's own.
        """
        loaded = self._engines[device].loaded
        if lease.on_new_version == "finish":
            return lease.policy_version if lease.policy_version in loaded else None
        newest = self._newest(loaded)
        return newest if newest is not None and newest >= lease.policy_version else None

    def is_hopeless(self, lease: Lease) -> bool:
        """Return True if no version that can start this lease is on disk or offered."""
        if lease.on_new_version == "interrupt" and lease.policy_version <= self.newest_published:
            return False
        return lease.policy_version not in self._on_disk and lease.policy_version not in self._offers

    def _newest(self, versions: Set[int]) -> int | None:
        """Return the newest of `versions` that the hub has published; None = it has published none of them. The node
        may hold newer versions, after the hub was restored from a backup.
        """
        return max((version for version in versions if version <= self.newest_published), default=None)

    @property
    def fetching_newest(self) -> bool:
        return self.newest_published in self._fetching

    def arrived(self, version: int) -> Fetched | None:
        """Return the report of the fetch that brought this version; None = the version is not on disk."""
        return self._on_disk.get(version)

    @property
    def reports(self) -> Iterable[Fetched]:
        return [fetched for fetched in self._on_disk.values() if fetched is not None]

    def published(self, version: int, offer: ArtefactOffer | None) -> list[Effect]:
        """Record the newest published version. An offer with other content replaces the earlier content of that
        version.
        """
        self.newest_published = version
        return [] if offer is None else self.offered(version, offer)

    def offered(self, version: int, offer: ArtefactOffer) -> list[Effect]:
        """Record the hub's offer of a version, new or old. An offer of version 0, the base model without adapter, is
        ignored.
        """
        if version == 0:
            return []
        content = _content_of(offer)
        effects = self._forget(version) if self._contents.get(version, content) != content else []
        # The version is on disk from before a restart: the fetch finds it there, and only resumes serving it.
        if version in self._on_disk and version not in self._offers:
            effects.append(FetchArtefact(policy_version=version, offer=offer))
        if version in self._offers and offer.manifest != self._offers[version].manifest:
            self._retry_at.pop(version, None)
            self._failures.pop(version, None)
        self._contents[version] = content
        self._offers[version] = offer
        self._open.append(offer)
        return effects

    def connected(self) -> None:
        """Ask the hub again for keyframes (versions that need no parent): it may have lost earlier requests."""
        for version in self._unreadable:
            self._retry_at.pop(version, None)

    def progressed(self, progress: Mapping[int | None, tuple[int, int]]) -> None:
        """Record (bytes received, total bytes) of the running fetches."""
        self._missing_bytes = {v: total - here for v, (here, total) in progress.items() if v is not None}

    def fetched(self, version: int, fetched: Fetched) -> bool:
        """Record a successful fetch. Return False for an abandoned fetch, whose files are being deleted."""
        if self._fetching.pop(version, None) is None:
            return False
        self._on_disk[version] = fetched
        if _is_of_tenant(version):
            self._used[version] = None
        self._failures.pop(version, None)
        self._unreadable.pop(version, None)
        return True

    def fetch_failed(self, version: int, now: float, jitter: float, *, unreadable: bool) -> None:
        """Record a failed fetch of a version. `unreadable`: its files arrived, but could not be decoded."""
        failed = self._fetching.pop(version, None)
        if failed is None:
            return
        self._open.append(failed)
        offer = self._offers.get(version)
        if offer is None or offer.manifest != failed.manifest:
            return
        if unreadable and offer.delta_parent is not None:
            self._unreadable[version] = offer.manifest
        else:
            self._put_off(version, now, jitter)

    def prepared(self, version: int, device: str = "") -> None:
        """Record that the engine can switch to this version without a wait."""
        self._engines[device].prepared.add(version)

    def engine_lost(self, device: str = "") -> None:
        self._engines.pop(device, None)

    def take_replaced(self) -> set[int]:
        """Return the versions whose content was replaced since the last call. Tokens drawn with them are invalid."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def reconcile(self, *, leased: Set[int], engines_up: Iterable[str], now: float, jitter: float) -> list[Effect]:
        """Return the effects that fetch, load, drop and delete versions by the rules of this module. `leased`: the
        versions that held leases need; `engines_up`: devices of the engines that can load versions now.
        """
        for version in sorted(filter(_is_of_tenant, leased)):
            self._used.pop(version, None)
            self._used[version] = None
        return [
            *self._fetches(leased, now, jitter),
            *(effect for device in engines_up for effect in self._loads(leased, device)),
            *self._removals(leased),
        ]

    def declined(self) -> list[Effect]:
        """Return messages that tell the hub to stop pushing newly offered versions for which no fetch runs."""
        pushes = {_info_hash_of(offer): offer for offer in self._open if offer.way in _PUSHED}
        self._open.clear()
        if pushes:
            for offer in self._fetching.values():
                pushes.pop(_info_hash_of(offer), None)
        return [SendMessage(message=Have(info_hash=one, pieces=(), wanted=False)) for one in pushes if one is not None]

    def _fetches(self, leased: Set[int], now: float, jitter: float) -> list[Effect]:
        wanted = (leased | {self.newest_published}) - self._on_disk.keys()
        parents = self._parents(wanted)
        surplus = self._fetching.keys() - wanted - parents
        closer = sorted(filter(self._is_closer_than_the_newest, surplus), key=self._nearness)
        abandoned = surplus.difference(closer[-MOST_SURPLUS:])
        for version in abandoned:
            self._open.append(self._fetching.pop(version))
        due: list[int] = []
        asked: list[int] = []
        # In ascending order: a delta's parent is older and must come first.
        for version in sorted(wanted - self._fetching.keys()):
            if version not in self._offers or self._retry_at.get(version, now) > now:
                continue
            if self._can_read(self._offers[version], version):
                self._fetching[version] = self._offers[version]
                due.append(version)
            else:
                self._unreadable[version] = self._offers[version].manifest
                self._put_off(version, now, jitter)
                asked.append(version)
        return [
            *(AbandonFetch(policy_version=v) for v in sorted(abandoned)),
            *(SendMessage(message=KeyframeWanted(policy_version=v)) for v in asked),
            *(FetchArtefact(policy_version=v, offer=self._offers[v]) for v in reversed(due)),
        ]

    def _can_read(self, offer: ArtefactOffer, version: int) -> bool:
        if offer.manifest == self._unreadable.get(version):
            return False
        parent = offer.delta_parent
        return parent is None or parent in self._on_disk or parent in self._fetching

    def _is_closer_than_the_newest(self, version: int) -> bool:
        """Return True if this fetch misses no more bytes than the fetch of the newest version. If the newest version's
        missing bytes are unknown, return True until that version is on disk.
        """
        newest = self._missing_bytes.get(self.newest_published)
        if newest is None:
            return self.newest_published not in self._on_disk
        return self._missing_bytes.get(version, newest) <= newest

    def _nearness(self, version: int) -> tuple[float, int]:
        """Order of running fetches: those with the fewest missing bytes are last, among equals the newest."""
        return -self._missing_bytes.get(version, math.inf), version

    def _parents(self, versions: Iterable[int]) -> set[int]:
        """Return the parents of the readable deltas that are offered for `versions`."""
        offers = {version: self._offers[version] for version in versions if version in self._offers}
        readable = [one for version, one in offers.items() if one.manifest != self._unreadable.get(version)]
        return {offer.delta_parent for offer in readable if offer.delta_parent is not None}

    def _put_off(self, version: int, now: float, jitter: float) -> None:
        failures = self._failures.get(version, 0)
        self._failures[version] = failures + 1
        self._retry_at[version] = now + backoff_s(failures, jitter)

    def _loads(self, leased: Set[int], device: str) -> list[Effect]:
        engine = self._engines[device]
        due = ((leased & self._on_disk.keys()) | {self._of_run[-1]}) - engine.loaded
        engine.loaded |= due
        return [AddPolicy(policy_version=v, device=device) for v in sorted(due, reverse=True)]

    def _removals(self, leased: Set[int]) -> list[Effect]:
        used = [version for version in self._used if version in self._on_disk]
        needed = leased | {self.newest_published}
        kept = {*self._of_run[-KEPT:], *used[-KEPT_OF_TENANTS:]} | needed | self._parents(self._fetching)
        stays = {*self._of_run[-LOADED:], *used[-LOADED_OF_TENANTS:]} | needed
        deleted = self._on_disk.keys() - kept - {0}
        drops = [effect for device in self._engines for effect in self._drops(device, stays)]
        for version in deleted:
            del self._on_disk[version]
            if version not in self._offers:
                del self._contents[version]
        idle = sorted(self._offers.keys() - kept - self._fetching.keys())
        for ours in (False, True):
            for version in [version for version in idle if _is_of_tenant(version) is ours][:-KEPT_OFFERS]:
                for known in (self._offers, self._contents, self._unreadable, self._failures, self._retry_at):
                    known.pop(version, None)
        self._used = {version: None for version in self._used if version in self._on_disk or version in leased}
        return [*drops, *(RemoveArtefact(policy_version=v) for v in sorted(deleted))]

    @property
    def _of_run(self) -> list[int]:
        """Return the versions on disk that are not a tenant's, in order; the base model is always there."""
        return sorted(version for version in self._on_disk if not _is_of_tenant(version))

    def _drops(self, device: str, stays: Set[int]) -> list[Effect]:
        engine = self._engines[device]
        dropped = engine.loaded - stays
        engine.drop(dropped)
        return [DropPolicy(policy_version=v, device=device) for v in sorted(dropped)]

    def _forget(self, version: int) -> list[Effect]:
        effects: list[Effect] = []
        if version in self._fetching:
            self._open.append(self._fetching[version])
            effects.append(AbandonFetch(policy_version=version))
        for device, engine in self._engines.items():
            if version in engine.loaded:
                effects.append(DropPolicy(policy_version=version, device=device))
            engine.drop({version})
        if version in self._on_disk:
            effects.append(RemoveArtefact(policy_version=version))
        self._replaced.add(version)
        for known in (self._fetching, self._on_disk, self._unreadable, self._failures, self._retry_at):
            known.pop(version, None)
        return effects


def _is_of_tenant(version: int) -> bool:
    return version >= FIRST_TENANT_VERSION


def _content_of(offer: ArtefactOffer) -> str:
    manifest = _manifest_of(offer)
    return offer.manifest.hex() if manifest is None else manifest.content


def _info_hash_of(offer: ArtefactOffer) -> bytes | None:
    manifest = _manifest_of(offer)
    return None if manifest is None else bytes.fromhex(manifest.info_hash)


def _manifest_of(offer: ArtefactOffer) -> Manifest | None:
    """Return the offer's manifest; None if it is invalid. The fetch, not this function, checks the signature."""
    try:
        return Manifest.model_validate_json(offer.manifest)
    except ValidationError:
        return None
