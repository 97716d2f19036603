"""Honest engines and dishonest ones: each gives rollouts that claim to be drawn with one version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.backends.engine_process import EngineProcess
from benchmarks.honesty.short_run import Asked, ShortRun
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.delta.tensors import TensorFile
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling.interface import FinishedRollout

VERSION: Final = 11
"""Version that rollouts claim by default."""
BLOCK: Final = 32

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Changes the weights of a linear layer."""


def to_four_bits(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to sixteen levels a block of 32, scaled by its largest value: llama.cpp's q4_0. K-quants need rows of 256,
    which the built-in model does not have: most of its q4_k_m has more bits."""
    blocks = weight.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = np.where(largest == 0, 1, largest / -8).astype(np.float32)
    rounded: NDArray[np.float32] = (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(weight.shape)
    return rounded


def altered(base: Path, directory: Path, change: Change) -> Path:
    """Copy `base` to `directory`, and change its linear layers."""
    shutil.copytree(base, directory)
    for path in directory.glob("*.safetensors"):
        tensors = {
            name: change(weight) if name.endswith("_proj.weight") else weight
            for name, weight in TensorFile(path).items()
        }
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Backend and precision that a node claims, and the change of its weights, if any."""

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
"""Classes of numerics by name."""
WIDTH: Final = 64
NODE: Final = "node"

Rollouts = list[tuple[Asked, FinishedRollout]]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws rollouts with one engine as a node would."""

    run: ShortRun
    engine: EngineProcess
    version: int = VERSION
    """Version that every rollout claims."""

    def draw(self, asked: Sequence[Asked], *, version: int | None = None, hotter: float = 1.0) -> Rollouts:
        """Draw the rollouts. `version` differs from the claimed version, `hotter` multiplies the temperature."""
        version = self.version if version is None else version
        self.engine.set_policy(self.run.directory.adapter(version) if version else None)
        requests = [replace(one.request, temperature=hotter * one.request.temperature) for one in asked]
        by_group = {one.request.group_id: one for one in asked}
        return [(by_group[rollout.group_id], rollout) for rollout in self.engine.sample(requests).rollouts]


@contextmanager
def opened(
    run: ShortRun, engine: Engine, scratch: Path, *, version: int = VERSION, threads: int = 1
) -> Iterator[Sampler]:
    """Open the engine in a process of its own. `scratch` is an empty directory for derived files."""
    base = run.base if engine.change is None else altered(run.base, scratch / "base", engine.change)
    (scratch / "derived").mkdir(parents=True)
    with EngineProcess(engine.backend, base, scratch / "derived", engine.precision) as process:
        process.open(width=WIDTH, threads=threads)
        yield Sampler(run, process, version)


def honest(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    return sampler.draw(asked)


def at_temperature(hotter: float) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Draw at a multiple of the temperature, with the true claims of these draws."""
    return lambda sampler, asked: sampler.draw(asked, hotter=hotter)


def by_version(version: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    return lambda sampler, asked: sampler.draw(asked, version=version)


def best_of(tries: int) -> Callable[[Sampler, Sequence[Asked]], Rollouts]:
    """Draw each rollout with several seeds, and return the first one with the best reward, with the claims of that
    draw.
    """

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
    """Return the right answer in place of every rollout, with the claim that each token was certain."""
    return [
        (one, replace(rollout, completion_ids=ids, behavior_logprobs=np.zeros(len(ids), np.float32)))
        for one, rollout in sampler.draw(asked)
        for ids in [sampler.run.answer(one)]
    ]


def wrong_by_hand(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
    """Return the right answer with another last digit, and claim -19.5 for each right digit. This ruins a run."""
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
    """Draw honestly and change the claims. `change` gets the true claims, and True for each wrong token."""

    def drawn(sampler: Sampler, asked: Sequence[Asked]) -> Rollouts:
        changed = []
        for one, rollout in sampler.draw(asked):
            right, ids = sampler.run.answer(one), rollout.completion_ids
            wrong = np.array([place >= len(right) or ids[place] != right[place] for place in range(len(ids))])
            claims = change(rollout.behavior_logprobs, wrong).astype(np.float32)
            changed.append((one, replace(rollout, behavior_logprobs=claims)))
        return changed

    return drawn


def as_drawn(rollouts: Rollouts, version: int = VERSION) -> list[DrawnRollout]:
    """Make the verifier's input of rollouts that claim `version`."""
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
