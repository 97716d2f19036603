from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echo_hub.learner.cuts import ChunkSizes, Cuts
from echo_hub.learner.history import NO_HISTORY
from echo_hub.learner.policy import Policy
from echo_hub.learner.ranks import TrainingRanks
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.step import StepOutcome, make_optimizer
from echo_hub.learner.within_memory import step_within_memory
from echo_shared.errors import LearnerError
from tests.echo_hub.learner.limited_memory import LimitedMemory

MakeGroups = Callable[[int], list[TrainingGroup]]
MakeSettings = Callable[..., LearnerSettings]
PLENTY = 100_000
UNLIMITED = LimitedMemory()


def cuts_in(directory: Path, tokens: int = PLENTY) -> Cuts:
    cuts = Cuts(directory / "checkpoints", place="here")
    cuts.put(1, ChunkSizes(micro_batch_tokens=tokens, gradient_checkpointing=False))
    return cuts


def trained(
    settings: LearnerSettings, groups: list[TrainingGroup], cuts: Cuts, memory: LimitedMemory, steps: int = 2
) -> tuple[torch.Tensor, list[StepOutcome]]:
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    outcomes = []
    with memory.measuring():
        for step in range(steps):
            history = outcomes[-1].history if outcomes else NO_HISTORY
            outcome = step_within_memory(
                policy, optimizer, groups, settings, cuts=cuts, learner_version=step, history=history
            )
            outcomes.append(outcome)
    weights = torch.cat([weight.detach().flatten() for weight in policy.parameters.values()])
    return weights, outcomes


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_too_large_for_memory_is_repeated_in_halves_with_equal_result(
    make_groups: MakeGroups, make_settings: MakeSettings, tmp_path: Path, updates: int
) -> None:
    # With two updates, the second one's clipping depends on weights that the first has changed.
    settings = make_settings(training={"updates_per_step": updates})
    memory = LimitedMemory()
    whole, expected = trained(settings, make_groups(0), cuts_in(tmp_path / "whole"), memory)
    (tmp_path / "halves").mkdir()
    cuts = cuts_in(tmp_path / "halves")
    little = LimitedMemory(0.7 * memory.peak_bytes)
    halves, outcomes = trained(settings, make_groups(0), cuts, little)
    torch.testing.assert_close(halves, whole, rtol=0, atol=2e-5)
    first, second = (outcome.metrics for outcome in outcomes)
    assert first["out_of_memory"] == little.refused > 0 == second["out_of_memory"], "the smaller size is remembered"
    assert 1 < first["fitted_tokens"] == second["fitted_tokens"] < PLENTY
    for ours, theirs in zip(outcomes, expected, strict=True):
        for key in {*ours.metrics} - {"train_s", "fitted_tokens", "out_of_memory"}:
            assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-3, abs=1e-5), key
        assert ours.history.norms == pytest.approx(theirs.history.norms, rel=1e-3)
        assert ours.screen == theirs.screen
    for known in (cuts, Cuts.read(tmp_path / "halves" / "checkpoints", place="here")):
        assert [cut and cut.micro_batch_tokens for cut in (known.at(1), known.at(2))] == [first["fitted_tokens"]] * 2


def test_a_single_rollout_is_the_floor_and_nothing_is_left_of_the_attempts(
    make_groups: MakeGroups, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(training={"updates_per_step": 2})
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    before = {name: weight.detach().clone() for name, weight in policy.parameters.items()}
    with (
        LimitedMemory(10_000).measuring(),
        pytest.raises(LearnerError, match="too little memory for a single") as error,
    ):
        step_within_memory(policy, optimizer, make_groups(0), settings, cuts=cuts_in(tmp_path))
    assert "Tried to keep" in error.value.got and "gradient_checkpointing to true" in error.value.do
    assert not optimizer.state
    for name, weight in policy.parameters.items():
        assert weight.grad is None and weight.equal(before[name])


def test_other_errors_are_not_treated_as_out_of_memory(
    make_groups: MakeGroups, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    policy = Policy.load(settings)
    monkeypatch.setattr(policy, "screened", lambda batch, **_: torch.empty(2) @ torch.empty(3))
    with pytest.raises(RuntimeError, match=r"size mismatch|inconsistent tensor size"):
        step_within_memory(
            policy, make_optimizer(policy, settings.training), make_groups(0), settings, cuts=cuts_in(tmp_path)
        )


class _TwoRanks(TrainingRanks):
    """Stand-in for rank 0 of two, while a micro-batch runs out of memory."""

    def __init__(self) -> None:
        super().__init__(rank=0, count=2)

    def shard(self, model: object, device_type: str) -> None:
        pass

    def tell(self, frame: object = None, *, by: int = 0) -> dict[str, object]:
        return frame or {}  # type: ignore[return-value]


def test_several_ranks_end_and_the_next_ones_know_why(
    make_groups: MakeGroups, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings()
    policy = Policy.load(settings, _TwoRanks())
    optimizer = make_optimizer(policy, settings.training)
    tokens = PLENTY
    for _ in range(2):
        cuts = Cuts.read(tmp_path / "checkpoints", place="here") if tokens < PLENTY else cuts_in(tmp_path)
        with LimitedMemory(10_000).measuring(), pytest.raises(torch.OutOfMemoryError):
            step_within_memory(policy, optimizer, make_groups(0), settings, cuts=cuts)
        known = Cuts.read(tmp_path / "checkpoints", place="here").at(1)
        assert known is not None and known.micro_batch_tokens <= tokens // 2
        tokens = known.micro_batch_tokens


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_under_a_limit_of_the_system_itself(base_dir: Path, tmp_path: Path) -> None:
    child = Path(__file__).with_name("under_a_limit.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, child, base_dir, tmp_path], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["out_of_memory"] >= 1 and found["fitted_tokens"] < 16_384
    assert found["difference"] < 2e-5 < found["moved"]
