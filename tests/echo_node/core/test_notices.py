import pytest

from echo_node.core.notices import QUARANTINED, REFUSED, TITLES, notice_of_end, notice_of_standby
from echo_shared.errors import ConnectError, RefusedError
from echo_shared.wire.messages import RefusalCode, Standby, StandbyReason


@pytest.mark.parametrize("code", [*RefusalCode, "hub_key_changed"])
def test_problems_that_need_a_person_are_notified(code: str) -> None:
    notice = notice_of_end(RefusedError("The hub says: no.", do="Ask it.", code=code))
    if code == RefusalCode.FINISHED:
        assert notice is None
    else:
        assert notice is not None and "The hub says: no." in notice.text and "Ask it." in notice.text
        assert notice.title == TITLES.get(code, REFUSED)  # type: ignore[call-overload]


def test_a_lost_network_is_not_notified() -> None:
    assert notice_of_end(ConnectError("The hub cannot be reached.")) is None


@pytest.mark.parametrize("reason", [None, *StandbyReason])
def test_of_all_reasons_to_stand_by_quarantine_alone_is_reported(reason: StandbyReason | None) -> None:
    notice = notice_of_standby(Standby(reason=reason), "Why.")
    if reason is StandbyReason.QUARANTINED:
        assert notice is not None and (notice.title, notice.text) == (QUARANTINED, "Why.")
    else:
        assert notice is None
