"""The two spellings of a tenant's token. The hub accepts both on both interfaces."""

from __future__ import annotations

from typing import Final

TINKER_PREFIX: Final = "tml-"
"""Prefix of keys for the Tinker API. Its client refuses a key without this prefix before it contacts any server."""
KEY_ADVICE: Final = "Prompts may go to strangers' machines: send no personal data and no secrets."


def tinker_key(secret: str) -> str:
    """Return a token in the spelling that the client of the Tinker API accepts."""
    return f"{TINKER_PREFIX}{secret}"


def token_in(key: str) -> str:
    """Return the token from a key in either spelling."""
    return key.removeprefix(TINKER_PREFIX)


def key_lines(secret: str) -> tuple[str, ...]:
    """Return lines for the owner of a new token: its two spellings, and where the prompts go."""
    return (
        f"For the Tinker API: TINKER_API_KEY={tinker_key(secret)}",
        f"For the OpenAI API: OPENAI_API_KEY={secret}",
        KEY_ADVICE,
    )
