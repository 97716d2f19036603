from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def make(directory: Path, *, labels: int = 1, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a reward model, a one-layer Llama whose tokens are characters, and return its directory."""
    vocabulary = {character: number for number, character in enumerate(["<pad>", *map(chr, range(32, 127))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="?")
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_labels=labels,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
    )
    torch.manual_seed(5)
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def plainly(directory: Path, prompt: str, completion: str) -> float:
    """Return the reward model's logit for one prompt and completion, computed by transformers without the hub's
    code."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    with torch.inference_mode():
        return float(model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0])
