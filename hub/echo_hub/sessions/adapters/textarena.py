"""Options of TextArena's games. The games themselves run in `echo_hub.sessions.inside.textarena_game`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from echo_hub.tasks.options import TaskOptions


class TextArenaOptions(TaskOptions):
    """Options of a task `textarena:GAME`."""

    game: str
    """Id of the game, taken from the task's name."""
    observation: Literal["new", "all"] = "new"
    """new: each observation has what the game has said since the last turn. all: it has the whole game so far."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the game, such as max_number, as TextArena defines them."""
    lowest: float = -1.0
    """Lowest reward of the game."""
    highest: float = 1.0
    """Highest reward of the game."""
    max_turns: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Largest number of turns. After them the game ends with the reward `broken_off`; 0 = only the game ends itself."""
    broken_off: float = 0.0
    """Reward of a game that was ended before its own end: max_turns turns were played, or the context is full."""

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError("lowest must be less than highest")
        if not self.lowest <= self.broken_off <= self.highest:
            raise ValueError("broken_off must be from lowest to highest")
        return self

    @classmethod
    def read(cls, task: str, options: Mapping[str, Any]) -> Self:
        return super().read(task, {**options, "game": task.partition(":")[2]})

    @property
    def declared(self) -> Mapping[str, Any]:
        return {"reward_bounds": (self.lowest, self.highest), "max_turns": self.max_turns}
