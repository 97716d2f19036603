"""A process on one host of the benchmark: it obeys requests, one JSON object a line, and answers each with one.

Requests are {"id", "do", ...}: `do` names a method of the host's object, the rest are its arguments. They run beside
each other. The answer is {"id", "result"} or {"id", "error"}. The process ends when its standard input does, so that
none outlives the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

MAX_LINE_BYTES = 2**22


async def obey(host: object) -> None:
    """Until the end of standard input; what is still running then is cancelled."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.create_task(_carry_out(host, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _carry_out(host: object, request: dict[str, Any]) -> None:
    number, method = request.pop("id"), getattr(host, request.pop("do"))
    try:
        answer = {"id": number, "result": await method(**request)}
    except Exception as error:  # noqa: BLE001 - whoever asked raises it.
        answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
