from typing import Any

import pytest

from echo_node.core.arrival import amount, arrival
from echo_shared.wire.messages import Fetched


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ({"pushed_bytes": 12_300}, "inline, 12.3 kB in 1.5 s"),
        (
            {"pushed_bytes": 1_000_000, "mesh_bytes": 3_000_000},
            "broadcast, 4.0 MB in 1.5 s, 75 % of it from other nodes",
        ),
        ({"swarm_bytes": 5, "web_seed_bytes": 3, "pushed_bytes": 4}, "swarm, 12 bytes in 1.5 s"),
        ({"web_seed_bytes": 2_500_000_000}, "web seed, 2.5 GB in 1.5 s"),
        ({"shared_memory_bytes": 9}, "through the host's shared memory, 9 bytes in 1.5 s"),
        ({"model_hub_bytes": 9}, "from a model hub, 9 bytes in 1.5 s"),
        ({}, "was already here"),
    ],
)
def test_the_way_that_brought_most_is_named(came: dict[str, Any], words: str) -> None:
    none = {"swarm_bytes": 0, "web_seed_bytes": 0}
    assert arrival(Fetched(info_hash=bytes(20), policy_version=1, seconds=1.5, **(none | came))) == words


def test_amounts_have_a_suitable_unit() -> None:
    assert [amount(n) for n in (0, 999, 1_000, 10**9)] == ["0 bytes", "999 bytes", "1.0 kB", "1.0 GB"]
