from __future__ import annotations

import pytest

from echo_hub.core.policy.lengths import PROMPTS, RECENT, CompletionLengths


def test_nothing_is_known_at_first() -> None:
    lengths = CompletionLengths()
    assert (lengths.mean_tokens, lengths.long_tokens, lengths.predict(None), lengths.predict(7)) == (0, 0, 0, 0)


def test_a_prompt_that_came_before_is_predicted_from_its_own_history() -> None:
    lengths = CompletionLengths()
    for _ in range(50):
        lengths.seen(1, 300)
        lengths.seen(2, 10)
    assert lengths.mean_tokens == 155.0
    assert lengths.predict(1) == pytest.approx(300, rel=0.05) and lengths.predict(2) == pytest.approx(10, rel=1.0)
    assert lengths.predict(3) == lengths.predict(None) == 155.0


def test_one_completion_moves_its_prompts_prediction_only_partly() -> None:
    lengths = CompletionLengths()
    for _ in range(100):
        lengths.seen(None, 100)
    lengths.seen(1, 400)
    assert 150 < lengths.predict(1) < 250


def test_a_prompts_length_changes_with_the_policy() -> None:
    lengths = CompletionLengths()
    for _ in range(200):
        lengths.seen(1, 100)
    for _ in range(200):
        lengths.seen(1, 500)
    assert lengths.predict(1) > 450


def test_few_completions_are_longer_than_the_long_ones() -> None:
    lengths = CompletionLengths()
    for number in range(1_000):
        lengths.seen(None, 10 if number % 25 else 600)
    assert lengths.long_tokens == 600.0
    for _ in range(RECENT):
        lengths.seen(None, 10)
    assert (lengths.long_tokens, lengths.mean_tokens) == (10.0, 10.0)


def test_prompts_without_end_need_no_memory_without_end() -> None:
    lengths = CompletionLengths()
    for prompt in range(PROMPTS + 100):
        lengths.seen(prompt, 100 if prompt else 900)
    assert lengths.predict(0) == lengths.mean_tokens, "forgotten"
    assert len(lengths._prompts) == PROMPTS


def test_how_much_longer_than_predicted_completions_become() -> None:
    lengths = CompletionLengths()
    assert lengths.longer == 1.0
    for _ in range(50):
        lengths.seen(1, 100)
    assert lengths.longer == 1.0, "all lengths are equal"
    for turn in range(2_000):
        lengths.seen(1, 50 if turn % 2 else 150)
    assert lengths.longer == pytest.approx(1.0 + 1.5 * 0.5, abs=0.05), "each length is half off"
    for _ in range(3_000):
        lengths.seen(1, 100)
    assert lengths.longer < 1.1, "old lengths are forgotten"
