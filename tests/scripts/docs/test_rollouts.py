from __future__ import annotations

import re

import pytest

from echo_shared.wire.messages import Checked, DropReason, ReceiptState, StandbyReason
from scripts.docs.rollouts import page


@pytest.mark.parametrize("kind", [ReceiptState, DropReason, Checked, StandbyReason])
def test_every_state_has_a_meaning(kind: type[ReceiptState]) -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page(), re.MULTILINE))
    assert all(told.get(member.value) for member in kind)
