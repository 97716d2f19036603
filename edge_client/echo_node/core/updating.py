"""Whether a node that a hub calls too old installs the next release by itself: what is known, and what follows.

A hub says so as often as it likes, and under as many names. It moves nothing but the installer that is here already,
with the source that the owner gave it; and that once for each thing that it says, and once a day in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal
from urllib.parse import urlsplit

UpdateMode = Literal["never", "tell", "auto"]
DAY_S: Final = 86_400.0
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_HASH: Final = "#sha256="


class Origin(StrEnum):
    """What an installer was given."""

    WHEELHOUSE = "wheelhouse"
    SOURCE = "source"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the installer noted of itself, and how things stand there now."""

    origin: Origin
    source: str
    """A path or an address; of what came from a hub, nothing that still counts."""
    is_there: bool = True
    """Of a path: whether it leads to something."""
    is_owners: bool = True
    """Of a path: whether the user and the system alone can put something else there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run of the installer."""

    name: str
    """Of what the hub had said: `name_of`."""
    at: float
    """Seconds since the epoch."""
    outcome: str = ""
    """In a sentence; empty = it was not seen to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """All that the decision goes by."""

    mode: UpdateMode
    refusal: str
    """What the hub says of a node that is too old; empty = it has not said so."""
    is_by_installer: bool
    """Whether this copy is an installer's."""
    is_replaced: bool = False
    """Whether the installer has put another version in the place of the one that runs."""
    note: Note | None = None
    """None = there is none."""
    hub_hosts: Collection[str] = ()
    """Of the hubs that this node knows."""
    tries: Sequence[Try] | None = ()
    """All there were, the newest last; None = that cannot be read."""
    is_held: bool = False
    """Whether the machine is left to its owner now."""
    now: float
    """Seconds since the epoch."""


class Why(StrEnum):
    """Why a node does not update itself."""

    NOT_ASKED = "not_asked"
    NOT_INSTALLED = "not_installed"
    NOT_NOTED = "not_noted"
    FROM_HUB = "from_hub"
    FROM_SOURCE = "from_source"
    PINNED = "pinned"
    UNENCRYPTED = "unencrypted"
    GONE = "gone"
    NOT_OWNERS = "not_owners"
    NO_BOOK = "no_book"
    TRIED = "tried"
    TODAY = "today"
    HELD = "held"


SENTENCES: Final = {
    Why.NOT_ASKED: "",
    Why.NOT_INSTALLED: "This copy is not an installer's, and only those update themselves.",
    Why.NOT_NOTED: "The installer left no note of where this copy came from, so it does not update itself.",
    Why.FROM_HUB: "This copy came from a hub, and nothing that comes from a hub is run by itself.",
    Why.FROM_SOURCE: "This copy was made from the source, {source}, which nobody but you brings up to date.",
    Why.PINNED: "This copy came from {source}, whose hash allows no other release.",
    Why.UNENCRYPTED: "This copy came from {source}, without encryption, and is not renewed from there by itself.",
    Why.GONE: "This copy came from {source}, where nothing is now.",
    Why.NOT_OWNERS: "This copy came from {source}, where other users of this machine could put something else.",
    Why.NO_BOOK: "What is tried cannot be written down and read again, so nothing is.",
    Why.TRIED: "The installer was run for this already. {outcome}",
    Why.TODAY: "The installer was run less than a day ago; it is run once a day at most.",
    Why.HELD: "The node updates itself once the machine is not left to its owner.",
}
_UNSEEN: Final = "How that ended was not seen."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """The node goes on as it is."""

    why: Why
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """The installer is to be run with its source."""

    source: str
    name: str
    """Of the try."""


@dataclass(frozen=True, slots=True)
class ComeBack:
    """Another version is in place: the node is to end, and to start as that."""


Decision = Stay | Install | ComeBack


def name_of(refusal: str) -> str:
    """What a hub said, as short as it is counted by."""
    return hashlib.blake2b(refusal.encode(), digest_size=10).hexdigest()


def decide(known: Known) -> Decision:
    """What follows from what is known."""
    if known.mode != "auto" or not known.refusal:
        return _stay(known, Why.NOT_ASKED)
    if known.is_replaced:
        return ComeBack()
    why = _against_copy(known) or against_try(known.tries, name_of(known.refusal), known.now)
    if why is None and known.is_held:
        why = Why.HELD
    if why is not None:
        return _stay(known, why)
    assert known.note is not None, "a copy without a note stays"
    return Install(source=known.note.source, name=name_of(known.refusal))


def against_try(tries: Sequence[Try] | None, name: str, now: float) -> Why | None:
    """Why the installer is not to be run again after those tries; None = it may be. A clock that was set back waits."""
    if tries is None:
        return Why.NO_BOOK
    if any(one.name == name for one in tries):
        return Why.TRIED
    return Why.TODAY if any(now - one.at < DAY_S for one in tries) else None


def _against_copy(known: Known) -> Why | None:
    """Why this copy never updates itself."""
    note = known.note
    if not known.is_by_installer:
        return Why.NOT_INSTALLED
    if note is None:
        return Why.NOT_NOTED
    if note.origin is Origin.HUB:
        return Why.FROM_HUB
    if note.origin is Origin.SOURCE:
        return Why.FROM_SOURCE
    if "://" in note.source:
        return _against_address(note.source, known.hub_hosts)
    if _HASH in note.source:
        return Why.PINNED
    if not note.is_there:
        return Why.GONE
    return None if note.is_owners else Why.NOT_OWNERS


def _against_address(source: str, hub_hosts: Collection[str]) -> Why | None:
    host = host_of(source)
    if not host:
        return Why.GONE
    if host in hub_hosts:
        return Why.FROM_HUB
    if _HASH in source:
        return Why.PINNED
    return None if urlsplit(source).scheme == "https" or host in _LOOPBACK else Why.UNENCRYPTED


def host_of(url: str) -> str:
    """The host that an address names, as hosts are compared; empty = none that is understood."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _stay(known: Known, why: Why) -> Stay:
    source = "" if known.note is None else known.note.source
    name = name_of(known.refusal)
    outcome = next((one.outcome for one in known.tries or () if one.name == name), "") or _UNSEEN
    return Stay(why=why, sentence=SENTENCES[why].format(source=source, outcome=outcome))
