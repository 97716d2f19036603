"""A node lags if it samples with an older version than it reports. Simulated mismatches vary by group as in real runs:
log-normal, with a spread of a factor of five.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from echo_hub.core.trust.evidence import NO_EVIDENCE
from echo_hub.core.trust.lagging import LASTING, POINT, REMEMBERED, SMOOTHED, Lag, Lagging
from echo_hub.core.trust.screening import Seen

Level = Callable[[int], float]
"""A node's mismatch (KL divergence between node and learner) by step, in nats per token."""
TOKENS = 10


def kinds(*node_ids: str) -> dict[str, str]:
    return {node_id: "4 bits" if node_id.startswith("q4") else "fine" for node_id in node_ids}


def level(kl: float, grows_from: int = 10_000, by: float = 1.25) -> Level:
    return lambda step: kl * by ** max(0, step - grows_from)


def run(
    lagging: Lagging,
    levels: Mapping[str, Level],
    steps: int,
    *,
    seed: int = 0,
    spread: float = 0.0,
    staleness: Callable[[str, int], int] = lambda node_id, step: 1,
    first: int = 1,
) -> dict[str, int]:
    """Return, for each node that is found to lag, the step of that finding."""
    chance = np.random.default_rng(seed)
    found: dict[str, int] = {}
    for step in range(first, first + steps):
        seen = []
        for node_id, of_node in levels.items():
            for _ in range(POINT // 8):
                kl = of_node(step) * float(np.exp(spread * chance.standard_normal()))
                evidence = replace(NO_EVIDENCE, draws=(TOKENS, 0, 0, 0, 0, 0), mismatch_kl=TOKENS * kl)
                seen += [Seen(node_id, evidence, staleness(node_id, step))] * 8
        found |= {lag.node_id: step for lag in lagging.add(step, seen, kinds(*levels))}
    return found


@pytest.mark.parametrize("usual", [1e-7, 6e-4, 5e-3])
def test_a_node_whose_mismatch_grows_alone_is_found(usual: float) -> None:
    lagging = Lagging()
    others = {"b": level(5e-4), "c": level(2e-3), "q4": level(1e-2)}
    (found,) = run(lagging, {"a": level(max(usual, 1e-3), grows_from=15, by=1.5), **others}, 40).items()
    assert found[0] == "a" and found[1] <= 30
    (lag,) = lagging.lags
    assert 14 <= lag.since <= 25 and not lag.is_alone and lag.mismatch > 8 * lag.usual
    assert lag.policy_version == lag.since - 2, "all rollouts of step n are sampled with version n - 2 here"


@pytest.mark.parametrize("seed", range(10))
def test_nodes_of_every_kind_that_keep_their_level_are_not(seed: int) -> None:
    levels = {"f32": level(2e-4), "bf16": level(1e-3), "q4": level(3e-3), "q4 b": level(2e-3), "other": level(2e-4)}
    assert run(Lagging(), levels, 200, seed=seed, spread=0.8) == {}


def test_a_node_is_compared_with_its_own_kind() -> None:
    """Growth in all 4-bit engines is no lag. A single 4-bit engine has no comparison, which the result must say."""
    grows = {name: level(5e-3, grows_from=15) for name in ("q4 a", "q4 b")}
    assert run(Lagging(), {"a": level(5e-4), "b": level(5e-4), **grows}, 60) == {}
    lagging = Lagging()
    assert run(lagging, {"a": level(5e-4), "b": level(5e-4), "q4 a": grows["q4 a"]}, 60).keys() == {"q4 a"}
    assert lagging.lags[0].is_alone


def test_a_growth_that_all_nodes_show_is_no_lag() -> None:
    levels = {name: level(5e-4, grows_from=20) for name in "abc"}
    assert run(Lagging(), levels, 60) == {}


def test_an_older_policy_explains_a_larger_mismatch() -> None:
    """From step 20 on, one node's rollouts are five versions old instead of one: this alone explains their mismatch."""

    def late(node_id: str, step: int) -> int:
        return 5 if node_id == "a" and step > 20 else 1

    levels = {"a": lambda step: 1e-2 if step > 20 else 5e-4, "b": level(1e-3), "c": level(1e-3)}
    assert run(Lagging(), levels, 60, staleness=late) == {}
    assert run(Lagging(), levels, 60).keys() == {"a"}


def test_a_node_alone_is_said_to_be_alone() -> None:
    lagging = Lagging()
    assert run(lagging, {"a": level(1e-3, grows_from=15)}, 60).keys() == {"a"}
    assert lagging.lags[0].is_alone and "or the run itself has changed" in str(lagging.lags[0])


def test_two_of_three_that_lag_are_both_found() -> None:
    levels = {"a": level(5e-4, grows_from=15), "b": level(5e-4, grows_from=15), "c": level(5e-4)}
    assert run(Lagging(), levels, 40).keys() == {"a", "b"}


def test_a_lag_is_over_once_the_node_is_as_before() -> None:
    lagging = Lagging()
    levels = {"a": lambda step: 2e-2 if 15 < step < 40 else 5e-4, "b": level(5e-4)}
    run(lagging, levels, 39)
    assert lagging.lags
    run(lagging, levels, SMOOTHED, first=40)
    assert not lagging.lags


def test_one_odd_step_is_no_lag() -> None:
    levels = {"a": lambda step: 1.0 if step in (20, 40) else 5e-4, "b": level(5e-4)}
    assert run(Lagging(), levels, 60) == {}


def test_a_returning_node_restarts_and_a_pardoned_one_does_not() -> None:
    levels = {"a": lambda step: 2e-2 if step > 15 else 5e-4, "b": level(5e-4)}
    for again, is_found in (("forget", False), ("look_again", True)):
        lagging = Lagging()
        assert run(lagging, levels, 30)
        getattr(lagging, again)("a")
        assert not lagging.lags
        assert bool(run(lagging, levels, SMOOTHED + LASTING, first=31)) is is_found


def test_memory_is_bounded() -> None:
    lagging = Lagging()
    run(lagging, {"a": level(1e-3), "b": level(1e-3)}, 5)
    run(lagging, {"b": level(1e-3)}, REMEMBERED + 2, first=6)
    assert set(lagging._nodes) == {"b"}
    lagging.add(999, [Seen("c", NO_EVIDENCE)], kinds("c"))
    assert "c" not in lagging._nodes, "node c has shown nothing"


def test_the_words() -> None:
    lag = Lag(node_id="a", mismatch=0.0125, usual=1e-3, since=9, policy_version=7, is_alone=False)
    assert str(lag) == (
        "Since step 9 its rollouts fit the learner's policy less and less: 0.013 nats per token, where 0.001 would "
        "be usual. The rollouts of other nodes do not: it likely samples with version 7 or an older one, not with the "
        "versions that it names."
    )
