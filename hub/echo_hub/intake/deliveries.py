"""Pass finished samples of tenants' requests to the part of the hub that serves tenants."""

from __future__ import annotations

from typing import Protocol

from echo_hub.core.accounting.effects import DeliverAnswer


class AnswerReceiver(Protocol):
    def take(self, action: DeliverAnswer) -> None:
        """Take one finished sample. Must not wait."""


class Deliveries:
    """Passes on each `DeliverAnswer`, after its commit. Without a receiver nothing happens: the samples stay in the
    store, and the receiver reads them when it starts."""

    def __init__(self) -> None:
        self._receiver: AnswerReceiver | None = None

    def go_to(self, receiver: AnswerReceiver) -> None:
        """Pass on all samples to `receiver` from now on."""
        self._receiver = receiver

    def deliver(self, action: DeliverAnswer) -> None:
        if self._receiver is not None:
            self._receiver.take(action)
