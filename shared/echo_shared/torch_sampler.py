"""Sampling with a transformers causal LM: one batch of groups, a shared prompt's cache, seeded draws.

The learner (co-located mode, evaluation) and the node's torch backend both sample here, so that both draw alike. This
is the one shared module that imports torch; whoever needs it imports it late.

A prompt is prefilled once, in a batch padded on the left; its cache rows are then repeated for its rollouts. Rows that
have finished leave the batch in bulk. What a batch is made of changes a row's logits only by rounding (matrix products
are blocked by the number of rows, and padding changes the length that attention sums over): about 1e-6 in float32, so
about one draw in a million differs from the same rollout sampled in other company, and none with the same batch.

Dimensions: P prompts, R rows (rollouts still in the batch), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_shared import draws
from echo_shared.errors import BackendError
from echo_shared.messages import FinishReason
from echo_shared.sampling import FinishedRollout, GroupRequest

DRAW_CHUNK_ELEMENTS: Final = 2**24
"""Logits that are drawn from at once: bounds the float64 copies to 128 MiB each."""

COMPACT_SHARE: Final = 0.25
"""Finished rows leave once they are this share of the batch: to drop them costs about as much as one token's step."""

Choose = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(logits [R, V], rows [R], position) -> token ids [R] and their logprobs [R]."""


def sample_groups(model: Any, groups: Sequence[GroupRequest]) -> Iterator[FinishedRollout]:
    """Draws all rollouts of `groups` in one batch and yields each as soon as it is finished.

    `model`: a transformers causal LM, bare or wrapped by PEFT, in eval mode. Raises BackendError when its logits are
    not finite.
    """
    started = time.perf_counter()
    work = [(group, index) for group in groups for index in group.indices]
    if not work:
        return
    device = _draw_device(model.device)
    uniforms_RT = np.zeros((len(work), max(group.max_tokens for group in groups)))
    for row, (group, index) in enumerate(work):
        uniforms_RT[row, : group.max_tokens] = draws.uniforms(group.seed, index, group.max_tokens)
    u_RT = torch.from_numpy(uniforms_RT).to(device)
    temperature_R = torch.tensor([group.temperature for group, _ in work], dtype=torch.float64, device=device)

    def choose(logits_RV: Tensor, rows_R: Tensor, position: int) -> tuple[Tensor, Tensor]:
        return draw(logits_RV, u_RT[rows_R, position], temperature_R[rows_R])

    finished = _decode(
        model,
        [group.prompt_ids for group, _ in work],
        max_tokens=[group.max_tokens for group, _ in work],
        stop_ids=[group.stop_ids for group, _ in work],
        choose=choose,
    )
    for row, completion_ids, logprobs in finished:
        group, index = work[row]
        stopped = int(completion_ids[-1]) in group.stop_ids
        yield FinishedRollout(
            lease_id=group.lease_id,
            group_id=group.group_id,
            index=index,
            policy_version=group.policy_version,
            completion_ids=completion_ids,
            behavior_logprobs=logprobs,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            sampling_s=time.perf_counter() - started,
        )


def greedy(
    model: Any,
    prompts: Sequence[NDArray[np.int32]],
    *,
    max_tokens: int,
    stop_ids: tuple[int, ...],
) -> list[NDArray[np.int32]]:
    """The most likely completion, token by token, of each prompt, in order; a stop token is its last token."""
    completions: list[NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)] * len(prompts)
    if not prompts:
        return completions
    finished = _decode(
        model,
        prompts,
        max_tokens=[max_tokens] * len(prompts),
        stop_ids=[stop_ids] * len(prompts),
        choose=_most_likely,
    )
    for row, completion_ids, _ in finished:
        completions[row] = completion_ids
    return completions


def draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """`echo_shared.draws.draw` in torch, with a temperature for each row; `u_R` and `temperature_R` are float64.

    Returns ids [R] (int64) and logprobs [R] (float64, nats), on the device of `u_R`.
    """
    chunk = max(1, DRAW_CHUNK_ELEMENTS // logits_RV.shape[-1])
    parts = zip(*(torch.split(value, chunk) for value in (logits_RV, u_R, temperature_R)), strict=True)
    tokens, logprobs = zip(*(_draw(*part) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits_RV: Tensor, u_R: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    scaled_RV = logits_RV.to(device=u_R.device, dtype=torch.float64) / temperature_R[:, None]
    scaled_RV -= scaled_RV.amax(dim=-1, keepdim=True)
    weights_RV = scaled_RV.exp()
    cumulative_RV = weights_RV.cumsum(dim=-1)
    totals_R = cumulative_RV[:, -1]
    tokens_R = torch.searchsorted(cumulative_RV, (u_R * totals_R)[:, None], right=True).squeeze(1)
    if bool((tokens_R == weights_RV.shape[-1]).any()):
        from_the_end_R = (weights_RV > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
        tokens_R = torch.minimum(tokens_R, weights_RV.shape[-1] - 1 - from_the_end_R)
    return tokens_R, scaled_RV.gather(1, tokens_R[:, None]).squeeze(1) - totals_R.log()


def _most_likely(logits_RV: Tensor, _rows_R: Tensor, _position: int) -> tuple[Tensor, Tensor]:
    logprobs_R, tokens_R = logits_RV.float().log_softmax(dim=-1).max(dim=-1)
    return tokens_R, logprobs_R


def _draw_device(device: torch.device) -> torch.device:
    """Where float64 exists: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


@torch.inference_mode()
def _decode(
    model: Any,
    prompts: Sequence[NDArray[np.int32]],
    *,
    max_tokens: Sequence[int],
    stop_ids: Sequence[tuple[int, ...]],
    choose: Choose,
) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.float32]]]:
    """Yields (row, completion ids, logprobs) as rows finish; one prompt, limit and set of stop tokens for each row."""
    device, draw_device = model.device, _draw_device(model.device)
    limits_R = np.asarray(max_tokens)
    stops_RS = _stop_table(stop_ids)
    ids_RT = np.zeros((len(prompts), limits_R.max()), dtype=np.int32)
    logprobs_RT = np.zeros((len(prompts), limits_R.max()), dtype=np.float32)
    batch = _Batch(model, prompts, room=int(limits_R.max()))
    rows = np.arange(len(prompts))  # The row in each of the batch's slots.
    alive = np.ones(len(prompts), dtype=bool)
    rows_on_device = torch.from_numpy(rows).to(draw_device)
    position = 0
    while True:
        tokens, logprobs = choose(batch.logits, rows_on_device, position)
        ids_RT[rows, position] = tokens.numpy(force=True)
        logprobs_RT[rows, position] = logprobs.numpy(force=True)
        if not np.isfinite(logprobs_RT[rows, position]).all():
            raise BackendError("The model gave logits that are not finite numbers.", do="Check the model's weights.")
        position += 1
        ends = (ids_RT[rows, position - 1, None] == stops_RS[rows]).any(axis=1) | (limits_R[rows] == position)
        for row in rows[alive & ends]:
            yield int(row), ids_RT[row, :position].copy(), logprobs_RT[row, :position].copy()
        alive &= ~ends
        if not alive.any():
            return
        if alive.mean() <= 1 - COMPACT_SHARE:
            kept = torch.from_numpy(np.flatnonzero(alive))
            batch.keep(kept.to(device))
            tokens = tokens[kept.to(draw_device)]
            rows, alive = rows[alive], alive[alive]
            rows_on_device = torch.from_numpy(rows).to(draw_device)
        batch.advance(tokens.to(device))


def _stop_table(stop_ids: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Each row's stop ids [R, S], filled up with an id that no token has."""
    table = np.full((len(stop_ids), max(1, max(len(ids) for ids in stop_ids))), -1)
    for row, ids in enumerate(stop_ids):
        table[row, : len(ids)] = ids
    return table


class _Batch:
    """The model's state for all slots: key-value cache, which of it to attend to, and the logits of the next token."""

    logits: Tensor

    def __init__(self, model: Any, prompts: Sequence[NDArray[np.int32]], *, room: int) -> None:
        distinct: dict[bytes, int] = {}
        prompt_of_row = [distinct.setdefault(prompt.astype("<i4").tobytes(), len(distinct)) for prompt in prompts]
        prompts_P = [np.frombuffer(prompt, dtype="<i4") for prompt in distinct]
        lengths_P = np.array([len(prompt) for prompt in prompts_P])
        longest = int(lengths_P.max())
        ids = np.zeros((len(prompts_P), longest), dtype=np.int64)
        mask = np.ones((len(prompts_P), longest + room), dtype=np.int64)
        for row, prompt in enumerate(prompts_P):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, : longest - len(prompt)] = 0
        positions = np.maximum(np.arange(longest) - (longest - lengths_P)[:, None], 0)

        self._model = model
        self._length = longest
        # Without padding there is no mask, which lets attention take its fastest path.
        self._mask = torch.from_numpy(mask).to(model.device) if (lengths_P < longest).any() else None
        self._positions = torch.from_numpy(lengths_P).to(model.device)
        self._cache: Any = None
        self._forward(torch.from_numpy(ids).to(model.device), torch.from_numpy(positions).to(model.device))
        if len(prompts_P) < len(prompts):
            self.keep(torch.tensor(prompt_of_row, device=model.device))

    def keep(self, slots: Tensor) -> None:
        """The batch becomes these slots, in this order; a slot may be named more than once."""
        self._cache.batch_select_indices(slots)
        self._positions = self._positions[slots]
        self.logits = self.logits[slots]
        if self._mask is not None:
            self._mask = self._mask[slots]

    def advance(self, tokens: Tensor) -> None:
        """Appends one token to every slot."""
        self._length += 1
        self._forward(tokens[:, None], self._positions[:, None])
        self._positions = self._positions + 1

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None if self._mask is None else self._mask[:, : self._length],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        self.logits = output.logits[:, -1]
