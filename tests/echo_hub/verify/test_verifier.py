from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from echo_hub.cluster.model_processes import ProcessBeside
from echo_hub.config.sections import HubConfig, TrustConfig
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner.settings import LearnerSettings
from echo_hub.run.directory import RunDirectory
from echo_hub.verify import verifier
from echo_hub.verify.drawn import DrawnRollout, NodeEvidence
from echo_hub.verify.verifier import NOT_KEPT, TOO_MANY, Verifier, program, verifier_settings
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.verify.conftest import VERSIONS, Versions
from tests.echo_hub.verify.odd_worker import clean

ODD = "tests.echo_hub.verify.odd_worker"


@dataclass(slots=True)
class Told:
    """Records the verifier's answers: evidence by rollout (`of`), and measured roundings (`measurements`)."""

    of: dict[str, tuple[NodeEvidence, ...] | str] = field(default_factory=dict)
    measurements: list[tuple[str, Evidence | None]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Rollout ids and roundings, in the order in which they were answered."""
    seconds: float = 0.0
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        self.seconds += seconds
        await self._note(rollout_id, spans)

    async def abandoned(self, rollout_id: str, why: str) -> None:
        await self._note(rollout_id, why)

    async def measured(self, rounding: str, _version: int, evidence: Evidence | None, seconds: float) -> None:
        self.seconds += seconds
        async with self.news:
            self.measurements.append((rounding, evidence))
            self.order.append(rounding)
            self.news.notify_all()

    async def _note(self, rollout_id: str, what: tuple[NodeEvidence, ...] | str) -> None:
        assert rollout_id not in self.of, "told twice"
        async with self.news:
            self.of[rollout_id] = what
            self.order.append(rollout_id)
            self.news.notify_all()

    async def all_of(self, rollout_ids: Sequence[str]) -> None:
        await self.reached(lambda: all(rollout_id in self.of for rollout_id in rollout_ids))

    async def reached(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(120), self.news:
            await self.news.wait_for(condition)


@asynccontextmanager
async def working(checker: Verifier) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(checker.run(told))
    try:
        yield told
    finally:
        pid = checker.pid
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert pid is None or not psutil.pid_exists(pid)


def made(
    versions: Versions,
    run_dir: Path,
    rollouts: Sequence[DrawnRollout],
    *,
    module: str = "echo_hub.verify.worker",
    loads: list[int] | None = None,
) -> Verifier:
    return Verifier(
        beside(versions.settings, run_dir, module),
        versions.settings,
        directory=RunDirectory(run_dir),
        kept=2,
        patience=3,
        rollouts=Committed(rollouts, loads),
    )


class Committed:
    """Stand-in for the store: committed rollouts and prompts. `loads` collects the number of rollouts in each read."""

    def __init__(self, rollouts: Sequence[DrawnRollout], loads: list[int] | None = None) -> None:
        self._kept = {one.rollout_id: one for one in rollouts}
        self._loads = loads

    async def load(self, rollout_ids: Sequence[str]) -> Mapping[str, DrawnRollout | str]:
        if self._loads is not None:
            self._loads.append(len(rollout_ids))
        return {rollout_id: self._kept[rollout_id] for rollout_id in rollout_ids if rollout_id in self._kept}

    def prompts(self) -> list[NDArray[np.int32]]:
        return [np.array([number + 2, 7, 9], np.int32) for number in range(4)]


def beside(settings: LearnerSettings, run_dir: Path, module: str) -> ProcessBeside:
    chosen = program(settings, worker=module)
    odd = replace(chosen, env={**chosen.env, "ODD_DIRECTORY": str(run_dir)})
    return ProcessBeside(odd, settings, logs=run_dir / "logs")


def of_one_token(rollout_id: str) -> DrawnRollout:
    return DrawnRollout(
        rollout_id=rollout_id,
        prompt_ids=np.array([3], np.int32),
        completion_ids=np.array([4], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        spans=(DrawnSpan(node_id="a", policy_version=0, num_tokens=1),),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
        seed=1,
        index=0,
    )


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "RESTART_S", 0.01)
    monkeypatch.setattr(verifier, "REST_S", 0.05)


async def test_a_real_process_distinguishes_honest_rollouts(versions: Versions) -> None:
    honest = [one for version in range(VERSIONS + 1) for one in versions.drawn(version, 2 * version, 2 * version + 1)]
    others = [
        replace(one, rollout_id=f"{one.rollout_id}-other", completion_ids=np.flip(one.completion_ids))
        for one in honest
        if len(one.completion_ids) > 3
    ]
    lost = [replace(honest[0], rollout_id="99-0", spans=(replace(honest[0].spans[0], policy_version=9),))]
    ids = [one.rollout_id for one in (*honest, *others, *lost)]
    checker = made(versions, versions.directory.root, [*honest, *others, *lost])
    async with working(checker) as told:
        assert checker.pid is None, "there is nothing to check yet"
        for rollout_id in (*ids, "77-0"):
            checker.submit(rollout_id, is_urgent=True)
        await told.all_of([*ids, "77-0"])
        assert checker.pid is not None
        if sys.platform != "win32":
            assert psutil.Process(checker.pid).nice() >= 10, "it yields to the learner"
    assert told.of["77-0"] == NOT_KEPT
    assert "version 9" in str(told.of["99-0"])
    for group, is_honest in ((honest, True), (others, False)):
        for one in group:
            spans = told.of[one.rollout_id]
            assert not isinstance(spans, str)
            ((node_id, shown),) = spans
            assert node_id == "a" and isinstance(shown, Evidence)
            assert (shown.draws[0] == shown.num_tokens == len(one.completion_ids)) == is_honest
    assert told.seconds > 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGSTOP")
async def test_a_killed_process_loses_no_request(versions: Versions) -> None:
    first, *rest = [one for version in (0, 1, 2) for one in versions.drawn(version, 3 * version, 3 * version + 1)]
    ids = [one.rollout_id for one in rest]
    checker = made(versions, versions.directory.root, [first, *rest])
    async with working(checker) as told:
        checker.submit(first.rollout_id, is_urgent=True)
        await told.all_of([first.rollout_id])
        killed = checker.pid
        assert killed is not None
        os.kill(killed, signal.SIGSTOP)  # The process answers no request from here on.
        for rollout_id in ids:
            checker.submit(rollout_id, is_urgent=True)
        asyncio.get_running_loop().call_soon(os.kill, killed, signal.SIGKILL)
        await told.all_of(ids)
        assert checker.pid != killed
    assert not any(isinstance(spans, str) for spans in told.of.values())


@pytest.mark.usefixtures("soon")
async def test_a_rollout_that_kills_is_found_out_and_the_others_are_checked(versions: Versions, tmp_path: Path) -> None:
    ids = [*(f"{number}-0" for number in range(6)), "deadly-1", *(f"{number}-0" for number in range(6, 9)), "deadly-2"]
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in ids], module=ODD)
    async with working(checker) as told:
        for rollout_id in ids:
            checker.submit(rollout_id, is_urgent=True)
        await told.all_of(ids)
        checker.submit("later-0", is_urgent=True)
        await told.all_of(["later-0"])
    given_up = {rollout_id for rollout_id, spans in told.of.items() if isinstance(spans, str)}
    assert given_up == {"deadly-1", "deadly-2", "later-0"}
    assert "fails on this rollout" in str(told.of["deadly-1"]) and told.of["later-0"] == NOT_KEPT
    assert told.seconds == 9 * 0.5


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("trouble", ["no_base", "dies_at_once"])
async def test_without_a_working_process_all_requests_fail_and_are_retried_later(
    versions: Versions, tmp_path: Path, trouble: str
) -> None:
    (tmp_path / trouble).touch()
    ids = [f"{number}-0" for number in range(5)]
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in (*ids, "9-0")], module=ODD)
    async with working(checker) as told:
        for rollout_id in ids:
            checker.submit(rollout_id, is_urgent=True)
        await told.all_of(ids)
        assert all("The verifier process keeps failing" in str(spans) for spans in told.of.values())
        (tmp_path / trouble).unlink()
        while all(isinstance(spans, str) for spans in told.of.values()):
            told.of.pop("9-0", None)
            checker.submit("9-0", is_urgent=True)
            await told.all_of(["9-0"])
    starts = len((tmp_path / "starts").read_text())
    assert starts == 2 if trouble == "no_base" else starts == verifier.DEATHS_IN_A_ROW + 1


async def test_requests_beyond_the_limit_are_answered_at_once(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "MOST_WAITING", 3)
    ids = [f"{number}-0" for number in range(7)]
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in ids], module=ODD)
    for rollout_id in ids:
        checker.submit(rollout_id, is_urgent=True)
    async with working(checker) as told:
        await told.all_of(ids)
    assert [rollout_id for rollout_id in ids if told.of[rollout_id] == TOO_MANY] == ids[3:]


async def test_waiting_rollouts_are_handed_over_together(versions: Versions, tmp_path: Path) -> None:
    ids = [f"{number}-0" for number in range(verifier.TOGETHER + 4)]
    loads: list[int] = []
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in ids], module=ODD, loads=loads)
    for rollout_id in ids:
        checker.submit(rollout_id, is_urgent=True)
    async with working(checker) as told:
        await told.all_of(ids)
    assert loads == [verifier.TOGETHER, 4]
    assert (tmp_path / "requests").read_text().split() == [str(verifier.TOGETHER), "4"]


@pytest.mark.parametrize("comes", ["something urgent", "a third version", "enough", "the end of its time"])
async def test_checks_that_are_not_urgent_wait_for_a_batch(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    monkeypatch.setattr(verifier, "COMPANY_S", 0.05 if comes == "the end of its time" else 1e6)
    ids = [f"{number}-0" for number in range(verifier.ENOUGH - 1)]
    last = f"{verifier.ENOUGH}-0"
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in (*ids, last, "now-0")], module=ODD)
    async with working(checker) as told:
        checker.hasten()
        checker.published()
        checker.submit("now-0", is_urgent=True)
        await told.all_of(["now-0"])
        for rollout_id in ids:
            checker.submit(rollout_id, is_urgent=False)
        checker.published()
        checker.published()
        if comes == "a third version":
            checker.published()
        elif comes != "the end of its time":
            checker.submit(last, is_urgent=comes == "something urgent")
            ids.append(last)
        await told.all_of(ids)
    assert (tmp_path / "requests").read_text().split() == ["1", str(len(ids))]


async def test_the_urgent_ones_go_first(versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "TOGETHER", 2)
    monkeypatch.setattr(verifier, "COMPANY_S", 0.05)
    ids = [f"{number}-0" for number in range(5)]
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in ids], module=ODD)
    for number, rollout_id in enumerate(ids):
        checker.submit(rollout_id, is_urgent=number in (3, 4))
    async with working(checker) as told:
        await told.all_of(ids)
    assert list(told.of) == ["3-0", "4-0", "0-0", "1-0", "2-0"]


# --- measuring


async def test_a_measurement_comes_before_later_checks(versions: Versions, tmp_path: Path) -> None:
    """Measurements must come even before earlier checks that have not begun."""
    ids = [f"{number}-0" for number in range(3)]
    checker = made(versions, tmp_path, [of_one_token(rollout_id) for rollout_id in ids], module=ODD)
    checker.submit(ids[0], is_urgent=False)
    checker.measure("q8_0", 0)
    checker.submit(ids[1], is_urgent=True)
    checker.measure("f32", 0)
    async with working(checker) as told:
        await told.all_of(ids[:2])
        assert told.order[:2] == ["q8_0", "f32"] and told.measurements == [("q8_0", clean(3)), ("f32", clean(3))]
        checker.measure("bf16", 2)
        checker.submit(ids[2], is_urgent=True)
        await told.all_of(ids)
    assert told.order[-2:] == ["bf16", ids[2]]
    assert (tmp_path / "requests").read_text().split() == ["q8_0,f32@0", "2", "bf16@2", "1"]
    assert told.seconds == 3 * 0.25 + 3 * 0.5


async def test_a_measurement_waits_for_nothing(versions: Versions, tmp_path: Path) -> None:
    checker = made(versions, tmp_path, [], module=ODD)
    async with working(checker) as told:
        checker.measure("f32", 0)
        await told.reached(lambda: len(told.measurements) == 1)


async def test_a_measurement_hastens_no_check(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that wait for a full batch must continue to wait."""
    monkeypatch.setattr(verifier, "COMPANY_S", 1e6)
    checker = made(versions, tmp_path, [of_one_token("1-0")], module=ODD)
    async with working(checker) as told:
        checker.submit("1-0", is_urgent=False)
        checker.measure("q8_0", 0)
        await told.reached(lambda: len(told.measurements) == 1)
        await asyncio.sleep(0.2)
        assert not told.of, "the check is not urgent"
        checker.hasten()
        await told.all_of(["1-0"])


async def test_a_rounding_is_measured_with_the_newest_version(versions: Versions, tmp_path: Path) -> None:
    """Later requests replace an earlier one for the same rounding; measurements follow the order of versions."""
    checker = made(versions, tmp_path, [], module=ODD)
    checker.measure("q8_0", 1)
    checker.measure("f32", 4)
    checker.measure("q8_0", 3)
    async with working(checker) as told:
        await told.reached(lambda: len(told.measurements) == 2)
    assert (tmp_path / "requests").read_text().split() == ["q8_0@3", "f32@4"]


@pytest.mark.usefixtures("soon")
async def test_a_process_that_dies_while_measuring_is_asked_again(versions: Versions, tmp_path: Path) -> None:
    checker = made(versions, tmp_path, [of_one_token("1-0")], module=ODD)
    checker.measure("f32", 0)
    checker.measure("deadly", 0)
    checker.measure("q8_0", 0)
    checker.submit("1-0", is_urgent=True)
    async with working(checker) as told:
        await told.all_of(["1-0"])
    assert sorted(name for name, shown in told.measurements if shown is not None) == ["deadly", "f32", "q8_0"]
    assert told.order[-1] == "1-0" and (tmp_path / "starts").read_text() == "xx"


@pytest.mark.usefixtures("soon")
async def test_a_rounding_that_ends_every_process_is_abandoned(versions: Versions, tmp_path: Path) -> None:
    checker = made(versions, tmp_path, [of_one_token("1-0")], module=ODD)
    checker.measure("fatal", 0)
    async with working(checker) as told:
        await told.reached(lambda: told.measurements)
        while not isinstance(told.of.get("1-0"), tuple):
            told.of.pop("1-0", None)
            checker.submit("1-0", is_urgent=True)
            await told.all_of(["1-0"])
    assert told.measurements == [("fatal", None)]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("trouble", ["no_base", "dies_at_once"])
async def test_without_a_working_process_nothing_is_measured(versions: Versions, tmp_path: Path, trouble: str) -> None:
    """Requesters must get an answer, even while the verifier pauses after failures."""
    (tmp_path / trouble).touch()
    checker = made(versions, tmp_path, [], module=ODD)
    checker.measure("f32", 0)
    checker.measure("q8_0", 0)
    async with working(checker) as told:
        await told.reached(lambda: len(told.measurements) == 2)
        checker.measure("bf16", 0)
        await told.reached(lambda: len(told.measurements) == 3)
    assert sorted(told.measurements) == [("bf16", None), ("f32", None), ("q8_0", None)]


async def test_an_impossible_measurement_is_reported_and_others_continue(versions: Versions, tmp_path: Path) -> None:
    checker = made(versions, tmp_path, [], module=ODD)
    checker.measure("too large", 0)
    checker.measure("q8_0", 0)
    async with working(checker) as told:
        await told.reached(lambda: len(told.measurements) == 2)
    assert told.measurements == [("too large", None), ("q8_0", clean(3))]


async def test_a_real_process_measures(versions: Versions) -> None:
    """Measure a version that exists and a removed one; a check afterwards must still work."""
    (honest, *_) = versions.drawn(2, 3)
    checker = made(versions, versions.directory.root, [honest])
    for rounding, version in (("f32", 2), ("q4_0", 2), ("q8_0", 9)):
        checker.measure(rounding, version)
    checker.submit(honest.rollout_id, is_urgent=True)
    async with working(checker) as told:
        await told.all_of([honest.rollout_id])
    measured = dict(told.measurements)
    assert set(measured) == {"f32", "q4_0", "q8_0"} and measured["q8_0"] is None
    exact, coarse = measured["f32"], measured["q4_0"]
    assert exact is not None and coarse is not None and exact.num_tokens == coarse.num_tokens > 100
    assert int(exact.draws_CS[0].argmax()) < int(coarse.draws_CS[0].argmax())
    assert told.seconds > 0 and not isinstance(told.of[honest.rollout_id], str)


async def test_a_hub_without_verification_reports_it(versions: Versions, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    checker = Verifier(None, versions.settings, directory=directory, kept=1, patience=1, rollouts=Committed([]))
    async with working(checker) as told:
        checker.submit("1-0", is_urgent=True)
        await told.all_of(["1-0"])
    assert "trust.verifier is off" in str(told.of["1-0"])


def test_the_verifiers_settings_are_a_single_learners_with_the_whole_base(versions: Versions) -> None:
    many = LearnerConfig(processes=2, device="cuda", base_bits=4, threads=8, gradient_checkpointing=True)
    trust = TrustConfig(verifier_device="cpu", verifier_threads=2, verifier_precision="float32")
    config = HubConfig(trust=trust)
    found = verifier_settings(config, versions.settings.model_copy(update={"learner": many})).learner
    assert (found.device, found.threads, found.processes, found.base_bits) == ("cpu", 2, 1, 0)
    assert (found.gradient_checkpointing, found.precision) == (False, "float32")
