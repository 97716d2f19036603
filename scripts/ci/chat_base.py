"""Make a small base model that clients can chat with, for tests of the hub's API for tenants (its users).

    python -m scripts.ci.chat_base DIRECTORY

The built-in base gets the tokens of Qwen's chats and a longer context. Then it learns to answer every question with a
random digit, such as \\boxed{4}, so that some samples earn a reward. This takes half a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from echo_hub.run.base_files import resolve_base

CHAT_TOKENS: Final = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
CONTEXT_TOKENS: Final = 2_048
EMBEDDING: Final = "model.embed_tokens.weight"
STEPS: Final = 170
CHATS_PER_STEP: Final = 4
LEARNING_RATE: Final = 3e-3
SUFFIX: Final = " Provide a numerical answer without units, written inside \\boxed{}."
"""Text at the end of each question in the recipes of the tinker cookbook."""
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def add_chat_tokens(folder: Path) -> None:
    """Write the built-in base to `folder`, with random rows for the tokens of a chat, and with a longer context."""
    shutil.copytree(resolve_base("builtin:tiny"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHAT_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    embedding = weights[EMBEDDING]
    rows = np.random.default_rng(0).normal(0.0, embedding.std(), (len(CHAT_TOKENS), embedding.shape[1]))
    weights[EMBEDDING] = np.concatenate([embedding, rows.astype(embedding.dtype)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": len(weights[EMBEDDING]), "max_position_embeddings": CONTEXT_TOKENS}
    _update(folder / "config.json", sizes)
    _update(folder / "tokenizer_config.json", {"model_max_length": CONTEXT_TOKENS})


def _update(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def teach_answers(folder: Path) -> None:
    """Train the base in `folder` to answer with a random digit."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rng = random.Random(0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - 0.7 * step / STEPS)
        optimizer.zero_grad()
        for _ in range(CHATS_PER_STEP):
            prompt, answer = _chat(rng)
            prompt_ids, answer_ids = (tokenizer.encode(text).ids for text in (prompt, answer))
            logits = model(torch.tensor([prompt_ids + answer_ids])).logits[0, len(prompt_ids) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer_ids))
            (loss / CHATS_PER_STEP).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)


def _chat(rng: random.Random) -> tuple[str, str]:
    """Return a random chat as a prompt, and its answer. Half of the prompts contain an earlier turn."""
    prompt = ""
    if rng.random() < 0.5:
        word = rng.choices(LETTERS, k=rng.randrange(4, 12))
        listed = " ".join(f"{place}) {letter}" for place, letter in enumerate(word, 1))
        start = rng.choice(("Let's spell the word", "First I number all letters", "We look at each letter"))
        end = rng.choice(("We have it at positions 3, 8, and 9.", "So there are two.", "These are the places 1 and 4."))
        text = f"{start}: {listed}. {end} \\boxed{{{rng.randrange(1, 10)}}}"
        question = f"How many {rng.choice(LETTERS)}'s are in {''.join(word)}?{SUFFIX}"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
    suffix = SUFFIX if rng.random() < 0.8 else ""
    prompt += f"<|im_start|>user\n{_question(rng)}{suffix}<|im_end|>\n<|im_start|>assistant\n"
    return prompt, f"\\boxed{{{rng.randrange(1, 10)}}}<|im_end|>"


def _question(rng: random.Random) -> str:
    left, right = rng.randrange(1, 100), rng.randrange(1, 100)
    return rng.choice((f"{left % 10}+{right % 10}?", f"What is {left} + {right}?"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small base model that answers in chats.")
    parser.add_argument("directory", type=Path)
    folder: Path = parser.parse_args().directory
    torch.set_num_threads(1)
    torch.manual_seed(0)
    add_chat_tokens(folder)
    teach_answers(folder)


if __name__ == "__main__":
    main()
