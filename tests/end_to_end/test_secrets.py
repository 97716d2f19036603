"""Secrets appear in no log, page or program output, and other users of the machine cannot read them."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo_hub.dashboard.access.credentials import set_password
from echo_hub.net.tracker import Tracker
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform == "win32", reason="files have no modes there"),
]

TALKATIVE = """
import logging, runpy, sys
log, module, *sys.argv[1:] = sys.argv[1:]
logging.basicConfig(level=logging.DEBUG, filename=log)
logging.Logger.setLevel = lambda self, level: None  # What the program asks for: everything is wanted here.
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
INVITATION = "the-invitation-of-this-run"
MISTYPED = "the-invitation-of-this-rum"
WEBHOOK = "the-address-that-only-we-know"
SIGNING = "what-alerts-are-signed-with"
PASSWORD = "correct horse battery staple"
WRONG = "correct horse battery stable"


def forms(name: str, secret: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, secret
    yield f"{name} in hex", secret.hex().encode()
    yield f"{name} in spaced hex", secret.hex(" ").encode()
    yield f"{name} in Base64", base64.b64encode(secret).rstrip(b"=")
    yield f"{name} in URL-safe Base64", base64.urlsafe_b64encode(secret).rstrip(b"=")
    yield f"{name} as Python shows it", repr(secret)[2:-1].encode()


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def private_seed(identity: Identity) -> bytes:
    pem = identity.to_pem().decode().splitlines()
    return base64.b64decode("".join(line for line in pem if not line.startswith("-")))[-32:]


def found(where: bytes, secrets: dict[str, bytes]) -> set[str]:
    return {name for name, secret in secrets.items() if secret in where}


def files(root: Path) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def talkative(site: Any, log: Path, module: str, *arguments: str | Path) -> Any:
    return await site.program(sys.executable, "-u", "-c", TALKATIVE, log, module, *arguments)


@pytest.mark.slow
async def test_secrets_are_nowhere_but_in_files_of_their_owner(site: Any, until: Any, operator: Any) -> None:
    root: Path = site.root
    os.umask(0o022)
    alerts = {"webhook_url": f"http://127.0.0.1:9/{WEBHOOK}", "webhook_secret": SIGNING, "disk_free_bytes": 2**62}
    run = await site.make_run(
        server={"join": "invite", "invite_tokens": [INVITATION]}, dissemination={"way": "swarm"}, alerts=alerts
    )
    set_password(run / "operator.password", PASSWORD)
    hub = await talkative(site, root / "hub.log", "echo_hub.main", "-v", "serve", run)
    url = (await hub.printed(r"Dashboard +(http://\S+)/\n"))[1]
    headers = operator(url, run)
    common = ("--backend", "torch", "--threads", "1", "--swarm-host", "127.0.0.1")
    there = ("--data-dir", root / "guest", "--name", "guest", *common)
    refused = ("--data-dir", root / "refused", "--name", "refused", *common)
    node = await talkative(site, root / "guest.log", "echo_node.main", "join", url, "--token", INVITATION, *there)
    await until(url, lambda view: view["trained_step"] >= 2)
    other = await talkative(site, root / "refused.log", "echo_node.main", "join", url, "--token", MISTYPED, *refused)
    status, refusal = await other.ended()
    assert status != 0 and "token" in refusal
    pages = b""
    async with aiohttp.ClientSession(url) as http:
        for path in ("/", "/leaderboard", "/api/v1/run", "/api/v1/nodes", "/metrics", "/login", "/readyz", "/no/page"):
            for who in ({}, headers):
                async with http.get(path, headers=who) as answer:
                    pages += await answer.read()
        async with http.get("/?token=not-the-right-token") as answer:
            assert answer.status == 401
        for secret, expected in ((WRONG, 403), (PASSWORD, 200)):
            own = {"Origin": url}
            async with http.post("/login", data={"secret": secret}, headers=own, allow_redirects=False) as answer:
                assert answer.status in (expected, 303)
    _, said_by_node = await node.end()
    _, said_by_hub = await hub.end()

    key = key_file.load(run / "hub.key")
    (node_key,) = (root / "guest").rglob("identity.key")
    run_keys = list(texts(json.loads((run / "run_keys.json").read_text())))
    plain = {
        "the invitation": INVITATION.encode(),
        "a mistyped invitation": MISTYPED.encode(),
        "the webhook's address": WEBHOOK.encode(),
        "the webhook's secret": SIGNING.encode(),
        "the password": PASSWORD.encode(),
        "a wrong password": WRONG.encode(),
        "the operator's token": (run / "operator.token").read_bytes().strip(),
        "the password's hash": (run / "operator.password").read_bytes().strip(),
        "the hub's key": private_seed(key),
        "the node's key": private_seed(key_file.load(node_key)),
        "the passkey": Tracker(key).passkey(key_file.load(node_key).node_id).encode(),
    }
    for number, text in enumerate(run_keys):
        if len(text) >= 32:
            plain[f"run key {number}"] = text.encode()
    assert any(name.startswith("run key") for name in plain)
    secrets = dict(form for name, secret in plain.items() for form in forms(name, secret))
    shown = {
        "pages": pages,
        "the hub's output": said_by_hub.encode(),
        "the node's output": said_by_node.encode(),
        "the refused node's output": refusal.encode(),
        **{name: path.read_bytes() for name, path in files(root).items() if ".log" in name or "/logs/" in name},
    }
    assert len(shown["hub.log"]) > 10_000 and len(shown["guest.log"]) > 10_000, "both logs must be long"
    assert {where: leaked for where, text in shown.items() if (leaked := found(text, secrets))} == {}

    holding = {name: mode(path) for name, path in files(root).items() if found(path.read_bytes(), secrets)}
    assert {"run/operator.token", "run/operator.password", "run/run_keys.json", "run/config.toml"} <= holding.keys()
    holding |= {path.name: mode(path) for path in (run / "hub.key", node_key)}
    assert {name: oct(bits) for name, bits in holding.items() if bits & 0o077} == {}
