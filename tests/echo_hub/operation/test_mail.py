"""Sent to a real mail server."""

from __future__ import annotations

import socket
import ssl
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation import mail as mail_module
from echo_hub.operation.alert import AboutRun, Alert
from echo_hub.operation.mail import Mail
from echo_shared.errors import ConnectError
from tests.echo_hub.net.certificates import Authority, Files
from tests.echo_hub.operation.receivers import mail_server


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "FIRST_S", 0.001)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority(tmp_path).server()


def context(files: Files) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(files.certificate, files.key)
    return made


def by(port: int, files: Files | None = None, **settings: Any) -> Mail:
    """Trusts the certificates of `files`, or those that the system trusts."""
    chosen = AlertsConfig.model_validate(
        {
            "email_to": ["ada@example.org", "bob@example.org"],
            "email_from": "hub@example.org",
            "smtp_host": "localhost",
            "smtp_port": port,
            **settings,
        }
    )
    trusted = None if files is None else str(files.authority)
    return Mail(chosen, tls=lambda: ssl.create_default_context(cafile=trusted))


async def test_an_email_goes_by_starttls_with_a_login(alert: Alert, about: AboutRun, files: Files) -> None:
    async with mail_server(context(files)) as server:
        await by(server.port, files, smtp_user="hub", smtp_password="open sesame").send(alert, about)
    assert server.secure == [True] and server.logins == [("hub", "open sesame")]
    read = message_from_bytes(server.got[0], policy=policy.default)
    assert read["To"] == "ada@example.org, bob@example.org" and read["From"] == "hub@example.org"
    assert alert.text in read.get_content() and read["Subject"] == f"[spring] {alert.text}"


async def test_an_email_goes_by_tls_from_the_start(alert: Alert, about: AboutRun, files: Files) -> None:
    async with mail_server(context(files), at_once=True) as server:
        await by(server.port, files, smtp_security="tls").send(alert, about)
    assert server.secure == [True]


async def test_without_tls_only_if_the_settings_say_so(alert: Alert, about: AboutRun) -> None:
    async with mail_server() as server:
        await by(server.port, smtp_security="none").send(alert, about)
        assert server.secure == [False]
        with pytest.raises(ConnectError, match="does not take alerts"):
            await by(server.port).send(alert, about)
    assert len(server.got) == 1, "a server that offers no TLS gets nothing"


async def test_a_server_that_nobody_vouches_for_gets_nothing(alert: Alert, about: AboutRun, files: Files) -> None:
    async with mail_server(context(files)) as server:
        with pytest.raises(ConnectError) as caught:
            await by(server.port, smtp_user="hub", smtp_password="open sesame").send(alert, about)
    assert server.got == server.logins == [] and "sesame" not in str(caught.value)


@pytest.mark.parametrize("word", ["CONNECT", "MAIL", "RCPT", "DATA"])
async def test_a_server_with_a_bad_moment_is_tried_again(alert: Alert, about: AboutRun, word: str) -> None:
    async with mail_server() as server:
        server.replies = {word: "451 come back later"}
        await by(server.port, smtp_security="none").send(alert, about)
    assert len(server.got) == 1


async def test_a_refusal_for_good_is_told_without_the_servers_words(alert: Alert, about: AboutRun) -> None:
    async with mail_server() as server:
        server.replies = {"DATA": "554 no \x1b[2J spam"}
        with pytest.raises(ConnectError) as caught:
            await by(server.port, smtp_security="none").send(alert, about)
    assert "code 554" in str(caught.value) and "spam" not in str(caught.value) and server.got == []


async def test_a_server_that_is_silent_is_given_up(
    alert: Alert, about: AboutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail_module, "ATTEMPT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectError, match="does not take") as caught:
            await by(port, smtp_host="127.0.0.1", smtp_security="none").send(alert, about)
    assert "no answer within" in str(caught.value)
