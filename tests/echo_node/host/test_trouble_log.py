import pytest

from echo_node.core.troubles import TroubleCode
from echo_node.host.trouble_log import TroubleLog
from echo_shared.errors import DISK_FULL, StorageError


def test_a_trouble_is_logged_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    troubles, full = TroubleLog(), StorageError("The disk is full.", code=DISK_FULL)
    for _ in range(5):
        troubles.met("the spool", full)
        troubles.met("the pause", full)
    assert [trouble.code for trouble in troubles.now] == [TroubleCode.DISK_FULL]
    troubles.end("the pause")
    troubles.end("the spool")
    troubles.end("the spool")
    assert [record.message for record in caplog.records] == [
        "The disk is full.",
        "The disk has free space again: the node resumes.",
    ]
