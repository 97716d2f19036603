"""Users' mistakes: errors name problem, value and remedy, and nothing is lost."""

from __future__ import annotations

import shutil
import socket
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


async def test_a_corrupt_config_names_key_and_line(site: Any) -> None:
    run = await site.make_run()
    config = run / "config.toml"
    good = config.read_text()
    for there, here, expected in (
        ("steps = 4", "steps = -4", ("training.steps", "-4", "line")),
        ("steps = 4", "stepz = 4", ("training.stepz", "did you mean steps", "line")),
        ("steps = 4", "steps = = 4", ("TOML", "line")),
    ):
        config.write_text(good.replace(there, here))
        status, said = await site.command("echo_hub.main", "serve", run)
        assert status == 1
        check_said(said, *expected)


async def test_a_run_is_never_overwritten_and_a_directory_without_one_is_not_served(site: Any) -> None:
    status, said = await site.command("echo_hub.main", "serve", site.root / "nothing")
    assert status == 1
    check_said(said, "not a run directory", "echo-hub init")
    run = await site.make_run()
    before = (run / "config.toml").read_text(), (run / "hub.key").read_bytes()
    status, said = await site.command("echo_hub.main", "init", run)
    assert status == 1
    check_said(said, "This directory already contains a run")
    assert ((run / "config.toml").read_text(), (run / "hub.key").read_bytes()) == before


async def test_a_port_and_a_run_in_use(site: Any) -> None:
    run = await site.make_run()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = await site.command("echo_hub.main", "serve", run, "--port", str(taken.getsockname()[1]))
    assert status == 1
    check_said(said, "port is in use", "--port")
    _, url = await site.hub(run)
    status, said = await site.command("echo_hub.main", "serve", run)
    assert status == 1
    check_said(said, "is using this run directory", str(run))
    assert url


async def test_an_unreachable_hub_and_invalid_addresses(site: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    status, said = await join(site, f"http://127.0.0.1:{free}")
    assert status == 1
    check_said(said, "cannot be reached", str(free))
    for url, expected in (("ftp://127.0.0.1", "http"), ("127.0.0.1:8710", "http"), ("http://192.0.2.1", "--insecure")):
        status, said = await join(site, url)
        assert status == 1
        check_said(said, url.removeprefix("ftp://"), expected)


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
