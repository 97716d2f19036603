from echo_node.core.effects import AbandonFetch, AddPolicy, DropPolicy, Effect, FetchArtefact, RemoveArtefact
from echo_node.core.policies import Policies
from echo_shared.messages import ArtefactOffer


def offer(version: int, marker: str = "") -> ArtefactOffer:
    manifest = f"{version}{marker}".encode()
    return ArtefactOffer(manifest=manifest, signature=bytes(64), torrent=b"", web_seed_path="/a/")


def policies() -> Policies:
    return Policies(jitter=lambda: 0.0)


def settle(shelf: Policies, *leased: int, engine_up: bool = True, now: float = 0.0) -> list[Effect]:
    return shelf.reconcile(leased=set(leased), engine_up=engine_up, now=now)


def have(shelf: Policies, *versions: int) -> None:
    for version in versions:
        shelf.published(version, offer(version))
        settle(shelf)
        shelf.fetched(version)
        settle(shelf)


def test_the_base_is_loaded_without_a_fetch() -> None:
    assert settle(policies()) == [AddPolicy(policy_version=0)]


def test_nothing_is_loaded_while_there_is_no_engine() -> None:
    assert settle(policies(), engine_up=False) == []


def test_the_newest_version_is_fetched_once_then_loaded() -> None:
    shelf = policies()
    shelf.published(3, offer(3))
    assert FetchArtefact(policy_version=3, offer=offer(3)) in settle(shelf)
    assert settle(shelf) == []
    shelf.fetched(3)
    assert settle(shelf) == [AddPolicy(policy_version=3)]
    assert shelf.newest_loaded == 3


def test_a_superseded_fetch_is_abandoned_and_its_late_arrival_ignored() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf)
    shelf.published(2, offer(2))
    assert settle(shelf) == [AbandonFetch(policy_version=1), FetchArtefact(policy_version=2, offer=offer(2))]
    shelf.fetched(1)
    assert settle(shelf) == []


def test_a_fetch_that_a_lease_needs_is_not_abandoned() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf, 1)
    shelf.published(2, offer(2))
    assert settle(shelf, 1) == [FetchArtefact(policy_version=2, offer=offer(2))]


def test_keeps_the_newest_two_and_what_leases_name() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    shelf.published(3, offer(3))
    settle(shelf, 1)
    shelf.fetched(3)
    assert settle(shelf, 1) == [AddPolicy(policy_version=3), *_reload(shelf, 1)]
    assert settle(shelf) == [DropPolicy(policy_version=1), RemoveArtefact(policy_version=1)]
    assert shelf.is_loaded(2) and shelf.is_loaded(3) and not shelf.is_loaded(1)


def _reload(shelf: Policies, version: int) -> list[Effect]:
    return [] if shelf.is_loaded(version) else [AddPolicy(policy_version=version)]


def test_the_base_is_unloaded_but_never_deleted_and_comes_back_for_a_lease() -> None:
    shelf = policies()
    settle(shelf)
    have(shelf, 1)
    shelf.published(2, offer(2))
    settle(shelf)
    shelf.fetched(2)
    assert DropPolicy(policy_version=0) in settle(shelf)
    assert settle(shelf, 0) == [AddPolicy(policy_version=0)]


def test_a_failed_fetch_is_tried_again_later_and_later() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    settle(shelf)
    shelf.fetch_failed(1, 10.0)
    assert settle(shelf, now=10.5) == []
    assert settle(shelf, now=11.0) == [FetchArtefact(policy_version=1, offer=offer(1))]
    shelf.fetch_failed(1, 20.0)
    assert settle(shelf, now=21.5) == []
    assert settle(shelf, now=22.0) == [FetchArtefact(policy_version=1, offer=offer(1))]


def test_a_contradicting_offer_replaces_what_the_first_one_brought() -> None:
    shelf = policies()
    have(shelf, 1)
    assert shelf.published(1, offer(1)) == []
    assert shelf.published(1, offer(1, "b")) == [DropPolicy(policy_version=1), RemoveArtefact(policy_version=1)]
    assert FetchArtefact(policy_version=1, offer=offer(1, "b")) in settle(shelf)


def test_a_new_engine_is_told_all_it_needs() -> None:
    shelf = policies()
    have(shelf, 1, 2)
    shelf.engine_lost()
    assert shelf.newest_loaded is None
    assert settle(shelf, 1) == [AddPolicy(policy_version=2), AddPolicy(policy_version=1)]


def test_a_version_that_nobody_offers_is_hopeless() -> None:
    shelf = policies()
    shelf.published(1, offer(1))
    assert shelf.is_hopeless(7)
    assert not shelf.is_hopeless(1)
    assert not shelf.is_hopeless(0)


def test_an_older_version_that_a_lease_brings_is_fetched_for_it_and_given_up_after() -> None:
    shelf = policies()
    have(shelf, *range(5, 20))
    assert shelf.is_hopeless(2)
    assert shelf.offered(2, offer(2)) == [] and shelf.newest_published == 19
    assert settle(shelf, 2) == [FetchArtefact(policy_version=2, offer=offer(2))]
    shelf.fetched(2)
    assert settle(shelf, 2) == [AddPolicy(policy_version=2)]
    assert shelf.newest_loaded == 19
    assert settle(shelf) == [DropPolicy(policy_version=2), RemoveArtefact(policy_version=2)]
