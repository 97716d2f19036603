"""Simulated sessions: the environment's answers to turns, and the losses of sessions, drawn at random."""

from __future__ import annotations

from typing import Final

import numpy as np

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.events import RolloutContinued, RolloutScored, SessionDiverged, SessionLost
from echo_hub.simulator.scenario import Scenario

_ANSWER: Final = np.zeros(1, np.int32)
"""Token ids of every answer of the simulated environment."""


class SimulatedHost:
    """Answers turns until an episode has all its turns. Sessions are lost with the scenario's probabilities."""

    def __init__(self, scenario: Scenario) -> None:
        self._sessions = scenario.sessions
        self._turns: dict[int, int] = {}
        """Turn number of each lease, by lease id. Leases of an episode's first turn are left out."""
        self._chance = np.random.default_rng([scenario.run.seed, 5])

    def lease(self, lease: SendLease) -> None:
        if lease.turn:
            self._turns[lease.lease_id] = lease.turn

    def answer(self, ended: RolloutScored) -> RolloutScored | RolloutContinued | SessionDiverged | SessionLost:
        """Return the environment's answer to a finished turn. `ended`: the episode's score, in case this turn ends the
        episode, also by the loss of its session."""
        name, drawn = ended.rollout_id, self._chance.random()
        turn = self._turns.get(int(name.partition("-")[0]), 0)
        if drawn < self._sessions.lost_share:
            return SessionLost(rollout_id=name, if_lost=ended, detail="simulated")
        if turn and drawn < self._sessions.lost_share + self._sessions.diverged_share:
            at = int(self._chance.integers(turn))
            return SessionDiverged(rollout_id=name, turn=at, observation_ids=_ANSWER, if_lost=ended)
        if turn + 1 < self._sessions.turns:
            return RolloutContinued(rollout_id=name, observation_ids=_ANSWER)
        return ended
