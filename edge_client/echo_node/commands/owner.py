"""Commands of a running node's owner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from echo_node.commands.options import DataDir, Json, OneDevice
from echo_node.core.manners import HoldReason, OwnerPause
from echo_node.host import control
from echo_node.host.devices import check_names
from echo_node.host.paths import NodePaths
from echo_node.host.pause import DevicePausesFile, PauseFile, pause_for
from echo_node.panel import from_json, rows
from echo_node.status_page.browser import open_in_browser
from echo_shared.errors import ConnectError


def status(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the running node's state."""
    answer = asyncio.run(control.ask(NodePaths.find(data_dir).control_file, "status"))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for label, value in rows(from_json(answer)):
            typer.echo(f"{label:<10} {value}")


def page(
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")] = True,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show the running node on a live page of this computer, with buttons."""
    paths = NodePaths.find(data_dir)
    url = asyncio.run(control.ask(paths.control_file, "page"))["url"]
    if as_json:
        typer.echo(json.dumps({"url": url}))
        return
    opened = browser and open_in_browser(url, paths.page_file)
    typer.echo(f"{'It opens in the browser.' if opened else 'Open within a minute; the address works once:'}\n{url}")


def tray(data_dir: DataDir = None) -> None:
    """Show an icon in the desktop's tray, with the node's state and buttons, until it is closed."""
    from echo_node.tray import Tray

    Tray(NodePaths.find(data_dir)).run()


def pause(
    length: Annotated[str | None, typer.Option("--for", help="30m, 2h, 1h30m, 3d; default: until `resume`.")] = None,
    device: OneDevice = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Leave the machine, or one of its devices, to its owner. Another node or device continues the unfinished work."""
    paths, wanted = NodePaths.find(data_dir), pause_for(length)
    is_running = _tell(paths, "pause", {"length": length, "device": device})
    if not is_running:
        _save_pause(paths, device, wanted)
    _say_pause(wanted.until, device, is_running=is_running, as_json=as_json)


def resume(device: OneDevice = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """End the pause of the node, or of one device."""
    paths = NodePaths.find(data_dir)
    is_running = _tell(paths, "resume", {"device": device})
    if not is_running:
        _save_pause(paths, device, None)
    if as_json:
        typer.echo(json.dumps({"running": is_running}))
    elif is_running:
        answer = asyncio.run(control.ask(paths.control_file, "status"))
        typer.echo(" ".join(["No longer paused.", *_still_held(answer, device)]))
    else:
        typer.echo("No longer paused. No node is running here: start one with: echo-node run")


def _still_held(status: Mapping[str, Any], device: str | None) -> list[str]:
    """Return sentences with the reasons why the node and its devices, or `device` alone, still pause."""
    found = [sentence for reason, sentence in status["holds"].items() if device or reason != HoldReason.PAUSED]
    for one in status["devices"]:
        if device in (None, one["name"]):
            found += [said for reason, said in one["holds"].items() if not device or reason != HoldReason.PAUSED]
    return ["It is still held back:", *found] if found else []


def _save_pause(paths: NodePaths, device: str | None, pause: OwnerPause | None) -> None:
    """Store a pause, or the end of one, for the next start. Raises ConfigError for a name that no device has."""
    if device is None:
        PauseFile(paths.pause_file).save(pause)
        return
    check_names([device])
    file = DevicePausesFile(paths.device_pauses_file)
    others = {name: one for name, one in file.load().items() if name != device}
    file.save(others if pause is None else {**others, device: pause})


def finish(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Finish the node's current leases, take no new ones, then stop."""
    answer = asyncio.run(control.ask(NodePaths.find(data_dir).control_file, "finish"))
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"The node finishes its {answer['held_rollouts']} rollouts, then stops.")


def _tell(paths: NodePaths, verb: str, arguments: Mapping[str, Any] = {}) -> bool:
    """Pass the command to the running node. Return False if no node runs here."""
    try:
        asyncio.run(control.ask(paths.control_file, verb, arguments))
    except ConnectError:
        return False
    return True


def _say_pause(until: float | None, device: str | None, *, is_running: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"until": until, "running": is_running}))
        return
    end = "" if until is None else f" until {datetime.fromtimestamp(until).astimezone():%a %H:%M}"
    resume = "echo-node resume" if device is None else f"echo-node resume --device {device}"
    if is_running:
        what = "Paused" if device is None else f"{device} is paused"
        typer.echo(f"{what}{end}. Resume with: {resume}")
    else:
        what = "A node that starts" if device is None else f"{device} of a node that starts"
        typer.echo(f"No node is running here. {what} is paused{end}; to resume: {resume}")
