import time
from pathlib import Path

import pytest

from echo_node.core.manners import OwnerPause
from echo_node.host.pause import DevicePausesFile, PauseFile, pause_for
from echo_shared.errors import ConfigError, StorageError


def test_a_pause_outlives_the_process(tmp_path: Path) -> None:
    file = PauseFile(tmp_path / "pause.json")
    assert file.load() is None
    for pause in (OwnerPause(), OwnerPause(until=1e9 + 0.5)):
        file.save(pause)
        assert PauseFile(tmp_path / "pause.json").load() == pause
    file.save(None)
    assert file.load() is None and list(tmp_path.iterdir()) == []
    file.save(None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"until": "x"}',
        '{"until": []}',
        "\x00",
        '{"until": NaN}',
        '{"until": 1e999}',
        '{"until": 1e15}',
    ],
)
def test_a_file_that_cannot_be_understood_is_a_pause(tmp_path: Path, text: str) -> None:
    (tmp_path / "pause.json").write_text(text)
    assert PauseFile(tmp_path / "pause.json").load() == OwnerPause()


def test_pauses_of_single_devices_outlive_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = DevicePausesFile(tmp_path / "device_pauses.json")
    assert file.load() == {}
    pauses = {"cuda:1": OwnerPause(), "MIG-c1": OwnerPause(until=1e9)}
    file.save(pauses)
    assert file.load() == pauses
    for text in ("", "[]", '{"cuda:1": "soon"}', '{"cuda:1": NaN}', '{"cuda:1": 1e300}'):
        (tmp_path / "device_pauses.json").write_text(text)
        assert file.load() == {}
    assert "pauses of single devices are lost" in caplog.text
    file.save({})
    assert list(tmp_path.iterdir()) == []


def test_a_pause_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be stored"):
        PauseFile(tmp_path / "file" / "pause.json").save(OwnerPause())


@pytest.mark.parametrize(
    ("length", "seconds"), [("30s", 30), ("90m", 5_400), ("1h30m", 5_400), ("2 H", 7_200), ("1.5d", 129_600)]
)
def test_lengths_are_written_as_people_do(length: str, seconds: float) -> None:
    until = pause_for(length).until
    assert until is not None and abs(until - time.time() - seconds) < 10
    assert pause_for(None) == OwnerPause()


@pytest.mark.parametrize("length", ["", "2", "h", "-2h", "2x", "0s", "999d", "2h or so", "1e9s", "٣h"])
def test_an_invalid_duration_is_refused(length: str) -> None:
    with pytest.raises(ConfigError, match="not a length of time"):
        pause_for(length)
