from __future__ import annotations

from pathlib import Path

from echo_hub.config.sections import HubConfig
from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net.joining import install_command, windows_install_command
from echo_hub.net.server import Server


def test_the_install_command_is_shown_if_it_is_offered(tmp_path: Path) -> None:
    for join, token in (("open", ""), ("invite", "oken TOKEN")):
        server = ServerConfig.model_validate({"public_url": "https://hub.example/", "join": join})
        assert install_command(HubConfig(server=server), Server(server)) == ""
        assert windows_install_command(HubConfig(server=server), Server(server)) == ""
        server = server.model_copy(update={"install_from": str(tmp_path)})
        assert install_command(HubConfig(server=server), Server(server)) == (
            f"curl -fsSL https://hub.example/install.sh | sh -s -- --join https://hub.example{token and f' --t{token}'}"
        )
        (tmp_path / "install.ps1").unlink(missing_ok=True)
        assert windows_install_command(HubConfig(server=server), Server(server)) == ""
        (tmp_path / "install.ps1").touch()
        assert windows_install_command(HubConfig(server=server), Server(server)) == (
            "& ([scriptblock]::Create((irm https://hub.example/install.ps1)))"
            f" -Join https://hub.example{token and f' -T{token}'}"
        )
