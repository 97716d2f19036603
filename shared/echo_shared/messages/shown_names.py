"""Names that nodes and teams give themselves, as others see them: nothing in them is invisible, none speaks for the
hub, and whether two look alike is told by their skeletons (UTS #39).

    looks_of("Аda") & looks_of("Ada")     # a Cyrillic А: they look alike
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from echo_shared.messages.confusables import LOOK_LIKE

_TO_ASCII: Final = str.maketrans(
    {
        **{char: ascii_form for ascii_form, chars in LOOK_LIKE.items() for char in chars},
        **{"0": "O", "1": "l", "I": "l", "|": "l", "m": "rn", "`": "'"},
    }
)
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode's control, format (text direction among them), surrogate, private, unassigned, and line separating ones."""
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks that show nothing."""
_OF_EMOJI: Final = "\ufe0f"
"""Has a symbol shown as an emoji; behind anything else, it shows nothing."""
_LATIN: Final = re.compile(r"(?:LETTER|CAPITAL) ([A-Z])(?: WITH .*)?$")
"""In the names that Unicode gives small capitals, letters in squares, and letters with strokes."""
MOST_MARKS: Final = 2
"""Accents on one letter."""
HUBS_OWN: Final = ("operator", "administrator", "admin", "moderator", "hub")
_BESIDE: Final = ("the", "echo", "official", "support", "team", "node")
"""Words that do not make one of HUBS_OWN another's."""


def fault_of(name: str) -> str:
    """What is wrong with a name, and what to do, in a sentence; empty = nothing."""
    before, marks = "", 0
    for char in name:
        category = unicodedata.category(char)
        is_variation = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
        if is_variation and char == _OF_EMOJI and before and unicodedata.category(before) == "So":
            continue
        if category in _INVISIBLE or char in _BLANK or is_variation:
            shown = f"U+{ord(char):04X} {unicodedata.name(char, '')}".strip()
            return f"a name may have no character that is invisible or turns text around: take out {shown}"
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > MOST_MARKS:
            return f"a name may have {MOST_MARKS} accents on a letter: take out those that are piled up"
        before = char
    if not any(unicodedata.category(char)[0] in "LNS" for char in name):
        return "a name needs a letter, a digit or a symbol"
    if word := _hubs_own(name):
        return f"a name may not look as if the hub or its operator spoke: choose one without {word!r}"
    return ""


def checked_name(name: str) -> str:
    """Return the name. Raises ValueError, which says what is wrong with it."""
    if fault := fault_of(name):
        raise ValueError(fault)
    return name


def looks_of(name: str) -> frozenset[str]:
    """The name's skeletons: two names that have one in common look alike. Of whatever case, and as it is written: a
    capital I looks like an l, a small i does not."""
    normal = " ".join(unicodedata.normalize("NFKC", name).replace(_OF_EMOJI, "").split())
    return frozenset({_skeleton(normal.casefold()), _skeleton(normal).casefold()})


def _skeleton(text: str) -> str:
    drawn = unicodedata.normalize("NFD", text).translate(_TO_ASCII)
    return unicodedata.normalize("NFD", drawn).translate(_TO_ASCII)


def _blurred(word: str) -> str:
    """Letters and digits alone, a letter of whatever shape as itself, and without what tells i from l and 1."""
    return "".join(map(_letter, word)).replace("l", "i").replace("m", "rn")


def _letter(char: str) -> str:
    if char.isascii():
        return char if char.isalnum() else ""
    found = _LATIN.search(unicodedata.name(char, ""))
    return found[1].lower() if found else char if char.isalnum() else ""


def _hubs_own(name: str) -> str:
    """The word of HUBS_OWN that the name, or a word in it, looks like. `hub` counts only if nothing else is in the name
    but numbers and words of _BESIDE: `my-hub-laptop` misleads nobody."""
    for look in looks_of(name):
        words = {_blurred(word) for word in re.split(r"[\W_]+", look)}
        joined = re.sub(r"^\d+|\d+$", "", _blurred(look))
        for own, pattern in _PATTERNS.items():
            if own != "hub" and not words.isdisjoint(_FORMS[own]):
                return own
            if pattern.fullmatch(joined):
                return own
    return ""


_FORMS: Final = {own: {_blurred(look) for look in looks_of(own)} for own in (*HUBS_OWN, *_BESIDE)}
_ANY: Final = "|".join(re.escape(form) for forms in _FORMS.values() for form in sorted(forms))
_PATTERNS: Final = {
    own: re.compile(rf"(?:{_ANY}|[0-9oi])*(?:{'|'.join(map(re.escape, sorted(_FORMS[own])))})(?:{_ANY}|[0-9oi])*")
    for own in HUBS_OWN
}
