"""`model.generate`, which users of transformers know: the baseline of the torch engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.harness.pool import Remote
from echo_node.host import hardware
from echo_shared.sampling.interface import GroupRequest

_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}


class GenerateProcess(Remote):
    """A model in a process of its own."""

    def __init__(self, base: Path, precision: str) -> None:
        super().__init__(_Model, base, precision)

    def sample(self, groups: list[GroupRequest], width: int) -> float:
        """Sample all rollouts, `width` at a time. Return tokens per second; tokens after a rollout's end do not
        count.
        """
        seconds, tokens = self.call("sample", groups, width)
        return float(tokens / seconds)


class _Model:
    """The model in the child process."""

    def __init__(self, base: Path, precision: str) -> None:
        torch.set_num_threads(hardware.sensible_threads())
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=_DTYPES[precision]).eval()

    def sample(self, groups: list[GroupRequest], width: int) -> tuple[float, int]:
        rows = [group for group in groups for _ in group.indices]
        torch.manual_seed(groups[0].seed % 2**31)
        began = time.perf_counter()
        tokens = sum(self._generate(rows[start : start + width]) for start in range(0, len(rows), width))
        return time.perf_counter() - began, tokens

    def _generate(self, rows: list[GroupRequest]) -> int:
        """Generate one batch, padded on the left, until its longest rollout ends."""
        longest = max(len(row.prompt_ids) for row in rows)
        ids, mask = np.zeros((2, len(rows), longest), np.int64)
        for number, row in enumerate(rows):
            ids[number, longest - len(row.prompt_ids) :] = row.prompt_ids
            mask[number, longest - len(row.prompt_ids) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
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


def _useful(completion: NDArray[np.int64], row: GroupRequest) -> int:
    """Return the number of tokens up to the end of a rollout; padding after it does not count."""
    stops = np.flatnonzero(np.isin(completion, row.stop_ids))
    end = int(stops[0]) + 1 if len(stops) else len(completion)
    return min(end, row.max_tokens)
