"""Completions that are cut at random places on one engine and continued on another: do they equal uncut completions?

Two models of the same shape run in float32. The built-in model, on its own task, is sure of most tokens and stops after
a few tokens. The other has random weights, is unsure of every token and draws `RANDOM_TOKENS` tokens. A continued
completion is identical if all its tokens are those that the first engine draws without a cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness.engine import SamplingEngine, lacks, sums
from benchmarks.harness.pool import apart
from benchmarks.harness.progress import Planned, Progress
from echo_hub.run.base_files import resolve_base
from echo_shared.sampling.interface import FinishedRollout, GroupRequest, Prefix

COMPLETIONS: Final = 500
WIDTH: Final = 64
GROUPS: Final = 160
"""Number of groups of four rollouts. They give more than the COMPLETIONS that are cut, because completions of one token
cannot be cut.
"""
RANDOM_TOKENS: Final = 64
RANDOM_RANGE: Final = 0.1
MODELS: Final = ("trained", "random")
WAYS: Final = (("llama_cpp", "torch"), ("torch", "llama_cpp"), ("mlx", "llama_cpp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Completions that an engine drew without a cut (`whole`), and requests that continue the same completions from
    random places.
    """

    requests: list[GroupRequest]
    whole: dict[tuple[int, int], FinishedRollout]

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.completion_ids) for rollout in self.whole.values())

    @property
    def num_given(self) -> int:
        return sum(len(prefix.ids) for request in self.requests for prefix in request.prefixes)

    def identical(self, rollouts: Sequence[FinishedRollout]) -> float:
        """Return the share of the complete completions that `rollouts` repeat token for token."""
        found = {(rollout.lease_id, rollout.index): rollout.completion_ids.tolist() for rollout in rollouts}
        same: list[bool] = [found.get(name) == rollout.completion_ids.tolist() for name, rollout in self.whole.items()]
        return sum(same) / len(same)


def cut(
    groups: Sequence[GroupRequest], rollouts: Sequence[FinishedRollout], *, completions: int, rng: np.random.Generator
) -> Cut:
    """Cut the first `completions` rollouts of two or more tokens, each at a random place."""
    by_name = {(rollout.lease_id, rollout.index): rollout for rollout in rollouts}
    whole: dict[tuple[int, int], FinishedRollout] = {}
    requests = []
    for group in groups:
        prefixes = []
        for index in group.indices:
            rollout = by_name[group.lease_id, index]
            if len(rollout.completion_ids) > 1 and len(whole) < completions:
                whole[group.lease_id, index] = rollout
                at = int(rng.integers(1, len(rollout.completion_ids)))
                ids, logprobs = rollout.completion_ids[:at], rollout.behavior_logprobs[:at]
                prefixes.append(Prefix(index=index, ids=ids, logprobs=logprobs))
        if prefixes:
            indices = tuple(prefix.index for prefix in prefixes)
            requests.append(dataclasses.replace(group, indices=indices, prefixes=tuple(prefixes)))
    return Cut(requests=requests, whole=whole)


def plan() -> list[Planned]:
    return [
        Planned(name=_case(model, *way), seconds=25, lacks=lacks(way[0], "f32") or lacks(way[1], "f32"))
        for model in MODELS
        for way in WAYS
    ]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    rows = []
    for model in MODELS:
        wanted = [way for way in WAYS if progress.wants(_case(model, *way))]
        if not wanted:
            continue
        base, groups = _prepare(model, scratch, seed)
        about = base, scratch / f"{model}-gguf", "f32"
        for first, second in wanted:
            with apart(SamplingEngine, first, *about) as one, apart(SamplingEngine, second, *about) as other:
                for engine in (one, other):
                    engine.open(width=WIDTH, threads=1)
                row = {"model": model, "from": first, "to": second, **_migrate(one, other, groups, seed=seed)}
            told = ("identical", "identical_uncut", "nats_a_token")
            progress.done(_case(model, first, second), {name: row[name] for name in told})
            rows.append(row)
    return rows


def _case(model: str, first: str, second: str) -> str:
    return f"migration, {model}, {first} to {second}"


def _prepare(model: str, scratch: Path, seed: int) -> tuple[Path, list[GroupRequest]]:
    groups = sums(GROUPS, seed, group_size=4)
    tiny = resolve_base("builtin:tiny")
    if model == "trained":
        return tiny, groups
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(tiny, initializer_range=RANDOM_RANGE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(scratch / model)
    return scratch / model, [dataclasses.replace(group, max_tokens=RANDOM_TOKENS, stop_ids=()) for group in groups]


def _migrate(one: SamplingEngine, other: SamplingEngine, groups: list[GroupRequest], *, seed: int) -> dict[str, Any]:
    undisturbed = one.sample(groups).rollouts
    begun = cut(groups, undisturbed, completions=COMPLETIONS, rng=np.random.default_rng(seed))
    continued = other.sample(begun.requests)
    elsewhere = other.sample([dataclasses.replace(request, prefixes=()) for request in begun.requests])
    logprobs = np.concatenate([rollout.behavior_logprobs for rollout in begun.whole.values()])
    return {
        "completions": len(begun.whole),
        "tokens": begun.num_tokens,
        "given_tokens": begun.num_given,
        "nats_a_token": -float(logprobs.mean()),
        "identical": begun.identical(continued.rollouts),
        "identical_uncut": begun.identical(elsewhere.rollouts),
        "seconds": continued.seconds,
    }
