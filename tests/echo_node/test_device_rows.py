"""A node's devices are shown as rows, each with its engine's state and speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.backends.registry import BackendChoice
from echo_node.core.engines import DeviceWork
from echo_node.core.manners import Hold, HoldReason
from echo_node.device_rows import device_line, device_rows
from echo_node.host.devices import Device

PAUSED = Hold(HoldReason.PAUSED, "You have paused cuda:1.")


def work(device: str, **values: Any) -> DeviceWork:
    usual: dict[str, Any] = {
        "state": "working",
        "holds": (),
        "width": 16,
        "rollouts": 5,
        "tokens_per_s": 1_234.5,
        "precision": "bf16",
        "problem": "",
    }
    return DeviceWork(device=device, **{**usual, **values})


def shown(one: DeviceWork, *, is_here: bool = True, holds: tuple[Hold, ...] = ()) -> dict[str, Any]:
    on = Device(name=one.device, api="cuda", title="RTX 4090") if one.device else None
    choice = BackendChoice(name="torch", device="cuda", reason="", on=on)
    chooser = SimpleNamespace(by_device={one.device: SimpleNamespace(has_decided=is_here, choice=choice)})
    (row,) = device_rows([one], chooser, {one.device: holds})  # type: ignore[arg-type]
    return row


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (shown(work("cuda:0")), "cuda:0 (RTX 4090): sampling, 5 rollouts, at most 16 at once, 1,234 tokens/s"),
        (
            shown(work("cuda:0", rollouts=0, tokens_per_s=0.0)),
            "cuda:0 (RTX 4090): waiting, 0 rollouts, at most 16 at once",
        ),
        (shown(work("cuda:1", state="paused"), holds=(PAUSED,)), "cuda:1 (RTX 4090): paused. You have paused cuda:1."),
        (shown(work("cuda:1", state="paused")), "cuda:1 (RTX 4090): paused"),
        (
            shown(work("cuda:1", state="starting", width=0, problem="It is gone."), is_here=False),
            "cuda:1: starting. It is gone.",
        ),
    ],
)
def test_a_device_in_one_line(row: dict[str, Any], line: str) -> None:
    assert device_line(row) == line


def test_a_device_that_the_node_has_chosen_itself_is_named_by_its_kind() -> None:
    row = shown(work(""))
    assert (row["name"], row["is_chosen"], row["backend"], row["title"]) == ("cuda", False, "torch", "")
