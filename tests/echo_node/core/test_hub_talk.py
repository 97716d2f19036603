from typing import Any

from echo_node.core.effects import ForgetLease, SendMessage
from echo_node.core.hub_talk import HubTalk
from echo_shared.wire.messages import Goodbye, LeaseReturned, NodeStatus

RETURNED = LeaseReturned(lease_id=4, indices=(0, 3), reason="no")
SAID = [SendMessage(message=RETURNED), ForgetLease(lease_id=4)]


def status(**news: Any) -> NodeStatus:
    fields = {"activity": "waiting", "capacity": 4, "policy_version": 1, "tokens_per_s": 0.0}
    return NodeStatus(**{**fields, **news})


def test_a_message_without_a_connection_is_sent_after_the_next_welcome() -> None:
    talk = HubTalk([RETURNED])
    assert talk.say(RETURNED) == [] and not talk.connected
    assert talk.welcomed(5.0) == [*SAID, *SAID] and talk.connected
    talk.disconnected()
    assert talk.welcomed(5.0) == []
    assert talk.say(RETURNED) == SAID


def test_a_message_sent_without_a_connection_is_dropped() -> None:
    talk = HubTalk([])
    assert talk.send(Goodbye()) == [] and talk.report(status(), 0.0) == []
    assert talk.welcomed(5.0) == []
    assert talk.send(Goodbye()) == [SendMessage(message=Goodbye())]


def test_a_status_is_sent_as_news_and_as_the_heartbeat() -> None:
    talk = HubTalk([])
    talk.welcomed(5.0)
    first = status()
    assert talk.report(first, 1.0) == [SendMessage(message=first)]
    assert talk.report(status(tokens_per_s=9.0), 5.9) == [], "a change of the pace alone is not reported"
    assert len(talk.report(first, 6.0)) == 1
    for news in ({"activity": "sampling"}, {"capacity": 3}, {"policy_version": 2}):
        assert len(talk.report(status(**news), 6.0)) == 1
    talk.disconnected()
    talk.welcomed(5.0)
    assert len(talk.report(status(policy_version=2), 6.0)) == 1, "another connection has no status yet"
