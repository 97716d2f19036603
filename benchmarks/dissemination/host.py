"""A process on one host of the benchmark, which answers requests: one JSON object in a line each.

A request is {"id", "do", ...}: `do` names a method of the host's object, the rest are its arguments. Requests run in
parallel. The answer is {"id", "result"} or {"id", "error"}. The end of standard input ends the process, so no process
outlives the benchmark."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

MAX_LINE_BYTES = 2**22


async def obey(host: object) -> None:
    """Answer requests until the end of standard input; then cancel the running ones."""
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
    except Exception as error:  # noqa: BLE001 - The asking process raises it.
        answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
