"""The base model's files, and the conversion between text and token ids. Loads neither weights nor torch.

Only the hub tokenises. Nodes receive token ids and return token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from echo_hub.config.sections import HubConfig
from echo_hub.run.chat_template import ChatTemplate, Message
from echo_hub.run.control_tokens import ControlTokens
from echo_hub.run.gguf_base import SUFFIX, gguf_in, unpacked
from echo_hub.run.template_files import DEFAULT, TEMPLATES_FOLDER, TOOL_USE, read_map, read_templates
from echo_hub.run.thinking import CLOSE, OPEN, ends_in_thought, without_thinking
from echo_shared.errors import ConfigError
from echo_shared.wire.messages.fields import MAX_TOKENS

BUILTIN: Final = {"builtin:tiny": "tiny_base", "builtin:small": "small_base"}
"""Base models included in Echo, mapped to the name of the model's directory in `echo_hub/assets`."""

MODEL_FILES: Final = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_CHARACTER: Final = "\ufffd"
MOST_A_CHARACTER: Final = 8
"""Largest number of tokens shown as one character: twice the bytes of a UTF-8 character. Tokens that form no valid
character by then are shown unchanged.
"""

_ASKED: Final = "what is it"
_FIRST_CHARACTERS: Final = 8
"""To test whether a prompt is too long, first encode this many characters for each allowed token: twice the usual
length of a token.
"""


def resolve_base(reference: str) -> Path:
    """Return the directory of the base model that `reference` names. Download the model if necessary.

    `reference` is a key of `BUILTIN`, a directory in Hugging Face layout, a GGUF file, or an id on the model hub:
    `owner/name` or `owner/name@revision`. Raises ConfigError if there is no usable model.
    """
    if reference in BUILTIN:
        return Path(str(resources.files("echo_hub"))) / "assets" / BUILTIN[reference]
    directory = Path(reference).expanduser()
    if file := gguf_in(directory):
        return _checked(unpacked(file))
    if directory.is_dir():
        return _checked(directory)
    if reference.startswith(("builtin:", ".", "~")) or directory.is_absolute() or reference.endswith(SUFFIX):
        raise ConfigError(
            "The base model does not exist.",
            got=f"model.base = {reference!r}",
            do=f"Use {', '.join(BUILTIN)}, an existing directory or GGUF file, or an id on the model hub such as "
            "owner/name.",
        )
    return _checked(_download(reference))


def model_hub_source(reference: str, directory: Path) -> str:
    """Return `id@commit` of the model that `resolve_base(reference)` put into `directory`.

    Raises ConfigError if the model is not from the model hub.
    """
    # A snapshot directory is named after its commit, inside a folder that is named after the id (huggingface_hub,
    # "Understand caching").
    repo_id = reference.partition("@")[0]
    folder = f"models--{repo_id.replace('/', '--')}"
    if directory.parts[-3:-1] != (folder, "snapshots") or not re.fullmatch(r"[0-9a-f]{40}", directory.name):
        raise ConfigError(
            "Nodes cannot download this base model from a model hub.",
            got=f"model.base = {reference!r}, in {directory}",
            do='Set model.base to an id on the model hub, or dissemination.base to "swarm".',
        )
    return f"{repo_id}@{directory.name}"


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    repo_id, _, revision = reference.partition("@")
    try:
        directory = snapshot_download(
            repo_id, revision=revision or None, allow_patterns=list(MODEL_FILES), ignore_patterns=["*/*"]
        )
        # Download the folder of templates from the same commit: the patterns above exclude all folders.
        snapshot_download(repo_id, revision=Path(directory).name, allow_patterns=[f"{TEMPLATES_FOLDER}/*.jinja"])
        return Path(directory)
    except (OSError, ValueError) as error:  # Base classes of huggingface_hub's errors for ids, access and connections.
        raise ConfigError(
            "The base model cannot be downloaded from the model hub.",
            got=f"model.base = {reference!r}: {error}",
            do="Check the id, the connection and, for a gated model, your access token; or name a directory.",
        ) from error


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            "This directory contains no model in Hugging Face layout.",
            got=str(directory),
            do="It needs config.json and the weights as .safetensors, or one GGUF file; pickled weights are never "
            "loaded.",
        )
    return directory


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
        eos_id: int | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        """If `strip_thinking`, `<think>...</think>` is removed from replies before scoring. `eos_id` is the tokenizer's
        end of sequence. `vocabulary_size` is the model's number of token ids; larger ids are refused; None turns the
        check off.
        """
        self._tokenizer = tokenizer
        self._chat = chat
        self._system_prompt = system_prompt
        self._prompt_suffix = prompt_suffix
        self._strip_thinking = strip_thinking
        self._eos_id = eos_id
        self._vocabulary_size = vocabulary_size
        self._control = ControlTokens(tokenizer, () if chat is None else (chat.source, chat.tool_source))
        self._begins_with = _begins_with(tokenizer) if chat is None else []
        self.stop_ids = stop_ids
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
        tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = read_map(directory / "tokenizer_config.json")
        special_tokens = {name: _text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        eos_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        templates, options = read_templates(directory), dict(template_options or {})
        if not templates and options:
            raise ConfigError(
                "The base model has no chat template, so it cannot use template options.",
                got=f"task.template_options: {', '.join(options)}",
                do="Remove them, or use a chat model.",
            )
        return cls(
            tokenizer,
            stop_ids=_stop_ids(directory, eos_id),
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
            context_tokens=_context_tokens(directory),
        )

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> PromptCodec:
        """Return a copy of this codec in which every prompt begins with these tool definitions.

        Raises ConfigError if the chat template does not show tools, or cannot render a tool's message.
        """
        if not tools:
            return self
        if self._chat is None:
            raise ConfigError(
                "The task has tools, but the base model has no chat template to show them.",
                do="Use a chat model whose template supports tools.",
            )
        codec = copy(self)
        codec._chat = self._chat.with_tools(tools)
        codec.check()
        codec.encode_answer([{"role": "tool", "content": "", "name": "tool", "tool_call_id": "000000000"}], after=-1)
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

    def render_prompt(self, prompt: str) -> str:
        """Return the text whose tokens `encode_prompt` returns."""
        return self._render(self._messages(prompt))

    def has_room(self, prompt: str, *, tokens: int) -> bool:
        """Return True if the prompt has at most this many tokens.

        If a prompt is far longer, only its beginning is encoded, because 10 MB of text would take seconds.
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

    def _known(self, ids: list[int]) -> NDArray[np.int32]:
        """Return the token ids as an array. Raises ConfigError if the model lacks one of them."""
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
            ids = [*ids, self._end_of_reply]
        if not set(self.stop_ids).isdisjoint(ids[:-1]):
            raise ConfigError("A reply contains a stop token before its end.")
        return self._known(ids)

    def encode_answer(self, messages: Sequence[Message], *, after: int) -> NDArray[np.int32]:
        """Return the ids [T] int32 between a completion, whose last id is `after`, and the next completion.

        The ids end the assistant's turn, unless `after` already ends it, and continue with `messages` in the chat
        template up to the next reply. The completion itself is never tokenised again: the template writes identical
        text after any reply. Without a chat template, the ids are those of the concatenated message texts.
        """
        if self._chat is None:
            return self._known(self._control.ids_of_text("".join(message["content"] for message in messages)))
        before = self._messages("")
        quoting = self._control.quoting(before, messages, self._chat.tools)
        chat = replace(self._chat, tools=quoting.quoted(self._chat.tools))
        ids = quoting.ids(chat.behind_reply(quoting.quoted(before), quoting.quoted(messages)))
        return self._known(ids[1:] if ids[:1] == [after] else ids)

    def reply(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of a completion for scoring. If the run removes reasoning, the text is without it."""
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
    def _end_of_reply(self) -> int:
        """Return the stop token that the chat template writes after a reply. If it writes none, return the tokenizer's
        end of sequence.
        """
        if self._chat is not None:
            behind = self._tokenizer.encode(self._chat.behind_reply(self._messages(""), ()), add_special_tokens=False)
            if behind.ids and behind.ids[0] in self.stop_ids:
                return int(behind.ids[0])
        return self._eos_id if self._eos_id in self.stop_ids else self.stop_ids[0]

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
        """Return the texts of all `pieces` as one text. This is faster than `pieces`."""
        every = _plain(ids)
        if every and (min(every) < 0 or max(every) >= self._tokenizer.get_vocab_size()):
            return "".join(text for text, _ in self.pieces(every))
        return str(self._tokenizer.decode(every, skip_special_tokens=False))

    def _behind(self, ids: Sequence[int], place: int) -> str:
        """Return the text that the ids from index `place` on add to the text of the earlier ids."""
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


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(
            "The base model has no fast tokenizer.",
            got=f"{path} is missing",
            do="Save it with AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes tokenizer.json.",
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for an unreadable file.
        raise ConfigError("The base model's tokenizer cannot be read.", got=f"{path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


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


def vocabulary_size(directory: Path) -> int:
    """Return the vocabulary size from the model's config, or from the config's part for text. Raises ConfigError if
    there is none."""
    config = read_map(directory / "config.json")
    found = config.get("vocab_size", _text_config(config).get("vocab_size"))
    if type(found) is not int or found < 1:
        raise ConfigError(
            "The base model's config has no valid vocabulary size.",
            got=f"vocab_size = {found!r} in {directory / 'config.json'}",
            do="Use a language model in Hugging Face layout, whose config.json has vocab_size.",
        )
    return found


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def _context_tokens(directory: Path) -> int:
    """Return the context length from the model's config, or from its part for text, limited to the size of a
    message."""
    config = read_map(directory / "config.json")
    known = config.get("max_position_embeddings") or _text_config(config).get("max_position_embeddings")
    return min(int(known), MAX_TOKENS) if known else MAX_TOKENS


def _stop_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the ids that end a completion: those of the generation config, else of the model config, and the
    tokenizer's eos.

    Raises ConfigError without such an id, because completions would never end by themselves.
    """
    stop = read_map(directory / "generation_config.json").get("eos_token_id")
    if stop is None:
        stop = read_map(directory / "config.json").get("eos_token_id")
    candidates = [*(stop if isinstance(stop, list) else [stop]), tokenizer_eos]
    # A model cannot sample an id outside its vocabulary.
    known = range(vocabulary_size(directory))
    found = {int(token_id) for token_id in candidates if token_id is not None and int(token_id) in known}
    if not found:
        raise ConfigError(
            "The base model has no end-of-sequence token in its vocabulary.",
            got=f"eos_token_id = {', '.join(map(str, candidates))} in {directory}, vocab_size = {len(known)}",
            do="Set eos_token_id in its generation_config.json.",
        )
    return tuple(sorted(found))


def _plain(ids: Iterable[int] | NDArray[np.integer[Any]]) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
