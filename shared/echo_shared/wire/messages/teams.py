"""Teams: a node's request, and the state of its team.

Both travel over HTTP with the node's credentials (`echo_shared.wire.credentials`), so that a command can ask while the
node is connected.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from echo_shared.wire.messages.base import WireMessage
from echo_shared.wire.messages.fields import Count, printable_line
from echo_shared.wire.messages.shown_names import checked_name

MAX_TEAM_NAME: Final = 40

TeamName = Annotated[str, Field(max_length=MAX_TEAM_NAME), AfterValidator(printable_line)]
"""Name of a team. Characters that control terminals or change the text direction are replaced, as in a node's name."""


class TeamWanted(WireMessage):
    """Create a team, join one, leave it, or ask for its state. The answer is Team or Refused.

    A node that creates or joins a team leaves its previous one.
    """

    type: Literal["team_wanted"] = "team_wanted"
    action: Literal["create", "join", "leave", "show"]
    name: TeamName = ""
    """Name of the team to create or join."""

    @model_validator(mode="before")
    @classmethod
    def _shows_what_it_is(cls, values: Any) -> Any:
        """Check the name of a new team as the user typed it, before `TeamName` replaces invisible characters."""
        if isinstance(values, dict) and values.get("action") == "create" and isinstance(values.get("name"), str):
            checked_name(values["name"])
        return values


class Team(WireMessage):
    """The node's current team. All fields have their defaults if the node has no team."""

    type: Literal["team"] = "team"
    name: TeamName = ""
    is_founder: bool = False
    """True: this node created the team."""
    members: Count = 0
    rollouts: Count = 0
    """Rollouts trained on or evaluated while their nodes were in the team. `tokens` counts their tokens."""
    tokens: Count = 0
    tokens_per_day: Annotated[float, Field(ge=0)] = 0.0
    """Recent average of the team's tokens per day."""
    rank: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Rank among teams by rollouts; None = none of the team's rollouts was used yet."""
    num_ranked: Count = 0
    page: Annotated[str, Field(max_length=512, pattern=r"^(/[!-~]*)?$")] = ""
    """Path of the team's page on the hub."""
