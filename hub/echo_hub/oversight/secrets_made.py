"""Secrets (invite tokens and API tokens) that the operator's actions create."""

from __future__ import annotations

from echo_hub.actions.requests import AnyRequest, MakeInvite, MakeToken
from echo_hub.dashboard.access.api_tokens import new_api_token
from echo_hub.net.invitations import hash_of, new_token


def secret_of(request: AnyRequest) -> tuple[str, str]:
    """Return a new token for this action, and the hash that the database stores instead of it. Both are "" if the
    action creates no token."""
    if isinstance(request, MakeInvite):
        secret = new_token()
    elif isinstance(request, MakeToken):
        secret = new_api_token()
    else:
        return "", ""
    return secret, hash_of(secret)
