"""Tokenizer of the small base model: one token per word of the lessons, and one per character for other text.

A word's token starts with the space before it. A word without a space gets a joiner in front: `"Aria` becomes `"`, the
joiner and ` Aria`, so the model sees the same token after a quotation mark. Decoding removes each joiner with the space
after it. A joiner in the text itself is escaped by another one. Characters outside printable ASCII are written as UTF-8
bytes, so decoding restores every text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.make_tiny_base import CHARACTERS, SPECIAL_TOKENS

VOCABULARY: Final = 512
CONTEXT: Final = 1024
JOINER: Final = "\u2060"
TAGS: Final = ("<answer>", "</answer>")
_BYTES: Final = [byte for byte in range(0xF5) if chr(byte) not in CHARACTERS]
"""Byte values that have their own token: bytes of multi-byte UTF-8 characters, and control characters."""
_WORD: Final = re.compile(r"(?<![A-Za-z<])(?<!</)(?:[A-Za-z][a-z]+|[Aa])(?![A-Za-z])")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Build the tokenizer; its words are the most frequent ones in `texts`."""
    counts = Counter(word for text in texts for word in _WORD.findall(text))
    fixed = [*SPECIAL_TOKENS, *CHARACTERS, *(f"<0x{byte:02X}>" for byte in _BYTES), JOINER, *TAGS]
    words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    words = words[: VOCABULARY - len(fixed)]
    vocabulary = {token: i for i, token in enumerate((*fixed, *(f" {word}" for word in words)))}
    word = f"(?:{'|'.join(words)})(?![A-Za-z])"
    tags = "|".join(TAGS)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, ignore_merges=True))
    tokenizer.normalizer = normalizers.Replace(
        Regex(rf"(?<={JOINER})(?= |\z)|(?<![ A-Za-z<])(?<!</)(?={word})"), f"{JOINER} "
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{tags}| {word}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex(rf"{JOINER}(?: |\z)"), "")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
