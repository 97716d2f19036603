"""Sampling on the learner's device, for the co-located mode and for evaluations: all groups in one continuous batch, as
wide as the device's memory allows.

Sampling holds only keys and values, while training holds the activations of every layer. So the batch width does not
follow from the micro-batch size: sampling has its own budget, `learner.kv_cache_bytes`. If memory still runs out,
unfinished rollouts are sampled again with half the width, and later batches keep that width.

In a run with multi-turn episodes, half of the budget caches the keys and values of sampled tokens for the current
weights. The prompts of the next turn begin with these tokens.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from echo_hub.learner.policy import Policy
from echo_shared.process.out_of_memory import ran_out
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_cache import RowBytes, row_bytes, spare_bytes
from echo_shared.sampling.torch_draws import Choose
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.sampling.torch_sampler import sample_groups

log = logging.getLogger(__name__)

LOGIT_BYTES: Final = 2**30
"""Memory limit, in bytes, for the float64 logits of one sampling step, which has a row for each rollout in
the batch.
"""
MOST_ROWS: Final = 1_024


class Drawing:
    """Samples groups, and remembers the batch width that fits."""

    def __init__(self, policy: Policy, *, kv_cache_bytes: int, multi_turn: bool = False) -> None:
        """`kv_cache_bytes` 0 means half of a GPU's free memory, or a quarter of a host's. `multi_turn` keeps a prefix
        cache.
        """
        self._policy = policy
        self._kv_cache_bytes = kv_cache_bytes
        self._multi_turn = multi_turn
        self._prefixes: tuple[str, TorchPrefixCache] | None = None
        """A fingerprint of the weights, and the cache of keys and values of prompt prefixes that was computed with
        these weights."""
        self._row: RowBytes | None = None
        """Bytes of memory that one row of a batch (one rollout) takes. Measured once, before the first batch; None
        until then.
        """
        self.rows = max(1, min(MOST_ROWS, LOGIT_BYTES // (8 * policy.vocab_size)))

    def draw(self, groups: Sequence[GroupRequest], choose: Choose) -> Iterator[FinishedRollout]:
        """Yield each rollout as soon as it is finished.

        Raises the device's error if memory is too small for a single rollout.
        """
        model = self._policy.model
        if self._row is None:
            with self._policy.autocast():
                self._row = row_bytes(model)
        cells = max(1, (self._kv_cache_bytes or spare_bytes(model.device)) // self._row.per_token)
        if self._multi_turn:
            cells = max(1, cells // 2)
        waiting = list(groups)
        while waiting:
            done: set[tuple[int, int, int]] = set()
            width = min(self.rows, sum(len(group.indices) for group in waiting))
            try:
                with self._policy.autocast():
                    prefixes = self._prefixes_by_what_is_held(cells)
                    for rollout in sample_groups(
                        model,
                        waiting,
                        choose,
                        width=width,
                        max_cells=cells,
                        state_cells=self._row.state_tokens,
                        prefixes=prefixes,
                        routers=self._policy.routers,
                    ):
                        done.add((rollout.lease_id, rollout.group_id, rollout.index))
                        yield rollout
                return
            except (MemoryError, RuntimeError) as error:
                if width == 1 or not ran_out(error):
                    raise
                said = str(error) or type(error).__name__
            # Free memory outside the handler: inside it, the traceback still refers to the failed attempt's tensors.
            self._prefixes = prefixes = None
            gc.collect()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            self.rows = width // 2
            waiting = _without(waiting, done)
            log.warning("out of memory, sampling continues with at most %d rollouts at a time: %s", self.rows, said)

    def forget(self) -> None:
        self._prefixes = None

    def _prefixes_by_what_is_held(self, max_tokens: int) -> TorchPrefixCache | None:
        if not self._multi_turn:
            return None
        held = _fingerprint(self._policy)
        if self._prefixes is None or self._prefixes[0] != held:
            self._prefixes = held, TorchPrefixCache(max_tokens)
        return self._prefixes[1]


def _fingerprint(policy: Policy) -> str:
    """Return a fingerprint of the active weights: "base", or a hash of the adapter."""
    adapted = (module for module in policy.model.modules() if isinstance(module, BaseTunerLayer))
    if any(layer.disable_adapters for layer in adapted):
        return "base"
    digest = hashlib.blake2b()
    for weight in policy.parameters.values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _without(groups: Sequence[GroupRequest], done: set[tuple[int, int, int]]) -> list[GroupRequest]:
    rest = []
    for group in groups:
        indices = tuple(index for index in group.indices if (group.lease_id, group.group_id, index) not in done)
        prefixes = tuple(prefix for prefix in group.prefixes if prefix.index in indices)
        rest.append(replace(group, indices=indices, prefixes=prefixes))
    return [group for group in rest if group.indices]
