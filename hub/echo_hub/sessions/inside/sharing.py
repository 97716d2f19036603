"""Sessions that share one process and one event loop, for adapters that only talk to servers of environments."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections import deque
from typing import Any, Final

from echo_hub.sessions.inside.calls import ControlLines, SessionCalls, as_line, make_adapter, say_failed, say_ready

LONGEST_LINE: Final = 2**24
"""Longest line that the hub may send as a call, in bytes."""
CLOSING_S: Final = 30.0
"""Longest time in seconds for an adapter to close one session, or itself."""


class _Shared:
    def __init__(self, control: socket.socket, adapter: Any) -> None:
        self._control = control
        self._adapter = adapter
        self._lines = ControlLines()
        self._sockets: deque[socket.socket] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the hub closes the control socket. Then close all sessions and the adapter."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._listen)
        await self._is_over.wait()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CLOSING_S)
        close = getattr(self._adapter, "aclose", None)
        if close is not None and inspect.isawaitable(closing := close()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing, CLOSING_S)

    def _listen(self) -> None:
        part, descriptors, _, _ = socket.recv_fds(self._control, 65_536, 16)
        self._sockets += [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if not part:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._is_over.set()
            return
        for asked in self._lines.lines(part):
            number = asked["session"]
            if asked["do"] == "session":
                self._tasks[number] = asyncio.create_task(self._play(number, self._sockets.popleft()))
            elif asked["do"] == "end" and number in self._tasks:
                self._tasks[number].cancel()

    async def _play(self, number: int, line: socket.socket) -> None:
        """Answer the calls of one session until its socket closes, or until the hub ends it."""
        reader, writer = await asyncio.open_connection(sock=line, limit=LONGEST_LINE)
        calls = SessionCalls(self._adapter)
        said = ""
        try:
            while asked := await reader.readline():
                writer.write(await calls.answer(asked))
                await writer.drain()
        except (OSError, ValueError) as error:
            said = f"The connection to the hub failed: {error!r}"
        finally:
            try:
                await asyncio.wait_for(calls.close(), CLOSING_S)
            except Exception as error:  # noqa: BLE001 - An environment is a plug-in: its session ends in any case.
                said = f"The session could not be closed: {error!r}"
            with contextlib.suppress(OSError):
                writer.write(b"\n" + as_line({"ended": said}))
            writer.close()
            del self._tasks[number]


def serve(control: socket.socket, adapter_name: str, opening: dict[str, Any]) -> None:
    """Make the adapter, and serve sessions on one event loop, until the control socket closes."""

    async def run() -> None:
        try:
            adapter = make_adapter(adapter_name, opening)
            if inspect.isawaitable(adapter):
                adapter = await adapter
        except Exception as error:  # noqa: BLE001 - An import may raise any exception. The operator sees it.
            say_failed(control, error)
            return
        say_ready(control)
        await _Shared(control, adapter).run()

    asyncio.run(run())
