"""Find the environment's messages in the token ids between two replies: the reverse of `PromptCodec.encode_answer`.

For display only. The chat template writes text around each message. A rendered placeholder shows which text that is, so
any template works. Ids that do not have the expected form become one message without a role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError
from echo_shared.records.rollout import ObservedMessage

_FIRST: Final = "echo7message"
_SECOND: Final = "echo8message"
_ROLES: Final = ("tool", "user")
_NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The text and token ids that the chat template writes around the messages of one role.

    To tell several messages apart, compare ids, not text: if an environment's text looks like a control token, its ids
    still differ from the token's.
    """

    role: str
    before: str
    after: str
    ids_before: tuple[int, ...] = ()
    ids_between: tuple[int, ...] = ()
    """Ids between two messages; () if a token crosses a message's boundary."""
    ids_after: tuple[int, ...] = ()


class AnswerFrames:
    """The forms in which a base model's chat template writes the messages of an environment between two replies."""

    def __init__(self, codec: PromptCodec) -> None:
        self._codec = codec

    def messages(self, ids: NDArray[np.int32]) -> tuple[ObservedMessage, ...]:
        """Return the messages that are encoded in these ids; () if there are no ids."""
        if not len(ids):
            return ()
        if not self._codec.is_chat:
            return (ObservedMessage(role="user", text=self._codec.text(ids)),)
        text = self._codec.text(ids)
        for frame in self._frames:
            has_room = len(text) >= len(frame.before) + len(frame.after)
            if has_room and text.startswith(frame.before) and text.endswith(frame.after):
                return self._within(frame, ids)
        return (ObservedMessage(role="", text=text),)

    def _within(self, frame: _Frame, ids: NDArray[np.int32]) -> tuple[ObservedMessage, ...]:
        known = tuple(ids.tolist())
        start, end = len(frame.ids_before), len(known) - len(frame.ids_after)
        if frame.ids_between and known[:start] == frame.ids_before and known[end:] == frame.ids_after:
            texts = [self._codec.text(part) for part in _parted(known[start:end], frame.ids_between)]
        else:
            text = self._codec.text(ids)
            texts = [text[len(frame.before) : len(text) - len(frame.after)]]
        return tuple(ObservedMessage(role=frame.role, text=text) for text in texts)

    @cached_property
    def _frames(self) -> tuple[_Frame, ...]:
        """Return all known frames, those with the longest text before the message first. The order matters because a
        template may write a tool's answer as a part of a user's turn."""
        found = {
            (frame.before, frame.after): frame
            for role in _ROLES
            for after in (self._codec.end_of_reply, _NO_TOKEN)
            for frame in self._frame(role, after)
        }
        return tuple(sorted(found.values(), key=lambda frame: -len(frame.before)))

    def _frame(self, role: str, after: int) -> list[_Frame]:
        try:
            alone = self._codec.text(self._codec.encode_answer([_message(role, _FIRST)], after=after))
            two = self._codec.encode_answer([_message(role, _FIRST), _message(role, _SECOND)], after=after)
        except ConfigError:
            return []  # The template cannot write messages of this role.
        before, is_shown, behind = alone.partition(_FIRST)
        return [self._with_ids(_Frame(role=role, before=before, after=behind), two)] if is_shown else []

    def _with_ids(self, frame: _Frame, ids: NDArray[np.int32]) -> _Frame:
        """Return the frame with the token ids around the two placeholders in `ids`. This needs both placeholders to
        begin and end at token boundaries; otherwise return the frame unchanged.
        """
        places = {0: 0}
        length = number = 0
        for text, count in self._codec.pieces(ids):
            length, number = length + len(text), number + count
            places[length] = number
        whole = self._codec.text(ids)
        edges = [
            places.get(edge)
            for mark in (_FIRST, _SECOND)
            if (found := whole.find(mark)) >= 0
            for edge in (found, found + len(mark))
        ]
        known = tuple(ids.tolist())
        match edges:
            case [int(first), int(behind_first), int(second), int(behind_second)]:
                return replace(
                    frame,
                    ids_before=known[:first],
                    ids_between=known[behind_first:second],
                    ids_after=known[behind_second:],
                )
        return frame


def _message(role: str, text: str) -> dict[str, str]:
    message = {"role": role, "content": text}
    return message | {"name": "tool", "tool_call_id": "000000000"} if role == "tool" else message


def _parted(ids: Sequence[int], between: Sequence[int]) -> list[Sequence[int]]:
    """Split ids at each occurrence of the sequence `between`."""
    parts, start, place, width = list[Sequence[int]](), 0, 0, len(between)
    while place + width <= len(ids):
        if tuple(ids[place : place + width]) == tuple(between):
            parts.append(ids[start:place])
            start = place = place + width
        else:
            place += 1
    return [*parts, ids[start:]]
