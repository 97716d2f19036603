from __future__ import annotations

from echo_hub.core.accounting.effects import DeliverAnswer
from echo_hub.intake.deliveries import Deliveries


class Receiver:
    def __init__(self) -> None:
        self.taken: list[DeliverAnswer] = []

    def take(self, action: DeliverAnswer) -> None:
        self.taken.append(action)


def test_samples_go_to_the_receiver_once_there_is_one() -> None:
    deliveries, receiver = Deliveries(), Receiver()
    first = DeliverAnswer(group_id=1, index=0, rollout_id="1-0", node_id="a")
    second = DeliverAnswer(group_id=1, index=1, rollout_id="1-1", node_id="a")
    deliveries.deliver(first)
    deliveries.go_to(receiver)
    deliveries.deliver(second)
    assert receiver.taken == [second]
