"""Demonstrations as token ids: a file of JSON lines, each a conversation whose replies are to be learned.

    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "completion": "4"}

Both of these are the same: the prompt as the hub renders it for rollouts (the chat template with the run's options and
its task's tools, the run's words around the problem), then the reply as a node would draw it, with its stop token. What
stands between two replies is made as for an episode of several turns. A line that begins with a turn of the system's
keeps it in place of the run's. Where a run has several tasks, `task` says which one's words a line takes.

What no node could draw is left out and counted, never cut: a demonstration that ends in the middle teaches to do so.
Every line is checked before the first is used.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.run.base_model import PromptCodec
from echo_hub.run.chat_template import Message
from echo_shared.errors import ConfigError
from echo_shared.strict_json import read_json

_ROLES: Final = ("system", "user", "assistant", "tool")
_FIELDS: Final = {"role", "content", "name", "tool_call_id"}
_SHOWN_LINES: Final = 5
_SHOWN_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One line; `completion_ids` [T] is all that follows the prompt, `prompt_ids` [P]."""

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """[T], whether the token is of a reply; the last one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What a file holds."""

    examples: tuple[Demonstration, ...]
    """In the order of the file."""
    long_replies: tuple[int, ...]
    """Lines that are left out, from 1 on: a reply has more tokens than a completion may have."""
    long_conversations: tuple[int, ...]
    """Lines that are left out: they are longer than the base's context."""


def read_demonstrations(path: Path, codecs: Mapping[str, PromptCodec], *, max_tokens: int) -> Demonstrations:
    """All of a file. `codecs`: of the run's tasks, by their keys; `max_tokens`: of a reply, its stop token included.

    Raises ConfigError for a file that cannot be read, with every line that is no demonstration; and where none is left.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("The demonstrations cannot be read.", got=str(error), do="Name another file.") from error
    examples, wrong, long_replies, long_conversations = [], [], [], []
    for number, line in enumerate(lines, start=1):
        if not line.removeprefix(BOM_UTF8).strip():
            continue
        try:
            codec, messages = _parse(line, codecs)
            example, longest = _encode(messages, codec)
        except ConfigError as error:
            wrong.append(f"line {number}: {error.brief}: {_excerpt(line)}")
            continue
        if longest > max_tokens:
            long_replies.append(number)
        elif len(example.prompt_ids) + len(example.completion_ids) > codec.context_tokens:
            long_conversations.append(number)
        else:
            examples.append(example)
    if wrong:
        more = f"\n       and {len(wrong) - _SHOWN_LINES} more" if len(wrong) > _SHOWN_LINES else ""
        raise ConfigError(
            f"{len(wrong)} of the lines of {path} cannot be trained on; nothing was trained.",
            got="\n       ".join(wrong[:_SHOWN_LINES]) + more,
            do='Every line must look like {"prompt": "2+2=", "completion": "4"}, or hold "messages" that begin with a '
            "user's and end with the assistant's.",
        )
    if not examples:
        raise ConfigError(
            "There is no demonstration to train on.",
            got=f"{path}: {len(long_replies)} with a reply above sampling.max_tokens = {max_tokens}, "
            f"{len(long_conversations)} longer than the base's context",
            do="Raise sampling.max_tokens, or give shorter ones.",
        )
    return Demonstrations(
        examples=tuple(examples), long_replies=tuple(long_replies), long_conversations=tuple(long_conversations)
    )


def _parse(line: bytes, codecs: Mapping[str, PromptCodec]) -> tuple[PromptCodec, list[Message]]:
    try:
        content = read_json(line)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(content, dict):
        raise ConfigError("not a map")
    key = content.get("task", next(iter(codecs)) if len(codecs) == 1 else None)
    if not isinstance(key, str) or key not in codecs:
        raise ConfigError("it has to name its task", got=f"{key!r} is none of {', '.join(filter(None, codecs))}")
    if "messages" in content and ("prompt" in content or "completion" in content):
        raise ConfigError("it has messages and a prompt or completion: one of the two is meant")
    if "messages" in content:
        return codecs[key], _checked(content["messages"])
    prompt, completion = content.get("prompt"), content.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return codecs[key], _checked([*prompt, *completion])
    return codecs[key], _checked([{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])


def _checked(messages: Any) -> list[Message]:
    """Raises ConfigError unless they are a system's turn or none, a user's, and others up to one of the assistant's."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError("messages are no list of maps")
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ConfigError("a message has an unknown role", got=f"{role!r}, none of {', '.join(_ROLES)}")
        if not isinstance(content, str) or not (content.strip() or role == "system"):
            raise ConfigError(f"the {role} says nothing", got=f"{content!r}, which is no text")
        if unknown := {name for name, value in message.items() if value is not None} - _FIELDS:
            raise ConfigError("a message has fields that no prompt of a run has", got=", ".join(sorted(unknown)))
        if role == "system" and place:
            raise ConfigError("a system's turn is not the first")
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles[:1] != ["user"] or roles[-1] != "assistant":
        raise ConfigError("it has to begin with a user's turn and end with the assistant's", got=", ".join(roles))
    if ("assistant", "assistant") in pairwise(roles):
        raise ConfigError("the assistant speaks twice in a row")
    return messages


def _encode(messages: Sequence[Message], codec: PromptCodec) -> tuple[Demonstration, int]:
    """The conversation's ids, and how many the longest reply has."""
    turns = [list(turn) for _, turn in groupby(messages, key=lambda message: message["role"] == "assistant")]
    ids: list[NDArray[np.int32]] = []
    drawn: list[NDArray[np.bool_]] = []
    for place, turn in enumerate(turns[1:], start=1):
        is_reply = place % 2 == 1
        part = codec.encode_reply(turn[0]["content"]) if is_reply else codec.encode_answer(turn, after=int(ids[-1][-1]))
        ids.append(part)
        drawn.append(np.full(len(part), is_reply))
    demonstration = Demonstration(
        prompt_ids=codec.encode_opening(turns[0]),
        completion_ids=np.concatenate(ids),
        loss_mask=np.concatenate(drawn),
    )
    return demonstration, max(map(len, ids[::2]))


def _excerpt(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
