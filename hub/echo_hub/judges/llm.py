"""A judge that is a language model behind an OpenAI-compatible endpoint: `POST URL/chat/completions`.

The hub's event loop sends up to `concurrency` requests at the same time; further requests wait, and the number of
leases limits them. Faults of the judge are retried with growing delays: connection errors, timeouts, statuses such as
401, 404, 429 or 503, and malformed responses. A status that blames the request (400, 413, 422) is final only if the
judge has answered another request before.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
import reprlib
import secrets
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from echo_hub.config.judge_section import LlmJudgeConfig
from echo_hub.judges.asking import Asked, messages, verdict
from echo_hub.judges.base import FIRST_S, LIMIT_S, Absence, Counts
from echo_shared.errors import ConfigError, ScorerError
from echo_shared.process.backoff import backoff_s

MOST_BYTES: Final = 4 * 2**20
"""Maximum number of bytes of an answer."""
IMPATIENT_ATTEMPTS: Final = 3
"""Number of attempts after which an unanswered request is an error, if `is_patient` is False."""
_OF_THE_QUESTION: Final = frozenset({400, 413, 422})
_PATH: Final = "/chat/completions"


class _AwayError(Exception):
    def __init__(self, reason: str, *, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def key_of(name: str, settings: LlmJudgeConfig) -> str:
    """Return the endpoint's key; "" if it needs none. Raises ConfigError if the environment variable is not set."""
    if not settings.api_key_env:
        return ""
    if key := os.environ.get(settings.api_key_env, ""):
        return key
    raise ConfigError(
        "The key of a judge is not in the environment.",
        got=f"reward.judges.{name}.api_key_env = {settings.api_key_env!r}, which is not set",
        do="Set this variable where the hub is started, or leave api_key_env out for an endpoint without a key.",
    )


class LlmJudge:
    """A judge behind one endpoint. It sends its requests with `session`. If `is_patient`, it waits while the endpoint
    does not answer."""

    def __init__(
        self,
        name: str,
        settings: LlmJudgeConfig,
        session: aiohttp.ClientSession,
        *,
        is_patient: bool = True,
        first_s: float = FIRST_S,
    ) -> None:
        self.name = name
        self.counts = Counts()
        self.absence = Absence(name)
        self._settings = settings
        self._session = session
        self._is_patient = is_patient
        self._first_s = first_s
        self._places = asyncio.Semaphore(settings.concurrency)
        self._has_answered = False
        url = settings.url.rstrip("/")
        self._url = url if url.endswith(_PATH) else url + _PATH

    async def value(self, asked: Asked) -> float:
        async with self._places:
            attempt = 1
            while True:
                said = await self._said(asked)
                try:
                    return verdict(said, lowest=self._settings.lowest, highest=self._settings.highest)
                except ScorerError as error:
                    self.counts.without_verdict += 1
                    if attempt >= self._settings.attempts:
                        raise ScorerError(
                            f"The judge {self.name} gave no verdict in {attempt} answers.", got=error.brief
                        ) from error
                    attempt += 1

    async def _said(self, asked: Asked) -> str:
        """Return the text of the judge's answer. Retries without limit if the judge is patient."""
        failures = 0
        while True:
            try:
                said = await self._asked_once(asked)
            except _AwayError as error:
                self.counts.unanswered += 1
                self.absence.stays_away(str(error))
                if not self._is_patient and failures + 1 >= IMPATIENT_ATTEMPTS:
                    raise ScorerError(f"The judge {self.name} does not answer.", got=str(error)) from error
                waits_s = backoff_s(failures, random.random(), first_s=self._first_s, limit_s=LIMIT_S)
                await asyncio.sleep(max(waits_s, error.wait_s))
                failures += 1
            else:
                self._has_answered = True
                self.absence.answered()
                return said

    async def _asked_once(self, asked: Asked) -> str:
        self.counts.calls += 1
        settings = self._settings
        question = {
            "model": settings.model,
            "messages": messages(settings.prompt, asked, secrets.token_hex(8)),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        try:
            async with asyncio.timeout(settings.timeout_s):
                async with self._session.post(self._url, json=question, allow_redirects=False) as answer:
                    body = await _read(answer.content)
        except TimeoutError as error:
            raise _AwayError(f"no answer within {settings.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _AwayError(str(error) or type(error).__name__) from error
        if answer.status == 200:
            return self._content(body)
        reason = f"status {answer.status}: {_excerpt(body)}"
        if answer.status in _OF_THE_QUESTION and self._has_answered:
            raise ScorerError(f"The judge {self.name} refuses this completion.", got=reason)
        raise _AwayError(reason, wait_s=_retry_after(answer.headers.get("Retry-After", "")))

    def _content(self, body: bytes) -> str:
        """Return the text of a chat completion. If the answer was cut off, return a text without a verdict. Raises
        _AwayError if the body is not a chat completion."""
        try:
            read = json.loads(body)
            choice = read["choices"][0]
            said, usage = choice["message"]["content"], read.get("usage")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _AwayError(f"an answer that is not a chat completion: {_excerpt(body)}") from error
        if isinstance(usage, dict):
            self.counts.tokens_read += _count(usage.get("prompt_tokens"))
            self.counts.tokens_written += _count(usage.get("completion_tokens"))
        is_whole = choice.get("finish_reason") != "length" and isinstance(said, str)
        return said if is_whole else f"(cut off after {self._settings.max_tokens} tokens)"


def session_for(settings: LlmJudgeConfig, key: str) -> aiohttp.ClientSession:
    """Open a session for one endpoint. An endpoint on this machine (loopback) is reached without proxies."""
    headers = {"User-Agent": "echo-hub"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connector = aiohttp.TCPConnector(limit=settings.concurrency)
    is_near = _is_loopback(urlsplit(settings.url).hostname or "")
    timeout = aiohttp.ClientTimeout(total=None)  # Each call sets its own timeout.
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout, trust_env=not is_near)


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Read the whole body. Raises ValueError if it has more than MOST_BYTES."""
    body = bytearray()
    async for chunk in stream.iter_any():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
    return bytes(body)


def _retry_after(text: str) -> float:
    """Return the seconds in a Retry-After header, at most LIMIT_S; 0 if the header is missing or not a number."""
    return min(float(text), LIMIT_S) if text.isascii() and text.isdigit() else 0.0


def _count(given: Any) -> int:
    return given if isinstance(given, int) and 0 <= given < 2**31 else 0


def _excerpt(body: bytes) -> str:
    return reprlib.repr(body[:300].decode("utf-8", "replace"))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
