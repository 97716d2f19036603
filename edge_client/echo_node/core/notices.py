"""Desktop notifications for the owner, about problems that only a person can solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_shared.errors import EchoError, RefusedError
from echo_shared.wire.messages import RefusalCode, Standby, StandbyReason

TITLES: Final = {
    RefusalCode.BANNED: "The hub has banned this node",
    RefusalCode.PROTOCOL_VERSION: "The versions of this node and its hub do not match",
    RefusalCode.BAD_TOKEN: "The hub asks for an invitation",
}
REFUSED: Final = "The hub has refused this node"
QUARANTINED: Final = "The hub has put this node in quarantine"


@dataclass(frozen=True, slots=True)
class Notice:
    title: str
    text: str


def notice_of_end(error: EchoError) -> Notice | None:
    """Return a notice for the owner about the error that ended the hub's connection; None if the run is over or the
    network failed.
    """
    if not isinstance(error, RefusedError) or error.code == RefusalCode.FINISHED:
        return None
    return Notice(TITLES.get(error.code, REFUSED), str(error))  # type: ignore[call-overload]


def notice_of_standby(news: Standby, sentence: str) -> Notice | None:
    """Return a notice if the hub has put the node in quarantine. `sentence` gives the reason."""
    return Notice(QUARANTINED, sentence) if news.reason is StandbyReason.QUARANTINED else None
