"""An adapter for tests: a game of TextArena whose later steps draw from the system's random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from echo_hub.sessions.inside.textarena_game import TextArenaGame, TextArenaSession


class ChanceSession(TextArenaSession):
    steps = 0

    def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        if self.steps >= self._options["chance_from"]:
            random.seed()
        self.steps += 1
        return super().step(reply)


class ChanceGame(TextArenaGame):
    def open(self, problem: Mapping[str, Any], seed: int) -> TextArenaSession:
        return ChanceSession(self._options, problem["metadata"]["seed"])


def make(options: Mapping[str, Any], place: Mapping[str, Any]) -> ChanceGame:
    return ChanceGame(options)
