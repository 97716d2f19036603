"""The tokens that actions make, whichever door they come by."""

from __future__ import annotations

from echo_hub.actions.requests import AnyRequest, MakeInvite, MakeToken
from echo_hub.dashboard.access.api_tokens import new_api_token
from echo_hub.net.invitations import hash_of, new_token


def secret_of(request: AnyRequest) -> tuple[str, str]:
    """The token that this makes, and what the books keep of it; nothing where it makes none."""
    if isinstance(request, MakeInvite):
        secret = new_token()
    elif isinstance(request, MakeToken):
        secret = new_api_token()
    else:
        return "", ""
    return secret, hash_of(secret)
