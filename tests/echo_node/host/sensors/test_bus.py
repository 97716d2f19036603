import time

import pytest

from echo_node.host.sensors import bus as bus_module
from echo_node.host.sensors.bus import Bus
from tests.echo_node.host.sensors.conftest import Desktop

NAME, PATH = "org.example.Clock", "/clock"


def test_asks_and_is_answered(desktop: Desktop) -> None:
    desktop.serve(NAME)
    desktop.answers = {(PATH, "Now"): ("u", (7,)), (PATH, "Get/Zone"): ("v", (("s", "UTC"),))}
    bus = Bus("SESSION")
    assert bus.call(NAME, PATH, NAME, "Now") == (7,)
    assert bus.get(NAME, PATH, NAME, "Zone") == "UTC"
    assert bus.call(NAME, PATH, NAME, "Then") is None
    assert bus.call("org.example.Nobody", PATH, NAME, "Now") is None
    assert bus.call(NAME, PATH, NAME, "Now") == (7,), "an error is an answer"
    bus.close()


def test_a_desktop_that_hangs_costs_one_wait_and_is_left_alone_for_a_while(
    desktop: Desktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jeepney.bus_messages import message_bus
    from jeepney.io.blocking import open_dbus_connection

    monkeypatch.setattr(bus_module, "ANSWER_S", 0.05)
    with open_dbus_connection(bus=desktop.address) as silent:
        silent.send_and_get_reply(message_bus.RequestName(NAME))
        bus = Bus("SESSION")
        assert bus.call(NAME, PATH, NAME, "Now") is None
        monkeypatch.setattr(bus_module, "ANSWER_S", 1_000.0)
        assert bus.call(NAME, PATH, NAME, "Now") is None, "not asked"
    desktop.serve("org.example.Other")
    desktop.answers = {(PATH, "Now"): ("u", (7,))}
    bus._not_before = time.monotonic()
    assert bus.call("org.example.Other", PATH, NAME, "Now") == (7,)
    bus.close()


def test_a_machine_without_a_bus_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("unix:path=/nowhere/at/all", "nonsense", ""):
        monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", address)
        assert Bus("SESSION").call(NAME, PATH, NAME, "Now") is None
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Bus("SESSION").get(NAME, PATH, NAME, "Zone") is None
