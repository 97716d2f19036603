"""What is worth a notification on the owner's desktop: what only a person can mend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_shared.errors import EchoError, RefusedError
from echo_shared.messages import RefusalCode, Standby, StandbyReason

TITLES: Final = {
    RefusalCode.BANNED: "The hub has banned this node",
    RefusalCode.PROTOCOL_VERSION: "This node and its hub are of different ages",
    RefusalCode.BAD_TOKEN: "The hub asks for an invitation",
}
REFUSED: Final = "The hub has refused this node"
QUARANTINED: Final = "The hub has put this node in quarantine"


@dataclass(frozen=True, slots=True)
class Notice:
    """Both texts are plain."""

    title: str
    text: str


def notice_of_end(error: EchoError) -> Notice | None:
    """Of what has ended the connection to the hub for good; None: the run is over, or a network is at fault."""
    if not isinstance(error, RefusedError) or error.code == RefusalCode.FINISHED:
        return None
    return Notice(TITLES.get(error.code, REFUSED), str(error))  # type: ignore[call-overload]


def notice_of_standby(news: Standby, sentence: str) -> Notice | None:
    """Of why the hub gives the node no work; `sentence` says it in words."""
    return Notice(QUARANTINED, sentence) if news.reason is StandbyReason.QUARANTINED else None
