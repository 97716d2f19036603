"""Makes batches of lessons for the small base model, and does the optimizer steps on them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from scripts.make_tiny_base import IGNORED
from scripts.small_base.lessons import Lesson
from scripts.small_base.muon import Muon

BATCH_TOKENS: Final = 2_048
"""Tokens per batch, padding included."""
POOL: Final = 1_024
"""Number of lessons that are sorted by length together, so that the lessons of a batch have similar lengths."""
WARMUP_SHARE: Final = 0.03
LAST_RATE: Final = 0.03
"""Learning rate at the end of a phase, relative to its peak."""

Teacher = Callable[[random.Random, float], Lesson]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    tokens: int
    """Tokens to read in this phase, padding included."""
    shares: Mapping[str, float]
    """Probability that a lesson comes from this teacher, by the teacher's name."""
    slips: Mapping[str, float]
    """Probability of mistakes by teacher. A teacher without an entry makes none."""
    learning_rate: float


class Lessons:
    """Endless batches of ids and labels, both [B, T]. Held-out problems are excluded."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        teachers: Mapping[str, Teacher],
        *,
        held_out: frozenset[str],
        rng: random.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._teachers = teachers
        self._held_out = held_out
        self._rng = rng

    def batches(self, phase: Phase) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            pool = sorted((self._row(phase) for _ in range(POOL)), key=lambda row: len(row[0]) + len(row[1]))
            batches, begun = [], 0
            for end in range(1, POOL + 1):
                longest = sum(map(len, pool[min(end, POOL - 1)]))
                if end == POOL or (end + 1 - begun) * longest > BATCH_TOKENS:
                    batches.append(pool[begun:end])
                    begun = end
            self._rng.shuffle(batches)
            yield from map(self._padded, batches)

    def _row(self, phase: Phase) -> tuple[list[int], list[int]]:
        while True:
            (kind,) = self._rng.choices(list(phase.shares), list(phase.shares.values()))
            lesson = self._teachers[kind](self._rng, phase.slips.get(kind, 0.0))
            if lesson.prompt not in self._held_out:
                prompt, completion = (self._tokenizer.encode(text) for text in (lesson.prompt, lesson.completion))
                completion.append(self._tokenizer.eos_token_id)
                return ([], prompt + completion) if lesson.reads else (prompt, completion)

    def _padded(self, rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        ids_BT = torch.full((len(rows), width), self._tokenizer.pad_token_id)
        labels_BT = torch.full((len(rows), width), IGNORED)
        for row, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion)
            ids_BT[row, :end] = torch.tensor(prompt + completion)
            labels_BT[row, len(prompt) : end] = torch.tensor(completion)
        return ids_BT, labels_BT


def teach(model: Qwen3ForCausalLM, lessons: Lessons, phase: Phase) -> Iterator[tuple[int, float]]:
    """Train on one phase; yield (tokens read so far, loss) after each step.

    Muon trains the layers' matrices, AdamW all other weights (Keller Jordan's recipe). The learning rate has a warm-up
    and a half cosine decay.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    read = 0
    for ids_BT, labels_BT in lessons.batches(phase):
        done = read / phase.tokens
        if done >= 1:
            return
        rate = phase.learning_rate * min(1.0, (done + 1e-3) / WARMUP_SHARE)
        rate *= max(LAST_RATE, 0.5 * (1 + math.cos(math.pi * done)))
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(rate)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad(set_to_none=True)
        read += ids_BT.numel()
        yield read, loss.item()
