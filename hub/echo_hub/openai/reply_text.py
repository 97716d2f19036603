"""Visible text of a growing reply: whole characters, cut before a stop string.

To keep the cost linear in the reply's length, decoding starts a few tokens back, not at the first token. For replies
with invalid UTF-8, the number of replacement characters may differ from decoding all tokens together.

For example, with the stop string "END" and tokens "a", " E", "ND", "x":

    add([a])      "a"
    add([E])      " "      because "E" may begin "END"
    add([ND, x])  ""       the text has ended; later tokens add nothing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from echo_hub.run.base_model import PromptCodec

_NO_CHARACTER: Final = "\ufffd"
_MOST_UNDECODED: Final = 64
"""Maximum number of tokens that are held back because their last character may be unfinished. Longer sequences are
invalid UTF-8 and are shown."""


class ReplyText:
    """Decodes one reply while it grows. `end_ids`: tokens whose text is hidden at the end of the reply."""

    def __init__(
        self,
        codec: PromptCodec,
        *,
        end_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        shows_special: bool = False,
    ) -> None:
        self._codec = codec
        self._end_ids = end_ids
        self._stops = stop_strings
        self._shows_special = shows_special
        self._shown_ids: list[int] = []
        """Newest tokens whose text was already passed on. They end with a whole character."""
        self._new_ids: list[int] = []
        """Newer tokens than `_shown_ids`, which form no whole character yet."""
        self._held = ""
        """Decoded text that is held back because it may begin a stop string."""
        self._waiting: int | None = None
        """Newest token, held back because `end_ids` contains it. None: nothing is held back."""
        self.text = ""
        """All text that was passed on so far."""
        self.is_cut = False
        """True after a stop string has occurred."""

    def add(self, ids: Iterable[int]) -> str:
        """Append these tokens, and return the text that can now be shown in addition."""
        return "" if self.is_cut else self._show("".join(map(self._decoded, ids)), is_end=False)

    def end(self, *, is_stop: bool) -> str:
        """Return the rest of the text. `is_stop`: the reply ended by itself, so an end token's text is left out."""
        rest = ""
        if self._waiting is not None and not is_stop:
            rest = self._next(self._waiting)
        self._waiting = None
        return self._show(rest + self._flush(), is_end=True)

    def _decoded(self, token_id: int) -> str:
        """Return the text that a token completes. Keep an end token back until it is known to be an ordinary one."""
        before, self._waiting = self._waiting, None
        text = "" if before is None else self._next(before)
        if token_id in self._end_ids:
            self._waiting = token_id
            return text
        return text + self._next(token_id)

    def _next(self, token_id: int) -> str:
        self._new_ids.append(token_id)
        text = self._text_of_new()
        if (text and not text.endswith(_NO_CHARACTER)) or len(self._new_ids) >= _MOST_UNDECODED:
            self._shown_ids, self._new_ids = self._new_ids, []
            return text
        return ""

    def _flush(self) -> str:
        text = self._text_of_new()
        self._shown_ids, self._new_ids = self._new_ids, []
        return text

    def _text_of_new(self) -> str:
        """Return the text that the new tokens add. It depends on the tokens before them: some tokenizers leave out a
        space at the beginning of a text."""
        return self._decode(self._shown_ids + self._new_ids)[len(self._decode(self._shown_ids)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._codec.text(ids) if self._shows_special else self._codec.decode(ids)

    def _show(self, text: str, *, is_end: bool) -> str:
        if self.is_cut:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_cut = True
            shown, self._held = self._held[: min(places)], ""
        else:
            kept = 0 if is_end else _may_begin(self._held, self._stops)
            shown = self._held[: len(self._held) - kept]
            self._held = self._held[len(shown) :]
        self.text += shown
        return shown


def _may_begin(text: str, wanted: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of the `wanted` texts without completing it."""
    most = max((len(one) for one in wanted), default=1) - 1
    lengths = range(min(most, len(text)), 0, -1)
    return next((length for length in lengths if any(one.startswith(text[-length:]) for one in wanted)), 0)
