"""Texts for volunteers that the run's operator writes."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, HttpUrl, TypeAdapter, ValidationError

from echo_hub.config.section import Section

_WEB: Final = TypeAdapter(HttpUrl)
_SPACES: Final = re.compile(r"[\x00-\x20\x7f\"'<>\\]")


def _is_web_address(address: str) -> str:
    """Return the address if a page may link to it. Raise ValueError unless it is an http or https address."""
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
    """Texts for volunteers on the public pages /about and /leaderboard, which they can read before they lend a machine.
    The texts are plain; an empty line begins a paragraph."""

    description: Annotated[str, Field(max_length=4_000)] = ""
    """Purpose of the model, names of its makers, and intended use of the results."""
    contact: Annotated[str, Field(max_length=400)] = ""
    """Contact for questions, for example an e-mail address. With server.join = "invite", also for tokens."""
    consent: Annotated[str, Field(max_length=4_000)] = ""
    """Terms that a volunteer accepts by joining: what the machine computes, and which data are kept and shown."""
    links: Annotated[dict[LinkTitle, LinkAddress], Field(max_length=12)] = Field(default_factory=dict)
    """Links by title, http and https only: links = {"Paper" = "https://example.org/paper"}."""
