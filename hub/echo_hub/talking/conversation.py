"""A conversation of a user with one version, as token ids. As in training, replies keep their sampled tokens, and only
new messages are tokenised."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError

Ids = NDArray[np.int32]
LEAST_REPLY: Final = 16
"""Smallest number of tokens of the context that must be left for a reply."""


class Conversation:
    """The conversation so far. `prompt` does not change it; `take` adds a question with its reply."""

    def __init__(self, codec: PromptCodec) -> None:
        self._codec = codec
        self._ids = np.zeros(0, dtype=np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def prompt(self, text: str) -> Ids:
        """Return the ids [P] of the conversation with the user's `text`, up to the reply. Raises ConfigError if the
        model's context has no space for a reply.
        """
        message = {"role": "user", "content": text}
        if len(self._ids):
            after = self._codec.encode_answer([message], after=int(self._ids[-1]))
            ids = np.concatenate([self._ids, after])
        else:
            ids = self._codec.encode_opening([message])
        if len(ids) + LEAST_REPLY > self._codec.context_tokens:
            raise ConfigError(
                "The conversation is too long for this model.",
                got=f"{len(ids)} tokens of {self._codec.context_tokens}",
                do="Begin a new one (/reset), or write less.",
            )
        return ids

    def room(self, prompt_ids: Ids, max_tokens: int) -> int:
        """Return the largest number of tokens that the reply may have, at most `max_tokens`."""
        return min(max_tokens, self._codec.context_tokens - len(prompt_ids))

    def take(self, prompt_ids: Ids, reply_ids: Ids) -> None:
        """Append a turn: the ids that `prompt` returned, and the sampled tokens of the reply."""
        if len(reply_ids):
            self._ids = np.concatenate([prompt_ids, reply_ids])


class TextStream:
    """The text of a growing reply, in pieces that end with a whole character."""

    def __init__(self, codec: PromptCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._told = 0

    @property
    def text(self) -> str:
        return self._codec.decode(self._ids)

    def more(self, ids: Ids, *, is_end: bool) -> str:
        """Return the text that `ids` add. An incomplete character is kept back until it is complete or `is_end` is
        True."""
        self._ids.extend(ids.tolist())
        text = self.text
        shown = text if is_end else text.rstrip(_NO_CHARACTER)
        piece = shown[self._told :]
        self._told = max(self._told, len(shown))
        return piece


_NO_CHARACTER: Final = "\ufffd"
