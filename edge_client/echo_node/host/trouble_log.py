"""A node's troubles. Each is logged when it begins and when it ends."""

from __future__ import annotations

import logging

from echo_node.core.troubles import Trouble, TroubleCode, Troubles, trouble_of
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)


class TroubleLog:
    """Log of troubles: each is logged when it begins and when it ends. Use it only on the event loop's thread."""

    def __init__(self) -> None:
        self._troubles = Troubles()

    @property
    def now(self) -> tuple[Trouble, ...]:
        """Current troubles (problems that may pass by themselves), one for each code."""
        return self._troubles.now

    def begin(self, part: str, trouble: Trouble) -> None:
        """Record that the node's part `part` meets the trouble, for the first time or still."""
        if (news := self._troubles.begin(part, trouble)) is not None:
            log.warning("%s", news)

    def met(self, part: str, error: EchoError, *, otherwise: TroubleCode = TroubleCode.STORAGE) -> None:
        self.begin(part, trouble_of(error, otherwise=otherwise))

    def end(self, part: str) -> None:
        """Record that `part` has recovered. No effect if it had no trouble."""
        if (news := self._troubles.end(part)) is not None:
            log.info("%s", news)
