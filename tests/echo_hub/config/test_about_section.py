from __future__ import annotations

import pytest
from pydantic import ValidationError

from echo_hub.config.about_section import AboutConfig


def test_links_are_of_the_web() -> None:
    links = {"Paper": "https://example.org/a?b=c#d", "Plain": "http://127.0.0.1:80/"}
    assert AboutConfig(links=links).links == links


@pytest.mark.parametrize(
    "link",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,<b>",
        "file:///etc/passwd",
        "//example.org",
        "mailto:a@b.c",
        "example.org",
        "",
        "https://",
        "https://example.org/ x",
        'https://example.org/"onclick="',
        " https://example.org",
        f"https://example.org/{'x' * 500}",
    ],
)
def test_other_texts_are_not_links(link: str) -> None:
    with pytest.raises(ValidationError):
        AboutConfig(links={"Paper": link})


@pytest.mark.parametrize(
    "settings",
    [
        {"description": "x" * 4_001},
        {"consent": "x" * 4_001},
        {"contact": "x" * 401},
        {"links": {"": "https://example.org"}},
        {"links": {"x" * 81: "https://example.org"}},
        {"links": {str(i): "https://example.org" for i in range(13)}},
        {"other": "x"},
    ],
)
def test_lengths_are_bounded(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AboutConfig.model_validate(settings)
