"""Tokens that the operator's actions make."""

from __future__ import annotations

from echo_hub.actions.requests import AnyRequest, MakeInvite, MakeToken
from echo_hub.dashboard.access.api_tokens import new_api_token
from echo_hub.net.invitations import hash_of, new_token


def secret_of(request: AnyRequest) -> tuple[str, str]:
    """Return the new token and its hash for the store; "" twice if the action makes none."""
    if isinstance(request, MakeInvite):
        secret = new_token()
    elif isinstance(request, MakeToken):
        secret = new_api_token()
    else:
        return "", ""
    return secret, hash_of(secret)
