"""A node's troubles, each told in the log when it begins and when it is over."""

from __future__ import annotations

import logging

from echo_node.core.troubles import Trouble, TroubleCode, Troubles, trouble_of
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)


class TroubleLog:
    """Used from the event loop's thread alone."""

    def __init__(self) -> None:
        self._troubles = Troubles()

    @property
    def now(self) -> tuple[Trouble, ...]:
        """One of each code."""
        return self._troubles.now

    def begin(self, part: str, trouble: Trouble) -> None:
        """`part` of the node has met it, or meets it still."""
        if (news := self._troubles.begin(part, trouble)) is not None:
            log.warning("%s", news)

    def met(self, part: str, error: EchoError, *, otherwise: TroubleCode = TroubleCode.STORAGE) -> None:
        """As `begin`, from what was raised."""
        self.begin(part, trouble_of(error, otherwise=otherwise))

    def end(self, part: str) -> None:
        """`part` has got through; harmless where it had met nothing."""
        if (news := self._troubles.end(part)) is not None:
            log.info("%s", news)
