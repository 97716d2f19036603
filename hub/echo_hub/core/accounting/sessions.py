"""Episodes whose environment is a session: what happens to their rollouts if the session is lost.

A session that died is rebuilt from the stored turns. If it gives all stored answers again, nothing is lost. If its
answer to turn k differs, the turns behind k were sampled after something that never happened. They are dropped as
SESSION_LOST, the answer to turn k is replaced, and turn k + 1 wants a lease. If the session cannot be rebuilt, all its
turns are dropped as SESSION_LOST, and the episode starts again from its prompt with the next attempt.

An episode that starts again may go better. So a policy could learn to crash an environment that goes badly. To prevent
this, an episode ends after a number of losses (`SessionRules.losses`), with a reward that its environment gives for
this case. All its turns are kept then, because the policy sampled them. Restarts of the hub do not count as losses.
"""

from __future__ import annotations

from echo_hub.core.accounting.effects import CloseSession, SessionNoted
from echo_hub.core.accounting.events import SessionDiverged, SessionLost
from echo_hub.core.accounting.groups import LeasedRollout
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_shared.wire.messages import DropReason


class LostSessions:
    """Changes the ledger after an episode has lost its session."""

    def __init__(self, *, ledger: Ledger, out: Outbox) -> None:
        self._ledger = ledger
        self._out = out

    def ends_episode(self, rollout: LeasedRollout, event: SessionDiverged | SessionLost) -> bool:
        """Return True if the rollout's episode must end because of this loss."""
        group = self._ledger.groups[rollout.group_id]
        assert group.session is not None, "only a session can be lost"
        return event.is_loss and group.slots[rollout.index].losses + 1 >= group.session.losses

    def diverge(self, rollout: LeasedRollout, event: SessionDiverged, now: float) -> LeasedRollout:
        """Drop the received `rollout` and all turns after turn `event.turn`. Replace the answer to that turn, and
        return the turn. If the new answer ends the episode, the caller lets the group's owner end it with that turn."""
        group = self._ledger.groups[rollout.group_id]
        slot = group.slots[rollout.index]
        turn, behind = slot.turns[event.turn], slot.received[event.turn + 1 :]
        slot.replaced += 1
        self._note(rollout, is_loss=event.is_loss)
        self._ledger.revoke(slot.leased, DropReason.SESSION_LOST)
        detail = event.detail or f"Its rebuilt environment answered turn {event.turn + 1} otherwise."
        self._ledger.drop(reversed(behind), DropReason.SESSION_LOST, detail)
        turn.components = event.components
        self._ledger.replace_answer(turn, event.observation_ids, turn_reward=event.turn_reward, now=now)
        return turn

    def start_again(self, rollout: LeasedRollout, event: SessionLost) -> None:
        """Drop all turns of the received rollout's episode, which starts again from its prompt."""
        slot = self._ledger.groups[rollout.group_id].slots[rollout.index]
        self._out.act(CloseSession(group_id=rollout.group_id, index=rollout.index, attempt=slot.attempt))
        slot.attempt += 1
        self._note(rollout, is_loss=event.is_loss)
        if slot.turns:  # The prompts of the current leases contain these turns, which are lost now.
            self._ledger.revoke(slot.leased, DropReason.SESSION_LOST)
        slot.failed_on, slot.num_returns, slot.begun = (), 0, None
        self._ledger.drop(reversed(slot.received), DropReason.SESSION_LOST, event.detail)

    def _note(self, rollout: LeasedRollout, *, is_loss: bool) -> None:
        slot = self._ledger.groups[rollout.group_id].slots[rollout.index]
        slot.losses += is_loss
        self._out.record(
            SessionNoted(
                group_id=rollout.group_id,
                index=rollout.index,
                attempt=slot.attempt,
                losses=slot.losses,
                replaced=slot.replaced,
            )
        )
