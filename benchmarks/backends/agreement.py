"""Agreement of an engine's rollouts with those of the float32 model, with the same seeds, on a trained model.

The reference is transformers in float32. The reference model reads each rollout in one pass and draws every token again
from the same uniforms. Equal tokens mean that the reference would have drawn this rollout."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from echo_shared import draws
from echo_shared.sampling import FinishedRollout, GroupRequest

_Pair = tuple[GroupRequest, FinishedRollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of an engine with the reference."""

    identical: float
    """Share of rollouts that equal those of the reference, token for token."""
    max_difference: float
    """Largest |Δ log-probability| of all tokens, in nats."""


class Reference:
    """The base, or the base with an adapter, in float32."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            # PEFT takes seconds to load. Engines' processes load this module without a comparison.
            from peft import PeftModel

            with warnings.catch_warnings():
                # PEFT reads an attribute that transformers has renamed.
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
                model = PeftModel.from_pretrained(model, str(adapter))
        self._model = model.eval()

    def compare(self, groups: list[GroupRequest], rollouts: list[FinishedRollout]) -> Agreement:
        by_lease = {group.lease_id: group for group in groups}
        pairs = [(by_lease[rollout.lease_id], rollout) for rollout in rollouts]
        pairs.sort(key=_fed_tokens)
        identical = 0
        differences = []
        for _, same_length in itertools.groupby(pairs, key=_fed_tokens):
            batch = list(same_length)
            for logits, (group, rollout) in zip(self._logits(batch), batch, strict=True):
                tokens, logprobs = _redraw(logits, group, rollout)
                identical += bool((tokens == rollout.completion_ids).all())
                differences.append(np.abs(logprobs - rollout.behavior_logprobs))
        return Agreement(identical=identical / len(rollouts), max_difference=float(max(map(np.max, differences))))

    @torch.inference_mode()
    def _logits(self, batch: list[_Pair]) -> NDArray[np.float32]:
        """[rollouts, tokens, vocabulary] of prompts and completions that have the same length together."""
        ids = np.stack([np.concatenate([group.prompt_ids, rollout.completion_ids[:-1]]) for group, rollout in batch])
        logits: NDArray[np.float32] = self._model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
        return logits


def _fed_tokens(pair: _Pair) -> int:
    group, rollout = pair
    return len(group.prompt_ids) + len(rollout.completion_ids) - 1


def _redraw(
    logits_TV: NDArray[np.float32], group: GroupRequest, rollout: FinishedRollout
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw the reference's token after each prefix, and compute its log-probabilities of the engine's tokens."""
    count = len(rollout.completion_ids)
    logits = logits_TV[-count:]
    tokens, _ = draws.draw(logits, draws.uniforms(group.seed, rollout.index, count), group.temperature)
    scaled = logits.astype(np.float64) / group.temperature
    normalised = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    return tokens, normalised[np.arange(count), rollout.completion_ids]
