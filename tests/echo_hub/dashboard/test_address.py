from __future__ import annotations

from dataclasses import replace
from typing import Any

from echo_hub.dashboard.address import addressed


async def test_commands_show_the_address_that_the_reader_used(source: Any) -> None:
    run = await source.run_view()
    run = replace(
        run,
        address="http://10.0.0.1:8710",
        join_command="echo-node join http://10.0.0.1:8710 --token TOKEN",
        install_command="curl -fsSL http://10.0.0.1:8710/install.sh | sh -s -- --join http://10.0.0.1:8710",
    )
    shown = addressed(run, "https://hub.example.org")
    assert shown.join_command == "echo-node join https://hub.example.org --token TOKEN"
    assert "10.0.0.1" not in shown.install_command and shown.install_command.count("https://hub.example.org") == 2
    assert addressed(run, "") is run
