"""Real receivers of alerts on this machine: a webhook, and a mail server that speaks as much of RFC 5321 as clients do,
with STARTTLS (RFC 3207) and AUTH PLAIN (RFC 4954)."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass(slots=True)
class Hook:
    """Answers with `answers` in turn, then with 204; a status of 0 = with nothing, until the test ends."""

    answers: list[int] = field(default_factory=list)
    got: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((await request.read(), dict(request.headers)))
        self.news.set()
        status = self.answers.pop(0) if self.answers else 204
        if status == 0:
            await asyncio.Event().wait()
        headers = {"Location": "/elsewhere"} if status in (302, 307) else {}
        return web.Response(status=status, headers=headers)


@asynccontextmanager
async def webhook() -> AsyncIterator[Hook]:
    hook = Hook()
    application = web.Application()
    application.router.add_post("/hook/{secret}", hook.take)
    application.router.add_route("*", "/elsewhere", hook.take)
    async with TestServer(application) as server:
        hook.url = str(server.make_url("/hook/the-secret-of-this-hook"))
        yield hook


@dataclass(slots=True)
class MailServer:
    """`replies` are given in the place of its own, by the command's first word, once each."""

    tls: ssl.SSLContext | None = None
    replies: dict[str, str] = field(default_factory=dict)
    got: list[bytes] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    secure: list[bool] = field(default_factory=list)
    """Of each message: whether it came by TLS."""
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            await self._talk(reader, writer)
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(text: str) -> None:
            writer.write(f"{text}\r\n".encode())
            await writer.drain()

        await say(self.replies.pop("CONNECT", "220 here"))
        while line := (await reader.readline()).decode().strip():
            word = line.split()[0].upper()
            if word in self.replies:
                await say(self.replies.pop(word))
            elif word == "EHLO":
                is_plain = writer.get_extra_info("ssl_object") is None
                offers = "STARTTLS" if is_plain and self.tls else "AUTH PLAIN"
                await say(f"250-here\r\n250 {offers}")
            elif word == "STARTTLS" and self.tls is not None:
                await say("220 go on")
                await writer.start_tls(self.tls)
            elif word == "AUTH":
                _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
                self.logins.append((user, password))
                await say("235 come in")
            elif word == "DATA":
                await say("354 go on")
                self.got.append(await reader.readuntil(b"\r\n.\r\n"))
                self.secure.append(writer.get_extra_info("ssl_object") is not None)
                await say("250 taken")
            elif word == "QUIT":
                await say("221 bye")
                return
            else:
                await say("250 well")


@asynccontextmanager
async def mail_server(tls: ssl.SSLContext | None = None, *, at_once: bool = False) -> AsyncIterator[MailServer]:
    """`at_once`: it speaks TLS from the start."""
    made = MailServer(tls=None if at_once else tls)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls if at_once else None)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
