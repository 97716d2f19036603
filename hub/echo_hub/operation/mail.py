"""Sends an alert by e-mail: by the standard library's client, on a thread that nobody has to wait for."""

from __future__ import annotations

import asyncio
import random
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from threading import Thread
from typing import Final

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.alert import AboutRun, Alert, email
from echo_shared.backoff import backoff_s
from echo_shared.errors import ConnectError

ATTEMPTS: Final = 4
FIRST_S: Final = 5.0
"""Until the second attempt, or half of it; twice as long each time."""
LIMIT_S: Final = 120.0
SILENCE_S: Final = 10.0
"""The server may be silent for so long."""
ATTEMPT_S: Final = 30.0
"""For one attempt, whatever it hangs on."""


class Mail:
    """The server that the settings name; `tls` is what its certificate is checked by."""

    name: Final = "e-mail"

    def __init__(
        self,
        settings: AlertsConfig,
        *,
        attempts: int = ATTEMPTS,
        jitter: Callable[[], float] = random.random,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._settings = settings
        self._attempts = attempts
        self._jitter = jitter
        self._tls = tls

    async def send(self, alert: Alert, about: AboutRun) -> None:
        """Returns once the server has taken it. Raises ConnectError when it has not, after the last attempt."""
        message = email(alert, about, sender=self._settings.email_from, to=self._settings.email_to)
        trouble = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(backoff_s(attempt - 1, self._jitter(), first_s=FIRST_S, limit_s=LIMIT_S))
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    await _in_daemon(lambda: self._send(message))
            except TimeoutError:
                trouble = f"no answer within {ATTEMPT_S:.0f} s"
            except smtplib.SMTPResponseException as error:
                trouble = f"{type(error).__name__}, code {error.smtp_code}"  # Its text is the server's.
                if error.smtp_code >= 500:
                    break
            except (smtplib.SMTPException, OSError) as error:
                trouble = type(error).__name__ if isinstance(error, smtplib.SMTPException) else str(error)
                if isinstance(error, smtplib.SMTPRecipientsRefused | smtplib.SMTPNotSupportedError):
                    break
            else:
                return
        raise ConnectError(
            "The mail server does not take alerts.",
            got=f"{trouble}, from {self._settings.smtp_host}:{self._settings.smtp_port}",
            do="Correct alerts.smtp_*, or look at the server; then: echo-hub alert-test RUN",
        )

    def _send(self, message: EmailMessage) -> None:
        settings = self._settings
        at = settings.smtp_host, settings.smtp_port
        with (
            smtplib.SMTP_SSL(*at, timeout=SILENCE_S, context=self._tls())
            if settings.smtp_security == "tls"
            else smtplib.SMTP(*at, timeout=SILENCE_S)
        ) as server:
            if settings.smtp_security == "starttls":
                server.starttls(context=self._tls())
            if settings.smtp_user:
                server.login(settings.smtp_user, settings.smtp_password)
            server.send_message(message)


async def _in_daemon(work: Callable[[], None]) -> None:
    """Does `work` on a thread of its own, which holds up neither this loop's end nor the program's: a server that sends
    a byte now and then could keep it for ever. Cancelled, it leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failed: Exception | None = None
        try:
            work()
        except Exception as error:  # noqa: BLE001  # Raised where it is waited for.
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, failed)

    Thread(target=run, name="e-mail", daemon=True).start()
    await done
