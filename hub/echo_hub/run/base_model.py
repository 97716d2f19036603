"""The base model's files, and the conversion between text and token ids. Loads neither weights nor torch.

Only the hub tokenises. Nodes receive token ids and return token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import context_tokens_of, load_tokenizer, stop_ids_of, vocabulary_size
from echo_hub.run.chat_template import ChatTemplate, Message
from echo_hub.run.control_tokens import ControlTokens
from echo_hub.run.template_files import DEFAULT, TOOL_USE, read_map, read_templates
from echo_hub.run.thinking import CLOSE, OPEN, ends_in_thought, without_thinking
from echo_shared.errors import ConfigError
from echo_shared.wire.messages.fields import MAX_TOKENS

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_CHARACTER: Final = "\ufffd"
MOST_A_CHARACTER: Final = 8
"""Largest number of tokens that are joined to show one character: twice the bytes of a UTF-8 character. If this many
tokens form no valid character, they are shown unchanged."""

_ASKED: Final = "what is it"
_FIRST_CHARACTERS: Final = 8
"""To test whether a prompt is too long, this number of characters for each allowed token is encoded first. It is twice
the usual length of a token."""


class PromptCodec:
    """Converts prompts to token ids and completions to text, with the base model's own tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: tuple[int, ...],
        chat: ChatTemplate | None,
        system_prompt: str = "",
        prompt_suffix: str = "",
        strip_thinking: bool = False,
        context_tokens: int = MAX_TOKENS,
        bos_id: int | None = None,
        eos_id: int | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        """If `strip_thinking`, `<think>...</think>` is removed from replies before scoring. `bos_id` and `eos_id` are
        the tokenizer's begin and end of sequence. `vocabulary_size` is the model's number of token ids; larger ids are
        refused; None turns the check off.
        """
        self._tokenizer = tokenizer
        self._chat = chat
        self._system_prompt = system_prompt
        self._prompt_suffix = prompt_suffix
        self._strip_thinking = strip_thinking
        self._eos_id = eos_id
        self.bos_id = bos_id
        self._vocabulary_size = vocabulary_size
        self._control = ControlTokens(tokenizer, () if chat is None else (chat.source, chat.tool_source))
        self._begins_with = _begins_with(tokenizer) if chat is None else []
        self.stop_ids = stop_ids
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Largest number of characters of a token."""
        self.context_tokens = context_tokens
        """Largest number of tokens that a prompt and its completion may have together."""

    @classmethod
    def of_run(cls, config: HubConfig, base_dir: Path) -> PromptCodec:
        """Return the codec of the run's base model, with the run's system prompt and prompt suffix."""
        task = config.task
        codec = cls.load(
            base_dir,
            system_prompt=task.system_prompt,
            prompt_suffix=task.prompt_suffix,
            template_options=task.template_options,
            strip_thinking=task.strip_thinking,
        )
        codec.check()
        return codec

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        system_prompt: str = "",
        prompt_suffix: str = "",
        template_options: Mapping[str, Any] | None = None,
        strip_thinking: bool = False,
    ) -> PromptCodec:
        """Return the codec of the model in `directory`.

        Raises ConfigError if the model's tokenizer cannot be used, or if the model has no chat template for
        `template_options`.
        """
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        config = read_map(directory / "tokenizer_config.json")
        special_tokens = {name: _text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        bos_id, eos_id = (tokenizer.token_to_id(special_tokens.get(f"{name}_token", "")) for name in ("bos", "eos"))
        templates, options = read_templates(directory), dict(template_options or {})
        if not templates and options:
            raise ConfigError(
                "The base model has no chat template, so it cannot use template options.",
                got=f"task.template_options: {', '.join(options)}",
                do="Remove them, or use a chat model.",
            )
        return cls(
            tokenizer,
            stop_ids=stop_ids_of(directory, eos_id),
            bos_id=bos_id,
            eos_id=eos_id,
            vocabulary_size=vocabulary_size(directory),
            chat=None
            if not templates
            else ChatTemplate(
                source=templates[DEFAULT],
                tool_source=templates.get(TOOL_USE, ""),
                special_tokens=special_tokens,
                options=options,
            ),
            system_prompt=system_prompt,
            prompt_suffix=prompt_suffix,
            strip_thinking=strip_thinking,
            context_tokens=context_tokens_of(directory),
        )

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> PromptCodec:
        """Return a copy of this codec in which every prompt begins with these tool definitions.

        Raises ConfigError if the chat template does not show tools, or cannot show a tool's message.
        """
        if not tools:
            return self
        if self._chat is None:
            raise ConfigError(
                "The task has tools, but the base model has no chat template to show them.",
                do="Use a chat model whose template supports tools.",
            )
        codec = self._with_chat(self._chat.with_tools(tools))
        codec.check()
        assert codec._chat is not None, "just set"
        return codec._with_chat(codec._chat.showing_answers(self._messages(""), stops=self._stop_texts))

    def _with_chat(self, chat: ChatTemplate | None) -> PromptCodec:
        codec = copy(self)
        codec._chat = chat
        for name in ("_begins_in_thought", "_ends_reply"):  # Cached for the template without tools.
            codec.__dict__.pop(name, None)
        return codec

    def check(self) -> None:
        """Test the chat template with a short prompt.

        Raises ConfigError if the template rejects its options or tools, cannot render the prompt, omits the prompt's
        text, or writes tokens that the model does not have.
        """
        if self._chat is None:
            return
        self._chat.check()
        rendered = self.render_prompt(_ASKED)
        if _ASKED.casefold() not in rendered.casefold():
            raise ConfigError(
                "The base model's chat template omits the user's message.",
                got=f"a prompt of {len(rendered)} characters: {rendered[:200]!r}",
                do="Use a model whose template shows text messages of the user, or put another template into its "
                "chat_template.jinja.",
            )
        if not len(self.encode_prompt(_ASKED)):
            raise ConfigError(
                "The base model's tokenizer encodes a prompt as no tokens.",
                got=repr(rendered[:200]),
                do="Use tokenizer.json and chat template from the same model.",
            )

    def with_words(self, *, system_prompt: str, prompt_suffix: str) -> PromptCodec:
        other = copy(self)
        other._system_prompt, other._prompt_suffix = system_prompt, prompt_suffix
        return other

    def encode_prompt(self, prompt: str) -> NDArray[np.int32]:
        """Return the ids [P] int32 of a prompt, up to the beginning of the reply: the system message if there is one,
        then a user message with `prompt` and the run's suffix.

        Without a chat template, the ids encode plain text: system prompt, empty line, prompt.
        """
        return self._encode_conversation(self._messages(prompt))

    def encode_opening(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Encode a conversation up to its first reply, like `encode_prompt`.

        If the conversation has no system prompt, the run's is added. The run's suffix is added to the first user
        message.
        """
        return self._encode_conversation(self._with_words(messages))

    @property
    def is_chat(self) -> bool:
        """Return True if the model has a chat template."""
        return self._chat is not None

    def render_opening(self, messages: Sequence[Message], *, is_for_reply: bool = True) -> str:
        """Return the text whose tokens `encode_opening` returns. Without `is_for_reply`, a chat ends with its last
        message.
        """
        said = self._with_words(messages)
        return self._render(said) if self._chat is None else self._chat.render(said, is_for_reply=is_for_reply)

    def render_prompt(self, prompt: str) -> str:
        """Return the text whose tokens `encode_prompt` returns."""
        return self._render(self._messages(prompt))

    def has_room(self, prompt: str, *, tokens: int) -> bool:
        """Return True if the prompt has at most this many tokens.

        Of a far longer prompt, only the beginning is encoded, because 10 MB of text would take seconds.
        """
        shown = _FIRST_CHARACTERS * max(tokens, 1)
        while len(prompt) > shown:
            if len(self._control.ids_of_text(prompt[:shown])) > 2 * tokens:
                return False
            shown *= 4
        return len(self.encode_prompt(prompt)) <= tokens

    def _encode_conversation(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        if self._chat is None:
            return self._known([*self._begins_with, *self._control.ids_of_text(self._render(messages))])
        quoting = self._control.quoting(messages, self._chat.tools)
        chat = replace(self._chat, tools=quoting.quoted(self._chat.tools))
        return self._known(quoting.ids(chat.render(quoting.quoted(messages))))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> NDArray[np.int32]:
        """Encode a conversation that another program has composed, up to its next reply. The run's system prompt,
        prompt suffix and template options are not used.

        `options` are variables of the chat template. Raises ConfigError if the template cannot render the conversation
        or does not show tools.
        """
        if self._chat is None:
            if tools:
                raise ConfigError("This model has no chat template, so it cannot use tools.")
            return self._encode_conversation(messages)
        chat = replace(self._chat, options={}, tools=())
        if tools:
            chat = chat.with_tools(tools)
            chat.check()
        quoting = self._control.quoting(messages, tools, options)
        chat = replace(chat, tools=quoting.quoted(chat.tools), options=quoting.quoted(options or {}))
        return self._known(quoting.ids(chat.render(quoting.quoted(messages))))

    def encode_raw(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a whole prompt that another program wrote as text. Control tokens in the text count as
        control tokens. The tokenizer's begin tokens come first, once.
        """
        begins, ids = _begins_with(self._tokenizer), self.ids_of_plain(text)
        return self._known(ids if begins and ids[: len(begins)] == begins else [*begins, *ids])

    def has_ids(self, ids: Sequence[int]) -> bool:
        """Return True if the model has all these token ids."""
        return min(ids, default=0) >= 0 and max(ids, default=0) < self.num_model_ids

    @property
    def num_model_ids(self) -> int:
        """Number of the model's token ids."""
        return self._tokenizer.get_vocab_size() if self._vocabulary_size is None else self._vocabulary_size

    def _known(self, ids: list[int]) -> NDArray[np.int32]:
        """Return the token ids as an array. Raises ConfigError if the model lacks one of these ids."""
        if self._vocabulary_size is not None and max(ids, default=0) >= self._vocabulary_size:
            strange = next(token_id for token_id in ids if token_id >= self._vocabulary_size)
            raise ConfigError(
                "The base model's tokenizer produces a token that the model does not have.",
                got=f"id {strange} ({self._tokenizer.id_to_token(strange)!r}), vocab_size = {self._vocabulary_size} in "
                "config.json",
                do="Use the tokenizer that belongs to the model, or resize the model's embeddings for this one.",
            )
        return np.array(ids, dtype=np.int32)

    def _render(self, messages: Sequence[Message]) -> str:
        if self._chat is None:
            return "\n\n".join(message["content"] for message in messages)
        return self._chat.render(messages)

    def encode_reply(self, text: str) -> NDArray[np.int32]:
        """Return the ids [T] int32 with which a node would sample `text` as a reply, including the stop token.

        If the chat template itself opens a reasoning block, an opening tag at the beginning of `text` is dropped.
        Raises ConfigError if a stop token occurs before the end.
        """
        if self._begins_in_thought and text.startswith(OPEN):
            text = text.removeprefix(OPEN).removeprefix("\n")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids or ids[-1] not in self.stop_ids:
            ids = [*ids, *(self._ends_reply or [self._last_resort])]
        if not set(self.stop_ids).isdisjoint(ids[:-1]):
            raise ConfigError("A reply contains a stop token before its end.")
        return self._known(ids)

    def encode_answer(self, messages: Sequence[Message], *, after: int) -> NDArray[np.int32]:
        """Return the ids [T] int32 between a completion, whose last id is `after`, and the next completion.

        The ids end the assistant's turn, unless `after` already ends it, and continue with `messages` in the chat
        template up to the next reply. `after` may be the last of several ids that end a turn. The completion itself
        need not be tokenised again, because the template writes identical text after any reply. Without a chat
        template, the ids are those of the concatenated message texts.
        """
        if self._chat is None:
            return self._known(self._control.ids_of_text("".join(message["content"] for message in messages)))
        before = self._messages("")
        quoting = self._control.quoting(before, messages, self._chat.tools)
        chat = replace(self._chat, tools=quoting.quoted(self._chat.tools))
        behind = chat.behind_reply(quoting.quoted(before), quoting.quoted(messages), stops=self._stop_texts)
        ids = quoting.ids(behind)
        end = self._ends_reply
        ended = end if ids[: len(end)] == end else ids[:1]
        return self._known(ids[len(ended) :] if ended[-1:] == [after] else ids)

    def reply(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of a completion for scoring. If `strip_thinking` is set, reasoning is removed."""
        if not self._strip_thinking:
            return self.decode(ids)
        if not self._special & {OPEN, CLOSE}:
            return without_thinking(self.decode(ids), is_open=self._begins_in_thought)
        text = without_thinking(self.text(ids), is_open=self._begins_in_thought)
        for token in self._special:
            text = text.replace(token, "")
        return text

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _begins_in_thought(self) -> bool:
        return self._chat is not None and ends_in_thought(self._chat.begins_reply_with(self._messages("")))

    @cached_property
    def _stop_texts(self) -> list[str]:
        texts = (self._tokenizer.id_to_token(stop) for stop in self.stop_ids)
        return [text for text in texts if text]

    @cached_property
    def _ends_reply(self) -> list[int]:
        """Return the ids that the chat template writes between a reply and the next user's turn, up to the first stop
        token. Empty if it writes no stop token there.

        A template may write further tokens before the stop token, such as a line break. A model's own replies end with
        the same ids.
        """
        if self._chat is None:
            return []
        try:
            behind = self._chat.behind_reply(self._messages(""), [{"role": "user", "content": _ASKED}])
        except ConfigError:  # A template for a single turn.
            behind = self._chat.behind_reply(self._messages(""), ())
        ids: list[int] = self._tokenizer.encode(behind.partition(_ASKED)[0], add_special_tokens=False).ids
        return next((ids[: place + 1] for place, token_id in enumerate(ids) if token_id in self.stop_ids), [])

    @property
    def _last_resort(self) -> int:
        """Return the stop token for a reply if the chat template writes none: the tokenizer's end of sequence."""
        return self._eos_id if self._eos_id is not None and self._eos_id in self.stop_ids else self.stop_ids[0]

    @property
    def end_of_reply(self) -> int:
        """Return the stop token that the chat template writes after a reply, else the tokenizer's end of sequence."""
        return (self._ends_reply or [self._last_resort])[-1]

    @property
    def end_of_text(self) -> int:
        """Return the tokenizer's end of sequence. If it has none, return the stop token of a reply."""
        return self.end_of_reply if self._eos_id is None else self._eos_id

    @cached_property
    def begins_with_bos(self) -> bool:
        """Return True if every prompt begins with the tokenizer's begin of sequence. Return False if the chat template
        begins each message with this token."""
        if self.bos_id is None or self.encode_prompt(_ASKED)[:1].tolist() != [self.bos_id]:
            return False
        return self._chat is None or "bos_token" in self._chat.source or self.bos_id in _begins_with(self._tokenizer)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def ids_of_plain(self, text: str) -> list[int]:
        """Return the ids with which the tokenizer encodes a text. Unlike in prompts, control tokens in the text are
        encoded as control tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def normalized(self, text: str) -> str:
        """Return the text after the tokenizer's normalisation, such as Unicode's NFC."""
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    @property
    def num_ids(self) -> int:
        """Return the size of the tokenizer's vocabulary. The tokenizer has no ids of this size or larger."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def decode(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(_plain(ids), skip_special_tokens=True)
        return text

    def pieces(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> list[tuple[str, int]]:
        """Return the text of `ids` in pieces (text, token count), with special tokens written out.

        Each piece is the shortest run of tokens that forms valid text. So a character of several tokens is one piece,
        up to `MOST_A_CHARACTER` tokens. An id that the tokenizer does not have (strangers may send such ids) is shown
        as a number in angle brackets.
        """
        every, size = _plain(ids), self._tokenizer.get_vocab_size()
        found: list[tuple[str, int]] = []
        context = start = 0
        for end in range(1, len(every) + 1):
            if not 0 <= every[end - 1] < size:
                if start < end - 1:
                    found.append((self._behind(every[context : end - 1], start - context), end - 1 - start))
                found.append((f"⟨{every[end - 1]}⟩", 1))
                context = start = end
                continue
            text = self._behind(every[context:end], start - context)
            if text.endswith(_NO_CHARACTER) and end < len(every) and end - start < MOST_A_CHARACTER:
                continue  # The character continues in the next token.
            found.append((text, end - start))
            context, start = start, end
        return found

    def text(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of all `pieces` joined, with special tokens written out. This is faster than `pieces`."""
        every = _plain(ids)
        if every and (min(every) < 0 or max(every) >= self._tokenizer.get_vocab_size()):
            return "".join(text for text, _ in self.pieces(every))
        return str(self._tokenizer.decode(every, skip_special_tokens=False))

    def _behind(self, ids: Sequence[int], place: int) -> str:
        """Return the text that the ids from index `place` on add to the text of the ids before them."""
        before, whole = (self._tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:place], ids))
        return str(whole[len(before) :])

    def _messages(self, prompt: str) -> list[Message]:
        return self._with_words([{"role": "user", "content": prompt}])

    def _with_words(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the run's system prompt and prompt suffix."""
        found = list(messages)
        first = next((place for place, message in enumerate(found) if message["role"] == "user"), None)
        if first is not None:
            found[first] = {**found[first], "content": found[first]["content"] + self._prompt_suffix}
        if self._system_prompt and not any(message["role"] == "system" for message in found):
            found.insert(0, {"role": "system", "content": self._system_prompt})
        return found


def _begins_with(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts before a text, such as a begin token.

    Ids that the tokenizer puts after a text are left out. Otherwise prompts would end with a token that marks the end
    of a reply.
    """
    for text in ("a", "1", " ", "\n", "?"):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        whole: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
        for place in range(len(whole) if plain else 0):
            if whole[place : place + len(plain)] == plain:
                return whole[:place]
    return []


def _text(token: str | Mapping[str, Any]) -> str:
    """Return a special token's text. In tokenizer_config.json it is a text, or a map with `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _plain(ids: Iterable[int] | NDArray[np.integer[Any]]) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
