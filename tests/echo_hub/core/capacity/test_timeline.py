from __future__ import annotations

import pytest

from echo_hub.core.capacity.model import Mode, NodeClass, Pool, Workload
from echo_hub.core.capacity.timeline import timeline


def spans(mode: Mode, *, rate: float, every: int = 1, bound: int = 2) -> dict[str, list[tuple[int, float, float]]]:
    pool = Pool.of([NodeClass(name="n", count=1, rollouts_per_s=rate, latency_s=0.0)])
    workload = Workload(
        mode=mode, rollouts_per_step=32, train_s=1.0, broadcast_s=0.25, max_staleness=bound, publish_every=every
    )
    lanes: dict[str, list[tuple[int, float, float]]] = {}
    for span in timeline(workload, pool, num_steps=4):
        lanes.setdefault(span.lane, []).append((span.number, round(span.begin_s, 3), round(span.end_s, 3)))
    return lanes


def test_a_learner_that_never_waits() -> None:
    lanes = spans("async", rate=64.0)
    assert lanes["training"] == [(21, 0.0, 1.0), (22, 1.0, 2.0), (23, 2.0, 3.0), (24, 3.0, 4.0)]
    assert "waiting" not in lanes
    assert lanes["broadcast"] == [(20, 0.0, 0.25), (21, 1.0, 1.25), (22, 2.0, 2.25), (23, 3.0, 3.25)]
    assert lanes["sampling"][:2] == [(19, 0.0, 0.25), (20, 0.25, 1.25)]
    assert lanes["sampling"][-1] == (23, 3.25, 4.0)


def test_one_after_the_other() -> None:
    lanes = spans("sequential", rate=64.0)
    assert lanes["waiting"][:2] == [(21, 0.0, 0.75), (22, 1.75, 2.5)]
    assert lanes["training"][0] == (21, 0.75, 1.75)
    assert lanes["broadcast"][0] == (20, 0.0, 0.25)
    assert lanes["sampling"][0] == (20, 0.25, 0.75)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_version_every_few_steps(every: int) -> None:
    numbers = [number for number, _, _ in spans("async", rate=640.0, every=every, bound=3)["broadcast"]]
    assert numbers == [number for number in range(20 * every, 20 * every + 4) if number % every == 0]


def test_nothing_is_outside_the_picture() -> None:
    for lane in spans("async", rate=20.0).values():
        assert all(begin >= 0 and end >= begin for _, begin, end in lane)
