"""Decides whether a node that a hub calls too old installs the next release by itself.

A hub can send many refusals, with arbitrary texts and names. A refusal can only start the local installer with the
owner's own source: once per distinct refusal, and at most once a day.
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


class SourceKind(StrEnum):
    """Kind of source from which the installer made this copy of Echo."""

    WHEELHOUSE = "wheelhouse"
    SOURCE = "source"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The installer's note about this copy's source, and the source's present state."""

    origin: SourceKind
    source: str
    """Path or address of the source. Unused if the source is a hub."""
    is_there: bool = True
    """For a source that is a path: True if the path exists."""
    is_owners: bool = True
    """For a source that is a path: True if other users of the machine cannot change its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    name: str
    """Hash of the hub's refusal that led to this run of the installer, from `name_of`."""
    at: float
    """Start of the installer's run, in seconds since the epoch."""
    outcome: str = ""
    """Result of the installer in a sentence; empty = the node did not see the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Facts about this copy of Echo and its hub. They decide whether the node updates itself."""

    mode: UpdateMode
    refusal: str
    """The hub's refusal of this node as too old; empty = none."""
    is_by_installer: bool
    """True if an installer made this copy of Echo."""
    is_replaced: bool = False
    """True if the installer has replaced the running version."""
    note: Note | None = None
    """The installer's note about this copy's source; None = it left none."""
    hub_hosts: Collection[str] = ()
    """Hosts of the hubs that this node knows. Nothing is installed from them."""
    tries: Sequence[Try] | None = ()
    """All earlier runs of the installer, newest last; None = their record cannot be read."""
    is_held: bool = False
    """True while the node pauses for its owner."""
    now: float
    """Present time, in seconds since the epoch."""


class Why(StrEnum):
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
    Why.NOT_INSTALLED: "This copy was not made by an installer, and only such copies update themselves.",
    Why.NOT_NOTED: "The installer left no note of this copy's source, so it does not update itself.",
    Why.FROM_HUB: "This copy came from a hub. Nothing from a hub is run automatically.",
    Why.FROM_SOURCE: "This copy was made from the source, {source}, which only you update.",
    Why.PINNED: "This copy came from {source}, whose hash allows no other release.",
    Why.UNENCRYPTED: "This copy came from {source}, without encryption, so it does not update itself from there.",
    Why.GONE: "This copy came from {source}, which no longer exists.",
    Why.NOT_OWNERS: "This copy came from {source}, which other users of this machine can change.",
    Why.NO_BOOK: "The record of updates cannot be written or read, so none is tried.",
    Why.TRIED: "The installer has already run for this. {outcome}",
    Why.TODAY: "The installer ran less than a day ago; it runs at most once a day.",
    Why.HELD: "The node updates itself once it is no longer held back.",
}
_UNSEEN: Final = "Its end was not seen."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Decision: the node continues unchanged."""

    why: Why
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    source: str
    name: str
    """Hash of the hub's refusal that leads to this run of the installer."""


@dataclass(frozen=True, slots=True)
class ComeBack:
    """Decision: another version is installed, so the node ends and starts again as that version."""


Decision = Stay | Install | ComeBack


def name_of(refusal: str) -> str:
    """Return a short hash of a hub's refusal, which identifies the refusal."""
    return hashlib.blake2b(refusal.encode(), digest_size=10).hexdigest()


def decide(known: Known) -> Decision:
    if known.mode != "auto" or not known.refusal:
        return _stay(known, Why.NOT_ASKED)
    if known.is_replaced:
        return ComeBack()
    why = _objection_to_copy(known) or against_try(known.tries, name_of(known.refusal), known.now)
    if why is None and known.is_held:
        why = Why.HELD
    if why is not None:
        return _stay(known, why)
    assert known.note is not None, "a copy without a note stays"
    return Install(source=known.note.source, name=name_of(known.refusal))


def against_try(tries: Sequence[Try] | None, name: str, now: float) -> Why | None:
    """Return the reason against another run of the installer; None = it may run. If the clock was set back, the run
    must wait.
    """
    if tries is None:
        return Why.NO_BOOK
    if any(one.name == name for one in tries):
        return Why.TRIED
    return Why.TODAY if any(now - one.at < DAY_S for one in tries) else None


def _objection_to_copy(known: Known) -> Why | None:
    """Return the reason why this copy may not update itself; None = it may."""
    note = known.note
    if not known.is_by_installer:
        return Why.NOT_INSTALLED
    if note is None:
        return Why.NOT_NOTED
    if note.origin is SourceKind.HUB:
        return Why.FROM_HUB
    if note.origin is SourceKind.SOURCE:
        return Why.FROM_SOURCE
    if "://" in note.source:
        return _objection_to_address(note.source, known.hub_hosts)
    if _HASH in note.source:
        return Why.PINNED
    if not note.is_there:
        return Why.GONE
    return None if note.is_owners else Why.NOT_OWNERS


def _objection_to_address(source: str, hub_hosts: Collection[str]) -> Why | None:
    host = host_of(source)
    if not host:
        return Why.GONE
    if host in hub_hosts:
        return Why.FROM_HUB
    if _HASH in source:
        return Why.PINNED
    return None if urlsplit(source).scheme == "https" or host in _LOOPBACK else Why.UNENCRYPTED


def host_of(url: str) -> str:
    """Return the address's host in a form that can be compared; "" if the address is not valid."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _stay(known: Known, why: Why) -> Stay:
    source = "" if known.note is None else known.note.source
    name = name_of(known.refusal)
    outcome = next((one.outcome for one in known.tries or () if one.name == name), "") or _UNSEEN
    return Stay(why=why, sentence=SENTENCES[why].format(source=source, outcome=outcome))
