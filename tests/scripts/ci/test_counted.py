"""`scripts.ci.counted` records the large messages that a program reads."""

import json
from pathlib import Path

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire import codec
from echo_shared.wire.codec import encode
from echo_shared.wire.messages import Goodbye, specimens
from scripts.ci.counted import REFUSED, count


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file into which `count` writes its counts. The functions that `count` replaces in the codec are
    restored after the test.
    """
    for name in ("decode_from_hub", "decode_from_node"):
        monkeypatch.setattr(codec, name, getattr(codec, name))
    return tmp_path / "counts.json"


def test_large_frames_are_counted_and_small_ones_are_not(file: Path) -> None:
    count(file)
    for message in (*specimens.from_node(), specimens.from_node()[0], Goodbye(reason="")):
        codec.decode_from_node(encode(message))
    codec.decode_from_hub(encode(specimens.from_hub()[0]))
    assert json.loads(file.read_text()) == {"rollout": 2, "rollout_parts": 1, "check_result": 1, "lease": 1}


def test_refused_messages_are_recorded(file: Path) -> None:
    count(file)
    with pytest.raises(CodecError):
        codec.decode_from_hub(b"nothing")
    (text,) = json.loads(file.read_text())
    assert text.startswith(f"{REFUSED}A message is not MessagePack.")
