from __future__ import annotations

import pytest

from echo_node.core.agreement import Agreement, compare
from echo_node.host.spool import STATES
from echo_shared.wire.messages import Checked, DropReason, Receipt, ReceiptState


def hubs(state: str, reason: DropReason | None = None, checked: Checked = Checked.NO) -> Receipt:
    return Receipt(rollout_id="1-0", state=ReceiptState(state), drop_reason=reason, checked=checked)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ("leased", "leased", Agreement.SAME),
        ("leased", "dropped", Agreement.HUB_AHEAD),
        ("sent", "leased", Agreement.ON_ITS_WAY),
        ("sent", "received", Agreement.HUB_AHEAD),
        ("sent", "dropped", Agreement.HUB_AHEAD),
        ("received", "scored", Agreement.HUB_AHEAD),
        ("received", "leased", Agreement.DIFFERENT),
        ("scored", "received", Agreement.DIFFERENT),
        ("scored", "trained", Agreement.HUB_AHEAD),
        ("trained", "trained", Agreement.SAME),
        ("trained", "scored", Agreement.DIFFERENT),
        ("trained", "dropped", Agreement.DIFFERENT),
        ("evaluated", "trained", Agreement.DIFFERENT),
    ],
)
def test_the_hub_may_be_ahead_and_never_behind(mine: str, theirs: str, expected: Agreement) -> None:
    found = compare(mine, None, "no", hubs(theirs, DropReason.EXPIRED if theirs == "dropped" else None))
    assert found.agreement is expected
    assert bool(found.sentence) is (expected is not Agreement.SAME)
    assert ("operator" in found.sentence) is (expected is Agreement.DIFFERENT)


def test_another_reason_is_another_word() -> None:
    assert compare("dropped", "stale", "no", hubs("dropped", DropReason.STALE)).agreement is Agreement.SAME
    assert compare("dropped", "stale", "no", hubs("dropped", DropReason.FORGED)).agreement is Agreement.DIFFERENT


def test_a_check_is_never_taken_back() -> None:
    assert compare("trained", None, "passed", hubs("trained", checked=Checked.PASSED)).agreement is Agreement.SAME
    news = compare("trained", None, "no", hubs("trained", checked=Checked.FAILED))
    assert news.agreement is Agreement.HUB_AHEAD and "failed" in news.sentence
    for other in (Checked.NO, Checked.FAILED):
        assert compare("trained", None, "passed", hubs("trained", checked=other)).agreement is Agreement.DIFFERENT


def test_every_pair_of_states_has_an_answer() -> None:
    for mine in STATES:
        for theirs in ReceiptState:
            assert compare(mine, None, "no", hubs(theirs)).agreement in Agreement
