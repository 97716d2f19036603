from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from echo_hub.lifecycle.gguf.vocabulary import PRE, Vocabulary, vocabulary_in, vocabulary_of
from echo_hub.lifecycle.gguf.writing import write_vocabulary
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.conftest import CHATML, byte_tokenizer, piece_tokenizer

KEYS = gguf.Keys.Tokenizer


def values(vocabulary: Vocabulary) -> dict[str, Any]:
    return {field.key: field.value for field in vocabulary.fields}


def read(directory: Path) -> dict[str, Any]:
    return values(vocabulary_of(directory, PromptCodec.load(directory)))


def test_a_byte_tokenizer_keeps_its_tokens_and_merges(write_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer("qwen2")
    directory = write_tokenizer(tokenizer, end="<|im_end|>", template=CHATML, spare=3)
    vocabulary = vocabulary_of(directory, PromptCodec.load(directory))
    told = values(vocabulary)
    size = tokenizer.get_vocab_size()
    assert told[KEYS.MODEL] == "gpt2" and vocabulary.readings[0] == {PRE: "qwen2"}
    assert told[KEYS.LIST][:size] == [tokenizer.id_to_token(number) for number in range(size)]
    assert told[KEYS.LIST][size:] == [f"[UNUSED_{size + number}]" for number in range(3)]
    assert told[KEYS.TOKEN_TYPE][-5:] == [3, 3, 5, 5, 5] and set(told[KEYS.TOKEN_TYPE][:-5]) == {1}
    assert all(" " in pair for pair in told[KEYS.MERGES]) and KEYS.SCORES not in told
    assert told[KEYS.CHAT_TEMPLATE] == CHATML
    assert (told[KEYS.EOS_ID], told[KEYS.ADD_BOS], told[KEYS.ADD_EOS]) == (
        tokenizer.token_to_id("<|im_end|>"),
        False,
        False,
    )


def test_the_begin_token_is_added_if_prompts_begin_with_it(write_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer("gpt-2")
    tokenizer.add_special_tokens(["<s>"])
    directory = write_tokenizer(tokenizer, end="<|im_end|>", template="{{ bos_token }}" + CHATML, bos_token="<s>")
    told = read(directory)
    assert told[KEYS.ADD_BOS] is True and told[KEYS.BOS_ID] == tokenizer.token_to_id("<s>")
    (directory / "chat_template.jinja").write_text(CHATML)
    assert read(directory)[KEYS.ADD_BOS] is False, "the hub has trained without it"


def test_a_template_whose_messages_begin_with_the_begin_token_writes_it_itself(write_tokenizer: Any) -> None:
    told = read(write_tokenizer(byte_tokenizer("gpt-2"), end="<|im_end|>", template=CHATML, bos_token="<|im_start|>"))
    assert told[KEYS.ADD_BOS] is False


def test_ends_of_text_and_of_replies_are_both_told(write_tokenizer: Any) -> None:
    tokenizer = byte_tokenizer("gpt-2")
    tokenizer.add_special_tokens(["<end>"])
    directory = write_tokenizer(tokenizer, end="<end>", template=CHATML)
    ids = [tokenizer.token_to_id(text) for text in ("<end>", "<|im_end|>")]
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    told = read(directory)
    assert [told[KEYS.EOS_ID], told[KEYS.EOT_ID]] == ids and KEYS.EOM_ID not in told


def test_a_tokenizer_of_pieces_gets_scores_in_the_order_of_merges(write_tokenizer: Any) -> None:
    told = read(write_tokenizer(piece_tokenizer(prefix=True), end="</s>", bos_token="<s>"))
    tokens, scores, kinds = told[KEYS.LIST], told[KEYS.SCORES], told[KEYS.TOKEN_TYPE]
    assert told[KEYS.MODEL] == "llama"
    made = [scores[tokens.index(text)] for text in ("\u2581t", "he", "\u2581the", "in", "ing")]
    assert made == [0.0, -1.0, -2.0, -3.0, -4.0] and scores[tokens.index("a")] < min(made)
    assert (kinds[tokens.index("<0x0A>")], kinds[tokens.index("<unk>")], kinds[tokens.index("<s>")]) == (6, 2, 3)


def test_single_characters_become_a_vocabulary_of_their_own() -> None:
    told = read(resolve_base("builtin:tiny"))
    assert told[KEYS.MODEL] == "t5" and "\u2581" in told[KEYS.LIST] and " " not in told[KEYS.LIST]
    assert told[KEYS.UNK_ID] == told[KEYS.LIST].index("<unk>") and len(told[KEYS.LIST]) == 99


def test_words_that_llama_cpp_cannot_split_are_refused(write_tokenizer: Any) -> None:
    words = {text: number for number, text in enumerate(("<unk>", "</s>", "one", "two"))}
    base = write_tokenizer(Tokenizer(models.WordLevel(words, unk_token="<unk>")), end="</s>")
    with pytest.raises(ConfigError, match=r"(?s)no tokenizer of this base model's kind.*WordLevel.*--merged"):
        vocabulary_of(base, PromptCodec.load(base))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(write_tokenizer: Any) -> None:
    directory = write_tokenizer(byte_tokenizer("gpt-2"), end="\u0120", spare=-2)
    with pytest.raises(ConfigError, match=r"does not fit into a GGUF file"):
        vocabulary_of(directory, PromptCodec.load(directory))


def test_unigram_scores_are_kept(write_tokenizer: Any) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.5), ("b", -2.5), ("</s>", 0.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    told = read(write_tokenizer(tokenizer, end="</s>"))
    assert told[KEYS.MODEL] == "t5" and told[KEYS.SCORES] == [0.0, -1.5, -2.5, 0.0] and told[KEYS.UNK_ID] == 0


def test_the_fields_of_a_gguf_file_are_taken_over_unchanged(write_tokenizer: Any, tmp_path: Path) -> None:
    directory = write_tokenizer(byte_tokenizer("smollm"), end="<|im_end|>", template=CHATML)
    vocabulary = vocabulary_of(directory, PromptCodec.load(directory))
    write_vocabulary(tmp_path / "file.gguf", vocabulary)
    again = vocabulary_in(tmp_path / "file.gguf", num_tokens=vocabulary.num_tokens)
    assert again is not None and again.readings == ({},)
    assert values(again) == {**values(vocabulary), PRE: "smollm"}
    assert vocabulary_in(tmp_path / "file.gguf", num_tokens=vocabulary.num_tokens + 1) is None
