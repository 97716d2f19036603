import asyncio
import sys

from echo_hub.net.progress import progress

LARGE = bytes(64 * 2**20)


async def test_downloads_show_progress_and_finished_ones_none() -> None:
    opened: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.set_result(writer)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        sender = await opened
        transport = sender.transport
        assert isinstance(transport, asyncio.Transport)
        assert progress(transport) is None
        sender.write(LARGE)
        before = progress(transport)
        assert before is not None and before[0] > 0
        await reader.readexactly(len(LARGE) // 2)
        during = progress(transport)
        assert during is not None and during != before
        if sys.platform == "linux":
            assert during[1] > before[1]
        await reader.readexactly(len(LARGE) // 2)
        assert progress(transport) is None
        transport.abort()
        assert progress(transport) is None
        writer.close()
