"""The tokenizer of a base model as fields of a GGUF file, so that llama.cpp reads and writes text with the file alone.

Four kinds of tokenizers can be written:

    tokenizer.json                          tokenizer.ggml.model
    BPE over bytes (GPT-2, Llama 3, Qwen)   gpt2
    BPE over characters (Llama 2, Gemma)    llama; llama.cpp merges by score, so the n-th merge gets score -n
    Unigram                                 t5
    WordLevel of single characters          t5; its search has only one way through such a vocabulary

llama.cpp splits text before merging by one of its built-in rules, which the file only names. `Vocabulary.readings` are
the rules that may fit; `echo_hub.lifecycle.gguf.reading` finds out which one reads text as the base's tokenizer does.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import gguf

from echo_hub.lifecycle.gguf.rules import rules_for
from echo_hub.run.base_files import vocabulary_size
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.template_files import DEFAULT, read_templates
from echo_shared.errors import ConfigError
from echo_shared.gguf.summary import CheckedReader

PRE: Final = gguf.Keys.Tokenizer.PRE
SPACE_PREFIX: Final = gguf.Keys.Tokenizer.ADD_PREFIX
MERGED_SPACES: Final = gguf.Keys.Tokenizer.REMOVE_EXTRA_WS
_OF_TOKENIZER: Final = "tokenizer."
_MODEL: Final = gguf.Keys.Tokenizer.MODEL
_TOKENS: Final = gguf.Keys.Tokenizer.LIST
_ESCAPED_SPACE: Final = "\u2581"
_NO_VOCABULARY: Final = ("none", "no_vocab")

Reading = Mapping[str, str | bool]
"""Values of the GGUF fields that select one of llama.cpp's rules for splitting text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a GGUF file. `item_type` is the type of the items of an array."""

    key: str
    value: Any
    type: gguf.GGUFValueType
    item_type: gguf.GGUFValueType | None = None


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer's fields of a GGUF file, and several rules for splitting text. A test chooses the rule that
    fits."""

    fields: tuple[Field, ...]
    readings: tuple[Reading, ...]
    """Rules for splitting text that are tried, the likeliest first."""

    @cached_property
    def num_tokens(self) -> int:
        return next(len(field.value) for field in self.fields if field.key == _TOKENS)

    @property
    def is_split_by_rules(self) -> bool:
        """True if the readings are rules by which llama.cpp splits text before BPE."""
        return PRE in self.readings[0]

    @cached_property
    def unknown_id(self) -> int | None:
        """Return the id for unknown characters; None if the tokenizer encodes all text."""
        return next((field.value for field in self.fields if field.key == gguf.Keys.Tokenizer.UNK_ID), None)

    def fields_with(self, reading: Reading) -> Iterator[Field]:
        yield from self.fields
        for key, value in reading.items():
            is_text = isinstance(value, str)
            kind = gguf.GGUFValueType.STRING if is_text else gguf.GGUFValueType.BOOL
            yield Field(key=key, value=value, type=kind)


def vocabulary_of(directory: Path, codec: PromptCodec) -> Vocabulary:
    """Return the vocabulary of the model in `directory`, whose codec is `codec`. Raises ConfigError if llama.cpp has no
    tokenizer of its kind.
    """
    state = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    read = _Reader(state, vocabulary_size(directory), codec)
    fields = [*read.model_fields(), *_special_fields(codec), *_template_fields(directory)]
    return Vocabulary(fields=tuple(fields), readings=read.readings)


def vocabulary_in(file: Path, *, num_tokens: int) -> Vocabulary | None:
    """Return the vocabulary of a GGUF file, unchanged. Return None if the file has no vocabulary of exactly
    `num_tokens` tokens."""
    found = []
    for field in CheckedReader(file).fields.values():
        if field.name.startswith(_OF_TOKENIZER):
            kind = field.types[0]
            item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            found.append(Field(key=field.name, value=field.contents(), type=kind, item_type=item))
    values = {field.key: field.value for field in found}
    if values.get(_MODEL, "none") in _NO_VOCABULARY or len(values.get(_TOKENS, ())) != num_tokens:
        return None
    return Vocabulary(fields=tuple(found), readings=({},))


class _Reader:
    """Reads tokenizer.json, parsed as `state`, of a model with `size` token ids."""

    def __init__(self, state: Mapping[str, Any], size: int, codec: PromptCodec) -> None:
        self._state = state
        self._model: Mapping[str, Any] = state["model"]
        self._size = size
        self._unknown_id = codec.id_of(_text_of(self._model, state) or "")
        self.readings: tuple[Reading, ...] = ({},)

    def model_fields(self) -> Iterator[Field]:
        kind = self._model.get("type") or ("BPE" if "merges" in self._model else None)
        if kind == "BPE" and _parts(self._state, "ByteLevel"):
            self.readings = tuple({PRE: name} for name in rules_for(self._state))
            yield from self._fields("gpt2", merges=True)
        elif kind == "BPE" and self._model.get("byte_fallback"):
            self.readings = ({SPACE_PREFIX: False}, {SPACE_PREFIX: True})
            yield from self._fields("llama", scores=self._scores_of_merges())
        elif kind == "Unigram":
            self.readings = tuple(
                {SPACE_PREFIX: prefix, MERGED_SPACES: merged} for prefix in (True, False) for merged in (False, True)
            )
            yield from self._fields("t5", scores=dict(enumerate(score for _, score in self._model["vocab"])))
            yield from _character_map(self._state)
        elif kind == "WordLevel" and self._is_by_characters():
            self.readings = ({SPACE_PREFIX: False, MERGED_SPACES: False},)
            yield from self._fields("t5", scores={})
        else:
            raise ConfigError(
                "llama.cpp has no tokenizer of this base model's kind.",
                got=f"{kind or 'an unknown model'} in tokenizer.json",
                do="Export it as a directory for transformers: --merged instead of --gguf.",
            )

    def _fields(
        self, model: str, *, merges: bool = False, scores: Mapping[int, float] | None = None
    ) -> Iterator[Field]:
        tokens, kinds = self._tokens(is_escaped=model != "gpt2")
        yield Field(key=_MODEL, value=model, type=gguf.GGUFValueType.STRING)
        yield _array(_TOKENS, tokens, gguf.GGUFValueType.STRING)
        yield _array(gguf.Keys.Tokenizer.TOKEN_TYPE, kinds, gguf.GGUFValueType.INT32)
        if merges:
            pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in self._model["merges"]]
            yield _array(gguf.Keys.Tokenizer.MERGES, [" ".join(pair) for pair in pairs], gguf.GGUFValueType.STRING)
        if scores is not None:
            least = min(scores.values(), default=0.0) - 1.0
            ordered = [float(scores.get(token_id, least if scores else 0.0)) for token_id in range(len(tokens))]
            yield _array(gguf.Keys.Tokenizer.SCORES, ordered, gguf.GGUFValueType.FLOAT32)
        if self._unknown_id is not None and model != "gpt2":
            yield _number(gguf.Keys.Tokenizer.UNK_ID, self._unknown_id)

    def _tokens(self, *, is_escaped: bool) -> tuple[list[str], list[int]]:
        """Return text and GGUF type of every token id. Raises ConfigError if the tokenizer has an id that the model
        lacks, or two ids with the same text.
        """
        vocab = self._model["vocab"]
        texts = (
            dict(enumerate(text for text, _ in vocab)) if isinstance(vocab, list) else {v: k for k, v in vocab.items()}
        )
        kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
        if is_escaped:
            texts = {token_id: text.replace(" ", _ESCAPED_SPACE) for token_id, text in texts.items()}
            kinds |= {token_id: gguf.TokenType.BYTE for token_id, text in texts.items() if _is_byte(text)}
        for token in self._state.get("added_tokens", ()):
            # llama.cpp searches the original text for these tokens, in which spaces are not escaped.
            is_plain = is_escaped and not token["special"]
            texts[token["id"]] = token["content"].replace(_ESCAPED_SPACE, " ") if is_plain else token["content"]
            kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        if self._unknown_id is not None and is_escaped:
            kinds[self._unknown_id] = gguf.TokenType.UNKNOWN
        for token_id in range(self._size):
            if token_id not in texts:
                texts[token_id], kinds[token_id] = f"[UNUSED_{token_id}]", gguf.TokenType.UNUSED
        if len(texts) > self._size or len(set(texts.values())) < len(texts):
            raise ConfigError(
                "This tokenizer does not fit into a GGUF file.",
                got=f"{len(texts)} token ids for a model with {self._size}, {len(set(texts.values()))} different texts",
                do="Use the tokenizer that belongs to the model, or export a directory: --merged instead of --gguf.",
            )
        order = sorted(texts)
        return [texts[token_id] for token_id in order], [int(kinds[token_id]) for token_id in order]

    def _scores_of_merges(self) -> dict[int, float]:
        """Return a score for each token that a merge makes: llama.cpp merges the pair with the highest score first, as
        BPE merges the pair with the lowest rank first.
        """
        vocab: Mapping[str, int] = self._model["vocab"]
        scores: dict[int, float] = {}
        for rank, pair in enumerate(self._model["merges"]):
            left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
            scores.setdefault(vocab[left + right], -float(rank))
        return scores

    def _is_by_characters(self) -> bool:
        added = {token["content"] for token in self._state.get("added_tokens", ())}
        return self._state.get("normalizer") is None and all(
            len(text) == 1 for text in self._model["vocab"] if text not in added
        )


def _text_of(model: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Return the text of the unknown token; None if there is none."""
    if model.get("unk_token") is not None:
        return str(model["unk_token"])
    number = model.get("unk_id")
    return None if number is None else str(model["vocab"][number][0])


def _special_fields(codec: PromptCodec) -> Iterator[Field]:
    """Yield the fields with the ids of the tokens that begin and end text.

    llama.cpp puts the begin token before a prompt if the template writes it there. A program that also renders the
    template drops one of the two.
    """
    keys = gguf.Keys.Tokenizer
    begin = codec.bos_id
    if begin is not None:
        yield _number(keys.BOS_ID, begin)
    yield Field(key=keys.ADD_BOS, value=codec.begins_with_bos, type=gguf.GGUFValueType.BOOL)
    yield Field(key=keys.ADD_EOS, value=False, type=gguf.GGUFValueType.BOOL)
    ends = list(dict.fromkeys((codec.end_of_text, codec.end_of_reply, *codec.stop_ids)))
    for key, token_id in zip((keys.EOS_ID, keys.EOT_ID, keys.EOM_ID), ends, strict=False):
        yield _number(key, token_id)


def _template_fields(directory: Path) -> Iterator[Field]:
    for name, source in read_templates(directory).items():
        key = gguf.Keys.Tokenizer.CHAT_TEMPLATE
        if name != DEFAULT:
            key = gguf.Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)
        yield Field(key=key, value=source, type=gguf.GGUFValueType.STRING)


def _character_map(state: Mapping[str, Any]) -> Iterator[Field]:
    """Yield SentencePiece's table of normalisations, if the tokenizer has one."""
    for part in _parts(state, "Precompiled"):
        table = base64.b64decode(part["precompiled_charsmap"])
        if table:
            yield _array(gguf.Keys.Tokenizer.PRECOMPILED_CHARSMAP, list(table), gguf.GGUFValueType.UINT8)
            return


def _parts(state: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return all parts of this type in the normaliser, the pre-tokenizer and the decoder."""
    found, waiting = [], [state.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [one for name in ("normalizers", "pretokenizers", "decoders") for one in part.get(name) or ()]
            found += [part] if part.get("type") == kind else []
    return found


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _array(key: str, value: list[Any], item_type: gguf.GGUFValueType) -> Field:
    return Field(key=key, value=value, type=gguf.GGUFValueType.ARRAY, item_type=item_type)


def _number(key: str, value: int) -> Field:
    return Field(key=key, value=value, type=gguf.GGUFValueType.UINT32)
