"""Requests for a sampling engine: sums for the built-in model, and random tokens for models of random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from echo_hub.run.base_model import resolve_base
from echo_hub.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from echo_shared.sampling import draws
from echo_shared.sampling.interface import GroupRequest

GROUP_SIZE: Final = 8
PROMPT_TOKENS: Final = 32
SUM_TOKENS: Final = 8
"""Most tokens of a sum's answer."""


def group_request(
    number: int,
    prompt_ids: NDArray[np.int32],
    *,
    seed: int,
    indices: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
) -> GroupRequest:
    """Make a request whose lease and group have this number, with version 0."""
    return GroupRequest(
        lease_id=number,
        group_id=number,
        indices=tuple(indices),
        prompt_ids=prompt_ids,
        seed=seed,
        policy_version=0,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=tuple(stop_ids),
    )


def sums(count: int, seed: int, *, group_size: int = GROUP_SIZE) -> list[GroupRequest]:
    """Make groups of the built-in model's own task: short completions that end by themselves."""
    task = ArithmeticTask(ArithmeticOptions())
    base = resolve_base("builtin:tiny")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    stop_id = json.loads((base / "config.json").read_text())["eos_token_id"]
    return [
        group_request(
            number,
            np.array(tokenizer.encode(task.sample(draws.derive_seed(seed, number)).prompt).ids, np.int32),
            seed=draws.derive_seed("sums", seed, number),
            indices=range(group_size),
            max_tokens=SUM_TOKENS,
            stop_ids=(stop_id,),
        )
        for number in range(count)
    ]


def texts(
    max_tokens: Sequence[int],
    seed: int,
    *,
    vocabulary: int,
    prompt_tokens: int = PROMPT_TOKENS,
    group_size: int = GROUP_SIZE,
) -> list[GroupRequest]:
    """Make groups of random tokens, one for each number of tokens. No completion ends earlier."""
    rng = np.random.default_rng(seed)
    return [
        group_request(
            number,
            rng.integers(0, vocabulary, prompt_tokens).astype(np.int32),
            seed=draws.derive_seed("texts", seed, number),
            indices=range(group_size),
            max_tokens=limit,
        )
        for number, limit in enumerate(max_tokens)
    ]
