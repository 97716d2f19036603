"""What volunteers are told of a run, in its operator's own words."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, HttpUrl, TypeAdapter, ValidationError

from echo_hub.config.section import Section

_WEB: Final = TypeAdapter(HttpUrl)
_SPACES: Final = re.compile(r"[\x00-\x20\x7f\"'<>\\]")


def _is_web_address(address: str) -> str:
    """Raises ValueError for what a page must not link to: anything but http and https."""
    try:
        _WEB.validate_python(address)
    except ValidationError as error:
        raise ValueError(f"a link must be an http:// or https:// address, got {address!r}") from error
    if _SPACES.search(address):
        raise ValueError(f"a link must be one address without spaces and quotes, got {address!r}")
    return address


LinkTitle = Annotated[str, Field(min_length=1, max_length=80)]
LinkAddress = Annotated[str, Field(max_length=500), AfterValidator(_is_web_address)]


class AboutConfig(Section):
    """What volunteers are told before they lend a machine, on the public pages /about and /leaderboard. All of it is
    shown as plain text; an empty line begins a new paragraph."""

    description: Annotated[str, Field(max_length=4_000)] = ""
    """What the model is trained for, by whom, and what becomes of it."""
    contact: Annotated[str, Field(max_length=400)] = ""
    """Whom to write to with questions, an e-mail address or the like."""
    consent: Annotated[str, Field(max_length=4_000)] = ""
    """What a volunteer agrees to by joining: what their machine computes, what is kept and shown of it."""
    links: Annotated[dict[LinkTitle, LinkAddress], Field(max_length=12)] = Field(default_factory=dict)
    """By title, http and https alone: links = {"Paper" = "https://example.org/paper"}."""
    token_from: Annotated[str, Field(max_length=400)] = ""
    """With server.join = "invite": whom to ask for a token; empty = contact."""
