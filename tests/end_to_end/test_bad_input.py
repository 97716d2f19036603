"""Error texts name problem and remedy: those of nodes that a hub refuses, of nodes that find another hub than before,
and of hubs whose database belongs to another run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo_shared.signing import key_file
from echo_shared.wire.codec import decode_from_hub, encode
from echo_shared.wire.credentials import Credentials
from echo_shared.wire.messages import (
    Hello,
    Refused,
)

pytestmark = pytest.mark.timeout(600)


def check_said(said: str, *expected: str) -> None:
    assert "Traceback" not in said, said
    missing = [text for text in expected if text not in said]
    assert not missing, f"{missing} not in:\n{said}"


async def join(site: Any, url: str, *flags: str, name: str = "volunteer") -> tuple[int, str]:
    return await (await site.node(url, name, *flags)).ended()


async def test_tokens_protocol_versions_and_keys(site: Any) -> None:
    run: Path = await site.make_run(server={"join": "invite", "invite_tokens": ["open-sesame"]})
    hub, url = await site.hub(run)
    for flags in ((), ("--token", "wrong-token")):
        status, said = await join(site, url, *flags)
        assert status == 1
        check_said(said, "invite token", "--token")

    old = Hello(protocol_version=1, software_version="0.0.1", node_key=bytes(32), nonce=bytes(32))
    headers = {"Authorization": Credentials(hello=encode(old)).header()}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/node", headers=headers) as refusal:
        answer = decode_from_hub(await refusal.read())
    assert isinstance(answer, Refused) and refusal.status == 426
    assert answer.code == "protocol_version"
    check_said(answer.what + answer.do, "protocol", "0.0.1", "Upgrade the node")

    node = await site.node(url, "volunteer", "--token", "open-sesame")
    await node.printed("Connected")
    assert (await node.end())[0] == 0
    assert (await hub.end())[0] == 0
    (run / "hub.key").unlink()
    key_file.load_or_create(run / "hub.key")
    status, said = await site.command("echo_hub.main", "serve", run)
    assert status == 1
    check_said(said, "store belongs to another run", "hub.key")
    shutil.rmtree(run / "artefacts")
    (run / "echo.db").unlink()
    _, url = await site.hub(run, "--port", url.rpartition(":")[2])
    status, said = await join(site, url, "--token", "open-sesame")
    assert status == 1
    check_said(said, "key differs from the one", "--trust-new-key")
    node = await site.node(url, "volunteer", "--token", "open-sesame", "--trust-new-key")
    await node.printed("Connected")
