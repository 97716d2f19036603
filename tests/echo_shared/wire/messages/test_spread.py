from typing import Any

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node
from echo_shared.wire.messages import Fetched, PolicyPublished
from tests.echo_shared.wire.messages.examples import IN_MEMORY, OFFER, changed, plain


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**31},
        {"pid": "1/../self"},
        {"pid": ...},
        {"descriptor": -1},
        {"descriptor": 2**31},
        {"descriptor": True},
        {"name": "echo-"},
        {"name": "echo-" + "0" * 33},
        {"name": "echo-" + "0" * 31 + "\n"},
        {"name": "echo-" + "0" * 30 + "/."},
    ],
    ids=str,
)
def test_an_address_in_memory_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    offered = PolicyPublished(policy_version=3, offer=IN_MEMORY)
    with pytest.raises(CodecError):
        decode_from_hub(changed(offered, **{f"offer__shared_memory__{name}": new for name, new in fields.items()}))


def test_peers_that_know_nothing_of_shared_memory_are_understood() -> None:
    published = PolicyPublished(policy_version=3, offer=OFFER)
    assert plain(decode_from_hub(changed(published, offer__shared_memory=...))) == plain(published)
    fetched = Fetched(info_hash=bytes(20), policy_version=1, seconds=1.0, swarm_bytes=1, web_seed_bytes=0)
    assert plain(decode_from_node(changed(fetched, shared_memory_bytes=...))) == plain(fetched)
