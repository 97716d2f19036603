from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_hub.run.base_model import PromptCodec
from echo_hub.run.chat_template import ChatTemplate
from echo_hub.talking.conversation import Conversation, TextStream
from echo_shared.errors import ConfigError
from tests.echo_hub.lifecycle.gguf.conftest import CHATML, byte_tokenizer


def codec(**settings: Any) -> PromptCodec:
    tokenizer = byte_tokenizer("gpt-2")
    end = tokenizer.token_to_id("<|im_end|>")
    chat = ChatTemplate(source=CHATML, special_tokens={})
    return PromptCodec(tokenizer, stop_ids=(end,), chat=chat, eos_id=end, **settings)


def test_later_turns_keep_the_sampled_tokens_as_they_are() -> None:
    known = codec(system_prompt="Be brief.", prompt_suffix="!")
    talk = Conversation(known)
    first = talk.prompt("One")
    assert (
        known.text(first)
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne!<|im_end|>\n<|im_start|>assistant\n"
    )
    # The reply is sampled letter by letter, although the tokenizer has a token for " the".
    reply = np.array([known.id_of(sign) for sign in ("\u0120", "t", "h", "e")] + list(known.stop_ids), dtype=np.int32)
    talk.take(first, reply)
    second = talk.prompt("Two")
    assert second[: len(first) + len(reply)].tolist() == [*first.tolist(), *reply.tolist()]
    assert known.text(second[len(first) + len(reply) :]) == "\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_was_cut_off_is_ended() -> None:
    known = codec()
    talk = Conversation(known)
    first = talk.prompt("One")
    talk.take(first, np.array([known.id_of("h")], dtype=np.int32))
    assert known.text(talk.prompt("Two")).endswith(
        "assistant\nh<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_question_that_was_not_answered_leaves_nothing() -> None:
    talk = Conversation(codec())
    first = talk.prompt("One")
    talk.take(first, np.zeros(0, dtype=np.int32))
    assert talk.num_tokens == 0 and talk.prompt("One").tolist() == first.tolist()


def test_the_context_bounds_the_reply_and_the_conversation() -> None:
    talk = Conversation(codec(context_tokens=100))
    prompt = talk.prompt("a" * 20)
    assert talk.room(prompt, 10) == 10 and talk.room(prompt, 500) == 100 - len(prompt)
    with pytest.raises(ConfigError, match=r"(?s)too long for this model.*of 100.*/reset"):
        talk.prompt("a" * 80)


def test_text_grows_by_whole_characters() -> None:
    known = codec()
    stream = TextStream(known)
    ids = np.array(known.ids_of_plain("a\u00fc\U0001f33ab"), dtype=np.int32)
    pieces = [stream.more(ids[place : place + 1], is_end=False) for place in range(len(ids))]
    assert [piece for piece in pieces if piece] == [
        "a",
        "\u00fc",
        "\U0001f33a",
        "b",
    ] and stream.text == "a\u00fc\U0001f33ab"
    broken = TextStream(known)
    assert broken.more(ids[1:2], is_end=False) == "" and broken.more(ids[:0], is_end=True) == "\ufffd"
