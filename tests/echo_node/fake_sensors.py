from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection

from echo_node.core.manners import MannersConfig, SensorReading

PATIENCE_S = 60.0


class FakeSensors:
    def __init__(self) -> None:
        self.reading = SensorReading()
        self.asked: list[tuple[bool, tuple[int, ...]]] = []
        self.is_closed = False
        self._looked = threading.Condition()

    def read(self, settings: MannersConfig, *, engines: Collection[int], on_gpu: bool) -> SensorReading:
        with self._looked:
            self.asked.append((on_gpu, tuple(engines)))
            self._looked.notify_all()
            return self.reading

    def close(self) -> None:
        self.is_closed = True

    async def looked_at(self, *, times: int = 2) -> None:
        enough = len(self.asked) + times

        def wait() -> bool:
            with self._looked:
                return self._looked.wait_for(lambda: len(self.asked) >= enough, PATIENCE_S)

        assert await asyncio.to_thread(wait)


class FakeWakeLock:
    def __init__(self) -> None:
        self.held_by = ""
        self.granted_by = "the test"

    def keep(self) -> None:
        self.held_by = self.granted_by

    def release(self) -> None:
        self.held_by = ""
