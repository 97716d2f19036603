from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_hub.core.accounting.effects import CheckRecorded, RolloutsDropped
from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.dashboard.board import AboutView
from echo_hub.dashboard.public_rooms import WHAT_IT_MEANS
from echo_hub.store.reading import read_receipts
from echo_hub.store.store import Store
from echo_shared.wire.messages import DropReason, ReceiptState
from echo_shared.wire.messages.receipts import Checked
from tests.echo_hub.dashboard.public_parts import fill, open_store, served
from tests.echo_hub.store.conftest import Records

ABOUT = AboutView(
    description="Sums for all.\n\nBy <b>us</b>.\u202e",
    contact="ada@example.org",
    consent="You agree.\nReally.",
    links={"Paper <i>": "https://example.org/?a=1&b=2"},
    needs_token=True,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


async def text_of(session: Any, path: str, status: int = 200) -> str:
    async with session.get(path) as answer:
        assert answer.status == status
        return str(await answer.text())


async def test_the_about_page_shows_texts_as_plain_text(source: Any, store: Store, guard: Guard) -> None:
    async with served(source, store, guard, about=ABOUT) as stranger:
        text = await text_of(stranger, "/about")
        for said in (
            "<p>Sums for all.</p>",
            "<p>By &lt;b&gt;us&lt;/b&gt;.</p>",
            '<a href="https://example.org/?a=1&amp;b=2" rel="noreferrer noopener nofollow">Paper &lt;i&gt;</a>',
            "You agree.<br>Really.",
            "ask <bdi>ada@example.org</bdi>",
            "echo-node join http://192.168.1.20:8710",
            'class="copy"',
        ):
            assert said in text, said
        assert "\u202e" not in text
        board = await text_of(stranger, "/leaderboard")
        assert "ask <bdi>ada@example.org</bdi>" in board and 'href="/about"' in board


async def test_a_run_without_texts_says_so(source: Any, store: Store, guard: Guard) -> None:
    async with served(source, store, guard) as stranger:
        text = await text_of(stranger, "/about")
        assert "has not described" in text and "TOKEN" not in text


async def test_the_command_has_the_address_that_was_asked(source: Any, store: Store, guard: Guard) -> None:
    visits = Visits(place=lambda _: "x", is_https=lambda _: True, address=lambda _: "https://hub.example.org")
    source.address = "http://192.168.1.20:8710"
    async with served(source, store, Guard(guard.credentials, visits, name="test")) as stranger:
        for path in ("/about", "/leaderboard", "/teams"):
            text = await text_of(stranger, path)
            assert "echo-node join https://hub.example.org" in text and "192.168.1.20" not in text
            assert 'og:url" content="https://hub.example.org/' in text


async def test_a_public_receipt_equals_the_nodes_own(source: Any, store: Store, guard: Guard) -> None:
    (node,) = fill(store, ("<b>ada",), now=time.time())
    store.apply([CheckRecorded(rollout_id="1-0", checked=Checked.PASSED)], now=1.0)
    opened = [*Records.opened(7), Records.leased(9, 7, 0, 1, node_id=node)]
    store.apply(opened, now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("9-0",), reason=DropReason.STALE, detail="secret <x>")], now=2.0)
    async with served(source, store, guard) as stranger:
        for rollout in ("1-0", "1-1", "9-0", "9-1"):
            (told,) = store.read(read_receipts, node, [rollout])
            async with stranger.get(f"/api/v1/receipts/{rollout}") as answer:
                said = await answer.json()
            reason = told.drop_reason and told.drop_reason.value
            assert (said["state"], said["checked"], said["drop_reason"]) == (told.state, told.checked, reason)
            text = await text_of(stranger, f"/receipts?id={rollout}")
            assert f"<b>{told.state.value}</b>" in text and f"<b>{told.checked.value}</b>" in text
            for private in (node, "secret", "seed", "completion_ids"):
                assert private not in text + str(said)
            assert "<b>ada" not in text and "&lt;b&gt;ada" in text


async def test_a_receipt_of_an_unleased_rollout_reports_it(source: Any, store: Store, guard: Guard) -> None:
    async with served(source, store, guard) as stranger:
        assert "looks like 1203-4" in await text_of(stranger, "/receipts?id=<script>", 404)
        assert "<script>" not in await text_of(stranger, "/receipts?id=<script>", 404)
        for rollout in ("1-0", "9223372036854775808-0", "1-999999999"):
            assert "No rollout of this id" in await text_of(stranger, f"/receipts?id={rollout}", 404)
            assert (await stranger.get(f"/api/v1/receipts/{rollout}")).status == 404
        assert "Look up a receipt" in await text_of(stranger, "/receipts")


def test_every_state_has_a_meaning() -> None:
    states, reasons = ({one.value for one in kind} for kind in (ReceiptState, DropReason))
    assert states <= set(WHAT_IT_MEANS) <= states | reasons
