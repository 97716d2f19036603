from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from echo_hub.openai.reply_text import ReplyText
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from tests.echo_hub.lifecycle.gguf.conftest import byte_tokenizer, piece_tokenizer

SAID = "The quick the  ü 🌺 \ufffd日本語 END 12 00\n\nE EN END."
TOKENIZERS = {
    "bytes": byte_tokenizer("gpt-2"),
    "pieces": piece_tokenizer(prefix=True),
    "pieces without a space at the beginning": piece_tokenizer(prefix=False),
}
EACH = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def codec_of(tokenizer: Tokenizer) -> PromptCodec:
    return PromptCodec(tokenizer, stop_ids=(tokenizer.get_vocab_size() - 1,), chat=None)


def grown(text: ReplyText, ids: list[int], parts: random.Random) -> list[str]:
    """Feed the ids in parts of random length, and return the pieces of text."""
    pieces = []
    while ids:
        count = parts.randint(1, 3)
        pieces.append(text.add(ids[:count]))
        ids = ids[count:]
    return pieces


@EACH
def test_pieces_add_up_to_the_text_of_all_tokens(tokenizer: Tokenizer) -> None:
    codec, parts = codec_of(tokenizer), random.Random(1)
    ids = codec.ids_of_plain(SAID)
    for _ in range(50):
        text = ReplyText(codec)
        pieces = grown(text, ids, parts)
        # One replacement character belongs to the text. No half of another character may be shown as one.
        assert "".join(pieces).count("\ufffd") == 1
        assert "".join(pieces) + text.end(is_stop=False) == codec.decode(ids) == text.text


@EACH
def test_random_tokens_are_decoded_as_all_at_once(tokenizer: Tokenizer) -> None:
    """The tokens are random, so no real text has their order. Some are special tokens; with the tokenizer of bytes,
    invalid UTF-8 occurs too.
    """
    codec, draws = codec_of(tokenizer), random.Random(2)
    size = tokenizer.get_vocab_size()
    tokens = [one for one in range(size) if not str(tokenizer.id_to_token(one)).startswith("<0x")]
    for _ in range(100):
        ids = draws.choices(tokens, k=30)
        text = ReplyText(codec)
        assert "".join(grown(text, ids, draws)) + text.end(is_stop=False) == codec.decode(ids)


def test_special_tokens_are_shown_if_asked_for() -> None:
    codec = codec_of(TOKENIZERS["bytes"])
    ids = [*codec.ids_of_plain("a"), codec.stop_ids[0], *codec.ids_of_plain("b")]
    text = ReplyText(codec, shows_special=True)
    assert text.add(ids) == "a<|im_end|>b" and ReplyText(codec).add(ids) == "ab"


@EACH
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer) -> None:
    codec, parts = codec_of(tokenizer), random.Random(3)
    ids = codec.ids_of_plain(SAID)
    whole = codec.decode(ids)
    for stops in (["END"], ["quick", "END"], ["EN", "E"], ["nowhere"], ["ü 🌺"], ["12 00\n"]):
        expected = whole[: min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))]
        text = ReplyText(codec, stop_strings=stops)
        shown = ""
        for piece in grown(text, ids, parts):
            shown += piece
            assert expected.startswith(shown)
        assert shown + text.end(is_stop=True) == expected
        assert text.is_cut == (expected != whole)
        assert not text.is_cut or text.add(ids) == ""


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    codec = codec_of(TOKENIZERS["bytes"])
    text = ReplyText(codec, stop_strings=["END"])
    assert text.add(codec.ids_of_plain("aEN")) == "a"
    assert text.add(codec.ids_of_plain("E")) == "EN"
    assert text.end(is_stop=False) == "E"


def test_an_end_token_is_shown_only_if_the_reply_goes_on() -> None:
    codec = codec_of(TOKENIZERS["bytes"])
    a, b = codec.ids_of_plain("ab")
    ended = ReplyText(codec, end_ids={b})
    assert ended.add([a, b]) == "a" and ended.end(is_stop=True) == ""
    cut_off = ReplyText(codec, end_ids={b})
    assert cut_off.add([a, b]) == "a" and cut_off.end(is_stop=False) == "b"
    went_on = ReplyText(codec, end_ids={b})
    assert went_on.add([a, b]) == "a" and went_on.add([a]) == "ba"


def test_invalid_characters_without_end_are_shown_at_last() -> None:
    codec = codec_of(TOKENIZERS["bytes"])
    broken = codec.ids_of_plain("ü")[0]
    text = ReplyText(codec)
    assert text.add([broken] * 63) == "" and text.add([broken]) == "\ufffd" * 64


def test_the_cost_of_a_long_reply_grows_with_its_length() -> None:
    """A reply is decoded in windows of a few tokens: 20,000 tokens one by one would take minutes otherwise."""
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    ids = codec.ids_of_plain("12+34=46 ") * 2_500
    text = ReplyText(codec, stop_strings=["zzzz"])
    for token_id in ids:
        text.add([token_id])
    assert text.text + text.end(is_stop=False) == codec.decode(ids)
