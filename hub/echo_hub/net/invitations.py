"""Invites in memory, so that checking a token needs no database query.

An invite is for one person and a limited number of keys. Its token is 256 random bits; the hub keeps only its SHA-256.
Looking up by hash leaks nothing about the token through timing. A key that joined with an invite stays invited until
the invite is revoked. The key then needs no token, even after the invite expires or reaches its limit.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import sha256

from echo_shared.errors import RefusedError
from echo_shared.records.run import Invite
from echo_shared.wire.messages import RefusalCode


class InviteEndedError(RefusedError):
    """The token is valid, but its invite admits no further key: it is revoked, expired or used up. The attempt does not
    count as token guessing."""

    def __init__(self, ended: str) -> None:
        super().__init__(
            ended,
            do="Ask the hub's operator for another invite, then: echo-node join URL --token TOKEN",
            code=RefusalCode.BAD_TOKEN,
        )


def new_token() -> str:
    """Return a new token. It is shown to the invited person once."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Invitations:
    """All invites, and the keys (nodes) that joined with them. `came_by`: invite id by node id."""

    def __init__(self, invites: Iterable[Invite] = (), came_by: Mapping[str, int] = {}) -> None:
        self._came_by = dict(came_by)
        self._num_keys = Counter(self._came_by.values())
        self._invites: dict[int, Invite] = {}
        self._by_hash: dict[str, Invite] = {}
        self.renew(invites)

    def renew(self, invites: Iterable[Invite]) -> None:
        """Replace the known invites by `invites`; call it after the operator has made or revoked one."""
        self._invites = {invite.invite_id: invite for invite in invites}
        self._by_hash = {invite.token_hash: invite for invite in self._invites.values()}

    def has(self, node_id: str) -> bool:
        """Return True if this key joined with an invite that is not revoked."""
        invite = self._invites.get(self._came_by.get(node_id, 0))
        return invite is not None and invite.revoked_at is None

    def find(self, node_id: str, token: str | None) -> int | None:
        """Return the id of the invite that admits this key.

        Returns None for a key that has no invite and brings no known token. Raises InviteEndedError if
        the token's invite admits no further key.
        """
        given = None if token is None else self._by_hash.get(hash_of(token))
        before = self._invites.get(self._came_by[node_id]) if self.has(node_id) else None
        if given is not None and given is not before:
            ended = self._ended(given)
            if ended is None:
                return given.invite_id
            if before is None:
                raise InviteEndedError(ended)
        return None if before is None else before.invite_id

    def take(self, node_id: str, invite_id: int) -> None:
        """Record that the node with this key joined with the invite.

        Raises InviteEndedError if the invite was revoked or has been used up meanwhile.
        """
        before = self._came_by.get(node_id)
        invite = self._invites[invite_id]
        ended = self._ended(invite, is_new=before != invite_id)
        if ended is not None:
            raise InviteEndedError(ended)
        if before != invite_id:
            if before is not None:
                self._num_keys[before] -= 1
            self._num_keys[invite_id] += 1
            self._came_by[node_id] = invite_id

    def _ended(self, invite: Invite, *, is_new: bool = True) -> str | None:
        """Return why the invite admits no key (with `is_new`: no new key), or None if it admits one."""
        whose = f"This hub's invite for {invite.name}"
        if invite.revoked_at is not None:
            return f"{whose} has been revoked."
        if not is_new:
            return None
        if time.time() >= invite.expires_at:
            return f"{whose} expired on {datetime.fromtimestamp(invite.expires_at):%Y-%m-%d}."
        if self._num_keys[invite.invite_id] >= invite.max_keys:
            keys = "1 key has" if invite.max_keys == 1 else f"{invite.max_keys} keys have"
            return f"{whose} is used up: {keys} joined with it, and it allows no more."
        return None
