"""Checks of the display names that nodes and teams choose.

A name may not contain invisible characters or impersonate the hub. Two names look alike if they share a skeleton, the
form in which UTS #39 replaces look-alike characters by one of them:

    looks_of("Аda") & looks_of("Ada")     # not empty: the first A is Cyrillic
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from echo_shared.wire.messages.confusables import LOOK_LIKE

_TO_ASCII: Final = str.maketrans(
    {
        **{char: ascii_form for ascii_form, chars in LOOK_LIKE.items() for char in chars},
        **{"0": "O", "1": "l", "I": "l", "|": "l", "m": "rn", "`": "'"},
    }
)
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: control, format (for example text direction), surrogate, private use, unassigned, separators."""
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks that are displayed as nothing."""
_OF_EMOJI: Final = "\ufe0f"
"""Variation selector 16, which displays the symbol before it as an emoji. After other characters it is invisible."""
_LATIN: Final = re.compile(r"(?:LETTER|CAPITAL) ([A-Z])(?: WITH .*)?$")
"""Matches the Latin letter in the Unicode names of small capitals, squared letters and letters with strokes."""
MOST_MARKS: Final = 2
"""Maximum number of accents on one letter."""
HUBS_OWN: Final = ("operator", "administrator", "admin", "moderator", "hub")
_ABSORBED: Final = ("the", "echo", "official", "support", "team", "node")
"""Words that make no difference next to a word of HUBS_OWN: "official echo hub" impersonates the hub as much as "hub"
does.
"""


def fault_of(name: str) -> str:
    """Return a sentence with the name's fault and the remedy; "" if the name is allowed."""
    before, marks = "", 0
    for char in name:
        category = unicodedata.category(char)
        is_variation = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
        if is_variation and char == _OF_EMOJI and before and unicodedata.category(before) == "So":
            continue
        if category in _INVISIBLE or char in _BLANK or is_variation:
            shown = f"U+{ord(char):04X} {unicodedata.name(char, '')}".strip()
            return f"a name may not contain invisible characters or change the text direction: remove {shown}"
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > MOST_MARKS:
            return f"a name may have at most {MOST_MARKS} accents on a letter: remove the others"
        before = char
    if not any(unicodedata.category(char)[0] in "LNS" for char in name):
        return "a name needs a letter, a digit or a symbol"
    if word := _hubs_own(name):
        return f"a name may not look like that of the hub or its operator: choose one without {word!r}"
    return ""


def checked_name(name: str) -> str:
    """Return `name`. Raises ValueError with the text of `fault_of` if it is not allowed."""
    if fault := fault_of(name):
        raise ValueError(fault)
    return name


def looks_of(name: str) -> frozenset[str]:
    """Return the name's skeletons. Two names look alike if they share one.

    One skeleton ignores case, the other keeps it: a capital I looks like an l, a small i does not.
    """
    normal = " ".join(unicodedata.normalize("NFKC", name).replace(_OF_EMOJI, "").split())
    return frozenset({_skeleton(normal.casefold()), _skeleton(normal).casefold()})


def _skeleton(text: str) -> str:
    drawn = unicodedata.normalize("NFD", text).translate(_TO_ASCII)
    return unicodedata.normalize("NFD", drawn).translate(_TO_ASCII)


def _blurred(word: str) -> str:
    """Return the word's letters and digits, with accented and stylized letters made plain, and i, l and 1
    made equal.
    """
    return "".join(map(_letter, word)).replace("l", "i").replace("m", "rn")


def _letter(char: str) -> str:
    if char.isascii():
        return char if char.isalnum() else ""
    found = _LATIN.search(unicodedata.name(char, ""))
    return found[1].lower() if found else char if char.isalnum() else ""


def _hubs_own(name: str) -> str:
    """Return the word of HUBS_OWN that the name, or a word in the name, looks like; "" if there is none.

    `hub` counts only if the rest of the name is numbers and words of _ABSORBED: `my-hub-laptop` is allowed.
    """
    for look in looks_of(name):
        words = {_blurred(word) for word in re.split(r"[\W_]+", look)}
        joined = re.sub(r"^\d+|\d+$", "", _blurred(look))
        for own, pattern in _PATTERNS.items():
            if own != "hub" and not words.isdisjoint(_FORMS[own]):
                return own
            if pattern.fullmatch(joined):
                return own
    return ""


_FORMS: Final = {own: {_blurred(look) for look in looks_of(own)} for own in (*HUBS_OWN, *_ABSORBED)}
_ANY: Final = "|".join(re.escape(form) for forms in _FORMS.values() for form in sorted(forms))
_PATTERNS: Final = {
    own: re.compile(rf"(?:{_ANY}|[0-9oi])*(?:{'|'.join(map(re.escape, sorted(_FORMS[own])))})(?:{_ANY}|[0-9oi])*")
    for own in HUBS_OWN
}
