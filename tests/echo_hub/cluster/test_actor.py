from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from echo_hub.cluster.actor import ChildHost
from echo_hub.cluster.parcel import Parcel, source_hash
from echo_shared.process.child import HEADER_BYTES, pack_frame, unpack_frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="machines for scorers run Linux")

ECHO = """
import os, sys
from echo_shared.process.child import ParentPipe

pipe = ParentPipe()
pipe.send({"value": os.getcwd(), "opening": pipe.receive()})
while (frame := pipe.receive()) is not None:
    for number in frame["arguments"]:
        if number == 13:
            print("bad luck", file=sys.stderr)
            sys.exit(3)
        pipe.send({"value": number})
"""


def spec(**changed: Any) -> dict[str, Any]:
    own = {"module": "echo_child", "arguments": [], "name": "echoing", "env": {}, "ends_its_own": False}
    return {**own, "answer_s": 60.0, "counted": "arguments", "ending_s": 5.0, **changed}


async def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildHost:
    monkeypatch.chdir(tmp_path)  # pytest restores the directory after the test.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "echo_child.py").write_text(ECHO)
    Parcel(contents={"modules/echo_child.py": tmp_path / "echo_child.py"}).write(tmp_path / "sent.zip")
    host = ChildHost()
    assert await host.prepare((tmp_path / "sent.zip").read_bytes(), source_hash(), {}) == ""
    return host


def directories(where: Path) -> list[Path]:
    return list(where.glob("echo-ray-*"))


async def frames(host: ChildHost, count: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while True:
            answer = await host.answers(1)
            found += [unpack_frame(each[HEADER_BYTES:]) for each in answer["frames"]]
            if len(found) >= count or answer["exited"]:
                return found, answer


async def test_frames_reach_the_child_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await prepared(tmp_path, monkeypatch)
    await host.begin(1, spec(), pack_frame({"say": "hello"}))
    (ready,), _ = await frames(host, 1)
    assert ready["opening"] == {"say": "hello"}
    assert ready["value"].endswith("/work")
    for number in (2, 1, 3, 0):
        await host.send(1, number, pack_frame({"arguments": [number]}), {}, ())
    await host.send(2, 0, pack_frame({"arguments": [99]}), {}, ())  # This child does not exist.
    found, _ = await frames(host, 4)
    assert [each["value"] for each in found] == [0, 1, 2, 3]
    await host.close()
    assert directories(tmp_path) == []


async def test_answers_before_a_childs_exit_and_its_reason_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await prepared(tmp_path, monkeypatch)
    await host.begin(1, spec(), pack_frame({}))
    await host.send(1, 0, pack_frame({"arguments": [1, 2, 13, 4]}), {}, ())
    found, last = await frames(host, 4)
    assert [each["value"] for each in found[1:]] == [1, 2]
    assert (last["exited"]["returncode"], last["exited"]["death"]) == (3, "exited")
    assert last["exited"]["last_words"] == "bad luck"
    assert (await host.answers(1))["exited"] == last["exited"], "the answer stays the same"
    await host.close()


async def test_a_child_that_never_answers_is_ended_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await prepared(tmp_path, monkeypatch)
    (tmp_path / "echo_child.py").unlink()
    (directory,) = directories(tmp_path)
    (directory / "modules" / "echo_child.py").write_text(ECHO.replace('pipe.send({"value": number})', "pass"))
    await host.begin(1, spec(answer_s=0.1), pack_frame({}))
    await host.send(1, 0, pack_frame({"arguments": [1]}), {}, ())
    _, last = await frames(host, 2)
    assert last["exited"]["death"] == "late"
    await host.close()


READS = """
from pathlib import Path
from echo_shared.process.child import ParentPipe

pipe = ParentPipe()
pipe.send({"value": pipe.receive()})
while (frame := pipe.receive()) is not None:
    (name,) = frame["arguments"]
    file = Path("..", "sent", name)
    pipe.send({"value": file.read_text() if file.is_file() else None})
"""


async def test_files_are_there_before_their_frame_and_gone_when_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await prepared(tmp_path, monkeypatch)
    (directory,) = directories(tmp_path)
    (directory / "modules" / "echo_child.py").write_text(READS)
    await host.begin(1, spec(), pack_frame({}))
    asked = pack_frame({"arguments": ["3/weights"]})
    await host.send(1, 1, asked, {}, ())
    await host.send(1, 0, asked, {"3/weights": b"of three"}, ())
    found, _ = await frames(host, 3)
    assert [each["value"] for each in found[1:]] == ["of three", "of three"]
    await host.send(1, 2, asked, {"4/weights": b"of four"}, ["3"])
    assert [each["value"] for each in (await frames(host, 1))[0]] == [None]
    assert (directory / "sent" / "4" / "weights").is_file()
    await host.begin(2, spec(), pack_frame({}))
    assert not (directory / "sent").exists(), "the next child is sent its own files"
    await host.close()


async def test_where_files_cannot_be_written_the_child_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await prepared(tmp_path, monkeypatch)
    await host.begin(1, spec(), pack_frame({}))
    await frames(host, 1)
    (directory,) = directories(tmp_path)
    (directory / "sent").write_text("in the way")
    await host.send(1, 0, pack_frame({"arguments": [1]}), {"3/weights": b""}, ())
    assert "Error" in (await host.answers(1))["exited"]["failed"]
    await host.close()


async def test_another_version_of_echo_is_refused() -> None:
    assert "another version of Echo" in await ChildHost().prepare(b"", "0" * 32, {})


async def test_a_machine_without_the_base_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"12345")
    lacks = await ChildHost().prepare(b"", source_hash(), {str(file): 6})
    assert f"lacks {file}, or has another file there" in lacks and "has to lie under the same path" in lacks


async def test_files_left_by_a_killed_actor_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    left, kept = tmp_path / f"echo-ray-{ended.pid}-abc", tmp_path / f"echo-ray-{os.getpid()}-abc"
    left.mkdir()
    kept.mkdir()
    host = await prepared(tmp_path, monkeypatch)
    assert (left.exists(), kept.exists()) == (False, True)
    await host.close()
