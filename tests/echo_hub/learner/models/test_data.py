from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.plain_losses import CONFIGS, ModelsBench, a_request, computed, largest_error, peft_of, reference
from echo_hub.learner.models.data import LEAST_SHARED, PackedRows, divided, halved
from echo_hub.tenants.requests import ForwardBackward, LossFunction

CPU = torch.device("cpu")


def test_rows_are_divided_into_few_micro_batches_of_even_sizes() -> None:
    assert list(divided([4, 4, 4, 4], 8)) == [range(2), range(2, 4)]
    assert list(divided([4, 4, 4, 4], 13)) == [range(2), range(2, 4)]
    assert list(divided([20, 1, 1], 8)) == [range(1), range(1, 3)]
    assert list(divided([3], 8)) == [range(1)]


def test_halving_ends_with_single_rows() -> None:
    lengths, tokens, seen = [5, 6, 7, 8, 9], 1_000, []
    while (half := halved(lengths, tokens)) is not None:
        tokens = half
        seen.append(max(len(rows) for rows in divided(lengths, tokens)))
    assert seen[-1] == 1 and seen == sorted(seen, reverse=True)


def test_neighbours_share_a_long_common_beginning_once() -> None:
    prompt = np.arange(LEAST_SHARED, dtype=np.int32)
    rows = [np.append(prompt, [90, 91]), np.append(prompt, [92]), prompt, np.append(prompt[:-1], [93, 94])]
    packed = PackedRows.of([row.astype(np.int32) for row in rows], CPU)
    assert len(packed.input_ids_T) == LEAST_SHARED + 2 + 1 + 0 + LEAST_SHARED + 1
    assert packed.lengths == tuple(len(row) for row in rows)
    ids, positions = packed.input_ids_T[packed.predictors_N], packed.position_ids_T[packed.predictors_N]
    assert ids.tolist() == np.concatenate(rows).tolist()
    assert positions.tolist() == [place for row in rows for place in range(len(row))]


def test_a_short_common_beginning_is_not_shared() -> None:
    rows = [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)]
    assert len(PackedRows.of(rows, CPU).input_ids_T) == 6


@pytest.mark.parametrize("loss", [LossFunction.PPO, LossFunction.GSPO, LossFunction.CROSS_ENTROPY])
def test_shared_prompts_change_only_rounding(bench: ModelsBench, loss: LossFunction, tmp_path: Path) -> None:
    """The samples of a group share a prompt, but have different targets at the prompt's positions."""
    rng, data = np.random.default_rng(5), []
    for group in range(3):
        prompt = rng.integers(0, bench.policy.vocab_size, 10 + group).astype(np.int32)
        for datum in a_request(bench, loss, seed=group, count=4).data:
            # Replace the datum's first tokens by the prompt.
            ids = datum.input_ids.copy()
            ids[: len(prompt)] = prompt[: len(ids)]
            data.append(replace(datum, input_ids=ids))
    request = ForwardBackward(data=tuple(data), loss=loss, config=CONFIGS[loss])
    packed = PackedRows.of([datum.input_ids for datum in data], CPU)
    assert len(packed.input_ids_T) < len(packed.predictors_N) - 20
    model = bench.model(b_scale=0.3)
    total, logprobs, gradients = reference(peft_of(bench, model, tmp_path / "adapter"), request)
    result, found = computed(bench, model, request, tokens=70)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for of_datum, expected in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(of_datum, expected.numpy(), atol=1e-5)
    assert largest_error(found, gradients) < 1e-5
