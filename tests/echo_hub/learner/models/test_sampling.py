"""Each job gets the tokens that `echo_shared.sampling` defines, whatever other jobs are drawn at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.plain_losses import ModelsBench
from echo_hub.learner.models import files, sampling
from echo_hub.learner.models.sampling import Job, JobFailure, JobSampler, TokenPiece
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_shared.errors import LearnerError
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import Batch, sample_groups

BASE = resolve_base("builtin:tiny")


@pytest.fixture
def sampler(bench: ModelsBench) -> JobSampler:
    return JobSampler(bench.policy, bench.seat, base_dir=BASE, kv_bytes=2**26)


@pytest.fixture(scope="module")
def adapters(bench: ModelsBench, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write adapters of different ranks that change every answer."""
    found = []
    for rank in (2, 5, 1, 3, 4):
        found.append(tmp_path_factory.mktemp("adapters") / f"v{rank}")
        files.export(bench.model(rank=rank, seed=rank, b_scale=0.5), bench.seat, found[-1], probe=bench.probe)
    return found


def a_job(
    number: int,
    *,
    samples: int = 2,
    temperature: float = 1.5,
    max_tokens: int = 12,
    strings: tuple[str, ...] = (),
    first: int = 0,
    stops: bool = True,
) -> Job:
    request = GroupRequest(
        lease_id=number,
        group_id=number,
        indices=tuple(range(first, first + samples)),
        prompt_ids=np.array([3, 4, 5 + number % 7], dtype=np.int32),
        seed=number,
        policy_version=0,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=(1,) if stops else (),
    )
    return Job(number=number, request=request, strings=strings)


def drawn(sampler: JobSampler) -> list[TokenPiece | JobFailure]:
    found: list[TokenPiece | JobFailure] = []
    for _ in range(1_000):
        if not sampler.has_work:
            return found
        found += sampler.step()
    raise AssertionError("the sampler does not end")


def finished(found: Sequence[TokenPiece | JobFailure]) -> dict[tuple[int, int], TokenPiece]:
    ends = [item for item in found if isinstance(item, TokenPiece) and item.finish]
    by_key = {(item.number, item.index): item for item in ends}
    assert len(by_key) == len(ends), "each sample is finished once"
    return by_key


def expected(bench: ModelsBench, job: Job, adapter: Path | None) -> dict[int, FinishedRollout]:
    """Draw the job alone with the sampler of `echo_shared`, which defines the right tokens."""
    bench.seat.hold(None if adapter is None else bench.seat.read(adapter))
    return {rollout.index: rollout for rollout in sample_groups(bench.policy.model, [job.request])}


def test_jobs_of_several_adapters_are_drawn_as_each_alone(
    bench: ModelsBench, sampler: JobSampler, adapters: list[Path]
) -> None:
    jobs = [
        (a_job(number, temperature=(0.3, 1.5, 4.0)[number % 3], first=number % 2), adapter)
        for number, adapter in enumerate([None, *adapters, None, *adapters], 1)
    ]
    for job, adapter in jobs:
        sampler.add(job, adapter)
    ends = finished(drawn(sampler))
    assert len(ends) == 2 * len(jobs)
    for job, adapter in jobs:
        for index, rollout in expected(bench, job, adapter).items():
            found = ends[job.number, index]
            assert found.ids.tolist() == rollout.completion_ids.tolist()
            np.testing.assert_allclose(found.logprobs, rollout.behavior_logprobs, atol=1e-4)
            assert found.finish == rollout.finish_reason.value
    assert sum(item.ends_job for item in ends.values()) == len(jobs)


def test_temperature_near_zero_is_greedy(bench: ModelsBench, sampler: JobSampler) -> None:
    sampler.add(a_job(1, temperature=sampling.GREEDY_TEMPERATURE, samples=2), None)
    first, second = finished(drawn(sampler)).values()
    bench.seat.hold(None)
    ids = [3, 4, 6]
    for token in first.ids.tolist():
        with torch.no_grad():
            logits = bench.policy.model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert token == int(logits.argmax())
        ids.append(token)
    assert first.ids.tolist() == second.ids.tolist()


def test_pieces_and_the_end_agree(sampler: JobSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PIECES_S", 0.0)
    sampler.add(a_job(1, samples=3, max_tokens=30, stops=False), None)
    found = drawn(sampler)
    for (_, index), end in finished(found).items():
        ids: list[int] = []
        for item in found:
            if isinstance(item, TokenPiece) and item.index == index and not item.finish:
                assert item.start == len(ids) and len(item.ids) == len(item.logprobs) > 0
                ids += item.ids.tolist()
        assert ids == end.ids[: len(ids)].tolist() and len(ids) >= len(end.ids) - 1


@pytest.mark.parametrize("samples", [1, 4])
def test_a_stop_string_ends_its_sample_with_the_token_that_completes_it(
    bench: ModelsBench, sampler: JobSampler, samples: int
) -> None:
    codec = PromptCodec.load(BASE)
    whole = expected(bench, a_job(1, samples=samples, temperature=4.0, max_tokens=40, stops=False), None)
    text = codec.text(whole[0].completion_ids)
    string = text[len(text) // 2 : len(text) // 2 + 2]
    sampler.add(
        a_job(1, samples=samples, temperature=4.0, max_tokens=40, stops=False, strings=(string, "never said")), None
    )
    ends = finished(drawn(sampler))
    assert len(ends) == samples
    for index, rollout in whole.items():
        ids = ends[1, index].ids
        assert ids.tolist() == rollout.completion_ids[: len(ids)].tolist()
        if string in codec.text(rollout.completion_ids):
            assert string in codec.text(ids) and string not in codec.text(ids[:-1])
            assert ends[1, index].finish == "stop"
        else:
            assert len(ids) == len(rollout.completion_ids)
    assert len(ends[1, 0].ids) < len(whole[0].completion_ids)


def test_a_cancelled_job_ends_and_the_others_go_on(bench: ModelsBench, sampler: JobSampler) -> None:
    for number in (1, 2, 3):
        sampler.add(a_job(number, max_tokens=30), None)
    sampler.step()
    sampler.cancel(2)
    sampler.cancel(77)
    ends = finished(drawn(sampler))
    assert {number for number, _ in ends} == {1, 3}
    for index, rollout in expected(bench, a_job(3, max_tokens=30), None).items():
        assert ends[3, index].ids.tolist() == rollout.completion_ids.tolist()


def test_jobs_that_come_later_join_the_batch(bench: ModelsBench, sampler: JobSampler) -> None:
    sampler.add(a_job(1, max_tokens=40, temperature=0.5), None)
    found = [item for _ in range(3) for item in sampler.step()]
    sampler.add(a_job(2, max_tokens=5), None)
    ends = finished(found + drawn(sampler))
    for index, rollout in expected(bench, a_job(2, max_tokens=5), None).items():
        assert ends[2, index].ids.tolist() == rollout.completion_ids.tolist()


def test_an_adapter_that_cannot_be_read_fails_its_own_jobs(sampler: JobSampler, tmp_path: Path) -> None:
    sampler.add(a_job(1), tmp_path / "none")
    sampler.add(a_job(2), None)
    sampler.add(a_job(3), tmp_path / "none")
    found = drawn(sampler)
    failures = {item.number: item.error for item in found if isinstance(item, JobFailure)}
    assert set(failures) == {1, 3} and all(isinstance(error, LearnerError) for error in failures.values())
    assert {number for number, _ in finished(found)} == {2}


def test_waiting_adapters_get_a_batch_after_the_others_quantum(
    sampler: JobSampler, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five adapters share two batches. One of them always has jobs; the others must get a batch before its last job."""
    monkeypatch.setattr(sampling, "MOST_BATCHES", 2)
    monkeypatch.setattr(sampling, "QUANTUM_S", 0.0)
    for number in range(1, 31):
        sampler.add(a_job(number, samples=1, max_tokens=3), adapters[0])
    monkeypatch.setattr(sampler, "_rows", 2)
    for number, adapter in enumerate(adapters[1:], 100):
        sampler.add(a_job(number, samples=1, max_tokens=3), adapter)
    order = [number for number, _ in finished(drawn(sampler))]
    assert len(order) == 34
    assert max(order.index(number) for number in range(100, 104)) < 25


def test_a_batch_that_runs_out_of_memory_goes_on_narrower(
    bench: ModelsBench, sampler: JobSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "PIECES_S", 0.0)
    step, widths = Batch._step, list[int]()

    def limited(batch: Any) -> Any:
        widths.append(len(batch._table))
        if widths[-1] > 3 and len(widths) > 4:
            raise MemoryError("three rows fit")
        return step(batch)

    monkeypatch.setattr(Batch, "_step", limited)
    job = a_job(1, samples=8, max_tokens=20)
    request = replace(job.request)
    sampler.add(job, None)
    found = drawn(sampler)
    monkeypatch.setattr(Batch, "_step", step)
    ends = finished(found)
    assert max(widths) == 8 and len(ends) == 8
    for index, rollout in expected(bench, Job(number=1, request=request, strings=()), None).items():
        assert ends[1, index].ids.tolist() == rollout.completion_ids.tolist()
        starts = [
            item.start for item in found if isinstance(item, TokenPiece) and item.index == index and not item.finish
        ]
        assert starts == sorted(set(starts)), "no token is told twice"


def test_memory_for_not_even_one_completion_fails_the_job(sampler: JobSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_batch: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Batch, "_step", never)
    sampler.add(a_job(1, samples=4), None)
    (failure,) = [item for item in drawn(sampler) if isinstance(item, JobFailure)]
    assert "too little memory for a single completion" in str(failure.error)
