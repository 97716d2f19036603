from __future__ import annotations

import random

import pytest
from transformers import PreTrainedTokenizerFast

from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from scripts.small_base.lessons import Knights, worked_sum
from scripts.small_base.tokenizer import CONTEXT, JOINER, VOCABULARY, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    teacher, rng = Knights(), random.Random(0)
    lessons = [teacher(rng, 0.0) for _ in range(400)]
    return build_tokenizer(lesson.prompt + lesson.completion for lesson in lessons)


def test_digits_and_signs_are_single_tokens_and_words_are_few(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCABULARY and tokenizer.model_max_length == CONTEXT
    sums = worked_sum(random.Random(0), 0.0)
    assert len(tokenizer.encode(sums.prompt)) == len(sums.prompt)
    assert len(tokenizer.encode("#@-$.*+UDLRLLUU")) == 15, "a board's cells and moves"
    puzzle = Knights()(random.Random(1), 0.0).prompt
    assert len(tokenizer.encode(puzzle)) < len(puzzle) / 3


def test_a_word_is_one_token_in_any_position(tokenizer: PreTrainedTokenizerFast) -> None:
    (word,) = tokenizer.encode(" Aria")
    for before, behind in (("", ""), ('"', " is"), ("In ", "'s"), ("a/", '"'), ("\n ", "1"), ("\n", "2:")):
        assert word in tokenizer.encode(f"{before}Aria{behind}")
    assert word not in tokenizer.encode(" Ariadne") and word not in tokenizer.encode("mAria")


def test_every_text_decodes_unchanged(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    parts = [JOINER, " ", "Aria", "knight", "s", "A", "<answer>", "</answer>", "answer", "<", "</"]
    parts += ['"', "7", "\n", "\t", "\0", "\x7f", "é", "漢", "\N{GRINNING FACE}", "\uffff", "<0x41>", "<eos>"]
    codec = PromptCodec(tokenizer.backend_tokenizer, stop_ids=(tokenizer.eos_token_id,), chat=None)
    for _ in range(3_000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert "".join(piece for piece, _ in codec.pieces(ids)) == text


def test_the_base_in_the_box_has_this_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    file = resolve_base("builtin:small") / "tokenizer.json"
    boxed = PreTrainedTokenizerFast(tokenizer_file=str(file))
    teacher, rng = Knights(), random.Random(2)
    for _ in range(20):
        prompt = teacher(rng, 0.0).prompt
        assert boxed.convert_ids_to_tokens(boxed.encode(prompt)) == tokenizer.convert_ids_to_tokens(
            tokenizer.encode(prompt)
        )
