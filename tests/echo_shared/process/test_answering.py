from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from echo_shared.process.child import ChildExited, Death
from echo_shared.process.supervised import Command, SupervisedChild

PROGRAM = """
import sys
from echo_shared.process.answering import serve
from echo_shared.process.child import ParentPipe
from echo_shared.errors import ConfigError

def opened(opening):
    if opening["fails"]:
        raise ConfigError("It does not open.", got="a closed door", do="Open it.")
    return lambda request: ({"value": number + opening["more"]} for number in request["numbers"])

sys.exit(serve(ParentPipe(), opened))
"""


async def started(tmp_path: Path, **opening: Any) -> SupervisedChild:
    (tmp_path / "answering_child.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = Command(module="answering_child", name="test", log=tmp_path / "log", env={"PYTHONPATH": path})
    return await SupervisedChild.start(command, opening)


async def test_requests_are_answered_in_order_until_the_parent_closes(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        child = await started(tmp_path, fails=False, more=10)
        assert child.ready == {"ready": True}
        await child.send({"numbers": [1, 2]})
        await child.send({"numbers": []})
        await child.send({"numbers": [3]})
        assert [(await child.receive())["value"] for _ in range(3)] == [11, 12, 13]
        await child.stop()


async def test_an_opening_failure_is_reported_in_full_and_ends_the_child(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        child = await started(tmp_path, fails=True)
        assert all(part in child.ready["failed"] for part in ("It does not open.", "a closed door", "Open it."))
        with pytest.raises(ChildExited) as caught:
            await child.receive()
        assert (caught.value.death, caught.value.returncode) == (Death.EXITED, 1)
        await child.stop()
