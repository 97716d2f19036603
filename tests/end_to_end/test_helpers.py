"""A node samples one model together with a helper (a machine that lends its memory or GPU); the helper dies and
returns.
"""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)

STEPS = 40
"""Training steps of the run: so many that the helper (the machine that lends memory) is killed before the last one."""


@pytest.mark.slow
async def test_a_node_with_a_helper_trains_and_survives_its_loss(site: Any, until: Any, reached: Any) -> None:
    pytest.importorskip("llama_cpp")
    run = await site.make_run(training={"steps": STEPS})
    _, url = await site.hub(run)
    where = ("--host", "127.0.0.1", "--threads", "1", "--data-dir", site.root / "helper")
    helper = await site.start("echo_node.main", "lend", "--port", "0", *where)
    address = (await helper.printed(r"echo-node join URL --with (\S+#\S+)"))[1]
    node = await site.node(url, "node", "--with", address, backend="auto")
    await node.printed(r"Engine: llama_cpp on cpu")
    await reached(run, 1)

    (server,) = psutil.Process(helper.process.pid).children()
    server.send_signal(signal.SIGKILL)
    await node.printed(r"The sampling engine has ended.*RPC server")
    view = await until(url, lambda view: view["state"] == "finished")
    books = view["accounting"]
    assert books["leased"] == books["trained"] + sum(books["dropped"].values())
    assert books["trained"] == STEPS * 8 * 4
    status, said = await node.end()
    assert status == 0 and "Traceback" not in said, said
    status, said = await helper.end()
    assert status == 0 and said.count("Lent to 127.0.0.1.") >= 2, said
