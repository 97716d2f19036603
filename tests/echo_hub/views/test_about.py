from __future__ import annotations

from echo_hub.config.file import load_config
from echo_hub.dashboard.board import AboutView
from echo_hub.views.about import about_view


def test_the_about_view_has_the_settings_texts() -> None:
    said = {"description": "d", "contact": "c", "consent": "s", "links": {"t": "https://example.org"}}
    config = load_config(None, {"about": {**said, "token_from": "f"}, "server": {"join": "invite"}})
    assert about_view(config) == AboutView(**said, token_from="f", needs_token=True)
    assert about_view(load_config(None, {})) == AboutView()
