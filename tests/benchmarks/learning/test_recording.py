from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import recording
from benchmarks.learning.recording import Machine


def test_the_recording_holds_unequal_machines() -> None:
    nodes = recording.load()
    assert [(node.backend, node.precision, node.width) for node in nodes] == [
        (machine.backend, machine.precision, machine.width) for machine in recording.FLEET
    ]
    means = [node.traits.s_per_token for node in nodes]
    assert max(means) > 5 * min(means) > 0
    for node in nodes:
        assert node.traits.paces == node.paces and len(node.paces) >= recording.LEAST_ROLLOUTS


@pytest.mark.slow
def test_a_run_of_real_nodes_is_recorded(tmp_path: Path) -> None:
    fleet = {
        "quick": Machine(backend="llama_cpp", precision="f32", width=8, nice=0),
        "slow": Machine(backend="llama_cpp", precision="q8_0", width=2, nice=5),
    }
    settings = {**recording.SETTINGS, "training": {"steps": 12, "groups_per_step": 16, "max_staleness": 4}}
    quick, slow = recording.record(tmp_path, settings, fleet)
    assert (quick.width, slow.precision) == (8, "q8_0")
    assert all(0 < pace < 10 for node in (quick, slow) for pace in node.paces)
