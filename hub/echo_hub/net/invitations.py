"""Who may come by which invite: the store's invites in memory, so that no request costs a look into the store.

An invite is for one person and for so many keys. Its token is 256 random bits, of which the hub keeps a SHA-256: what
is looked up by a hash tells nobody's clock anything of the token. A key that has come by an invite stays invited, with
or without the token, when the invite expires or is full, until it is revoked.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Final

from echo_shared.books import Invite
from echo_shared.errors import RefusedError
from echo_shared.messages import RefusalCode

_DO: Final = "Ask the hub's operator for another invite, then: echo-node join URL --token TOKEN"


class InviteEndedError(RefusedError):
    """The token is a true one, and admits nobody new: no guess."""


def new_token() -> str:
    """What a person is given, once."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What the hub keeps of it."""
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Invitations:
    """`came_by`: the invite of each key that has one. `clock`: seconds since the epoch."""

    def __init__(
        self, invites: Iterable[Invite] = (), came_by: Mapping[str, int] = {}, clock: Callable[[], float] = time.time
    ) -> None:
        self._came_by = dict(came_by)
        self._num_keys = Counter(self._came_by.values())
        self._clock = clock
        self._invites: dict[int, Invite] = {}
        self._by_hash: dict[str, Invite] = {}
        self.renew(invites)

    def renew(self, invites: Iterable[Invite]) -> None:
        """These are all that there are, as the operator has made and revoked them."""
        self._invites = {invite.invite_id: invite for invite in invites}
        self._by_hash = {invite.token_hash: invite for invite in self._invites.values()}

    def has(self, node_id: str) -> bool:
        """Whether this key has come by an invite that is not revoked."""
        invite = self._invites.get(self._came_by.get(node_id, 0))
        return invite is not None and invite.revoked_at is None

    def find(self, node_id: str, token: str | None) -> int | None:
        """The invite by which this key comes; None where it has none, and the token is nobody's. Raises
        InviteEndedError when the token's invite admits no further key."""
        given = None if token is None else self._by_hash.get(hash_of(token))
        before = self._invites.get(self._came_by[node_id]) if self.has(node_id) else None
        if given is not None and given is not before:
            ended = self._ended(given)
            if ended is None:
                return given.invite_id
            if before is None:
                raise InviteEndedError(ended, do=_DO, code=RefusalCode.BAD_TOKEN)
        return None if before is None else before.invite_id

    def take(self, node_id: str, invite_id: int) -> None:
        """This key has come by it. Raises InviteEndedError when others have been quicker, or it was revoked."""
        before = self._came_by.get(node_id)
        invite = self._invites[invite_id]
        ended = self._ended(invite, is_new=before != invite_id)
        if ended is not None:
            raise InviteEndedError(ended, do=_DO, code=RefusalCode.BAD_TOKEN)
        if before != invite_id:
            if before is not None:
                self._num_keys[before] -= 1
            self._num_keys[invite_id] += 1
            self._came_by[node_id] = invite_id

    def _ended(self, invite: Invite, *, is_new: bool = True) -> str | None:
        """Why it admits nobody, or nobody new; None where it does."""
        whose = f"This hub's invite for {invite.name}"
        if invite.revoked_at is not None:
            return f"{whose} has been revoked."
        if not is_new:
            return None
        if self._clock() >= invite.expires_at:
            return f"{whose} expired on {datetime.fromtimestamp(invite.expires_at):%Y-%m-%d}."
        if self._num_keys[invite.invite_id] >= invite.max_keys:
            keys = "1 key has" if invite.max_keys == 1 else f"{invite.max_keys} keys have"
            return f"{whose} is used up: {keys} come by it, and it is for no more."
        return None
