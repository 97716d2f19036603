"""Ten turns of a conversation on a sampling engine, with and without keys and values kept from earlier turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.harness.engine import group_request
from benchmarks.harness.real_model import unpacked
from echo_hub.run.base_files import resolve_base
from echo_node.backends.base import Engine, EngineSettings
from echo_node.backends.registry import make_engine
from echo_shared.sampling.interface import FinishedRollout

TURNS: Final = 10
PROMPT_TOKENS: Final = 200
REPLY_TOKENS: Final = 8
ANSWER_TOKENS: Final = 60
REPETITIONS: Final = 3
TEXT: Final = (
    "You are an agent with tools. Each reply calls one tool, and each answer is what the tool has found. "
    "Row {0}: the store in the north has {1} boxes of {2}, sold {3} of them on day {0}, and orders {4} more. "
)
THINGS: Final = ("apples", "lamps", "books", "ropes", "clocks")


def text_ids(base: Path, count: int, seed: int) -> NDArray[np.int32]:
    """Return the ids of a text with this many tokens. Texts of different seeds differ from their first sentence on."""
    rng = np.random.default_rng(seed)
    tokenizer, ids = Tokenizer.from_file(str(base / "tokenizer.json")), list[int]()
    while len(ids) < count:
        numbers = rng.integers(2, 1_000, 5)
        text = f"{numbers[4]} {TEXT}".format(numbers[0], numbers[1], THINGS[numbers[2] % 5], numbers[2], numbers[3])
        ids += tokenizer.encode(text, add_special_tokens=False).ids
    return np.array(ids[:count], np.int32)


def conversation(engine: Engine, base: Path, seed: int) -> tuple[float, list[FinishedRollout]]:
    """Play a conversation of ten turns. Return the seconds, and the rollout of each turn."""
    request = group_request(0, text_ids(base, PROMPT_TOKENS, seed), seed=seed, indices=(0,), max_tokens=REPLY_TOKENS)
    answers = [text_ids(base, ANSWER_TOKENS, 1_000 * seed + turn) for turn in range(TURNS)]
    turns: list[FinishedRollout] = []
    began = time.perf_counter()
    for answer in answers:
        events = list(chain.from_iterable(engine.sample(iter([request]))))
        (drawn,) = (one for one in events if isinstance(one, FinishedRollout))
        turns.append(drawn)
        prompt = np.concatenate([request.prompt_ids, drawn.completion_ids, answer])
        request = replace(request, prompt_ids=prompt, seed=request.seed + 1)
    return time.perf_counter() - began, turns


async def prefix_speedup(
    seed: int, *, backend: str, model: str, precision: str, repetitions: int = REPETITIONS
) -> dict[str, Any]:
    """Return the time of ten turns without kept keys and values divided by the time with them, and how far the
    completions of the two ways differ.

    Each conversation is played twice: first with keys and values kept from earlier turns, then without. The first
    conversation is not timed.
    """
    with tempfile.TemporaryDirectory(prefix="echo-agents-") as scratch:
        base = unpacked(Path(scratch) / "base") if model == "real" else resolve_base(model)
        settings = EngineSettings(width=1, threads=1, precision=precision)
        engines = [_opened(backend, base, Path(scratch), replace(settings, kept_keys_share=share)) for share in (1, 0)]
        seconds: list[Sequence[float]] = []
        differences, same, tokens = [0.0], 0, 0
        for number in range(repetitions + 1):
            played = [conversation(one, base, seed + 100 * number) for one in engines]
            seconds.append([one[0] for one in played])
            for kept, anew in zip(*(one[1] for one in played), strict=True):
                alike = _num_alike(kept.completion_ids, anew.completion_ids)
                same, tokens = same + alike, tokens + len(kept.completion_ids)
                found = np.abs(kept.behavior_logprobs[:alike] - anew.behavior_logprobs[:alike])
                differences.append(float(found.max(initial=0)))
                if alike < len(kept.completion_ids):
                    break  # From here on, the two conversations differ.
        kept_keys = engines[0].kept
        for one in engines:
            one.close()
    with_s, without_s = (sum(column) for column in zip(*seconds[1 if repetitions else 0 :], strict=True))
    return {
        "speedup": without_s / with_s,
        "seconds_with": with_s / max(1, repetitions),
        "seconds_without": without_s / max(1, repetitions),
        "tokens_alike": same / tokens,
        "largest_logprob_difference": max(differences),
        "reused_tokens": kept_keys.tokens,
        "kept_mb": kept_keys.kept_bytes / 1e6,
    }


def _num_alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the longest common prefix of two completions, in tokens."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _opened(backend: str, base: Path, derived: Path, settings: EngineSettings) -> Engine:
    engine = make_engine(backend)
    engine.open(base, derived, settings)
    engine.set_policy(None)
    return engine
