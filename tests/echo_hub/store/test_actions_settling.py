from __future__ import annotations

from typing import Any

from echo_hub.core.accounting.effects import SettingRecorded
from echo_hub.store.actions import read_settings
from echo_hub.store.store import Store


def test_the_newest_of_each_setting_stands() -> None:
    store = Store.open("sqlite://")
    told: list[Any] = [("a", 1), ("a", [[1, 2]]), ("b", "x")]
    store.apply([SettingRecorded(setting=name, stored=value) for name, value in told], 1.0)
    store.apply([SettingRecorded(setting="b", stored="y")], 2.0)
    with store.engine.connect() as connection:
        assert read_settings(connection) == {"a": [[1, 2]], "b": "y"}
    store.close()
