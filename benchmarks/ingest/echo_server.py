"""The server for comparison: a process that only echoes websocket frames, with the library that the hub uses. It prints
`Echo` and its URL.
"""

from __future__ import annotations

import asyncio

from aiohttp import WSMsgType, web


async def echo(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(compress=False)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data)
    return socket


async def serve() -> None:
    app = web.Application()
    app.add_routes([web.get("/echo", echo)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4_096).start()
    print(f"Echo http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
