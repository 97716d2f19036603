"""The parts of the benchmark of agents: headline figures, times of turns from rows of a database, a conversation with
kept attention keys and values, and a run that is evaluated twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agents
from benchmarks.agents.learning import SOKOBAN, trained
from benchmarks.agents.prefixes import prefix_speedup
from benchmarks.agents.turns import figures
from benchmarks.harness.site import merged


def test_the_headline_has_the_smallest_speedup_of_both_engines() -> None:
    cases = {
        "turn": {"turn_fixed_ms_p50": 30.0, "fixed_ms_p50": 30.0},
        "turn of 16": {"turn_fixed_ms_p50_16": 40.0},
        "prefix torch small f32": {"speedup": 3.0},
        "prefix llama_cpp real q8_0": {"speedup": 2.5},
        "prefix mlx small f32": {"speedup": 1.5},
    }
    expected = {"turn_fixed_ms_p50": 30.0, "turn_fixed_ms_p50_16": 40.0, "prefix_speedup_10_turns": 2.5}
    assert agents.headline(cases) == expected
    assert agents.headline({}) == {}


def test_the_headline_has_the_worst_gain_and_all_kills() -> None:
    cases = {
        "learns sokoban": {"smallest_gain": -0.01, "gains": [0.1, -0.01, 0.2]},
        "kills game": {"kills": 24, "lost_or_twice": 1},
        "kills server": {"kills": 6, "lost_or_twice": 0},
    }
    assert agents.headline(cases) == {"learns": -0.01, "kills": 30, "lost_or_twice": 1}


def test_a_turns_fixed_time_is_that_between_leases_without_drawing() -> None:
    first = [(1, 0, turn, 10.0 + turn, 10.7 + turn, 0.5) for turn in range(4)]
    other = [(1, 1, turn, 20.0 + 2 * turn, 20.7 + 2 * turn, 0.5) for turn in range(3)]
    found = figures(first + other)
    assert found["turns"] == 5
    assert found["fixed_ms_p50"] == pytest.approx(500) and found["node_ms_p50"] == pytest.approx(200)
    assert found["hub_ms_p50"] == pytest.approx(300)


async def test_kept_keys_change_no_token_of_the_small_model() -> None:
    pytest.importorskip("llama_cpp")
    found = await prefix_speedup(7, backend="llama_cpp", model="builtin:small", precision="f32", repetitions=0)
    assert found["tokens_alike"] == 1.0 and found["largest_logprob_difference"] < 1e-4
    assert found["reused_tokens"] > 4_000 and found["kept_mb"] > 0


@pytest.mark.slow
async def test_base_and_last_version_play_the_same_held_out_games(tmp_path: Path) -> None:
    few = {"training": {"steps": 1, "groups_per_step": 1, "group_size": 2}, "evaluation": {"problems": 4}}
    found = await trained(tmp_path / "run", merged(SOKOBAN, few), 2)
    assert found["gain"] == pytest.approx(found["sampled_after"] - found["sampled_before"])
    assert 0 <= found["sampled_before"] <= 1 and found["error"] >= 0
