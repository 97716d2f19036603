from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from benchmarks.trust import tls
from benchmarks.trust.protocol import Unnoticed


def test_the_hub_has_to_answer_a_first_message_that_needs_no_more_to_be_whole(tmp_path: Path) -> None:
    files = tls.settings(tmp_path)["server"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["tls_certificate"], files["tls_key"])
    hello = tls.client_hello()
    for message, is_answered in ((hello, True), (hello[: len(hello) // 2], False), (hello[:1], False)):
        received, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
        received.write(message)
        with pytest.raises(ssl.SSLWantReadError):
            context.wrap_bio(received, answer, server_side=True).do_handshake()
        assert bool(answer.pending) is is_answered


def test_what_the_hub_does_not_count_goes_unnoticed() -> None:
    before = {"connections, handshake_too_late": 3}
    assert "'connections, handshake_too_late': 2" in tls.counted(before, {"connections, handshake_too_late": 5})
    with pytest.raises(Unnoticed, match="counts none"):
        tls.counted(before, dict(before))
