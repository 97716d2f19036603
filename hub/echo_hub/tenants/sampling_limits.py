"""Check sample requests, and fill in the values that a client left open. Pure: properties of the base model are
arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import SamplingWish

MOST_SAMPLES: Final = 128
"""Maximum number of samples in one request."""
MOST_STOPS: Final = 64
"""Maximum number of token ids, and of texts, that end a completion."""
LONGEST_STOP: Final = 1_024
"""Maximum number of characters of a text that ends a completion."""
MOST_TOP_K: Final = 100
HIGHEST_TEMPERATURE: Final = 10.0
GREEDY_TEMPERATURE: Final = 1e-9
"""Temperature used in place of 0, by which samplers would divide. It is so low that every draw gives the likeliest
token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFacts:
    """Properties of the served base model that limit sample requests."""

    vocabulary_size: int
    context_tokens: int
    """Largest number of tokens of a prompt together with its completion."""
    stop_ids: frozenset[int]
    """The model's own end tokens."""
    can_check: bool = True
    """False if nodes draw the samples and the hub does not verify them."""


def complete(prompt_ids: NDArray[np.int32], wish: SamplingWish, facts: SamplingFacts) -> SamplingWish:
    """Return the wish with the values of max_tokens, stop_ids and temperature that will be used. Raises Refusal."""
    _check_prompt(prompt_ids, facts)
    _check_wish(wish, facts)
    left = facts.context_tokens - len(prompt_ids)
    max_tokens = left if wish.max_tokens is None else wish.max_tokens
    if max_tokens < 1 or max_tokens > left:
        raise Refusal(
            RefusalKind.INVALID,
            "The prompt and its completion exceed the context length of the model.",
            got=f"{len(prompt_ids)} tokens in the prompt, max_tokens {max_tokens}; the context length is "
            f"{facts.context_tokens}",
            do="Shorten the prompt, or lower max_tokens.",
            param="max_tokens",
        )
    stop_ids = wish.stop_ids
    if stop_ids is None:
        stop_ids = facts.stop_ids
    elif stop_ids:
        stop_ids |= facts.stop_ids
    return replace(
        wish, max_tokens=max_tokens, stop_ids=stop_ids, temperature=max(wish.temperature, GREEDY_TEMPERATURE)
    )


def _check_prompt(prompt_ids: NDArray[np.int32], facts: SamplingFacts) -> None:
    if not len(prompt_ids):
        raise Refusal(
            RefusalKind.INVALID, "The prompt is empty.", do="Give at least one token in the prompt.", param="prompt"
        )
    lowest, highest = int(prompt_ids.min()), int(prompt_ids.max())
    if lowest < 0 or highest >= facts.vocabulary_size:
        raise Refusal(
            RefusalKind.INVALID,
            "The prompt has a token id that the model does not know.",
            got=str(lowest if lowest < 0 else highest),
            do=f"Use ids from 0 to {facts.vocabulary_size - 1}: those of the served model's own tokenizer.",
            param="prompt",
        )


def _check_wish(wish: SamplingWish, facts: SamplingFacts) -> None:
    if wish.checked and not facts.can_check:
        raise Refusal(
            RefusalKind.INVALID,
            "This hub cannot give checked samples only: it checks none.",
            got="trust.verifier = off",
            do="Ask for unchecked samples, or have the operator set trust.verifier.",
            param="checked",
        )
    _check_range("num_samples", wish.num_samples, 1, MOST_SAMPLES)
    _check_range("temperature", wish.temperature, 0.0, HIGHEST_TEMPERATURE)
    _check_range("topk_prompt_logprobs", wish.topk_prompt_logprobs, 0, min(MOST_TOP_K, facts.vocabulary_size))
    _check_range("number of stop strings", len(wish.stop_strings), 0, MOST_STOPS, param="stop")
    stop_ids = wish.stop_ids or frozenset()
    _check_range("number of stop tokens", len(stop_ids | facts.stop_ids), 0, MOST_STOPS, param="stop")
    for stop_id in stop_ids:
        _check_range("stop token id", stop_id, 0, facts.vocabulary_size - 1, param="stop")
    for text in wish.stop_strings:
        _check_range("length of a stop string", len(text), 1, LONGEST_STOP, param="stop")


def _check_range(name: str, value: float, low: float, high: float, *, param: str = "") -> None:
    if not low <= value <= high:
        raise Refusal(
            RefusalKind.INVALID,
            f"The {name} is out of range.",
            got=str(value),
            do=f"Use a value from {low} to {high}.",
            param=param or name,
        )
