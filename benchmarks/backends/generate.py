"""What a transformers user gets: `model.generate`, the baseline of the torch engine."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from echo_shared.sampling import GroupRequest

_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}


class GenerateProcess:
    """A model in a process of its own."""

    def __init__(self, base: Path, precision: str, threads: int) -> None:
        self.precision = precision
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._opening = (base, precision, threads)

    def __enter__(self) -> Self:
        self._pool.submit(_open, *self._opening).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def sample(self, groups: list[GroupRequest], width: int) -> tuple[float, int]:
        """Samples all rollouts, `width` at a time; (seconds, tokens). Tokens past a rollout's own end do not count."""
        measured: tuple[float, int] = self._pool.submit(_sample, groups, width).result()
        return measured


_model: Any


def _open(base: Path, precision: str, threads: int) -> None:
    global _model
    torch.set_num_threads(threads)
    _model = AutoModelForCausalLM.from_pretrained(base, dtype=_DTYPES[precision]).eval()


def _sample(groups: list[GroupRequest], width: int) -> tuple[float, int]:
    rows = [group for group in groups for _ in group.indices]
    torch.manual_seed(groups[0].seed % 2**31)
    began = time.perf_counter()
    tokens = sum(_generate(rows[start : start + width]) for start in range(0, len(rows), width))
    return time.perf_counter() - began, tokens


def _generate(rows: list[GroupRequest]) -> int:
    """One batch, padded on the left; it runs until its longest rollout ends, as `generate` does."""
    longest = max(len(row.prompt_ids) for row in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros((len(rows), longest), np.int64)
    for number, row in enumerate(rows):
        ids[number, longest - len(row.prompt_ids) :] = row.prompt_ids
        mask[number, longest - len(row.prompt_ids) :] = 1
    with torch.inference_mode():
        output = _model.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            do_sample=True,
            temperature=rows[0].temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(row.max_tokens for row in rows),
            eos_token_id=list(rows[0].stop_ids) or None,
            pad_token_id=0,
        )
    completions = output[:, longest:].numpy()
    return sum(_useful(completion, row) for completion, row in zip(completions, rows, strict=True))


def _useful(completion: np.ndarray[Any, np.dtype[np.int64]], row: GroupRequest) -> int:
    stops = np.flatnonzero(np.isin(completion, row.stop_ids))
    end = int(stops[0]) + 1 if len(stops) else len(completion)
    return min(end, row.max_tokens)
