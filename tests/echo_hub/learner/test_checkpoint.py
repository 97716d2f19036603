from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echo_hub.learner import checkpoint
from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, StepTold, TrainingGroup
from echo_hub.learner.step import make_optimizer, train_step

MakeGroups = Callable[[int], list[TrainingGroup]]


def told_of(step: int) -> StepTold:
    return StepTold(metrics={"loss": step / 2}, screen={"left_out": [step]})


def history_of(step: int) -> History:
    return History(norms=(0.5, float(step)), newest_entropy=step / 3, entropy_coefficient=step / 7)


def started(settings: LearnerSettings) -> tuple[Policy, torch.optim.Optimizer]:
    policy = Policy.load(settings)
    return policy, make_optimizer(policy, settings.training)


def write(root: Path, settings: LearnerSettings, steps: int, *, kept: int = 10, milestones: int = 0) -> None:
    policy, optimizer = started(settings)
    for step in range(1, steps + 1):
        told = {number: told_of(number) for number in (step - 1, step) if number}
        state = checkpoint.CheckpointState(step=step, told=told, history=history_of(step))
        checkpoint.save(root, policy, checkpoint.take(policy, optimizer), state)
        checkpoint.prune(root, kept=kept, milestones=milestones)


def resume(root: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    checkpoint.restore(checkpoint.read(checkpoint.complete(root)[0], policy), policy, optimizer)


def test_resume_is_exact_to_the_bit(settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path) -> None:
    policy, optimizer = started(settings)
    for step in (1, 2):
        train_step(policy, optimizer, make_groups(step), settings)
    torch.rand(3)
    taken = checkpoint.take(policy, optimizer)
    noise = torch.rand(4)
    train_step(policy, optimizer, make_groups(3), settings)
    # Training continues before the checkpoint is saved, and must not change it.
    checkpoint.save(tmp_path, policy, taken, checkpoint.CheckpointState(step=2, told={2: told_of(2)}))

    resumed, resumed_optimizer = started(settings)
    resume(tmp_path, resumed, resumed_optimizer)
    assert torch.equal(torch.rand(4), noise)
    train_step(resumed, resumed_optimizer, make_groups(3), settings)
    for name, parameter in policy.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
        for field, value in optimizer.state[parameter].items():
            assert torch.equal(resumed_optimizer.state[resumed.parameters[name]][field], value), (name, field)


def test_a_changed_learning_rate_holds_after_resume(
    make_settings: Callable[..., LearnerSettings], tmp_path: Path
) -> None:
    write(tmp_path, make_settings(), steps=1)
    policy, optimizer = started(make_settings(training={"learning_rate": 5e-4}))
    resume(tmp_path, policy, optimizer)
    assert optimizer.param_groups[0]["lr"] == 5e-4


def test_the_newest_are_kept(settings: LearnerSettings, tmp_path: Path) -> None:
    write(tmp_path, settings, steps=5, kept=2)
    assert [item.step for item in checkpoint.complete(tmp_path)] == [5, 4]
    newest = checkpoint.complete(tmp_path)[0]
    assert (newest.step, newest.told, newest.history) == (5, {4: told_of(4), 5: told_of(5)}, history_of(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


def test_a_checkpoint_written_without_screens_is_read(settings: LearnerSettings, tmp_path: Path) -> None:
    write(tmp_path, settings, steps=2)
    marker = tmp_path / "step-000002" / checkpoint.MARKER
    said = json.loads(marker.read_bytes())
    for key in ("told", "norms", "newest_entropy", "entropy_coefficient"):
        del said[key]
    marker.write_text(json.dumps({**said, "metrics": {"loss": 1.0}, "earlier": {"1": {"loss": 0.5}}}))
    newest = checkpoint.complete(tmp_path)[0]
    assert newest.told == {1: StepTold(metrics={"loss": 0.5}), 2: StepTold(metrics={"loss": 1.0})}
    assert newest.history == NO_HISTORY


def test_milestones_stay_for_ever(settings: LearnerSettings, tmp_path: Path) -> None:
    write(tmp_path, settings, steps=8, kept=2, milestones=3)
    assert [item.step for item in checkpoint.complete(tmp_path)] == [8, 7, 6, 3]


def _no_marker(directory: Path) -> None:
    (directory / checkpoint.MARKER).unlink()


def _short_file(directory: Path) -> None:
    path = directory / checkpoint.OPTIMIZER
    path.write_bytes(path.read_bytes()[:-1])


def _missing_file(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()


def _cut_marker(directory: Path) -> None:
    marker = (directory / checkpoint.MARKER).read_text()
    (directory / checkpoint.MARKER).write_text(marker[: len(marker) // 2])


def _empty_marker(directory: Path) -> None:
    (directory / checkpoint.MARKER).write_text(json.dumps({}))


@pytest.mark.parametrize("damage", [_no_marker, _short_file, _missing_file, _cut_marker, _empty_marker])
def test_a_half_written_checkpoint_is_left_out(
    damage: Callable[[Path], None], settings: LearnerSettings, tmp_path: Path
) -> None:
    write(tmp_path, settings, steps=2)
    damage(tmp_path / "step-000002")
    assert [item.step for item in checkpoint.complete(tmp_path)] == [1]
    write(tmp_path, settings, steps=2)
    assert [item.step for item in checkpoint.complete(tmp_path)] == [2, 1]
