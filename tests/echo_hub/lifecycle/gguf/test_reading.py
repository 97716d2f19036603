"""llama.cpp must read texts with the written vocabularies as the original tokenizers do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from echo_hub.lifecycle.gguf.reading import EVERYDAY, RARE, Readings, best_reading, check_reading
from echo_hub.lifecycle.gguf.vocabulary import PRE, SPACE_PREFIX, Vocabulary, vocabulary_of
from echo_hub.lifecycle.gguf.writing import write_vocabulary
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.conftest import CHATML, RULES, byte_tokenizer, piece_tokenizer

pytest.importorskip("llama_cpp")


def found(directory: Path, vocabulary: Vocabulary | None = None) -> Readings:
    codec = PromptCodec.load(directory)
    vocabulary = vocabulary or vocabulary_of(directory, codec)
    write_vocabulary(directory / "vocabulary.gguf", vocabulary)
    return best_reading(directory / "vocabulary.gguf", vocabulary, codec)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of_a_byte_tokenizer_is_found(write_tokenizer: Any, rule: str) -> None:
    read = found(write_tokenizer(byte_tokenizer(rule), end="<|im_end|>", template=CHATML, spare=5))
    assert (read.reading, read.everyday, read.rare, read.unended) == ({PRE: rule}, (), (), ())


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_pieces_is_read_with_or_without_a_space_before(write_tokenizer: Any, prefix: bool) -> None:
    read = found(write_tokenizer(piece_tokenizer(prefix=prefix), end="</s>", bos_token="<s>"))
    assert (read.reading, read.everyday, read.rare) == ({SPACE_PREFIX: prefix}, (), ())


def test_single_characters_differ_only_in_text_that_the_model_does_not_know(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(resolve_base("builtin:tiny"), base)
    read = found(base)
    codec = PromptCodec.load(base)
    unknown = codec.id_of("<unk>")
    assert read.everyday == () and read.unended == ()
    assert read.rare and all(unknown in codec.ids_of_plain(text) for text in read.rare)


def test_other_tokens_in_everyday_text_are_refused(write_tokenizer: Any) -> None:
    directory = write_tokenizer(byte_tokenizer("qwen2"), end="<|im_end|>", template=CHATML)
    codec = PromptCodec.load(directory)
    known = vocabulary_of(directory, codec)
    read = found(directory, Vocabulary(fields=known.fields, readings=({PRE: "gpt-2"},)))
    assert set(read.everyday) <= {*EVERYDAY, *read.everyday} and read.everyday
    with pytest.raises(ConfigError, match=r"(?s)everyday text with other tokens.*texts differ.*--merged"):
        check_reading(read)


def test_a_rule_that_llama_cpp_does_not_know_is_passed_over(write_tokenizer: Any) -> None:
    directory = write_tokenizer(byte_tokenizer("gpt-2"), end="<|im_end|>", template=CHATML)
    known = vocabulary_of(directory, PromptCodec.load(directory))
    read = found(directory, Vocabulary(fields=known.fields, readings=({PRE: "no-such-rule"}, {PRE: "gpt-2"})))
    assert read.reading == {PRE: "gpt-2"}
    with pytest.raises(ConfigError, match="cannot load this base model's tokenizer"):
        found(directory, Vocabulary(fields=known.fields, readings=({PRE: "no-such-rule"},)))


def test_text_that_is_normalised_differs_as_rare_text(write_tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer("gpt-2")
    tokenizer.normalizer = normalizers.NFC()
    read = found(write_tokenizer(tokenizer, end="<|im_end|>", template=CHATML))
    assert read.reading == {PRE: "gpt-2"} and read.everyday == ()
    assert read.rare and all("\u0301" in text for text in read.rare)


def test_a_stop_token_that_llama_cpp_does_not_know_is_named(write_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer("gpt-2")
    tokenizer.add_special_tokens([f"<stop{number}>" for number in range(4)])
    directory = write_tokenizer(tokenizer, end="<|im_end|>", template=CHATML)
    ids = [tokenizer.token_to_id(f"<stop{number}>") for number in range(4)]
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    assert found(directory).unended == tuple(ids[2:]), "a file has room for three ends"


def test_texts_are_few_and_different() -> None:
    assert len({*EVERYDAY, *RARE}) == len(EVERYDAY) + len(RARE) < 40
