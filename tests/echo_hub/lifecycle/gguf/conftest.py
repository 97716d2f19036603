"""Tiny model directories with tokenizers of the same kinds as in published models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (" the", " quick", "ing", "er", "an", "in", "12", "00", "  ", "\n\n", "ello", " world", "'s", "on", "re", " a")
RULES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                    r"|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
"""Pre-tokenizers, by the name of the equivalent rule in llama.cpp."""


def byte_tokenizer(rule: str) -> Tokenizer:
    """Return a BPE tokenizer over bytes with a few merges, and with two control tokens."""
    vocabulary = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        signs = [
            piece
            for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
        ]
        left = signs[0][0]
        for sign in signs[0][1:]:
            if left + sign not in vocabulary:
                vocabulary[left + sign] = len(vocabulary)
                merges.append((left, sign))
            left += sign
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = RULES[rule]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def piece_tokenizer(*, prefix: bool) -> Tokenizer:
    """Return a tokenizer like those converted from SentencePiece: BPE over characters, with bytes for unknown
    characters."""
    vocabulary = {text: number for number, text in enumerate(("<unk>", "<s>", "</s>"))}
    for number in range(256):
        vocabulary[f"<0x{number:02X}>"] = len(vocabulary)
    for sign in "\u2581abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-":
        vocabulary[sign] = len(vocabulary)
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("i", "n"), ("in", "g"), ("\u2581", "\u2581")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model directory without weights and returns its path."""

    def write(tokenizer: Tokenizer, *, end: str, template: str = "", spare: int = 0, **told: Any) -> Path:
        directory = tmp_path / "model"
        directory.mkdir()
        tokenizer.save(str(directory / "tokenizer.json"))
        size = tokenizer.get_vocab_size() + spare
        config = {"vocab_size": size, "eos_token_id": tokenizer.token_to_id(end), "max_position_embeddings": 512}
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, **told}))
        if template:
            (directory / "chat_template.jinja").write_text(template)
        return directory

    return write
