"""One completion that grows: its tokens, and the text and tool calls that they mean."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from echo_hub.openai.drawn_replies import ReplyTokens
from echo_hub.openai.options import SamplingOptions
from echo_hub.openai.reply_calls import ReadCall, ReplyCalls
from echo_hub.openai.reply_text import ReplyText
from echo_hub.run.base_model import PromptCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyNews:
    """What new tokens add to a completion."""

    ids: list[int]
    logprobs: list[float]
    text: str
    calls: tuple[ReadCall, ...] = ()
    finish: str = ""
    """`stop`, `length` or `tool_calls` with the end of the completion; "" before."""


class GrowingReply:
    """Text and tool calls of one completion, updated with each new token. `number` is the completion's number in the
    answer. `calls` is None if tool calls are not parsed.
    """

    def __init__(self, number: int, prompt: int, text: ReplyText, calls: ReplyCalls | None = None) -> None:
        self.number = number
        self.prompt = prompt
        """Number of the prompt in the request."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.calls: tuple[ReadCall, ...] = ()
        self.finish = ""
        self._text = text
        self._reads = calls
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def add(self, tokens: ReplyTokens) -> ReplyNews:
        ids, logprobs = tokens.ids.tolist(), tokens.logprobs.tolist()
        self.ids += ids
        self.logprobs += logprobs
        shown = self._text.add(ids)
        if tokens.finish:
            shown += self._text.end(is_stop=tokens.finish == "stop")
            self.finish = tokens.finish
        if self._reads is not None:
            shown = self._reads.add(shown)
            if tokens.finish:
                rest, self.calls = self._reads.end()
                shown += rest
                if self.calls and tokens.finish == "stop":
                    self.finish = "tool_calls"
        self._shown.append(shown)
        return ReplyNews(ids=ids, logprobs=logprobs, text=shown, calls=self.calls, finish=self.finish)


def reply_text(codec: PromptCodec, options: SamplingOptions, *, end_ids: Collection[int]) -> ReplyText:
    """Return the text of a new completion. `end_ids` are the model's own end tokens."""
    ends = frozenset() if options.ignore_eos else frozenset(end_ids) | frozenset(options.stop_token_ids)
    return ReplyText(
        codec, end_ids=ends, stop_strings=options.stop_strings, shows_special=not options.skip_special_tokens
    )
