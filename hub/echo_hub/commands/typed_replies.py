"""Replies that a person types at a terminal, turn by turn, with the environment's messages before each."""

from __future__ import annotations

import contextlib
import importlib

import typer

from echo_hub.commands.answer_text import print_messages, print_prompt
from echo_hub.run.answer_frames import AnswerFrames
from echo_hub.run.base_model import PromptCodec
from echo_shared.sampling.interface import GroupRequest


class TypedReplies:
    """A `ReplySource` (`echo_hub.evaluation.by_hand`) that asks for each reply. A line is a reply; a line that ends in
    a backslash continues in the next line. The end of the input ends the episode."""

    def __init__(self, codec: PromptCodec) -> None:
        self._codec = codec
        self._frames = AnswerFrames(codec)
        self._num_known = 0
        """Number of tokens of the conversation that the person has seen or written."""

    def reply(self, request: GroupRequest) -> str | None:
        ids = request.prompt_ids
        if not self._num_known:
            print_prompt(self._codec.text(ids))
        else:
            print_messages(self._frames.messages(ids[self._num_known :]))
        text = _typed()
        if text is None:
            return None
        self._num_known = len(ids) + len(self._codec.encode_reply(text)[: request.max_tokens])
        return text


def _typed() -> str | None:
    with contextlib.suppress(ImportError):  # Windows has no readline.
        importlib.import_module("readline")  # With readline, input() has editing and a history.
    lines = list[str]()
    while not lines or lines[-1].endswith("\\"):
        try:
            lines.append(input("            > " if lines else "  reply     > "))
        except EOFError:
            typer.echo()
            return None
    return "\n".join(line.removesuffix("\\") for line in lines)
