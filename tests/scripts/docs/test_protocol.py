"""The page of the wire protocol lists every message under its sender, with all fields."""

from __future__ import annotations

import re
from typing import get_args

from echo_shared.wire import messages
from scripts.docs.protocol import page, parts_of


def test_every_message_and_field_is_listed() -> None:
    text = page()
    from_hub, from_node, parts = (
        re.findall(r"^### (\w+)", section, re.MULTILINE) for section in re.split(r"(?m)^## What .*$", text)[1:]
    )
    assert from_hub == [kind.__name__ for kind in get_args(messages.FromHub)]
    assert from_node == [kind.__name__ for kind in get_args(messages.FromNode)]
    assert {"Receipt", "DropReason", "LeasedPrefix", "ArtefactOffer", "RefusalCode"} <= set(parts)
    anchors = {name.lower() for name in [*from_hub, *from_node, *parts]}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= anchors
    for kind in [*get_args(messages.FromHub), *get_args(messages.FromNode)]:
        section = text.partition(f"### {kind.__name__}\n")[2].partition("\n### ")[0]
        assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == list(kind.model_fields)


def test_parts_are_each_told_once() -> None:
    parts = [kind.__name__ for kind in parts_of(get_args(messages.FromHub))]
    assert parts == sorted(set(parts)) and "Receipt" in parts
