"""Repeat one training step: the real learner trains the previous checkpoint on the step's batch.

The learner's own process runs in a temporary run directory that holds nothing but that checkpoint. So the step is
computed exactly as in the run: `learner.deterministic` gives the same bits on the same kind of machine with the same
libraries. Another machine rounds sums differently, so the repeated adapter may differ a little. Then the difference is
judged by two figures: its norm over all weights, relative to the step's own change, and the largest difference of a
single weight. Adam moves no weight by more than a few learning rates, so a larger difference is no rounding.

The checkpoint is checked too: its weights, rounded to the published precision, must equal the previous version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.bundles.discrepancies import Discrepancies, DiscrepancyKind
from echo_hub.bundles.episodes import BatchOfStep
from echo_hub.bundles.reading import Bundle, BundledRepeat, BundledStep
from echo_hub.config.sections import HubConfig
from echo_hub.learner.machine import machine_digest
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.run.directory import RunDirectory
from echo_shared.delta.adapter import WEIGHTS_FILE
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import EchoError
from echo_shared.process.child import ChildExited
from echo_shared.records.step_figures import GRAD_NORM, LOSS

FOLLOWS: Final = 0.25
"""Largest difference, as a share of the step's own change, at which a repeated step still counts as the same step on
another machine. Another batch gives about 1.4: two unrelated changes of the same size."""
MOST_MOVED: Final = 3.2
"""Largest change that Adam makes to one weight in one update, in learning rates: (1 - beta1) / sqrt(1 - beta2) with its
default betas (Kingma and Ba, arXiv 1412.6980, section 2.1)."""
FEW: Final = 0.01
LEAST_CHANGED: Final = 0.01
"""Largest difference of one weight beyond rounding, in learning rates, that is accepted if only few weights differ
between the repeated and the published adapter. Rounding on another machine changes most weights. If only the share
`FEW` differs, a larger difference of one weight is a forgery."""
_FRESH: Final = ".lora_A."
"""Part of the names of the weights that are random in a fresh adapter."""

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """Result of repeating a step."""

    step: int
    is_same: bool
    """True if every bit of the adapter is the same."""
    changed: int
    """Number of weights that differ."""
    weights: int
    share: float
    """Norm of the difference between the repeated and the published adapter, divided by the norm of the step's own
    change; 0 if nothing differs."""
    largest: float
    """Largest difference of a single weight."""
    beyond_rounding: float
    """Largest difference of a single weight, minus two steps of the published precision at that weight's size; at least
    0."""
    is_same_machine: bool
    """True if this machine and its libraries are of the same kind as the bundle's."""
    loss: float | None
    recorded_loss: float | None
    grad_norm: float | None
    recorded_grad_norm: float | None
    is_checkpoint_compared: bool = True
    """False if the bundle lacks the published version with which the checkpoint before the step must agree."""
    cannot: str = ""
    """Why the step could not be repeated; "" if it was repeated."""


def cannot_repeat(step: int, why: str) -> RepeatedStep:
    return RepeatedStep(
        step=step,
        is_same=False,
        changed=0,
        weights=0,
        share=0.0,
        largest=0.0,
        beyond_rounding=0.0,
        is_same_machine=False,
        loss=None,
        recorded_loss=None,
        grad_norm=None,
        recorded_grad_norm=None,
        cannot=why,
    )


async def repeat_step(
    bundle: Bundle,
    again: BundledRepeat,
    batch: BatchOfStep,
    *,
    config: HubConfig,
    settings: LearnerSettings,
    recorded: BundledStep | None,
    discrepancies: Discrepancies,
    started_with: int,
) -> RepeatedStep:
    """Repeat the bundle's named step, and compare the resulting adapter with the published one."""
    step = again.step
    groups = batch.groups()
    if isinstance(groups, str):
        return cannot_repeat(step, f"its batch is not whole: {groups}")
    if step not in bundle.adapters:
        return cannot_repeat(step, f"version {step} was not published, or its adapter is deleted")
    if again.has_checkpoint and step - 1 not in bundle.checkpoints:
        return cannot_repeat(step, "the checkpoint before it is not in the bundle")
    try:
        return await _repeated(
            bundle,
            again,
            groups,
            config=config,
            settings=settings,
            recorded=recorded,
            discrepancies=discrepancies,
            started_with=started_with,
        )
    except (EchoError, ChildExited) as error:
        return cannot_repeat(step, str(error))


async def _repeated(
    bundle: Bundle,
    again: BundledRepeat,
    groups: Sequence[TrainingGroup],
    *,
    config: HubConfig,
    settings: LearnerSettings,
    recorded: BundledStep | None,
    discrepancies: Discrepancies,
    started_with: int,
) -> RepeatedStep:
    step = again.step
    said = _weights(bundle.adapters[step])
    is_published = step - 1 in bundle.adapters
    before = _weights(bundle.adapters[step - 1]) if is_published else None
    if again.has_checkpoint:
        checkpoint = _weights(bundle.checkpoints[step - 1])
        if before is None:
            before = {name: _rounded(one) for name, one in checkpoint.items()} if _is_rounded(said) else checkpoint
        else:
            _check_before(checkpoint, before, step - 1, discrepancies)
    with tempfile.TemporaryDirectory(prefix="echo-repeated-") as temporary:
        directory = RunDirectory(Path(temporary))
        out = directory.adapter(step)
        if again.has_checkpoint:
            bundle.copy(bundle.checkpoints[step - 1], directory.checkpoint(step - 1))
        if config.objective.reference == "start" and started_with in bundle.adapters:
            bundle.copy(bundle.adapters[started_with], directory.start / "adapter")
        learner = await Learner.start(_settings(settings, again), directory.root)
        try:
            if learner.policy_version != step - 1:
                return cannot_repeat(step, "the learner cannot resume from the checkpoint in the bundle")
            under_way = await learner.train(
                step, groups, out, learning_rate=again.learning_rate, objective=again.objective
            )
            metrics = (await under_way.told()).metrics
        finally:
            await learner.stop()
        own = _weights(out)
        is_same = (out / WEIGHTS_FILE).read_bytes() == (bundle.adapters[step] / WEIGHTS_FILE).read_bytes()
    is_comparable = _fit(own, said) and all(np.isfinite(weight).all() for weight in said.values())
    changed = int(sum(np.count_nonzero(own[name] != said[name]) for name in own)) if is_comparable else 0
    result = RepeatedStep(
        step=step,
        is_same=is_same,
        changed=changed,
        weights=sum(weight.size for weight in own.values()),
        share=_share(own, said, before) if changed else 0.0,
        largest=max(float(np.abs(own[name] - said[name]).max()) for name in own) if changed else 0.0,
        beyond_rounding=_beyond_rounding(own, said) if changed else 0.0,
        is_same_machine=again.machine == machine_digest(settings.learner.device),
        loss=metrics.get(LOSS.key),
        recorded_loss=None if recorded is None else recorded.metrics.get(LOSS.key),
        grad_norm=metrics.get(GRAD_NORM.key),
        recorded_grad_norm=None if recorded is None else recorded.metrics.get(GRAD_NORM.key),
        is_checkpoint_compared=is_published or not again.has_checkpoint,
    )
    place = f"step {step}"
    if not is_comparable:
        text = "its adapter has other tensors than the run's settings give, or values that are not finite"
        discrepancies.add(DiscrepancyKind.STEP, place, text)
    elif fault := fault_of(result, again.learning_rate * config.training.updates_per_step):
        text = f"{changed} of {result.weights} weights of version {step} differ from the repeated step's, {fault}"
        discrepancies.add(DiscrepancyKind.STEP, place, text)
    for text in figure_faults(result):
        discrepancies.add(DiscrepancyKind.STEP, place, text)
    return result


def figure_faults(result: RepeatedStep) -> Iterator[str]:
    """Yield how the step's recorded figures differ from the repeated ones by more than rounding.

    A loss is a small difference of large sums. So on another machine, only the gradient's norm is compared.
    """
    norm, recorded_norm = result.grad_norm, result.recorded_grad_norm
    if result.is_same_machine and result.loss != result.recorded_loss:
        yield f"its record has the loss {result.recorded_loss}, the repeated step has {result.loss}"
    tolerance = 0.0 if result.is_same_machine else FOLLOWS
    if norm is not None and (recorded_norm is None or not isclose(norm, recorded_norm, rel_tol=tolerance)):
        yield f"its record has the gradient norm {recorded_norm}, the repeated step has {norm:.9g}"


def fault_of(result: RepeatedStep, rate: float) -> str:
    """Return why a difference is more than rounding; "" if it may be rounding. `rate` is the step's learning rate,
    multiplied by the number of its updates."""
    if result.changed and result.is_same_machine:
        return "though the bundle was made on this kind of machine with these libraries"
    if result.largest > 2 * MOST_MOVED * rate:
        return f"one by {result.largest:.3g}; rounding cannot change one by more than {2 * MOST_MOVED * rate:.3g}"
    if result.share > FOLLOWS:
        return f"by {result.share:.0%} of the step's own change"
    if result.changed <= FEW * result.weights and result.beyond_rounding > LEAST_CHANGED * rate:
        return f"one by {result.largest:.3g}, while all others are equal to the bit"
    return ""


def _settings(settings: LearnerSettings, again: BundledRepeat) -> LearnerSettings:
    """Return a learner's settings for one process, with the micro-batches of the step."""
    learner = settings.learner.model_copy(
        update={
            "processes": 1,
            "hosts": 1,
            "address": "",
            "precision": again.precision,
            "micro_batch_tokens": again.micro_batch_tokens,
            "gradient_checkpointing": again.gradient_checkpointing,
            "checkpoint_every": again.step + 1,
        }
    )
    return settings.model_copy(update={"learner": learner})


def _check_before(checkpoint: Weights, published: Weights, version: int, discrepancies: Discrepancies) -> None:
    """Compare the weights in the checkpoint before the step with the published version of the same number."""
    is_same = _fit(checkpoint, published) and all(
        np.array_equal(weight, published[name]) or np.array_equal(_rounded(weight), published[name])
        for name, weight in checkpoint.items()
    )
    if not is_same:
        text = f"its weights are not those of the published version {version}"
        discrepancies.add(DiscrepancyKind.STEP, f"checkpoint of step {version}", text)


def _weights(directory: Path) -> Weights:
    file = TensorFile(directory / WEIGHTS_FILE)
    return {name: np.array(file[name]) for name in file}


def _fit(one: Weights, other: Weights) -> bool:
    return {name: weight.shape for name, weight in one.items()} == {
        name: weight.shape for name, weight in other.items()
    }


def _rounded(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weights as nodes get them in bfloat16: rounded to nearest, ties to even."""
    bits = weight.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _is_rounded(weights: Weights) -> bool:
    """Return True if bfloat16 holds all of these weights."""
    return all(not (weight.view(np.uint32) & np.uint32(0xFFFF)).any() for weight in weights.values())


def _beyond_rounding(own: Weights, said: Weights) -> float:
    """Return the largest difference of a single weight, minus two steps of the published precision at that weight's
    size."""
    step = 2.0 ** -(7 if _is_rounded(own) else 22)
    return max(0.0, *(float((np.abs(own[name] - said[name]) - 2 * step * np.abs(own[name])).max()) for name in own))


def _share(own: Weights, said: Weights, before: Weights | None) -> float:
    """Return the size of the difference between two versions, divided by the change from the version `before`; infinite
    if nothing changed.

    Without `before`, the step began with a fresh adapter: B is 0. A is random, and has no gradient while B is 0. So
    only B counts as changed.
    """
    apart = sum(float(np.square(own[name] - said[name], dtype=np.float64).sum()) for name in own)
    if before is None or not _fit(own, before):
        before = {name: weight if _FRESH in name else np.zeros_like(weight) for name, weight in own.items()}
    step = sum(float(np.square(own[name] - before[name], dtype=np.float64).sum()) for name in own)
    return float(np.sqrt(apart / step)) if step else float("inf")
