"""Read demonstrations for supervised fine-tuning: a JSONL file of conversations, whose replies the model learns.

    {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "completion": "4"}

Both lines mean the same. The prompt is rendered as for rollouts: with the chat template, the run's options, the task's
tools, and the run's system prompt and suffix. The reply is encoded as a node would sample it, with its stop token. Text
between two replies is encoded as in multi-turn episodes. A system message in the line replaces that of the run. If a
run has several tasks, `task` selects the task whose prompts the line uses.

If no node could sample a line, the line is skipped and counted. It is never truncated, because a truncated
demonstration would teach the model to stop early. All lines are checked before the first one is used.
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
from echo_shared.files.strict_json import read_json

_ROLES: Final = ("system", "user", "assistant", "tool")
_FIELDS: Final = {"role", "content", "name", "tool_call_id"}
_SHOWN_LINES: Final = 5
_SHOWN_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One line of the file. `prompt_ids` has shape [P]; `completion_ids` [T] holds everything after the prompt."""

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """[T], True for tokens of a reply. The last entry is True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    examples: tuple[Demonstration, ...]
    """Demonstrations in the order of the file, without skipped lines."""
    long_replies: tuple[int, ...]
    """Line numbers, from 1, of skipped lines whose reply has more tokens than a completion may have."""
    long_conversations: tuple[int, ...]
    """Line numbers, from 1, of skipped lines whose conversation exceeds the base model's context."""


def read_demonstrations(path: Path, codecs: Mapping[str, PromptCodec], *, max_tokens: int) -> Demonstrations:
    """Read a whole file.

    `codecs` maps each task's key to the codec that encodes its prompts. `max_tokens` is the limit of a reply, including
    the stop token. Raises ConfigError if the file cannot be read, if lines are malformed (all of them are listed), or
    if no line is usable.
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
            do='Every line must look like {"prompt": "2+2=", "completion": "4"}, or contain "messages" that '
            "begin with a user message and end with an assistant message.",
        )
    if not examples:
        raise ConfigError(
            "There are no demonstrations to train on.",
            got=f"{path}: {len(long_replies)} with a reply above sampling.max_tokens = {max_tokens}, "
            f"{len(long_conversations)} longer than the base's context",
            do="Raise sampling.max_tokens, or use shorter demonstrations.",
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
        raise ConfigError("not a JSON object")
    key = content.get("task", next(iter(codecs)) if len(codecs) == 1 else None)
    if not isinstance(key, str) or key not in codecs:
        raise ConfigError("it must name its task", got=f"{key!r} is none of {', '.join(filter(None, codecs))}")
    if "messages" in content and ("prompt" in content or "completion" in content):
        raise ConfigError("it has both messages and a prompt or completion: use one form")
    if "messages" in content:
        return codecs[key], _checked(content["messages"])
    prompt, completion = content.get("prompt"), content.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return codecs[key], _checked([*prompt, *completion])
    return codecs[key], _checked([{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])


def _checked(messages: Any) -> list[Message]:
    """Return the messages if they are valid; otherwise raise ConfigError.

    In valid messages, an optional system message comes first, then a user message, then any others; the last message is
    the assistant's.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError("messages is not a list of objects")
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise ConfigError("a message has an unknown role", got=f"{role!r}, none of {', '.join(_ROLES)}")
        if not isinstance(content, str) or not (content.strip() or role == "system"):
            raise ConfigError(f"the content of the {role} message is empty", got=f"{content!r}")
        if unknown := {name for name, value in message.items() if value is not None} - _FIELDS:
            raise ConfigError("a message has unknown fields", got=", ".join(sorted(unknown)))
        if role == "system" and place:
            raise ConfigError("a system message is not the first message")
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles[:1] != ["user"] or roles[-1] != "assistant":
        raise ConfigError("it must begin with a user message and end with an assistant message", got=", ".join(roles))
    if ("assistant", "assistant") in pairwise(roles):
        raise ConfigError("two assistant messages follow each other")
    return messages


def _encode(messages: Sequence[Message], codec: PromptCodec) -> tuple[Demonstration, int]:
    """Encode a conversation. Return the demonstration, and the number of tokens of its longest reply."""
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
