"""The operator's information for volunteers, as shown on the pages."""

from __future__ import annotations

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.board import AboutView


def about_view(config: HubConfig) -> AboutView:
    """Return the view of this run's settings."""
    about = config.about
    return AboutView(
        description=about.description,
        contact=about.contact,
        consent=about.consent,
        links=about.links,
        needs_token=config.server.join == "invite",
        token_from=about.token_from,
    )
