"""Calls of one session, as JSON lines: one call at a time, and one answer to each.

    {"do": "sample", "seed": 7}                            {"problem": {"prompt": ..., "metadata": {...}}}
    {"do": "reset", "problem": {...}, "seed": 7}           {"opening": {"text": ...}}
    {"do": "step", "reply": {"text": ..., "ids": [...]}}   {"observation": {"text": ...}} or {"ending": {"reward": 1.0}}
    {"do": "score"}                                        {"ending": {"reward": 0.5}}
    {"do": "close"}                                        {"closed": true}

An exception is answered with `{"error": TEXT, "code": CODE}`. An adapter's exception may have an attribute `code`:
session_gone (default), environment_away, no_slot (with `most`), episode_refused, or config for a mistake in settings.
The parts `what`, `got` and `do` of such an exception travel apart. An adapter with `is_sync = True` has no coroutine
functions.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, Final

CODES: Final = ("session_gone", "environment_away", "no_slot", "episode_refused", "config")
LONGEST_TEXT: Final = 2_000
"""Largest number of characters of an exception's text that the hub gets."""


class SessionCalls:
    """Answers the hub's calls to one session, in order."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._session: Any = None
        self._closing: asyncio.Future[Any] | None = None

    async def answer(self, line: bytes) -> bytes:
        """Return the answer to the call in `line`, as a line."""
        try:
            return as_line(await self._answer(json.loads(line)))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - An environment is a plug-in: its exception is its answer.
            return as_line(failure(error))

    async def close(self) -> None:
        """Close the session, if it is open. Cancelling this call does not cancel the closing: a second call waits for
        the same closing."""
        session, self._session = self._session, None
        if session is not None:
            closing = session.close()
            self._closing = asyncio.ensure_future(closing) if _is_awaitable(closing) else None
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked["do"]
        if do == "sample":
            return {"problem": await _awaited(self._adapter.sample(asked["seed"]))}
        if do == "reset":
            self._session = await _awaited(self._adapter.open(asked["problem"], asked["seed"]))
            return {"opening": await _awaited(self._session.reset())}
        if do == "close":
            await self.close()
            return {"closed": True}
        if self._session is None:
            raise ValueError(f"{do} before reset")
        if do == "step":
            response: dict[str, Any] = await _awaited(self._session.step(asked["reply"]))
            return response
        if do == "score":
            ending: dict[str, Any] = await _awaited(self._session.score())
            return ending if "ending" in ending else {"ending": ending}
        raise ValueError(f"unknown call {do!r}")


def make_adapter(name: str, opening: dict[str, Any]) -> Any:
    """Import the factory `MODULE:FACTORY`, and with it the environment's package, and call it."""
    module, _, factory = name.partition(":")
    return getattr(importlib.import_module(module), factory)(opening["options"], opening["place"])


def say_ready(control: socket.socket) -> None:
    control.sendall(as_line({"ready": True}))


def say_failed(control: socket.socket, error: Exception) -> None:
    """Tell the hub why the adapter could not be made."""
    text = f"{type(error).__name__}: {error}"
    control.sendall(as_line({"failed": text[:LONGEST_TEXT]}))


async def _awaited(value: Any) -> Any:
    return await value if _is_awaitable(value) else value


def _is_awaitable(value: Any) -> bool:
    return hasattr(value, "__await__")


def run_at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop. A loop would cost each forked session a megabyte."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("The adapter says is_sync, but it waits.")


def as_line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def failure(error: BaseException) -> dict[str, Any]:
    """Return the answer that tells the hub about an exception."""
    code = getattr(error, "code", "")
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    place = "" if last is None or code in CODES else f" ({last.filename}, line {last.lineno})"
    cage = session_cage()
    limit = cage.named(error) if cage is not None else ""
    parts = {name: str(part) for name in ("what", "got", "do") if (part := getattr(error, name, "")) and code in CODES}
    text = parts.pop("what", f"{type(error).__name__}: {error}{place}")
    found: dict[str, Any] = {
        "error": (f"{limit} ({text})" if limit else text)[:LONGEST_TEXT],
        "code": code if code in CODES else CODES[0],
    }
    found |= {name: part[:LONGEST_TEXT] for name, part in parts.items()}
    if code == "no_slot" and isinstance(most := getattr(error, "most", None), int):
        found["most"] = most
    return found


def session_cage() -> Any:
    """Return the cage's module (the sandbox), which the program that starts this process has loaded
    (`echo_shared.cage`); None without a cage."""
    return sys.modules.get("session_cage")


class ControlLines:
    """Splits what the hub's control socket sends into lines, each with the socket that came with it."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, part: bytes) -> list[dict[str, Any]]:
        """Return the lines that are complete now that `part` has arrived."""
        *whole, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in whole]
