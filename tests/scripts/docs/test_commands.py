from __future__ import annotations

import pytest
import typer
from typer.main import get_command

from echo_hub.main import app as hub
from echo_node.main import app as node
from scripts.docs.commands import page, walk


@pytest.mark.parametrize(("program", "app"), [("echo-hub", hub), ("echo-node", node)])
def test_every_command_and_option_is_reported(program: str, app: typer.Typer) -> None:
    text = page(program, app, "All of it.")
    for path, command in walk(get_command(app), (program,)):
        if command.hidden:
            continue
        section = text.partition(f"\n## {' '.join(path)} {{ #{'-'.join(path)} }}\n")[2].partition("\n## ")[0]
        for one in command.params:
            if one.param_type_name == "option" and not one.hidden:
                assert one.opts[0] in section and (one.help or "x").split()[0] in section, (path, one.name)
