"""The key-value cache behaves like the simplest one: a list of tokens per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig
from transformers.cache_utils import DynamicCache, StaticLayer

from echo_shared.errors import BackendError
from echo_shared.sampling.torch_cache import RowBytes, SlotCache, columns_for, row_bytes
from tests.families import FAMILIES

LAYERS, HEADS, SIZE = 2, 3, 4
CPU = torch.device("cpu")


def states(rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((rows, HEADS, length, SIZE)).astype(np.float32))


class Plain:
    """The simplest cache: each row is a list of tokens, each token an array [LAYERS, 2, HEADS, SIZE]."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows: list[list[torch.Tensor]] = []
        self.slots = SlotCache(CPU)

    def join(self, lengths: list[int], rows: list[int]) -> None:
        padded = max(lengths) + int(self.rng.integers(0, 3))
        prompts = DynamicCache()
        given = [[states(self.rng, len(lengths), padded) for _ in range(2)] for _ in range(LAYERS)]
        for layer, (keys, values) in enumerate(given):
            prompts.update(keys, values, layer)
        sources = self.rng.permutation(len(lengths)).tolist()
        stacked = torch.stack([torch.stack(pair) for pair in given])
        for source, row in zip(sources, rows, strict=True):
            tokens = [stacked[:, :, source, :, column] for column in range(padded - lengths[source], padded)]
            self.rows[row : row + 1] = [tokens]
        self.slots.join(prompts, sources, rows, [lengths[source] for source in sources])

    def step(self) -> None:
        mask = self.slots.before_step()
        new = [[states(self.rng, len(self.rows), 1) for _ in range(2)] for _ in range(LAYERS)]
        stacked = torch.stack([torch.stack(pair) for pair in new])
        for row, tokens in enumerate(self.rows):
            tokens.append(stacked[:, :, row, :, 0])
        longest = max(len(tokens) for tokens in self.rows)
        assert self.slots.cache.get_mask_sizes(1, 0) == (longest, 0)
        for layer, (keys, values) in enumerate(new):
            found = self.slots.cache.update(keys, values, layer)
            for row, tokens in enumerate(self.rows):
                seen = mask[row] if mask is not None else torch.ones(longest, dtype=torch.bool)
                for part in range(2):
                    expected = torch.stack([token[layer, part] for token in tokens], dim=1)
                    torch.testing.assert_close(found[part][row][:, seen], expected, rtol=0, atol=0)
        self.slots.after_step()

    def leave(self, rows: list[int]) -> None:
        kept = [row for row in range(len(self.rows)) if row not in rows]
        gaps = [row for row in rows if row < len(kept)]
        movers = kept[len(kept) - len(gaps) :]
        for source, row in zip(movers, gaps, strict=True):
            self.rows[row] = list(self.rows[source])
        del self.rows[len(kept) :]
        self.slots.move(movers, gaps, len(kept))
        assert self.slots.count == len(kept)


@pytest.mark.parametrize("seed", range(8))
def test_rows_come_and_go(seed: int) -> None:
    plain = Plain(seed)
    rng = np.random.default_rng(100 + seed)
    plain.slots.reserve(4, columns_for(20))
    for turn in range(120):
        room = plain.slots.rows - len(plain.rows)
        if room and rng.random() < 0.3:
            count = int(rng.integers(1, room + 1))
            lengths = rng.integers(1, 12, count).tolist()
            plain.join(lengths, list(range(len(plain.rows), len(plain.rows) + count)))
        if turn == 60:
            plain.slots.reserve(7, columns_for(30))
        if plain.rows:
            plain.step()
            gone = [row for row, tokens in enumerate(plain.rows) if len(tokens) >= 19 or rng.random() < 0.1]
            if gone:
                plain.leave(gone)


def test_a_joining_prompt_may_be_longer_than_all_that_is_there() -> None:
    plain = Plain(0)
    plain.slots.reserve(2, 32)
    plain.join([2], [0])
    plain.step()
    plain.join([20], [1])
    plain.step()
    plain.join([3], [0])
    plain.step()


def test_rows_of_equal_length_need_no_mask() -> None:
    plain = Plain(0)
    plain.slots.reserve(2, 32)
    plain.join([5, 5], [0, 1])
    assert plain.slots.before_step() is None


@pytest.mark.parametrize(("length", "columns"), [(1, 32), (16, 64), (100, 128), (1_000, 1_152)])
def test_columns_leave_room_to_move(length: int, columns: int) -> None:
    assert columns_for(length) == columns


def test_a_layer_of_another_kind_is_refused() -> None:
    prompts: Any = DynamicCache()
    prompts.layers = [StaticLayer(max_cache_len=8)]
    slots = SlotCache(CPU)
    slots.reserve(1, 32)
    with pytest.raises(BackendError, match="cannot batch") as raised:
        slots.join(prompts, [0], [0], [3])
    assert raised.value.code == "unsupported_model"


@pytest.mark.filterwarnings("ignore")  # The model warns that fast kernels are not installed.
def test_a_model_without_attention_is_refused() -> None:
    config = MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(BackendError, match=r"(?s)cannot batch this kind of model.*no attention layer.*docs/models\.md"):
        row_bytes(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # Two layers with keys and values of 2 heads of 16 float32 numbers.
        ("llama", RowBytes(per_token=2 * 2 * 2 * 16 * 4, states=0)),
        # Two layers with a latent of 32 numbers and a rotary key of 16, which all heads share.
        ("deepseek_v2", RowBytes(per_token=2 * (32 + 16) * 4, states=0)),
        # One layer with keys and values of 2 heads of 16; one with a convolution over 3 columns of 64 numbers.
        ("lfm2", RowBytes(per_token=2 * 2 * 16 * 4, states=3 * 64 * 4)),
        # One layer with keys and values of 2 heads of 32. Three layers with 4 columns of 2 * 64 + 128 numbers and with
        # 4 heads of 32 * 32.
        ("qwen3_next", RowBytes(per_token=2 * 2 * 32 * 4, states=3 * (4 * 256 + 4 * 32 * 32) * 4)),
    ],
)
def test_a_rows_memory_by_hand(family: str, expected: RowBytes) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    assert row_bytes(model) == expected
    assert expected.state_tokens == -(-expected.states // expected.per_token)
