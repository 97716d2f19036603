import hashlib
from collections.abc import Mapping

import numpy as np

from echo_node.core.effects import (
    AbandonFetch,
    AddPolicy,
    DropPolicy,
    Effect,
    FetchArtefact,
    RemoveArtefact,
    SendMessage,
)
from echo_node.core.policies import (
    KEPT,
    KEPT_OF_TENANTS,
    KEPT_OFFERS,
    LOADED,
    LOADED_OF_TENANTS,
    MOST_SURPLUS,
    OnDisk,
    PolicyVersions,
)
from echo_shared.artefacts.manifest import Manifest, ManifestFile
from echo_shared.wire.messages import ArtefactOffer, Fetched, Have, KeyframeWanted, Lease, Way
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION


def offer(version: int, marker: str = "a", *, parent: int | None = None) -> ArtefactOffer:
    """Return an offer of a version. A different `marker` gives it different content."""
    manifest = Manifest(
        kind="policy",
        run_id="run",
        name=f"v{version}",
        policy_version=version,
        carrier="keyframe" if parent is None else "delta",
        delta_parent=parent,
        key_id=1,
        info_hash=f"{version:038x}{parent or 0:02x}",
        files=(ManifestFile(path="x.json", size_bytes=1, sha256=hashlib.sha256(marker.encode()).hexdigest()),),
    )
    return ArtefactOffer(
        manifest=manifest.encode(), signature=bytes(64), torrent=b"", web_seed_path="/a/", delta_parent=parent
    )


def lease(lease_id: int, *, version: int = 0) -> Lease:
    return Lease(
        lease_id=lease_id,
        group_id=lease_id,
        indices=(0,),
        prompt_ids=np.array([1, 2], np.int32),
        seed=9,
        policy_version=version,
        temperature=1.0,
        max_tokens=8,
        stop_ids=(1,),
        deadline_s=100.0,
    )


def fetched(version: int) -> Fetched:
    return Fetched(info_hash=bytes(20), policy_version=version, seconds=1.0, swarm_bytes=1, web_seed_bytes=0)


def policies(on_disk: Mapping[int, OnDisk] | None = None) -> PolicyVersions:
    return PolicyVersions(on_disk or {})


def settle(shelf: PolicyVersions, *leased: int, engine_up: bool = True, now: float = 0.0) -> list[Effect]:
    return shelf.reconcile(leased=set(leased), engines_up=[""] if engine_up else [], now=now, jitter=0.0)


def have(shelf: PolicyVersions, *versions: int) -> None:
    for version in versions:
        shelf.published(version, offer(version))
        settle(shelf)
        shelf.fetched(version, fetched(version))
        settle(shelf)


def asked(version: int) -> Effect:
    return SendMessage(message=KeyframeWanted(policy_version=version))


def test_the_base_is_loaded_without_a_fetch() -> None:
    assert settle(policies()) == [AddPolicy(policy_version=0)]


def test_an_offer_of_version_0_is_ignored_as_it_is_the_base() -> None:
    shelf = policies()
    assert shelf.offered(0, offer(1, "a")) + shelf.offered(0, offer(1, "b")) == []
    assert settle(shelf) == [AddPolicy(policy_version=0)]


def test_nothing_is_loaded_while_there_is_no_engine() -> None:
    assert settle(policies(), engine_up=False) == []


def test_the_newest_version_is_fetched_once_then_loaded() -> None:
    shelf = policies()
    shelf.published(3, offer(3))
    assert FetchArtefact(policy_version=3, offer=offer(3)) in settle(shelf)
    assert settle(shelf) == []
    shelf.fetched(3, fetched(3))
    assert settle(shelf) == [AddPolicy(policy_version=3)]
    assert shelf.newest_loaded == 3


def superseded() -> PolicyVersions:
    """Return policies that fetch version 1 when version 2 is published, and now fetch both."""
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf)
    shelf.published(2, offer(2))
    assert settle(shelf) == [FetchArtefact(policy_version=2, offer=offer(2))]
    return shelf


def test_a_superseded_fetch_is_abandoned_once_the_newer_is_closer() -> None:
    shelf = superseded()
    shelf.progressed({None: (0, 1_000), 1: (40, 100)})
    assert settle(shelf) == []  # Both fetches go on: the missing bytes of version 2 are unknown.
    shelf.progressed({1: (40, 100), 2: (0, 50)})
    assert settle(shelf) == [AbandonFetch(policy_version=1)]
    assert not shelf.fetched(1, fetched(1))
    assert settle(shelf) == []


def test_a_superseded_fetch_continues_while_it_is_closer() -> None:
    shelf = superseded()
    shelf.progressed({1: (60, 100), 2: (0, 50)})
    assert settle(shelf) == []
    shelf.fetched(1, fetched(1))
    # Load version 1, which is not the newest version, until version 2 arrives.
    assert settle(shelf) == [AddPolicy(policy_version=1)]
    shelf.fetched(2, fetched(2))
    assert AddPolicy(policy_version=2) in settle(shelf)


def test_a_superseded_fetch_is_abandoned_when_the_newest_is_here() -> None:
    shelf = superseded()
    shelf.fetched(2, fetched(2))
    shelf.progressed({1: (99, 100)})
    assert AbandonFetch(policy_version=1) in settle(shelf)


def test_few_superseded_fetches_continue_those_that_miss_least() -> None:
    shelf = policies()
    for version in range(1, 100):
        shelf.published(version, offer(version))
        shelf.progressed({3: (95, 100), 5: (90, 100)})
        settle(shelf)
    going = [version for version in range(1, 100) if shelf.fetched(version, fetched(version))]
    assert going == [3, 5, *range(99 - MOST_SURPLUS + 2, 100)]


def test_a_superseded_fetch_continues_as_the_parent_of_the_newest() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf)
    shelf.published(2, offer(2, parent=1))
    assert settle(shelf) == [FetchArtefact(policy_version=2, offer=offer(2, parent=1))]
    shelf.progressed({1: (0, 100), 2: (9, 10)})
    assert settle(shelf) == []


def test_a_fetch_that_a_lease_needs_is_not_abandoned() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf, 1)
    shelf.published(2, offer(2))
    assert settle(shelf, 1) == [FetchArtefact(policy_version=2, offer=offer(2))]


def test_the_newest_versions_and_those_of_leases_are_kept() -> None:
    shelf = policies()
    have(shelf, 1)
    assert settle(shelf, 1) == []
    for version in range(2, KEPT + 2):
        shelf.published(version, offer(version))
        settle(shelf, 1)
        shelf.fetched(version, fetched(version))
        settle(shelf, 1)
    assert 1 in shelf.loaded()
    assert settle(shelf) == [DropPolicy(policy_version=1), RemoveArtefact(policy_version=1)]
    assert [v for v in range(KEPT + 2) if v in shelf.loaded()] == [KEPT, KEPT + 1]
    assert [report.policy_version for report in shelf.reports] == list(range(2, KEPT + 2))


def test_the_parent_of_a_version_being_fetched_is_kept() -> None:
    shelf = policies()
    have(shelf, *range(1, KEPT + 1))
    shelf.published(9, offer(9, parent=1))
    settle(shelf)
    settle(shelf, 5)
    shelf.offered(5, offer(5))
    settle(shelf, 5)
    shelf.fetched(5, fetched(5))
    assert RemoveArtefact(policy_version=1) not in settle(shelf)
    shelf.fetched(9, fetched(9))
    assert RemoveArtefact(policy_version=1) in settle(shelf)


def test_the_base_is_unloaded_but_never_deleted_and_comes_back_for_a_lease() -> None:
    shelf = policies()
    settle(shelf)
    have(shelf, 1)
    shelf.published(2, offer(2))
    settle(shelf)
    shelf.fetched(2, fetched(2))
    assert DropPolicy(policy_version=0) in settle(shelf)
    assert settle(shelf, 0) == [AddPolicy(policy_version=0)]


def test_a_failed_fetch_is_tried_again_later_and_later() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf)
    shelf.fetch_failed(1, 10.0, 0.0, unreadable=False)
    assert settle(shelf, now=10.5) == []
    assert settle(shelf, now=11.0) == [FetchArtefact(policy_version=1, offer=offer(1))]
    shelf.fetch_failed(1, 20.0, 0.0, unreadable=False)
    assert settle(shelf, now=21.5) == []
    assert settle(shelf, now=22.0) == [FetchArtefact(policy_version=1, offer=offer(1))]


def test_a_contradicting_offer_replaces_the_first_ones_version() -> None:
    shelf = policies()
    have(shelf, 1)
    assert shelf.published(1, offer(1)) == []
    assert shelf.published(1, offer(1, "b")) == [DropPolicy(policy_version=1), RemoveArtefact(policy_version=1)]
    assert FetchArtefact(policy_version=1, offer=offer(1, "b")) in settle(shelf)


def test_the_same_version_in_another_carrier_is_no_contradiction() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    assert shelf.published(2, offer(2, parent=1)) == []
    assert settle(shelf) == []


def test_a_delta_whose_parent_is_on_disk_or_coming_is_fetched() -> None:
    shelf = policies()
    have(shelf, 1)
    shelf.published(2, offer(2, parent=1))
    shelf.offered(3, offer(3, parent=2))
    assert settle(shelf, 3) == [
        FetchArtefact(policy_version=3, offer=offer(3, parent=2)),
        FetchArtefact(policy_version=2, offer=offer(2, parent=1)),
    ]


def test_without_the_parent_the_keyframe_is_requested_until_it_comes() -> None:
    shelf = policies()
    shelf.published(5, offer(5, parent=4))
    assert settle(shelf, engine_up=False) == [asked(5)]
    assert settle(shelf, engine_up=False, now=0.9) == []
    assert settle(shelf, engine_up=False, now=1.0) == [asked(5)]
    assert settle(shelf, engine_up=False, now=2.9) == []
    shelf.connected()  # Repeat the request: the old connection may have lost it.
    shelf.published(5, offer(5, parent=4))
    assert settle(shelf, engine_up=False, now=2.9) == [asked(5)]
    shelf.published(5, offer(5))
    assert settle(shelf, engine_up=False, now=2.9) == [FetchArtefact(policy_version=5, offer=offer(5))]


def test_a_delta_that_cannot_be_read_is_not_fetched_again() -> None:
    shelf = policies()
    have(shelf, 4)
    shelf.published(5, offer(5, parent=4))
    settle(shelf)
    shelf.fetch_failed(5, 0.0, 0.0, unreadable=True)
    assert settle(shelf) == [asked(5)]
    # The new delta has another parent, version 3, which the node lacks. It asks for the keyframe again.
    shelf.published(5, offer(5, parent=3))
    assert settle(shelf) == [asked(5)]
    shelf.published(5, offer(5))
    assert settle(shelf) == [FetchArtefact(policy_version=5, offer=offer(5))]
    shelf.fetched(5, fetched(5))
    assert AddPolicy(policy_version=5) in settle(shelf)


def test_a_keyframe_that_cannot_be_read_is_fetched_again_later() -> None:
    shelf = policies()
    shelf.published(5, offer(5))
    settle(shelf)
    shelf.fetch_failed(5, 0.0, 0.0, unreadable=True)
    assert settle(shelf) == []
    assert settle(shelf, now=1.0) == [FetchArtefact(policy_version=5, offer=offer(5))]


def test_a_keyframe_that_is_offered_meanwhile_is_fetched_when_the_delta_fails() -> None:
    shelf = policies()
    have(shelf, 4)
    shelf.published(5, offer(5, parent=4))
    settle(shelf)
    shelf.published(5, offer(5))
    assert settle(shelf) == []
    shelf.fetch_failed(5, 0.0, 0.0, unreadable=True)
    assert settle(shelf) == [FetchArtefact(policy_version=5, offer=offer(5))]


def test_versions_on_disk_are_used_and_served_after_a_restart() -> None:
    content = Manifest.model_validate_json(offer(5).manifest).content
    shelf = policies({4: OnDisk(content="c" * 64, fetched=fetched(4)), 5: OnDisk(content=content, fetched=fetched(5))})
    assert list(shelf.reports) == [fetched(4), fetched(5)]
    again = FetchArtefact(policy_version=5, offer=offer(5, parent=3))
    # The version's files are on disk already, so the fetch needs no parent.
    assert shelf.published(5, offer(5, parent=3)) == [again]
    assert settle(shelf) == [AddPolicy(policy_version=5)]
    shelf.fetched(5, fetched(5))
    assert shelf.published(5, offer(5, parent=3)) == []
    shelf.published(6, offer(6, parent=4))
    assert settle(shelf) == [FetchArtefact(policy_version=6, offer=offer(6, parent=4))]
    # The hub now offers other content as version 4.
    assert shelf.offered(4, offer(4)) == [RemoveArtefact(policy_version=4)]


def test_an_invalid_manifest_is_left_to_the_fetch() -> None:
    shelf = policies()
    odd = offer(1).model_copy(update={"manifest": b"{}"})
    shelf.published(1, odd)
    assert FetchArtefact(policy_version=1, offer=odd) in settle(shelf)


def pushed(version: int, marker: str = "a", *, parent: int | None = None) -> ArtefactOffer:
    return offer(version, marker, parent=parent).model_copy(update={"way": Way.BROADCAST})


def declines(shelf: PolicyVersions) -> list[bytes]:
    messages = [effect.message for effect in shelf.declined() if isinstance(effect, SendMessage)]
    haves = [message for message in messages if isinstance(message, Have)]
    assert all(have.pieces == () and not have.wanted for have in haves) and len(haves) == len(messages)
    return [have.info_hash for have in haves]


def info_hash(version: int, parent: int = 0) -> bytes:
    return bytes.fromhex(f"{version:038x}{parent:02x}")


def test_a_push_that_is_fetched_is_not_declined_until_that_fails() -> None:
    shelf = policies()
    shelf.published(1, pushed(1))
    settle(shelf)
    assert declines(shelf) == []
    shelf.fetch_failed(1, 0.0, 0.0, unreadable=False)
    assert settle(shelf) == [] and declines(shelf) == [info_hash(1)] and declines(shelf) == []
    shelf.connected()
    shelf.published(1, pushed(1))
    assert settle(shelf, now=0.5) == [] and declines(shelf) == [info_hash(1)]
    assert settle(shelf, now=1.0) != [] and declines(shelf) == []


def test_pushes_of_unwanted_or_present_versions_are_declined() -> None:
    shelf = policies()
    have(shelf, 3)
    shelf.offered(2, pushed(2))
    shelf.published(3, pushed(3, parent=1))
    settle(shelf)
    assert declines(shelf) == [info_hash(2), info_hash(3, 1)]


def test_the_push_of_an_abandoned_version_is_declined() -> None:
    shelf = policies()
    have(shelf, 1)
    shelf.published(2, pushed(2, parent=1))
    settle(shelf)
    assert declines(shelf) == []
    shelf.published(2, pushed(2, "b"))  # Version 2 gets other content.
    settle(shelf)
    assert declines(shelf) == [info_hash(2, 1)]
    shelf.published(3, pushed(3))
    settle(shelf)
    assert declines(shelf) == []
    shelf.fetched(3, fetched(3))
    assert AbandonFetch(policy_version=2) in settle(shelf)
    assert declines(shelf) == [info_hash(2)]


def test_nothing_is_declined_that_is_not_pushed_or_has_no_name() -> None:
    shelf = policies()
    have(shelf, 3)
    shelf.offered(2, offer(2))
    shelf.offered(1, pushed(1).model_copy(update={"manifest": b"{}"}))
    settle(shelf)
    assert declines(shelf) == []


def test_a_new_engine_gets_all_policies_it_needs() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    shelf.engine_lost()
    assert shelf.newest_loaded is None
    assert settle(shelf, 1) == [AddPolicy(policy_version=2), AddPolicy(policy_version=1)]


def test_a_version_without_an_offer_is_hopeless() -> None:
    shelf = policies()
    shelf.published(3, offer(3))
    assert [shelf.is_hopeless(lease(1, version=version)) for version in (7, 3, 2, 0)] == [True, False, True, False]
    assert [shelf.is_hopeless(interruptible(version)) for version in (7, 3, 2, 0)] == [True, False, False, False]


def interruptible(version: int) -> Lease:
    return lease(1, version=version).model_copy(update={"on_new_version": "interrupt"})


def test_interruptible_leases_begin_with_the_newest_version_others_with_their_own() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    assert [shelf.version_for(lease(1, version=version)) for version in (1, 2, 3)] == [1, 2, None]
    assert [shelf.version_for(interruptible(version)) for version in (1, 2, 3)] == [2, 2, None]
    shelf.published(1, offer(1))  # The hub was restored from a backup, so its newest version is 1.
    assert [shelf.version_for(interruptible(version)) for version in (1, 2)] == [1, None]


def test_prepared_versions_are_known_until_dropped_or_replaced() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    assert shelf.newest_prepared() is None
    shelf.prepared(1)
    assert shelf.newest_prepared() == 1
    shelf.prepared(2)
    assert shelf.newest_prepared() == 2
    shelf.offered(2, offer(2, "b"))
    assert shelf.newest_prepared() == 1, "another version 2 is coming"
    assert (shelf.take_replaced(), shelf.take_replaced()) == ({2}, set())
    shelf.engine_lost()
    settle(shelf)
    assert shelf.newest_prepared() is None


def test_an_offer_is_kept_while_its_fetch_continues() -> None:
    shelf = policies()
    newest = KEPT + KEPT_OFFERS + 4
    for version in range(1, newest + 1):
        shelf.published(version, offer(version))
        settle(shelf)
    for version in range(1, newest + 1):  # The node is slow: each fetch ends only after all versions were published.
        shelf.fetched(version, fetched(version))
        settle(shelf)
    assert shelf.newest_loaded == newest


def test_an_older_version_of_a_lease_is_fetched_and_dropped_afterwards() -> None:
    shelf = policies()
    have(shelf, *range(5, 20))
    assert shelf.is_hopeless(lease(1, version=2))
    assert shelf.offered(2, offer(2)) == [] and shelf.newest_published == 19
    assert settle(shelf, 2) == [FetchArtefact(policy_version=2, offer=offer(2))]
    shelf.fetched(2, fetched(2))
    assert settle(shelf, 2) == [AddPolicy(policy_version=2)]
    assert shelf.newest_loaded == 19
    assert settle(shelf) == [DropPolicy(policy_version=2), RemoveArtefact(policy_version=2)]


OURS = FIRST_TENANT_VERSION


def use(shelf: PolicyVersions, version: int) -> list[Effect]:
    """Offer a tenant's version with a lease, fetch it, and end the lease."""
    shelf.offered(version, offer(version))
    effects = settle(shelf, version)
    shelf.fetched(version, fetched(version))
    effects += settle(shelf, version)
    return effects + settle(shelf)


def test_a_tenants_version_is_fetched_and_loaded_for_its_lease() -> None:
    shelf = policies()
    have(shelf, 1)
    effects = use(shelf, OURS + 3)
    assert FetchArtefact(policy_version=OURS + 3, offer=offer(OURS + 3)) in effects
    assert AddPolicy(policy_version=OURS + 3) in effects
    assert shelf.version_for(lease(1, version=OURS + 3)) == OURS + 3
    assert shelf.newest_loaded == 1, "a tenant's version is not the newest of the run"


def test_tenants_versions_do_not_drive_out_those_of_the_run() -> None:
    shelf = policies()
    have(shelf, *range(1, KEPT + 1))
    for number in range(2 * KEPT_OF_TENANTS):
        use(shelf, OURS + number)
    of_run = {version for version in shelf.on_disk if version < OURS}
    assert of_run == {0, *range(1, KEPT + 1)}
    assert {version for version in shelf.loaded() if version < OURS} == {*range(KEPT - LOADED + 1, KEPT + 1)}


def test_versions_of_the_run_do_not_drive_out_those_of_tenants() -> None:
    shelf = policies()
    use(shelf, OURS)
    have(shelf, *range(1, 3 * KEPT))
    assert OURS in shelf.on_disk and OURS in shelf.loaded()
    have(shelf, 3 * KEPT)
    assert AddPolicy(policy_version=3 * KEPT) not in settle(shelf) and 3 * KEPT in shelf.loaded()


def test_the_tenants_versions_used_last_are_kept() -> None:
    shelf = policies()
    numbers = range(KEPT_OF_TENANTS)
    for number in numbers:
        use(shelf, OURS + number)
    settle(shelf, OURS)  # Use the first version of the tenants again.
    effects = use(shelf, OURS + KEPT_OF_TENANTS)
    assert RemoveArtefact(policy_version=OURS + 1) in effects
    assert OURS in shelf.on_disk and OURS + 1 not in shelf.on_disk
    assert {version for version in shelf.loaded() if version >= OURS} == {OURS, OURS + KEPT_OF_TENANTS}
    assert LOADED_OF_TENANTS == 2


def test_a_leased_version_of_a_tenant_stays_however_many_others_come() -> None:
    shelf = policies()
    use(shelf, OURS)
    for number in range(1, 2 * KEPT_OF_TENANTS):
        shelf.offered(OURS + number, offer(OURS + number))
        settle(shelf, OURS, OURS + number)
        shelf.fetched(OURS + number, fetched(OURS + number))
        settle(shelf, OURS)
    assert OURS in shelf.on_disk and OURS in shelf.loaded()


def test_a_restart_keeps_tenants_versions_on_disk() -> None:
    on_disk = {version: OnDisk(content="c", fetched=fetched(version)) for version in (1, OURS, OURS + 1)}
    shelf = policies(on_disk)
    shelf.published(1, None)
    settle(shelf)
    assert {OURS, OURS + 1} <= shelf.on_disk and shelf.newest_loaded == 1
