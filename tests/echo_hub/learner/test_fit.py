from __future__ import annotations

from dataclasses import dataclass

import pytest

from echo_hub.learner.cuts import ChunkSizes
from echo_hub.learner.fit import MOST_TOKENS, MemoryLine, choose, fitting_tokens

GIB = 2**30
MIB = 2**20


@dataclass
class ScriptedDevice:
    """A device with 1 GiB of fixed memory; a token takes 1 MiB with recomputation, 4 MiB without."""

    memory_bytes: float = float("inf")

    def peak_bytes(self, tokens: int, *, gradient_checkpointing: bool) -> int | None:
        peak = GIB + tokens * (MIB if gradient_checkpointing else 4 * MIB)
        return peak if peak <= self.memory_bytes else None


def test_a_line_through_two_points() -> None:
    line = MemoryLine.through((512, 3 * GIB // 2), (1024, 5 * GIB // 2))
    assert (line.fixed, line.per_token) == (GIB / 2, 2 * MIB)
    assert line.tokens_in(63 * GIB) == 32_000
    assert line.tokens_in(GIB / 4) == line.tokens_in(-5) == 0


@pytest.mark.parametrize("points", [((512, 7), (1024, 7)), ((512, 9), (1024, 7)), ((512, 0), (1024, 10**9))])
def test_points_that_no_activations_give_are_still_a_rising_line_from_no_less_than_0(
    points: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    line = MemoryLine.through(*points)
    assert line.fixed >= 0 and line.per_token >= 1
    assert line.tokens_in(10**9) <= 10**9


@pytest.mark.parametrize(
    ("free_gib", "expected"),
    [
        (1_000, ChunkSizes(micro_batch_tokens=MOST_TOKENS, gradient_checkpointing=False)),
        (70, ChunkSizes(micro_batch_tokens=15_872, gradient_checkpointing=False)),
        (16, ChunkSizes(micro_batch_tokens=13_696, gradient_checkpointing=True)),
        (1, ChunkSizes(micro_batch_tokens=64, gradient_checkpointing=True)),
    ],
)
def test_layers_are_computed_twice_only_where_memory_is_short(free_gib: int, expected: ChunkSizes) -> None:
    measure = ScriptedDevice(free_gib * GIB)
    assert expected == choose(
        measure, micro_batch_tokens=0, gradient_checkpointing=None, longest_tokens=1, free_bytes=free_gib * GIB
    )
    peak = measure.peak_bytes(expected.micro_batch_tokens, gradient_checkpointing=expected.gradient_checkpointing)
    assert free_gib == 1 or (peak is not None and peak <= 0.9 * free_gib * GIB)


def test_given_values_are_kept() -> None:
    free = 16 * GIB
    for tokens, again in ((3_000, False), (8_000, True), (10**6, True)):
        cut = choose(
            ScriptedDevice(), micro_batch_tokens=tokens, gradient_checkpointing=None, longest_tokens=9, free_bytes=free
        )
        assert cut == ChunkSizes(micro_batch_tokens=tokens, gradient_checkpointing=again)
    found = choose(
        ScriptedDevice(), micro_batch_tokens=0, gradient_checkpointing=False, longest_tokens=9, free_bytes=free
    )
    assert found == ChunkSizes(micro_batch_tokens=3_392, gradient_checkpointing=False)


def test_a_rollout_that_does_not_fit_uses_gradient_checkpointing() -> None:
    for longest, again in ((15_000, False), (20_000, True)):
        cut = choose(
            ScriptedDevice(),
            micro_batch_tokens=0,
            gradient_checkpointing=None,
            longest_tokens=longest,
            free_bytes=70 * GIB,
        )
        assert cut.gradient_checkpointing is again


def test_a_device_that_cannot_compute_even_the_small_ones() -> None:
    large_only = fitting_tokens(ScriptedDevice(4 * GIB), gradient_checkpointing=False, free_bytes=4 * GIB)
    neither = fitting_tokens(ScriptedDevice(GIB), gradient_checkpointing=False, free_bytes=GIB)
    assert (large_only, neither) == (512, 0)
