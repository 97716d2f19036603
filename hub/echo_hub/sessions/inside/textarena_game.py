"""Adapter of TextArena's games for one player. Runs where textarena is installed, and imports nothing of Echo.

The game's seed is the problem's. The reward comes at the end, as the game gives it. An invalid move is answered as the
game answers it. TextArena's documentation: https://github.com/LeonGuertler/TextArena
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import textarena  # type: ignore[import-not-found,unused-ignore]

_MOST_SEED: Final = 2**32
"""Seeds given to a game are below this: some games seed numpy, which takes 32 bits."""


class TextArenaSession:
    """One game of TextArena, which is one episode of the model."""

    def __init__(self, options: Mapping[str, Any], seed: int) -> None:
        self._options = options
        self._seed = seed % _MOST_SEED
        self._game: Any = None

    def reset(self) -> dict[str, Any]:
        random.seed(self._seed)  # Some games draw from the global generators.
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self._seed)
        self._game = _make(self._options)
        self._game.reset(num_players=1, seed=self._seed)
        return {"text": self._observed()}

    def step(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        is_over, _ = self._game.step(reply["text"])
        if is_over:
            return self.score()
        return {"observation": {"text": self._observed() or "."}}

    def score(self) -> dict[str, Any]:
        rewards, _ = self._game.close()
        return {"ending": {"reward": float(rewards[0] if rewards else self._options["broken_off"])}}

    def close(self) -> None:
        self._game = None

    def _observed(self) -> str:
        """Return the game's text for the player: the whole game, or new messages without the player's moves."""
        if self._options["observation"] == "all":
            return str(self._game.get_observation()[1]).strip()
        game = self._game
        while isinstance(game, textarena.Wrapper):
            game = game.env
        messages = game.get_observation()[1]
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n\n".join(str(text).strip() for _, text, kind in messages if kind is not own)


class TextArenaGame:
    is_sync = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def sample(self, seed: int) -> dict[str, Any]:
        text = TextArenaSession(self._options, seed).reset()["text"]
        return {"prompt": text, "metadata": {"seed": seed}}

    def open(self, problem: Mapping[str, Any], seed: int) -> TextArenaSession:
        return TextArenaSession(self._options, problem["metadata"]["seed"])


def _make(options: Mapping[str, Any]) -> Any:
    return textarena.make(options["game"], **options["arguments"])


def make(options: Mapping[str, Any], place: Mapping[str, Any]) -> TextArenaGame:
    """Return the adapter of a game. Raises TextArena's exception for an unknown game, and for a game of several
    players."""
    game = TextArenaGame(options)
    game.sample(0)
    return game
