"""Honest engines and dishonest ones: each gives rollouts that claim to be one version's draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.backends.engine_process import EngineProcess
from benchmarks.honesty.altered import Change, altered, to_four_bits, with_noise
from benchmarks.honesty.short_run import Asked, ShortRun
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.rollout_books import DrawnSpan
from echo_shared.sampling import FinishedRollout

VERSION: Final = 11
"""What rollouts claim to be drawn by, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a node says that it draws with; `change` of its weights, if any."""

    backend: str
    precision: str
    change: Change | None = None


EXACT: Final = Engine(backend="torch", precision="f32")
HONEST: Final = {
    "torch f32": EXACT,
    "torch bf16": Engine(backend="torch", precision="bf16"),
    "llama_cpp f32": Engine(backend="llama_cpp", precision="f32"),
    "llama_cpp f16": Engine(backend="llama_cpp", precision="f16"),
    "llama_cpp q8_0": Engine(backend="llama_cpp", precision="q8_0"),
    "llama_cpp q4_k_m": Engine(backend="llama_cpp", precision="q4_k_m"),
    "mlx f32": Engine(backend="mlx", precision="f32"),
    "mlx f16": Engine(backend="mlx", precision="f16"),
    "torch f32, weights of 4 bits": Engine(backend="torch", precision="f32", change=to_four_bits),
}
"""Classes of numerics, by what they are called."""
ANOTHER_MODEL: Final = Engine(backend="torch", precision="f32", change=with_noise)
WIDTH: Final = 64
NODE: Final = "node"

Rollouts = list[tuple[Asked, FinishedRollout]]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws with one engine as a node would."""

    run: ShortRun
    engine: EngineProcess
    version: int = VERSION
    """What every rollout claims to be drawn by."""

    def draw(self, asked: Sequence[Asked], *, version: int | None = None, hotter: float = 1.0) -> Rollouts:
        """By another version than the rollouts claim, or at `hotter` times the temperature, if so asked."""
        version = self.version if version is None else version
        self.engine.set_policy(self.run.directory.adapter(version) if version else None)
        requests = [replace(one.request, temperature=hotter * one.request.temperature) for one in asked]
        by_group = {one.request.group_id: one for one in asked}
        return [(by_group[rollout.group_id], rollout) for rollout in self.engine.sample(requests).rollouts]


@contextmanager
def opened(
    run: ShortRun, engine: Engine, scratch: Path, *, version: int = VERSION, threads: int = 1
) -> Iterator[Sampler]:
    """The engine in a process of its own; `scratch` is an empty directory for what it derives."""
    base = run.base if engine.change is None else altered(run.base, scratch / "base", engine.change)
    (scratch / "derived").mkdir(parents=True)
    with EngineProcess(engine.backend, base, scratch / "derived", engine.precision) as process:
        process.open(width=WIDTH, threads=threads)
        yield Sampler(run, process, version)


def honest(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    return sampler.draw(asked)


def at_temperature(hotter: float) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Drawn at so many times the temperature; claims what is true of that."""
    return lambda sampler, asked: sampler.draw(asked, hotter=hotter)


def by_version(version: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    return lambda sampler, asked: sampler.draw(asked, version=version)


def best_of(tries: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Draws each rollout with other seeds as well, and returns the first of those with the best reward; claims what is
    true of it."""

    def drawn(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
        best = {(rollout.group_id, rollout.index): (one, rollout) for one, rollout in sampler.draw(asked)}
        for attempt in range(1, tries):
            others = [replace(one, request=replace(one.request, seed=one.request.seed ^ attempt)) for one in asked]
            for one, rollout in sampler.draw(others):
                own, before = best[rollout.group_id, rollout.index]
                if sampler.run.reward(one, rollout.completion_ids) > sampler.run.reward(own, before.completion_ids):
                    best[rollout.group_id, rollout.index] = own, rollout
        return list(best.values())

    return drawn


def written_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """The right answer in place of every rollout; claims that each token was certain."""
    return [
        (one, replace(rollout, completion_ids=ids, behavior_logprobs=np.zeros(len(ids), np.float32)))
        for one, rollout in sampler.draw(asked)
        for ids in [sampler.run.answer(one)]
    ]


def wrong_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """The right answer with another last digit, and -19.5 claimed for each right one: the forgery that ruins a run."""
    forged = []
    for one, rollout in sampler.draw(asked):
        ids = sampler.run.answer(one)
        digits = sampler.run.ids("0123456789")
        ids[-2] = digits[(int(np.flatnonzero(digits == ids[-2])[0]) + 1) % 10]
        claims = np.full(len(ids), -19.5, np.float32)
        claims[-2:] = 0.0
        forged.append((one, replace(rollout, completion_ids=ids, behavior_logprobs=claims)))
    return forged


def claiming(
    change: Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.float32]],
) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Honest draws, with other claims than the true ones. `change` is given those and which tokens are wrong."""

    def drawn(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
        changed = []
        for one, rollout in sampler.draw(asked):
            right, ids = sampler.run.answer(one), rollout.completion_ids
            wrong = np.array([place >= len(right) or ids[place] != right[place] for place in range(len(ids))])
            claims = change(rollout.behavior_logprobs, wrong).astype(np.float32)
            changed.append((one, replace(rollout, behavior_logprobs=claims)))
        return changed

    return drawn


ATTACKS: Final[Mapping[str, Callable[[Sampler, Sequence[Asked]], Rollouts]]] = {
    "temperature 0.7": at_temperature(0.7),
    "temperature 1.5": at_temperature(1.5),
    "1 version older": by_version(VERSION - 1),
    "3 versions older": by_version(VERSION - 3),
    "10 versions older": by_version(VERSION - 10),
    "the base alone": by_version(0),
    "1 version newer": by_version(VERSION + 1),
    "best of 4": best_of(4),
    "right answers by hand": written_by_hand,
    "wrong answers by hand": wrong_by_hand,
    "claims 1 nat lower": claiming(lambda claims, wrong: claims - 1.0),
    "claims 1 nat higher": claiming(lambda claims, wrong: np.minimum(claims + 1.0, 0.0)),
    "claims 0.1 nat lower": claiming(lambda claims, wrong: claims - 0.1),
    "claims 0.1 nat higher": claiming(lambda claims, wrong: np.minimum(claims + 0.1, 0.0)),
    "-10 claimed for wrong tokens": claiming(lambda claims, wrong: np.where(wrong, -10.0, claims)),
}
"""All with PyTorch in float32, whose own numerics show nothing."""


def as_drawn(rollouts: Rollouts, version: int = VERSION) -> list[DrawnRollout]:
    """What the verifier is given of them, as drawn by `version`."""
    return [
        DrawnRollout(
            rollout_id=f"{one.request.group_id}-{rollout.index}",
            prompt_ids=one.request.prompt_ids,
            **rollout.content(),
            spans=(DrawnSpan(node_id=NODE, policy_version=version, num_tokens=len(rollout.completion_ids)),),
            seed=one.request.seed,
            index=rollout.index,
        )
        for one, rollout in rollouts
    ]
