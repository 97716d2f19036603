"""Texts of single tokens, as answers with log-probabilities show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from echo_hub.run.base_model import PromptCodec

_NO_CHARACTER: Final = "\ufffd"
_REMEMBERED: Final = 16_384


class TokenTexts:
    """Texts of a tokenizer's tokens. The most recently used texts are kept in memory."""

    def __init__(self, codec: PromptCodec) -> None:
        self._codec = codec
        self.text = lru_cache(maxsize=_REMEMBERED)(self._text)

    def shown(self, token_id: int, *, as_id: bool) -> str:
        return f"token_id:{token_id}" if as_id else self.text(token_id)

    def chat_logprobs(self, ids: Sequence[int], logprobs: Iterable[float], *, as_ids: bool) -> dict[str, Any]:
        """Return log-probabilities (in nats) in the JSON form of chat completions. `bytes` is null for a part of a
        character."""
        content = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = self.text(token_id)
            content.append(
                {
                    "token": self.shown(token_id, as_id=as_ids),
                    "logprob": logprob,
                    "bytes": None if _NO_CHARACTER in text else list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}

    def completion_logprobs(
        self, ids: Sequence[int], logprobs: Iterable[float], *, as_ids: bool, offset: int
    ) -> dict[str, Any]:
        """Return log-probabilities (in nats) in the JSON form of `/v1/completions`. `offset` is the position at which
        the first token's text begins. `top_logprobs` has only the drawn token."""
        tokens = [self.shown(token_id, as_id=as_ids) for token_id in ids]
        listed = list(logprobs)
        offsets = []
        for token_id in ids:
            offsets.append(offset)
            offset += len(self.text(token_id))
        return {
            "tokens": tokens,
            "token_logprobs": listed,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, listed, strict=True)],
            "text_offset": offsets,
        }

    def length(self, ids: Iterable[int]) -> int:
        """Return the number of characters of the tokens' texts."""
        return sum(len(self.text(token_id)) for token_id in ids)

    def _text(self, token_id: int) -> str:
        # Decode the token behind another token: some tokenizers strip a space at the beginning of a text.
        return self._codec.text([token_id, token_id])[len(self._codec.text([token_id])) :]
