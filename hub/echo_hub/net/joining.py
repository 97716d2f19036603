"""The lines that a volunteer types to join a hub, with its address in them."""

from __future__ import annotations

from echo_hub.config.sections import HubConfig
from echo_hub.net.install_routes import is_for_windows
from echo_hub.net.server import Server


def join_command(config: HubConfig, server: Server) -> str:
    """What a volunteer types."""
    token = " --token TOKEN" if config.server.join == "invite" else ""
    return f"echo-node join {server.shared_url}{token}"


def install_command(config: HubConfig, server: Server) -> str:
    """What a volunteer types who has nothing of Echo yet; empty unless this hub offers it."""
    if not config.server.install_from:
        return ""
    arguments = join_command(config, server).removeprefix("echo-node join ")
    return f"curl -fsSL {server.shared_url}/install.sh | sh -s -- --join {arguments}"


def windows_install_command(config: HubConfig, server: Server) -> str:
    """The same for PowerShell on Windows; empty unless this hub has something for it now."""
    if not is_for_windows(config.server.install_from):
        return ""
    token = " -Token TOKEN" if config.server.join == "invite" else ""
    return f"& ([scriptblock]::Create((irm {server.shared_url}/install.ps1))) -Join {server.shared_url}{token}"
