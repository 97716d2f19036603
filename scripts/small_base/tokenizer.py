"""The second base's tokenizer: digits, signs and capitals one by one, words as far as the lessons use them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.make_tiny_base import CHARACTERS, SPECIAL_TOKENS

VOCABULARY: Final = 512
CONTEXT: Final = 1024
_PARTS: Final = r"</?answer>| ?[A-Za-z][a-z]+|[\s\S]"
"""What no token goes beyond."""


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding, learned on `texts`; of other characters than printable ASCII and the newline, <unk>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PARTS), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=list(CHARACTERS),
        limit_alphabet=len(CHARACTERS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
