from echo_node.core.base_model import BaseModel
from echo_node.core.effects import FetchArtefact
from tests.echo_node.core.loop_parts import fetched, offer

FIRST, SECOND = offer(1), offer(2)


def test_the_first_offer_is_fetched_and_later_ones_are_kept_for_a_retry() -> None:
    base = BaseModel()
    assert base.offered(FIRST) == [FetchArtefact(policy_version=None, offer=FIRST)]
    assert base.offered(SECOND) == []
    base.fetch_failed(10.0, 0.0)
    assert base.due(10.9) == []
    assert base.due(11.0) == [FetchArtefact(policy_version=None, offer=SECOND)]
    assert base.due(100.0) == [], "one retry for one failure"


def test_every_fetch_names_both_forms_of_the_newest_offers() -> None:
    base = BaseModel()
    assert base.offered(FIRST, SECOND) == [FetchArtefact(policy_version=None, offer=FIRST, gguf=SECOND)]
    base.fetch_failed(10.0, 0.0)
    assert base.due(11.0) == [FetchArtefact(policy_version=None, offer=FIRST, gguf=SECOND)]
    base.offered(FIRST, None)
    assert base.lacks_weights() == [FetchArtefact(policy_version=None, offer=FIRST)]


def test_a_base_fetch_waits_longer_after_each_failure() -> None:
    base = BaseModel()
    base.offered(FIRST)
    for now, wait_s in ((0.0, 0.75), (10.0, 1.5), (20.0, 3.0)):
        base.fetch_failed(now, 0.5)
        assert base.due(now + wait_s - 0.01) == [] and len(base.due(now + wait_s)) == 1


def test_a_base_arrives_once() -> None:
    base = BaseModel()
    assert base.fetched is None
    assert base.arrived(fetched(None)) and not base.arrived(fetched(None))
    assert base.fetched == fetched(None)


def test_a_base_without_weights_is_fetched_again_with_the_newest_offer() -> None:
    base = BaseModel()
    base.offered(FIRST)
    base.arrived(fetched(None))
    base.offered(SECOND)
    assert base.lacks_weights() == [FetchArtefact(policy_version=None, offer=SECOND)]
    assert base.fetched is None and base.arrived(fetched(None))
