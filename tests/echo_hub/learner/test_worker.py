"""A real learner process, driven by frames through its pipes, gives the same bits as an undisturbed one, even if it is
killed and restarted.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from echo_hub.learner import checkpoint, frames
from echo_hub.learner.policy import Policy
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings, StepTold, TrainingGroup
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.learner.worker import LearnerWorker
from echo_shared.delta.adapter import WEIGHTS_FILE
from echo_shared.errors import LearnerError, StorageError
from echo_shared.process.child import ChildExited, Frame
from echo_shared.records.step_figures import ENTROPY_COEFFICIENT
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import greedy, sample_groups

MakeGroups = Callable[[int], list[TrainingGroup]]
PROMPTS = [np.array([3, 4, 5], dtype=np.int32), np.array([9], dtype=np.int32), np.array([7, 7], dtype=np.int32)]


def request(policy_version: int, number: int = 0) -> GroupRequest:
    return GroupRequest(
        lease_id=10 + number,
        group_id=number,
        indices=(0, 1, 2),
        prompt_ids=PROMPTS[number % 3],
        seed=number,
        policy_version=policy_version,
        temperature=0.8,
        max_tokens=6,
        stop_ids=(1,),
    )


def same(one: FinishedRollout, other: FinishedRollout) -> bool:
    return (
        one.completion_ids.tolist() == other.completion_ids.tolist()
        and one.finish_reason is other.finish_reason
        and np.allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)
    )


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((after[name] - before[name]).abs().max()) for name in before)


@asynccontextmanager
async def learner_in(settings: LearnerSettings, run_dir: Path) -> AsyncIterator[Learner]:
    learner = await Learner.start(settings, run_dir)
    try:
        yield learner
    finally:
        await learner.stop()


def trained_here(settings: LearnerSettings, run_dir: Path, steps: Sequence[list[TrainingGroup]]) -> list[str]:
    """Train these steps in this process without any interruption; return the digest of each version's files."""
    run_dir.mkdir(exist_ok=True)
    worker = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(run_dir)})
    for step, groups in enumerate(steps, start=1):
        export_to = str(run_dir / f"v{step}")
        ask(worker, "train", step=step, groups=frames.pack_groups(groups), export_to=export_to)
    torch.use_deterministic_algorithms(False)
    return [digest(run_dir / f"v{step}") for step in range(1, len(steps) + 1)]


async def test_a_step_uses_the_rate_and_the_objective_sent_with_it(
    make_settings: Callable[..., LearnerSettings], make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Steps sent without a rate or an objective use the run's settings."""
    other, run = {"name": "aipo", "kl_coefficient": 0.5}, tmp_path / "told"
    plain, changed = make_settings(), make_settings(objective=other)
    async with learner_in(plain, run) as learner:
        for step, rate, objective in ((1, 1e-2, json.dumps(other)), (2, 1e-4, None), (3, None, None)):
            path = run / f"v{step}"
            sent = await learner.train(step, make_groups(step), path, learning_rate=rate, objective=objective)
            await sent.told()
    (as_set,) = trained_here(plain, tmp_path / "as set", [make_groups(1)])
    (set_so,) = trained_here(changed, tmp_path / "set", [make_groups(1)])
    assert plain.training.learning_rate == 1e-2 and digest(run / "v1") == set_so != as_set
    first, second, third = (load_file(run / f"v{step}" / WEIGHTS_FILE) for step in (1, 2, 3))
    assert 0 < moved(first, second) < 0.1 * moved(second, third), "Adam's steps are as large as the rate"
    (tmp_path / "again").mkdir()
    again = LearnerWorker.open({"settings": changed.model_dump(mode="json"), "run_dir": str(tmp_path / "again")})
    for step, rate in ((1, 1e-2), (2, 1e-4)):
        path = tmp_path / "again" / f"v{step}"
        groups = frames.pack_groups(make_groups(step))
        ask(again, "train", step=step, groups=groups, export_to=str(path), learning_rate=rate)
    torch.use_deterministic_algorithms(False)
    assert digest(run / "v2") != digest(path), "the second step has the settings' objective"


@pytest.mark.parametrize(
    ("precision", "objective"),
    [("bfloat16", {}), ("float32", {"entropy_coefficient": 0.02, "entropy_target": 5.0})],
)
async def test_a_killed_learner_repeats_its_step_to_the_bit(
    make_settings: Callable[..., LearnerSettings],
    make_groups: MakeGroups,
    tmp_path: Path,
    precision: str,
    objective: dict[str, float],
) -> None:
    settings = make_settings(
        publish_precision=precision, training={"steps": 100}, objective=objective, learner={"checkpoint_every": 2}
    )
    async with learner_in(settings, tmp_path) as learner:
        assert (learner.policy_version, learner.resumed) == (0, {})
        told: dict[int, StepTold] = {}
        for step in (1, 2, 3):
            under_way = await learner.train(step, make_groups(step), tmp_path / f"v{step}")
            told[step] = await under_way.told()
            assert learner.policy_version == step
        before = digest(tmp_path / "v3")
        os.kill(learner.pid, signal.SIGKILL)
        with pytest.raises(ChildExited) as caught:
            await (await learner.train(4, make_groups(4), None)).metrics()
        assert caught.value.returncode == -signal.SIGKILL

    successor = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(tmp_path)})
    assert successor.policy_version == 2, "step 3 was not in a checkpoint yet"
    assert successor.told == {1: told[1], 2: told[2]}
    assert told[1].metrics.keys() == told[2].metrics.keys() - {"gap_s"}, "the first step has no gap before it"
    ask(
        successor,
        "train",
        step=3,
        groups=frames.pack_groups(make_groups(3)),
        export_to=str(tmp_path / "v3-again"),
    )
    torch.use_deterministic_algorithms(False)
    assert digest(tmp_path / "v3-again") == before
    used = {step: of_step.metrics.get(ENTROPY_COEFFICIENT.key) for step, of_step in {**told, **successor.told}.items()}
    # By then the entropy coefficient has been raised twice towards its target, the second time before the kill.
    assert used == ({1: 0.0, 2: 0.02 + 0.005, 3: 0.02 + 0.005 + 0.005} if objective else dict.fromkeys((1, 2, 3)))
    assert digest(tmp_path / "v2") != before


async def test_the_process_gives_the_same_results_as_this_one(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)

    def complete() -> list[list[int]]:
        found = greedy(policy.model, PROMPTS, max_tokens=6, stop_ids=(1,))
        return [ids.tolist() for ids in found]

    expected = {0: complete()}
    for step in (1, 2):
        train_step(policy, optimizer, make_groups(step), settings)
        expected[step] = complete()
    requests = [request(2, number) for number in range(3)]
    drawn = {(r.group_id, r.index): r for r in sample_groups(policy.model, requests)}

    async with learner_in(settings, tmp_path) as learner:
        for step in (1, 2):
            under_way = await learner.train(step, make_groups(step), tmp_path / f"v{step}")
        await under_way.metrics()
        singles = [replace(request(0, number), indices=(0,)) for number in range(3)]
        for version, completions in expected.items():
            adapter = tmp_path / f"v{version}" if version else None
            evaluated = await learner.evaluate(singles, adapter=adapter, greedy=True)
            assert evaluated.seconds > 0
            found = {rollout.group_id: rollout.completion_ids.tolist() for rollout in evaluated.rollouts}
            assert [found[number] for number in range(3)] == completions
        drawn_again = (await learner.evaluate(requests, adapter=tmp_path / "v2", greedy=False)).rollouts
        assert all(same(rollout, drawn[rollout.group_id, rollout.index]) for rollout in drawn_again)
        sampled = [rollout async for rollout in learner.sample(requests)]
    assert len(sampled) == len(drawn_again) == len(drawn) == 9
    assert all(same(rollout, drawn[rollout.group_id, rollout.index]) for rollout in sampled)


@pytest.fixture
def worker(settings: LearnerSettings, tmp_path: Path) -> Iterator[LearnerWorker]:
    """Yield a worker in this process. PyTorch's choice of deterministic algorithms, which the worker changes, is reset
    afterwards.
    """
    yield LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(tmp_path)})
    torch.use_deterministic_algorithms(False)


def ask(worker: LearnerWorker, command: str, **fields: object) -> list[Frame]:
    """Return all answers to a command, once the files that it writes are complete."""
    answers: list[Frame] = []
    worker.handle(worker.admitted({"command": command, **fields}), SimpleNamespace(send=answers.append))
    worker.close()
    return answers


def test_a_refused_command_changes_nothing(worker: LearnerWorker, make_groups: MakeGroups, tmp_path: Path) -> None:
    groups = make_groups(1)
    first = groups[0].rollouts[0]
    short = replace(first, behavior_logprobs=first.behavior_logprobs[:-1])
    infinite = replace(first, behavior_logprobs=np.full_like(first.behavior_logprobs, -np.inf))

    def train(step: int, groups: list[TrainingGroup]) -> list[Frame]:
        return ask(worker, "train", step=step, groups=frames.pack_groups(groups), export_to=None)

    with pytest.raises(LearnerError, match="does not follow"):
        train(2, groups)
    with pytest.raises(LearnerError, match="at least one group"):
        train(1, [])
    undrawn = replace(first, loss_mask=np.zeros_like(first.loss_mask))
    more = replace(first, draws=np.array([[1, 0, len(first.completion_ids) + 1]], np.uint64))
    unknown = replace(first, turn_rewards=np.zeros(1))
    turns = np.array([[1, 0, 1], [1, 0, len(first.completion_ids) - 1]], np.uint64)
    endless = replace(first, draws=turns, turn_rewards=np.array([np.inf]))
    for bad in (short, infinite, undrawn, more, unknown, endless, replace(first, reward=float("nan"))):
        with pytest.raises(LearnerError, match="A rollout is invalid"):
            train(1, [replace(groups[0], rollouts=(bad, *groups[0].rollouts[1:]))])
    with pytest.raises(LearnerError, match="A group needs"):
        train(1, [replace(groups[0], rollouts=())])
    with pytest.raises(LearnerError, match="can sample only from the version that it holds"):
        ask(worker, "sample", groups=[frames.pack_request(request(1))])
    with pytest.raises(LearnerError, match="adapter cannot be read"):
        ask(worker, "evaluate", groups=[], greedy=True, adapter=str(tmp_path / "nothing"))
    with pytest.raises(LearnerError, match="does not know this command"):
        ask(worker, "dance")
    assert worker.policy_version == 0
    assert train(1, groups)[-1]["told"][0]["metrics"]["updated"] == 1


def test_nonfinite_weights_are_never_written(worker: LearnerWorker, make_groups: MakeGroups, tmp_path: Path) -> None:
    """Steps that make a weight NaN or infinite count as failed; a restarted learner resumes from the step before."""
    answers: list[Frame] = []
    for step, rate in ((1, 1e-3), (2, float("inf"))):
        groups = frames.pack_groups(make_groups(step))
        train = {"command": "train", "step": step, "groups": groups, "export_to": str(tmp_path / f"v{step}")}
        worker.handle(worker.admitted({**train, "learning_rate": rate}), SimpleNamespace(send=answers.append))
    with pytest.raises(LearnerError, match="weights that are not finite") as raised:
        worker.close()
    assert worker.failed and answers[-1]["what"] == raised.value.what
    assert "step 2" in (raised.value.got or "") and "learning_rate" in (raised.value.do or "")
    assert not (tmp_path / "v2").exists()
    assert [kept.step for kept in checkpoint.complete(tmp_path / "checkpoints")] == [1]


def test_files_written_during_the_next_step_are_unchanged(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Files written during the next step must equal those of a learner that waits for them. Steps are reported as
    computed before any file exists, and as done once their files are complete.
    """
    steps, told = (1, 2, 3), list[tuple[int, bool, int]]()
    computed: list[tuple[int, bool]] = []
    for name in ("beside", "one by one"):
        run = tmp_path / name
        run.mkdir()
        worker = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(run)})

        def look(frame: Frame, run: Path = run) -> None:
            if frame["kind"] == "item":
                computed.append((frame["computed"], (run / f"v{frame['computed']}").exists()))
                return
            step = frame["policy_version"]
            told.append((step, (run / f"v{step}").exists(), checkpoint.complete(run / "checkpoints")[0].step))

        for step in steps:
            groups = frames.pack_groups(make_groups(step))
            train = {
                "command": "train",
                "step": step,
                "groups": groups,
                "export_to": str(run / f"v{step}"),
            }
            worker.handle(worker.admitted(train), SimpleNamespace(send=look))
            if name == "one by one":
                worker.close()
        worker.close()
    torch.use_deterministic_algorithms(False)
    assert told == [(step, True, step) for step in steps] * 2
    assert computed == [(step, False) for step in steps] * 2
    for file in (*(f"v{step}/{WEIGHTS_FILE}" for step in steps), f"checkpoints/step-000003/{checkpoint.OPTIMIZER}"):
        assert (tmp_path / "beside" / file).read_bytes() == (tmp_path / "one by one" / file).read_bytes()


def begun(worker: LearnerWorker, step: int, groups: Sequence[TrainingGroup], export_to: Path) -> list[Frame]:
    """Return the answers to a step whose groups the worker already held without rewards; the rewards come with the
    step.
    """
    worker.hold({number: _unrewarded(frames.pack_group(group)) for number, group in enumerate(groups)})
    rewards = [[number, [rollout.reward for rollout in group.rollouts]] for number, group in enumerate(groups)]
    return ask(worker, "begin", step=step, rewards=rewards, let_go=[], export_to=str(export_to))


def _unrewarded(group: Frame) -> Frame:
    return {**group, "rollouts": [{**rollout, "reward": float("nan")} for rollout in group["rollouts"]]}


def test_an_unconfirmed_step_leaves_no_files(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    """Steps may begin before the hub has stored their plan, so they must leave no files until the hub confirms them.
    Then the files equal those of a step trained in one command.
    """
    kept = {}
    for name in ("begun", "trained"):
        run = tmp_path / name
        run.mkdir()
        worker = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(run)})
        for step in (1, 2):
            groups, adapter = make_groups(step), run / f"v{step}"
            if name == "trained":
                ask(worker, "train", step=step, groups=frames.pack_groups(groups), export_to=str(adapter))
                continue
            assert begun(worker, step, groups, adapter) == [{"kind": "item", "computed": step}]
            assert not adapter.exists() and not (run / "checkpoints" / f"step-{step:06d}").exists()
            with pytest.raises(LearnerError, match="not confirmed yet"):
                ask(worker, "train", step=step + 1, groups=frames.pack_groups(groups), export_to=None)
            worker.confirm(step)
            worker.close()
            worker.confirm(step)
        kept[name] = [
            (run / file).read_bytes()
            for file in ("v2/" + WEIGHTS_FILE, f"checkpoints/step-000002/{checkpoint.OPTIMIZER}")
        ]
    torch.use_deterministic_algorithms(False)
    assert kept["begun"] == kept["trained"]


async def test_a_hub_that_dies_before_its_confirmation_leaves_no_step(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    async with learner_in(settings, tmp_path) as learner:
        await (await learner.train(1, make_groups(1), None)).metrics()
        await learner.hold(dict(enumerate(make_groups(2))))
        rewards = {n: [one.reward for one in group.rollouts] for n, group in enumerate(make_groups(2))}
        await (await learner.begin(2, rewards, tmp_path / "v2")).computed()
    assert not (tmp_path / "v2").exists()
    successor = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(tmp_path)})
    assert successor.policy_version == 1
    groups = frames.pack_groups(make_groups(2))
    ask(successor, "train", step=2, groups=groups, export_to=str(tmp_path / "v2"))
    torch.use_deterministic_algorithms(False)
    assert (tmp_path / "v2").exists()


def drawn(worker: LearnerWorker, command: str, **fields: object) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    requests = [frames.pack_request(request(2, number)) for number in range(9)]
    rollouts = [f["rollout"] for f in ask(worker, command, groups=requests, **fields) if f["kind"] == "item"]
    return {
        (r["group_id"], r["index"]): (r["completion_ids"].tobytes(), r["behavior_logprobs"].tobytes()) for r in rollouts
    }


def test_sampling_uses_published_weights_and_training_unrounded_ones(
    make_settings: Callable[..., LearnerSettings], make_groups: MakeGroups, tmp_path: Path
) -> None:
    samples, versions, masters = [], [], []
    for precision in ("float32", "bfloat16"):
        run = tmp_path / precision
        run.mkdir()
        settings = make_settings(publish_precision=precision).model_dump(mode="json")
        worker = LearnerWorker.open({"settings": settings, "run_dir": str(run)})
        for step in (1, 2):
            groups = frames.pack_groups(make_groups(step))
            ask(worker, "train", step=step, groups=groups, export_to=str(run / f"v{step}"))
        samples.append(drawn(worker, "sample"))
        assert drawn(worker, "evaluate", adapter=str(run / "v2"), greedy=False) == samples[-1]
        ask(worker, "train", step=3, groups=frames.pack_groups(make_groups(3)), export_to=None)
        versions.append(digest(run / "v2"))
        masters.append(digest(checkpoint.complete(run / "checkpoints")[0].directory))
    torch.use_deterministic_algorithms(False)
    assert samples[0] != samples[1] and versions[0] != versions[1]
    assert masters[0] == masters[1], "three steps with sampling in between give the same unrounded weights"


@pytest.mark.parametrize("budget", [64, 16_384])
def test_sampling_and_evaluation_in_parts_keep_all(
    make_settings: Callable[..., LearnerSettings], worker: LearnerWorker, tmp_path: Path, budget: int
) -> None:
    small = make_settings(learner={"micro_batch_tokens": budget})
    run_dir = tmp_path / "other"
    run_dir.mkdir()
    other = LearnerWorker.open({"settings": small.model_dump(mode="json"), "run_dir": str(run_dir)})
    requests = [frames.pack_request(request(0, number)) for number in range(9)]
    drawn = [frame["rollout"] for frame in ask(other, "sample", groups=requests) if frame["kind"] == "item"]
    assert sorted((r["group_id"], r["index"]) for r in drawn) == [(g, i) for g in range(9) for i in range(3)]
    whole, parts = (
        {
            (frame["rollout"]["group_id"], frame["rollout"]["index"]): frame["rollout"]["completion_ids"].tolist()
            for frame in ask(one, "evaluate", groups=requests, greedy=True, adapter=None)
            if frame["kind"] == "item"
        }
        for one in (worker, other)
    )
    assert parts == whole and len(whole) == 27


def test_a_run_directory_has_one_learner(settings: LearnerSettings, tmp_path: Path) -> None:
    with FileLock(tmp_path / "learner.lock"), pytest.raises(LearnerError, match="Another learner works"):
        LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(tmp_path)})


@pytest.mark.slow
async def test_a_failure_in_mid_step_ends_the_process_and_is_reported(
    settings: LearnerSettings, make_groups: MakeGroups, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way of the adapter")
    async with learner_in(settings, tmp_path) as learner:
        with pytest.raises(StorageError, match="could not be written"):
            await (await learner.train(1, make_groups(1), tmp_path / "file" / "v1")).metrics()
        with pytest.raises(ChildExited):
            await learner.evaluate([request(0)], adapter=None, greedy=True)
    assert checkpoint.complete(tmp_path / "checkpoints") == [], "a step without an export is in no checkpoint"
