from typing import Any

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node
from echo_shared.wire.messages import MAX_BATCHED, ReceiptsWanted
from tests.echo_shared.wire.messages.examples import TOTALS, changed


@pytest.mark.parametrize(
    "ids", [[], ["3-5"] * (MAX_BATCHED + 1), ["3"], [3], "3-5", ["3-5", "1-" + "9" * 60]], ids=lambda ids: str(ids)[:20]
)
def test_receipts_wanted_out_of_bounds_are_refused(ids: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(ReceiptsWanted(rollout_ids=("3-5",)), rollout_ids=ids))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trained_rollouts", -1),
        ("trained_tokens", 2**60),
        ("dropped", [{"reason": "stale", "rollouts": 1}] * 65),
        ("dropped", [{"reason": "stale"}]),
        ("share", 1.5),
        ("share", float("nan")),
        ("rank", 0),
        ("num_ranked", "many"),
        ("page", "https://elsewhere.example"),
        ("page", "/leader\x1b[2Jboard"),
        ("page", "/leaderboard\n"),
        ("page", "/" + "a" * 256),
    ],
)
def test_totals_out_of_bounds_are_refused(field: str, value: Any) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(TOTALS, **{field: value}))


def test_reasons_are_safe_to_print() -> None:
    told = decode_from_hub(changed(TOTALS, dropped=[{"reason": "new\x1b[31m", "rollouts": 1}]))
    assert told.dropped[0].reason == "new?[31m"  # type: ignore[union-attr]
