"""Post alerts to the webhook: signed, with a timeout and retries, without following redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.alert import AboutRun, Alert, payload, signature
from echo_shared.errors import ConnectError
from echo_shared.process.backoff import backoff_s

ATTEMPTS: Final = 5
FIRST_S: Final = 2.0
"""Longest wait before the second attempt, in seconds. The wait doubles with each attempt up to LIMIT_S. Random jitter
shortens it by up to half."""
LIMIT_S: Final = 60.0
ATTEMPT_S: Final = 10.0
"""Time limit of one attempt, in seconds."""
_TRY_AGAIN: Final = frozenset({408, 425, 429})
"""HTTP statuses of client errors after which another attempt may succeed. After a server error there is always another
attempt."""


class Webhook:
    """The receiver of alerts that the settings name. `attempts` is the maximum number of attempts for each alert."""

    def __init__(self, settings: AlertsConfig, *, attempts: int = ATTEMPTS) -> None:
        self._settings = settings
        self._attempts = attempts

    async def send(self, alert: Alert, about: AboutRun) -> None:
        """Deliver the alert. Raises ConnectError after the last failed attempt."""
        body, trouble = payload(alert, about), ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt - 1, random.random(), first_s=FIRST_S, limit_s=LIMIT_S))
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    status = await self._post(body, alert.alert_id)
            except TimeoutError:
                trouble = f"no answer within {ATTEMPT_S:.0f} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # Log only the type: the text may contain the URL, which may contain a secret.
                trouble = type(error).__name__
            else:
                if 200 <= status < 300:
                    return
                trouble = f"status {status}"
                if status < 500 and status not in _TRY_AGAIN:
                    break
        raise ConnectError(
            "The webhook does not accept alerts.",
            got=f"{trouble} from {self._host}",
            do="Correct alerts.webhook_url, or check the receiver; then: echo-hub alert-test RUN",
        )

    async def _post(self, body: bytes, alert_id: str) -> int:
        headers = {"Content-Type": "application/json", "User-Agent": "echo-hub", "Echo-Alert-Id": alert_id}
        if self._settings.webhook_secret:
            headers["Echo-Signature"] = signature(body, self._settings.webhook_secret, int(time.time()))
        # One session per alert: alerts are rare, and a kept connection may have died.
        async with (
            aiohttp.ClientSession(trust_env=not _is_loopback(self._host)) as session,
            session.post(self._settings.webhook_url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            return answer.status

    @property
    def _host(self) -> str:
        """Return the host of the webhook's URL. Logs contain only this part of the URL, because the rest may be
        secret."""
        return urlsplit(self._settings.webhook_url).hostname or ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
