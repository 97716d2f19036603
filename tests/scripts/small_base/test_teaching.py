from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from scripts.make_tiny_base import IGNORED
from scripts.small_base.__main__ import build_model
from scripts.small_base.lessons import Lesson, worked_sum
from scripts.small_base.teaching import BATCH_TOKENS, Lessons, Phase, teach
from scripts.small_base.tokenizer import build_tokenizer

PHASE = Phase(tokens=10_000, shares={"plain": 0.9, "read": 0.1}, slips={}, learning_rate=3e-3)


def plain(rng: random.Random, slips: float) -> Lesson:
    left, right = rng.randrange(100), rng.randrange(100)
    return Lesson(f"{left}+{right}=", str(left + right))


def read(rng: random.Random, slips: float) -> Lesson:
    return Lesson("a story", " told", reads=True)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    return build_tokenizer(lesson.prompt + lesson.completion for lesson in (worked_sum(rng, 0.0) for _ in range(50)))


def lessons(tokenizer: PreTrainedTokenizerFast, held_out: frozenset[str] = frozenset()) -> Lessons:
    return Lessons(tokenizer, {"plain": plain, "read": read}, held_out=held_out, rng=random.Random(1))


def test_batches_stay_in_their_token_limit_and_prompts_have_no_labels(tokenizer: PreTrainedTokenizerFast) -> None:
    for ids_BT, labels_BT in itertools.islice(lessons(tokenizer).batches(PHASE), 12):
        assert ids_BT.numel() <= BATCH_TOKENS
        for ids, labels in zip(ids_BT, labels_BT, strict=True):
            text = tokenizer.decode(ids[ids != tokenizer.pad_token_id])
            learned = tokenizer.decode(labels[labels != IGNORED])
            asked = text.removesuffix(learned)
            assert learned.endswith("<eos>") and (asked.endswith("=") or learned.startswith("a story"))


def test_held_out_problems_are_not_taught(tokenizer: PreTrainedTokenizerFast) -> None:
    taught = {tokenizer.decode(row) for ids, _ in itertools.islice(lessons(tokenizer).batches(PHASE), 4) for row in ids}
    prompts = frozenset(text.partition("=")[0] + "=" for text in taught if "=" in text)
    again = itertools.islice(lessons(tokenizer, prompts).batches(PHASE), 4)
    assert prompts.isdisjoint(tokenizer.decode(row).partition("=")[0] + "=" for ids, _ in again for row in ids)


def test_teaching_reads_its_phases_number_of_tokens_and_learns(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    steps = list(teach(build_model(tokenizer), lessons(tokenizer), PHASE))
    counts, losses = zip(*steps, strict=True)
    assert list(counts) == sorted(counts) and PHASE.tokens <= counts[-1] < PHASE.tokens + BATCH_TOKENS
    assert losses[-1] < 0.9 * losses[0]
