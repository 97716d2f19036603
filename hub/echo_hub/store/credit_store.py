"""The books of credit and of teams: one transaction a method, as `echo_hub.store.store` has it of all others."""

from __future__ import annotations

from typing import assert_never

from sqlalchemy import Engine

from echo_hub.store import board, elsewhere, teams
from echo_hub.store.database import open_to_read, open_to_write
from echo_hub.store.elsewhere import Taken
from echo_shared.credit_books import Board, BoardQuery, Holder, PublicReceipt, StepShare
from echo_shared.messages import Team, TeamWanted
from echo_shared.run_credit import RunCredit


class CreditStore:
    """Of the open store whose engine it is given. What writes are teams, by the hub, and imports, by a command beside
    it; neither writes what a turn of the coordinator does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def board(self, wanted: BoardQuery, now: float) -> Board:
        """Some rows of the leaderboard of nodes or of teams."""
        with open_to_read(self._engine) as connection:
            return board.read_board(connection, wanted, now)

    def credited_node(self, start: str, now: float) -> tuple[str, Holder] | None:
        """A node in full, by its id or the start of it, and its id; None where nothing of such a one has counted."""
        with open_to_read(self._engine) as connection:
            node_id = board.find_node(connection, start)
            found = None if node_id is None else board.read_holder(connection, node_id, "node", now)
            return None if node_id is None or found is None else (node_id, found)

    def step_shares(self, holder: str, width: int) -> dict[int, StepShare]:
        """A holder's part in each `width` consecutive steps, by their number from 0."""
        with open_to_read(self._engine) as connection:
            return board.read_shares(connection, holder, width)

    def public_receipt(self, lease_id: int, index: int) -> PublicReceipt | None:
        """What became of one rollout; None where none of this id was ever leased."""
        with open_to_read(self._engine) as connection:
            return board.read_public_receipt(connection, lease_id, index)

    def change_team(self, node_id: str, wanted: TeamWanted, now: float) -> None:
        """Makes, joins or leaves a team, as the node wants. Raises RefusedError."""
        with open_to_write(self._engine) as connection:
            match wanted.action:
                case "create":
                    teams.create_team(connection, node_id, wanted.name, now)
                case "join":
                    teams.join_team(connection, node_id, wanted.name, now)
                case "leave":
                    teams.leave_team(connection, node_id)
                case "show":
                    pass
                case _:
                    assert_never(wanted.action)

    def remove_team(self, name: str) -> bool:
        """False: there is none of this name. Other processes than the hub's may say so, as `ban`."""
        with open_to_write(self._engine) as connection:
            return teams.remove_team(connection, name)

    def team(self, name: str, now: float) -> tuple[str, Holder] | None:
        """A team in full, by its name, and what it is as a holder of credit."""
        with open_to_read(self._engine) as connection:
            return teams.read_team(connection, name, now)

    def own_team(self, node_id: str, now: float) -> Team:
        """How the team that a node is in stands."""
        with open_to_read(self._engine) as connection:
            return teams.read_own_team(connection, node_id, now)

    def run_credit(self, *, run_id: str, run_name: str, hub_key: bytes, now: float) -> RunCredit:
        """What all nodes have earned in this run, to be signed."""
        with open_to_read(self._engine) as connection:
            return elsewhere.read_run_credit(connection, run_id=run_id, run_name=run_name, hub_key=hub_key, now=now)

    def known_hubs(self) -> frozenset[str]:
        """Keys of other hubs whose exports were taken in, in hexadecimal."""
        with open_to_read(self._engine) as connection:
            return elsewhere.known_hubs(connection)

    def take_in_credit(self, said: RunCredit, now: float) -> Taken:
        """Adds what another hub's export says. Other processes than the hub's may say so, as `ban`."""
        with open_to_write(self._engine) as connection:
            return elsewhere.take_in(connection, said, now)
