"""Reference of `echo-hub` and `echo-node`, generated from their command line parsers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.main import get_command

from scripts.docs.markdown import code, paragraphs, table, text


def page(program: str, app: typer.Typer, about: str) -> str:
    """Return a page of every visible command with its arguments and options."""
    return f"# {program}\n\n{about}\n\n" + "".join(
        _command(path, command) for path, command in walk(get_command(app), (program,)) if not command.hidden
    )


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the command and its subcommands, each with the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> str:
    context = command.context_class(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    arguments = [
        (code(*argument.get_usage_pieces(context)), text(argument.help))
        for argument in command.params
        if argument.param_type_name == "argument" and not argument.hidden
    ]
    records = [option.get_help_record(context) for option in command.params if option.param_type_name == "option"]
    options = [(code(names), text(about)) for names, about in filter(None, records)]
    return (
        f"## {' '.join(path)} {{ #{'-'.join(path)} }}\n\n{paragraphs(command.help)}`{usage}`\n\n"
        + table(("argument", "meaning"), arguments)
        + table(("option", "meaning"), options)
    )
