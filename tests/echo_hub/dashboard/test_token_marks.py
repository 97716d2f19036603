from __future__ import annotations

import math

import numpy as np
import pytest

from echo_hub.dashboard import token_marks
from echo_hub.dashboard.token_marks import legend, marks, summary_of
from echo_shared.records.rollout import RolloutPayload, RolloutText, TextPiece
from echo_shared.wire.messages import FinishReason


def drawn(*pieces: tuple[str, float, int], tokens: int = 1) -> RolloutText:
    """Return a rollout that consists of these pieces: (text, probability, version)."""
    logprobs = [math.log(probability) if probability else -math.inf for _, probability, _ in pieces]
    return RolloutText(
        text="".join(text for text, _, _ in pieces),
        pieces=tuple(
            TextPiece(text=text, num_tokens=tokens, logprob=tokens * logprob, version=version)
            for (text, _, version), logprob in zip(pieces, logprobs, strict=True)
        ),
        payload=RolloutPayload(
            completion_ids=np.arange(len(pieces), dtype=np.int32),
            behavior_logprobs=np.array(logprobs, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=1.0,
        ),
        observation="",
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_less_likely_the_stronger_the_mark(tokens: int) -> None:
    text = drawn(
        ("a", 1.0, 0), ("b", 0.91, 0), ("c", 0.6, 0), ("d", 0.2, 0), ("e", 0.05, 0), ("f", 0.001, 0), ("g", 0.0, 0),
        tokens=tokens,
    )  # fmt: skip
    assert [mark.css for mark in marks(text, "logprob", [0])] == ["p0", "p0", "p1", "p2", "p3", "p4", "p4"]
    assert len(legend("logprob", [])) == 5


def test_versions_are_marked_in_runs_and_named() -> None:
    text = drawn(("a", 0.5, 3), ("b", 0.5, 3), ("c", 0.5, 9))
    assert [(mark.text, mark.css, mark.title) for mark in marks(text, "version", [3, 9])] == [
        ("ab", "v0", "version 3"),
        ("c", "v1", "version 9"),
    ]
    assert legend("version", [3, 9]) == [("v0", "version 3"), ("v1", "version 9")]
    assert legend("version", list(range(9)))[6] == ("v0", "version 6")


def test_without_colours_the_text_is_one_piece() -> None:
    text = drawn(("a", 0.5, 0), ("\x1b", 0.5, 1))
    assert [(mark.text, mark.css) for mark in marks(text, "none", [0, 1])] == [("a␛", "")]
    assert legend("none", [0, 1]) == []


def test_of_a_long_completion_all_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_marks, "MOST_PIECES", 2)
    text = drawn(*((letter, 0.6, 0) for letter in "abcde"))
    assert [(mark.text, mark.css) for mark in marks(text, "logprob", [0])] == [("a", "p1"), ("b", "p1"), ("cde", "")]


def test_marks_are_also_described_in_words() -> None:
    figures = summary_of(drawn(("a", 0.5, 0), ("b", 0.01, 0), ("c", 0.25, 0), ("d", 1.0, 0)))
    assert figures.mean_logprob == pytest.approx((math.log(0.5) + math.log(0.01) + math.log(0.25)) / 4)
    assert [text for text, _ in figures.least_likely] == ["b", "c", "a"]
    assert [probability for _, probability in figures.least_likely] == pytest.approx([0.01, 0.25, 0.5])
