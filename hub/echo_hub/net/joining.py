"""Commands that a volunteer copies to install a node and join this hub; each contains the hub's address."""

from __future__ import annotations

from echo_hub.config.sections import HubConfig
from echo_hub.net.install_routes import is_for_windows
from echo_hub.net.server import Server


def join_command(config: HubConfig, server: Server) -> str:
    """Return the `echo-node join` command, with a placeholder for the token if the hub requires invites."""
    token = " --token TOKEN" if config.server.join == "invite" else ""
    return f"echo-node join {server.shared_url}{token}"


def install_command(config: HubConfig, server: Server) -> str:
    """Return the command that installs Echo and joins this hub on Linux or macOS; "" if this hub offers no
    installer."""
    if not config.server.install_from:
        return ""
    arguments = join_command(config, server).removeprefix("echo-node join ")
    return f"curl -fsSL {server.shared_url}/install.sh | sh -s -- --join {arguments}"


def windows_install_command(config: HubConfig, server: Server) -> str:
    """Return the command that installs Echo and joins this hub in PowerShell; "" if this hub offers no Windows archive
    now."""
    if not is_for_windows(config.server.install_from):
        return ""
    token = " -Token TOKEN" if config.server.join == "invite" else ""
    return f"& ([scriptblock]::Create((irm {server.shared_url}/install.ps1))) -Join {server.shared_url}{token}"
