from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import socket

import pytest

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation import webhook as webhook_module
from echo_hub.operation.alert import AboutRun, Alert
from echo_hub.operation.webhook import Webhook
from echo_shared.errors import ConnectError
from tests.echo_hub.operation.receivers import webhook

SECRET = "sixteen-letters-or-more"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "FIRST_S", 0.001)


def to(url: str, **settings: object) -> Webhook:
    return Webhook(AlertsConfig.model_validate({"webhook_url": url, **settings}))


async def test_an_alert_is_posted_once_and_signed(alert: Alert, about: AboutRun) -> None:
    async with webhook() as hook:
        await to(hook.url, webhook_secret=SECRET).send(alert, about)
    ((body, headers),) = hook.got
    assert json.loads(body)["message"] == alert.text and headers["Content-Type"] == "application/json"
    assert headers["Echo-Alert-Id"] == alert.alert_id
    found = re.fullmatch(r"t=(\d+),v1=([0-9a-f]{64})", headers["Echo-Signature"])
    assert found is not None
    mac = hmac.new(SECRET.encode(), found[1].encode() + b"." + body, hashlib.sha256)
    assert hmac.compare_digest(found[2], mac.hexdigest())


async def test_without_a_secret_nothing_is_signed(alert: Alert, about: AboutRun) -> None:
    async with webhook() as hook:
        await to(hook.url).send(alert, about)
    assert "Echo-Signature" not in hook.got[0][1]


async def test_a_receiver_with_a_bad_moment_is_tried_again_with_the_same_id(alert: Alert, about: AboutRun) -> None:
    async with webhook() as hook:
        hook.answers = [503, 429, 200]
        await to(hook.url).send(alert, about)
    assert {headers["Echo-Alert-Id"] for _, headers in hook.got} == {alert.alert_id} and len(hook.got) == 3


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (410, 1), (302, 1), (307, 1), (500, 5), (429, 5)])
async def test_a_refusal_names_only_the_host_of_the_address(
    alert: Alert, about: AboutRun, status: int, attempts: int
) -> None:
    async with webhook() as hook:
        hook.answers = [status] * 9
        with pytest.raises(ConnectError, match="does not accept alerts") as caught:
            await to(hook.url).send(alert, about)
    assert len(hook.got) == attempts, "redirects are not followed"
    assert f"status {status} from 127.0.0.1" in str(caught.value) and "the-secret" not in str(caught.value)


async def test_a_receiver_that_never_answers_times_out(
    alert: Alert, about: AboutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "ATTEMPT_S", 0.05)
    async with webhook() as hook:
        hook.answers = [0] * 9
        with pytest.raises(ConnectError, match="does not accept") as caught:
            await to(hook.url).send(alert, about)
    assert "no answer within" in str(caught.value)


async def test_an_unreachable_receiver_is_retried_some_times(alert: Alert, about: AboutRun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound but not listening: connections are refused.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/the-secret"
        with pytest.raises(ConnectError) as caught:
            async with asyncio.timeout(60):
                await to(url).send(alert, about)
    assert "the-secret" not in str(caught.value) and "127.0.0.1" in str(caught.value)
