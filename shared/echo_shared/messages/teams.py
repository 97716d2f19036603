"""Teams: what a node asks for with its key, and how its team stands. By HTTP with the node's credentials
(`echo_shared.credentials`), so that a command can ask beside a node that is connected."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from echo_shared.messages.base import Message
from echo_shared.messages.fields import Count, printable_line
from echo_shared.messages.shown_names import checked_name

MAX_TEAM_NAME: Final = 40

TeamName = Annotated[str, Field(max_length=MAX_TEAM_NAME), AfterValidator(printable_line)]
"""As with a node's name, what steers terminals or turns text round is replaced."""


class TeamWanted(Message):
    """The node makes a team and is in it, or joins one, and leaves the one that it was in; or leaves it; or asks how it
    stands. Answered by a Team, or refused."""

    type: Literal["team_wanted"] = "team_wanted"
    action: Literal["create", "join", "leave", "show"]
    name: TeamName = ""
    """Of the team that is made or joined."""

    @model_validator(mode="before")
    @classmethod
    def _shows_what_it_is(cls, values: Any) -> Any:
        """Before what is invisible is replaced: of a team that is to be made, the name as it was given."""
        if isinstance(values, dict) and values.get("action") == "create" and isinstance(values.get("name"), str):
            checked_name(values["name"])
        return values


class Team(Message):
    """The team that the node is in now. Of none all is empty."""

    type: Literal["team"] = "team"
    name: TeamName = ""
    is_founder: bool = False
    """The node has made it."""
    members: Count = 0
    rollouts: Count = 0
    """That were trained on or evaluated while their nodes were in the team; so the tokens."""
    tokens: Count = 0
    tokens_per_day: Annotated[float, Field(ge=0)] = 0.0
    """The recent average."""
    rank: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Among teams, by rollouts; None = nothing has counted yet."""
    num_ranked: Count = 0
    page: Annotated[str, Field(max_length=512, pattern=r"^(/[!-~]*)?$")] = ""
    """Path of the team's page on the hub."""
