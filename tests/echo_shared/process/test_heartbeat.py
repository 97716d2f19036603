"""Heartbeats through a real pipe show for how long a process with work has made no step."""

from __future__ import annotations

import os
from pathlib import Path

from echo_shared.process.child import Child

BEATING = """
from echo_shared.process.heartbeat import Heartbeat
from echo_shared.process.child import ParentPipe

pipe = ParentPipe()
slow = Heartbeat(pipe, 2.0)  # Its thread does not run: the beats are this script's.
slow.beat()
slow.working = True
slow.beat()
slow.beat()
slow.step()
slow.beat()
slow.beat()
slow.working = False
slow.beat()
with slow.at_work():
    slow.beat()  # There was a step as it began.
    slow.beat()
    with slow.at_work(expects_steps=False):
        slow.beat()
    slow.beat()
    slow.beat()
slow.beat()
with Heartbeat(pipe, 0.001):
    pipe.receive()
pipe.send({"type": "last"})
"""


async def test_time_without_a_step_is_counted_while_there_is_work(tmp_path: Path) -> None:
    (tmp_path / "beating.py").write_text(BEATING)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = await Child.start("beating", name="test", log=tmp_path / "log", env={"PYTHONPATH": path})
    beats = [await child.receive() for _ in range(30)]
    assert {beat["type"] for beat in beats} == {"alive"}
    assert [beat["stalled_s"] for beat in beats[:6]] == [0.0, 2.0, 4.0, 0.0, 2.0, 0.0]
    assert [beat["stalled_s"] for beat in beats[6:12]] == [0.0, 2.0, 0.0, 2.0, 4.0, 0.0]
    await child.send({})
    while (frame := await child.receive())["type"] == "alive":
        pass
    assert frame == {"type": "last"}  # No heartbeat follows: the thread that sends them has ended.
    await child.stop()
