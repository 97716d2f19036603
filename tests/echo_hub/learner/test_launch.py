"""Real learners of several processes, on one host or on several (here all on loopback), train like one process, and a
killed process costs only time.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.events import Event, LearnerLost, LearnerReady, StepComputed, StepDone
from echo_hub.dashboard.source import Changes
from echo_hub.driving.event_queue import EventQueue
from echo_hub.evaluation.due import DueVersions
from echo_hub.learner import checkpoint, frames
from echo_hub.learner.launch import Launch, run
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.worker import LearnerWorker
from echo_hub.run.directory import RunDirectory
from echo_hub.training import trainer as trainer_module
from echo_hub.training.trainer import Trainer
from echo_shared.errors import LearnerError
from echo_shared.files.full_disk import Room
from echo_shared.process.child import Frame
from echo_shared.sampling.interface import GroupRequest

MakeGroups = Callable[[int], list[TrainingGroup]]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def request(number: int, policy_version: int) -> GroupRequest:
    return GroupRequest(
        lease_id=number,
        group_id=number,
        indices=(0, 1, 2),
        prompt_ids=np.array([3 + number, 4], dtype=np.int32),
        seed=number,
        policy_version=policy_version,
        temperature=0.8,
        max_tokens=6,
        stop_ids=(1,),
    )


REQUESTS = [request(number, 3) for number in range(5)]
Drawn = dict[tuple[int, int], list[int]]


def alone(settings: LearnerSettings, make_groups: MakeGroups, run_dir: Path) -> tuple[Path, Drawn, Drawn]:
    """Train three steps in this process alone. Return the adapter, and rollouts of version 3 and of the base model."""
    run_dir.mkdir()
    worker = LearnerWorker.open({"settings": settings.model_dump(mode="json"), "run_dir": str(run_dir)})

    def ask(command: str, **fields: object) -> Drawn:
        answers: list[Frame] = []
        worker.handle(worker.admitted({"command": command, **fields}), SimpleNamespace(send=answers.append))
        worker.close()
        rollouts = [frames.unpack_rollout(answer["rollout"]) for answer in answers if "rollout" in answer]
        return {(r.group_id, r.index): r.completion_ids.tolist() for r in rollouts}

    for step in (1, 2, 3):
        export_to = str(run_dir / "v3") if step == 3 else None
        ask("train", step=step, groups=frames.pack_groups(make_groups(step)), export_to=export_to)
    requests = [frames.pack_request(one) for one in REQUESTS]
    sampled = ask("sample", groups=requests)
    by_base = ask("evaluate", groups=requests, adapter=None, greedy=True)
    torch.use_deterministic_algorithms(False)
    return run_dir / "v3", sampled, by_base


def assert_close(one: Path, other: Path) -> None:
    left, right = (load_file(directory / "adapter_model.safetensors") for directory in (one, other))
    assert left.keys() == right.keys()
    for name, weight in left.items():
        np.testing.assert_allclose(right[name], weight, rtol=0, atol=2e-5, err_msg=name)


def ranks_below(pid: int | None) -> list[psutil.Process]:
    """Return the processes that the launcher with this process id has started, in order of rank."""
    found = {process.environ()["RANK"]: process for process in psutil.Process(pid).children(recursive=True)}
    return [found[rank] for rank in sorted(found)]


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


class AllSteps:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def export_path(self, step: int) -> Path:
        return self._run_dir / f"v{step}"

    def learning_rate(self, step: int) -> None: ...

    def objective(self, step: int) -> None: ...


class Reports(EventQueue):
    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    async def put(self, event: Event) -> None:
        await self._hub.report(event)


class Hub:
    """Stand-in for the hub: requests one step after the other until step 3 is done."""

    def __init__(self, settings: LearnerSettings, run_dir: Path, make_groups: MakeGroups) -> None:
        self.events: list[Event] = []
        self.killed: list[psutil.Process] = []
        self.done = asyncio.Event()
        self._make_groups = make_groups
        self.trainer = Trainer(
            settings=settings,
            run_dir=run_dir,
            batches=self,
            steps=AllSteps(run_dir),
            queue=Reports(self),
            due=DueVersions(HubConfig(), RunDirectory(run_dir), done=()),
            pages=Changes(),
            room=Room(),
        )

    async def batch(self, step: int) -> Sequence[TrainingGroup]:
        if step == 3 and not self.killed:
            self.killed = ranks_below(self.trainer.pid)
            # Suspend rank 1, so that rank 0 begins the step and waits; then rank 1 is killed before its part is done.
            self.killed[1].suspend()
            asyncio.get_running_loop().call_later(0.3, self.killed[1].kill)
        return self._make_groups(step)

    async def groups(self, wanted: Mapping[int, Sequence[str]]) -> Mapping[int, TrainingGroup]:
        raise AssertionError("nothing is handed over")

    async def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, LearnerReady):
            self.trainer.train(event.policy_version + 1)
        elif isinstance(event, StepDone):
            if event.step == 3:
                self.done.set()
            else:
                self.trainer.train(event.step + 1)


@pytest.mark.slow
async def test_a_rank_that_is_killed_in_mid_step_costs_nothing_but_time(
    make_settings: Callable[..., LearnerSettings],
    make_groups: MakeGroups,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_module, "RESTART_S", 0.0)
    training = {"steps": 3}
    hub = Hub(make_settings(training=training, learner={"processes": 2}), tmp_path, make_groups)
    running = asyncio.create_task(hub.trainer.run())
    try:
        async with asyncio.timeout(240):
            await hub.done.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [type(event) for event in hub.events[:9]] == [
        LearnerReady,
        *(StepComputed, StepDone) * 2,
        LearnerLost,
        LearnerReady,
        *(StepComputed, StepDone),
    ]
    ready, trained = hub.events[6], hub.events[4]
    assert isinstance(ready, LearnerReady) and isinstance(trained, StepDone)
    assert ready.policy_version == 2, "from the newest checkpoint"
    assert ready.metrics[2] == trained.metrics
    assert_gone(hub.killed)
    expected, _, _ = alone(make_settings(training=training), make_groups, tmp_path / "alone")
    assert_close(expected, tmp_path / "v3")
    # A single process must be able to resume from a checkpoint of two processes.
    worker = LearnerWorker.open({"settings": make_settings().model_dump(mode="json"), "run_dir": str(tmp_path)})
    assert worker.policy_version == 3 == checkpoint.complete(tmp_path / "checkpoints")[0].step


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@asynccontextmanager
async def other_host(address: str, base_dir: Path, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "echo_hub.main", "learner"),
            *("--address", address, "--host-rank", "1", "--base", str(base_dir)),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


HUB = """
import asyncio, sys
from pathlib import Path
from echo_hub.learner.process import Learner
from echo_hub.learner.settings import LearnerSettings
async def main():
    learner = await Learner.start(LearnerSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
    print(learner.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
async def test_two_hosts_train_like_one_process_and_survive_the_hub(
    make_settings: Callable[..., LearnerSettings], make_groups: MakeGroups, base_dir: Path, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = make_settings(learner={"hosts": 2, "address": address})
    expected, sampled, by_base = alone(make_settings(), make_groups, tmp_path / "alone")
    async with other_host(address, base_dir, tmp_path / "host.log") as host, asyncio.timeout(280):
        killed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HUB, settings.model_dump_json(), str(tmp_path)), stdout=subprocess.PIPE
        )
        assert killed.stdout is not None
        launcher = psutil.Process(int(await killed.stdout.readline()))
        ranks = ranks_below(launcher.pid) + ranks_below(host.pid)
        assert len(ranks) == 2
        killed.kill()
        await killed.wait()
        await asyncio.to_thread(assert_gone, [launcher, *ranks])
        assert host.returncode is None, "the host waits for the hub to come back"
        # The restarted learner must find the other host at the same address.
        learner = await Learner.start(settings, tmp_path)
        for step in (1, 2, 3):
            under_way = await learner.train(step, make_groups(step), tmp_path / f"v{step}")
        await under_way.metrics()
        drawn = [rollout async for rollout in learner.sample(REQUESTS)]
        assert {(r.group_id, r.index): r.completion_ids.tolist() for r in drawn} == sampled
        drawn = (await learner.evaluate(REQUESTS, adapter=None, greedy=True)).rollouts
        assert {(r.group_id, r.index): r.completion_ids.tolist() for r in drawn} == by_base
        ranks = ranks_below(learner.pid) + ranks_below(host.pid)
        await learner.stop()
        await asyncio.to_thread(assert_gone, ranks)
        host.send_signal(signal.SIGTERM)
        await host.wait()
    assert_close(expected, tmp_path / "v3")


def test_an_address_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")  # Registered with monkeypatch, so that it is restored after the test.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        launch = Launch(processes=1, hosts=2, address=f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(LearnerError, match=r"(?s)cannot listen on its address.*learner\.address"):
            run(launch)
