"""Names of llama.cpp's rules that split text before BPE merges it: tokenizer.ggml.pre.

The names are llama.cpp's public interface (src/llama-vocab.cpp). Of several names for one rule, only one name is
listed. Echo does not know what a rule does: `echo_hub.lifecycle.gguf.reading` tries each rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_LIKELY: Final = (
    ("Digits", "smollm"),
    ("\\p{N}{1,3}", "llama-bpe"),
    ("\\p{N}{1,3}", "gpt-4o"),
    ("\\p{N}{1,3}", "deepseek-v3"),
    ("\\p{L}\\p{M}]+", "qwen35"),
    ("\\p{Lu}", "gpt-4o"),
    ("\\p{Lu}", "tekken"),
    ("(?i:'s|'t|'re", "qwen2"),
    ("\\p{N}|", "qwen2"),
)
"""Pairs of a text in a tokenizer.json, and the rule that tokenizers with this text often need. These rules are tried
early.
"""
RULES: Final = (
    *("llama-bpe", "qwen2", "gpt-2", "smollm", "gpt-4o", "deepseek-v3", "tekken", "qwen35", "starcoder", "dbrx"),
    *("olmo", "chatglm-bpe", "glm4", "stablelm2", "command-r", "refact", "deepseek-llm", "deepseek-coder", "falcon"),
    *("mpt", "poro-chat", "bloom", "viking", "jais", "codeshell", "exaone", "exaone4", "exaone-moe", "chameleon"),
    *("minerva-7b", "megrez", "superbpe", "trillion", "granite-docling", "bailingmoe", "seed-coder", "hunyuan"),
    *("hunyuan-dense", "joyai-llm", "kimi-k2", "grok-2", "afmoe", "laguna", "minimax-m2", "solar-open", "mellum2"),
    *("jais-2", "youtu", "tiny_aya", "minicpm5", "ufakzeka", "default"),
)
"""All rules to try, the most common first. An older llama.cpp refuses the names that it does not know."""


_IGNORE_MERGES: Final = frozenset({"llama-bpe", "tekken", "glm4", "youtu", "minicpm5"})
"""Rules that look up each word as a whole token before merging, like `ignore_merges` in tokenizer.json."""


def rules_for(state: Mapping[str, Any]) -> list[str]:
    """Return all rules to try. `state` is the parsed tokenizer.json; the rules that it probably needs come first."""
    shown = json.dumps(state.get("pre_tokenizer")).replace("\\\\", "\\")
    likely = [name for part, name in _LIKELY if part in shown] or ["gpt-2"]
    ignores = bool(state["model"].get("ignore_merges"))
    every = dict.fromkeys((*likely, *RULES))
    return sorted(every, key=lambda name: (name in _IGNORE_MERGES) != ignores)
