"""Bounds of what is asked about rollouts."""

from typing import Any

import pytest

from echo_shared.codec import decode_from_node
from echo_shared.errors import CodecError
from echo_shared.messages import MAX_BATCHED, ReceiptsWanted
from tests.echo_shared.messages.examples import changed


@pytest.mark.parametrize(
    "ids", [[], ["3-5"] * (MAX_BATCHED + 1), ["3"], [3], "3-5", ["3-5", "1-" + "9" * 60]], ids=lambda ids: str(ids)[:20]
)
def test_receipts_wanted_out_of_bounds_are_refused(ids: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(ReceiptsWanted(rollout_ids=("3-5",)), rollout_ids=ids))
