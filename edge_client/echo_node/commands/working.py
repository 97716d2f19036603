"""Commands that work for a hub: join, run, leave; and lend, which lends the machine to another node."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from echo_node.commands.options import (
    Backend,
    Cost,
    DataDir,
    Devices,
    Force,
    Json,
    MeshPort,
    Name,
    Power,
    Precision,
    Quiet,
    SwarmHost,
    SwarmPort,
    Threads,
    Width,
    With,
    given,
    joined_hub,
    last_hub,
    settings,
)
from echo_node.config import NodeConfig
from echo_node.farewell import farewell
from echo_node.host import control
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Flag, HubRecord, Hubs, Joining
from echo_node.host.installed_copy import InstalledCopy
from echo_node.host.installing import come_back
from echo_node.host.paths import NodePaths
from echo_node.host.shares import SharesFile
from echo_node.host.signals import run_until_stopped
from echo_node.host.spool import Spool
from echo_node.lending.pairing import DEFAULT_PORT
from echo_node.live_view import open_panel
from echo_node.releases import TAKES_OVER
from echo_shared.errors import ConnectError, EchoError, StorageError
from echo_shared.logs.log_file import LogFile
from echo_shared.signing import key_file

if TYPE_CHECKING:
    from echo_node.daemon import Daemon

log = logging.getLogger(__name__)

STOP_S: Final = 30.0


def join(
    url: Annotated[str, typer.Argument(help="The hub's address, or one of its pages': https://hub.example.org")],
    name: Name = None,
    token: Annotated[str | None, typer.Option("--token", help="Invite token, if the hub asks for one.")] = None,
    backend: Backend = None,
    device: Devices = None,
    data_dir: DataDir = None,
    threads: Threads = None,
    precision: Precision = None,
    width: Width = None,
    helpers: With = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow http:// to another machine.")] = False,
    trust_new_key: Annotated[bool, typer.Option("--trust-new-key", help="Accept that the hub's key changed.")] = False,
    swarm_port: SwarmPort = None,
    mesh_port: MeshPort = None,
    swarm_host: SwarmHost = None,
    cost_per_hour: Cost = None,
    power_watts: Power = None,
    share: Annotated[
        float, typer.Option("--share", min=0, help="Share of this node's time among its hubs; 0 = all of it.")
    ] = 0,
    quiet: Quiet = False,
) -> None:
    """Join a hub and work for it until stopped; with a share, also for the other joined hubs."""
    paths = NodePaths.find(data_dir)
    flags = given(
        name=name,
        backend=backend,
        devices=device or None,
        threads=threads,
        precision=precision,
        width=width,
        helpers=helpers or None,
        insecure=insecure or None,
        swarm_port=swarm_port,
        mesh_port=mesh_port,
        swarm_host=swarm_host,
        cost_per_hour=cost_per_hour,
        power_watts=power_watts,
    )
    config = settings(paths, flags | given(invite_token=token))
    address = HubAddress.parse(url, insecure=config.insecure)
    known = Hubs(paths).at(address.origin)
    joining = Joining(
        address=address,
        pinned=None if trust_new_key else known,
        invite_token=config.invite_token or (None if known is None else known.invite_token),
        flags=flags,
        patient=False,
        share=share,
    )
    _serve(paths, config, joining, by_turns=share > 0, quiet=quiet)


def run_command(
    name: Name = None,
    backend: Backend = None,
    device: Devices = None,
    data_dir: DataDir = None,
    threads: Threads = None,
    precision: Precision = None,
    width: Width = None,
    helpers: With = None,
    swarm_port: SwarmPort = None,
    mesh_port: MeshPort = None,
    swarm_host: SwarmHost = None,
    cost_per_hour: Cost = None,
    power_watts: Power = None,
    quiet: Quiet = False,
) -> None:
    """Work for the last joined hub again, or for all hubs with a share, with the flags of `join`.

    Options given here apply to this run only.
    """
    paths = NodePaths.find(data_dir)
    record = last_hub(paths)
    flags = given(
        name=name,
        backend=backend,
        devices=device or None,
        threads=threads,
        precision=precision,
        width=width,
        helpers=helpers or None,
        swarm_port=swarm_port,
        mesh_port=mesh_port,
        swarm_host=swarm_host,
        cost_per_hour=cost_per_hour,
        power_watts=power_watts,
    )
    by_turns = any(one.share for one in SharesFile(paths.shares_file).load().values())
    config, joining = _rejoining(paths, record, flags)
    _serve(paths, config, joining, by_turns=by_turns, flags=flags, quiet=quiet)


def lend(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; default: all.")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="TCP port; 0 = any free port.")] = DEFAULT_PORT,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 = one for each core.")] = 0,
    memory_limit: Annotated[
        float, typer.Option("--memory-limit", min=0, help="Maximum GiB to lend; 0 = all that is free.")
    ] = 0,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Lend this machine's GPU, or its CPU, to a node in your network, for a model too large for one machine."""
    from echo_node.lend import Helper, Lending

    paths = NodePaths.find(data_dir)
    _log_to(Console(), paths, file="lend.log", quiet=quiet)
    lending = Lending(host=host, port=port, threads=threads, memory_bytes=int(memory_limit * 2**30))
    run_until_stopped(Helper(paths, lending).run())


def leave(
    url: Annotated[str | None, typer.Argument(help="A hub's address; default: the last joined hub.")] = None,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Stop the node if it runs, and forget the hub with all its files."""
    paths = NodePaths.find(data_dir)
    record = last_hub(paths) if url is None else joined_hub(paths, url)
    was_running = True
    try:
        asyncio.run(control.ask(paths.control_file, "stop", {"leaves": record.url}))
    except ConnectError:
        was_running = False
        if not as_json:
            typer.echo("No node is running.")
    with paths.lock(wait_s=STOP_S):
        hubs = Hubs(paths)
        waiting = _waiting_rollouts(hubs.directory(record) / "spool.db")
        if waiting and not force:
            _confirm_loss(waiting, record, may_ask=not as_json)
        hubs.forget(record)
    if as_json:
        left = {"hub": record.url, "run": record.run_name, "was_running": was_running, "given_up_rollouts": waiting}
        typer.echo(json.dumps(left))
        return
    typer.echo(f"Left {record.run_name or 'the hub'} at {record.url}.")


def _rejoining(paths: NodePaths, record: HubRecord, flags: Mapping[str, Flag]) -> tuple[NodeConfig, Joining]:
    """Return settings and parameters for a previously joined hub."""
    config = settings(paths, {**record.flags, **flags})
    joining = Joining(
        address=HubAddress(origin=record.url),  # `join` has checked the address.
        pinned=record,
        invite_token=config.invite_token or record.invite_token,
        flags=record.flags,
        given=flags,
        patient=True,
    )
    return config, joining


def _serve(
    paths: NodePaths,
    config: NodeConfig,
    joining: Joining,
    *,
    by_turns: bool,
    flags: Mapping[str, Flag] = {},
    quiet: bool,
) -> None:
    """Run the daemon. `flags` also apply while the node works for its other hubs."""
    from echo_node.daemon import Daemon  # Import here: other commands run faster than these imports.
    from echo_node.turns import NodeTurns

    with _restarting_if_replaced(paths, joining, quiet=quiet), paths.lock():
        me = key_file.load_or_create(paths.identity_key)
        console = Console()
        _log_to(console, paths, file="node.log", quiet=quiet)

        async def serve() -> None:
            with open_panel(console, quiet=quiet) as panel:
                first = Daemon(paths=paths, config=config, me=me, joining=joining, panel=panel)
                if not by_turns:
                    with _farewell_at_the_end(console, first, quiet=quiet):
                        await first.run()
                    return

                def make(hub: str) -> Daemon:
                    config, joining = _rejoining(paths, joined_hub(paths, hub), flags)
                    return Daemon(paths=paths, config=config, me=me, joining=joining, panel=panel)

                await NodeTurns(SharesFile(paths.shares_file), make).run(first if joining.share else None)

        run_until_stopped(serve())


@contextmanager
def _restarting_if_replaced(paths: NodePaths, joining: Joining, *, quiet: bool) -> Iterator[None]:
    """If the node ended because a newer version was installed, run that version with the same command line."""
    copy = InstalledCopy()  # Remember the running version before another one is installed.
    try:
        yield
    except EchoError as error:
        if error.code != TAKES_OVER or not copy.is_replaced:
            raise
        log.info("Continuing as the newly installed version.")
        again = sys.argv[1:]
        if (
            not joining.patient and Hubs(paths).at(joining.address.origin) is not None
        ):  # This command has joined the hub, so continue with `run` instead of `join`.
            again = ["run", "--data-dir", str(paths.data_dir), *(["--quiet"] if quiet else [])]
        try:
            come_back(copy, again)
        except OSError as failed:
            raise error from failed


@contextmanager
def _farewell_at_the_end(console: Console, daemon: Daemon, *, quiet: bool) -> Iterator[None]:
    """Print the node's summary at its end: on a terminal directly, else into the log."""
    try:
        yield
    finally:
        lines = farewell(daemon.snapshot(), time.time(), leaves=daemon.leaves) if daemon.has_worked else []
        for line in lines:
            if console.is_terminal and not quiet:
                console.print(Text(line))  # Use Text: a plain string could be read as markup.
            else:
                log.info("%s", line)


def _log_to(console: Console, paths: NodePaths, *, file: str, quiet: bool) -> None:
    paths.logs.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [LogFile(paths.logs / file)]
    if sys.stdout is not None:  # A logon task of Windows has no stdout.
        shown: logging.Handler
        if console.is_terminal:
            shown = RichHandler(console=console, show_path=False, show_level=False)
            shown.setFormatter(logging.Formatter("%(message)s"))  # RichHandler itself shows the time.
        else:
            shown = logging.StreamHandler(sys.stdout)
        shown.setLevel(logging.WARNING if quiet else logging.INFO)
        handlers.append(shown)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    logging.getLogger("websockets").setLevel(logging.WARNING)


def _waiting_rollouts(spool_file: Path) -> int:
    if not spool_file.exists():
        return 0
    spool = Spool(spool_file)
    spool.open()
    try:
        return spool.counts()["sent"]
    finally:
        spool.close()


def _confirm_loss(waiting: int, record: HubRecord, *, may_ask: bool) -> None:
    what = f"{waiting} finished rollouts have not reached the hub."
    if not may_ask or not sys.stdin.isatty():
        do = "Send them with: echo-node run. Or drop them with: echo-node leave --force"
        raise StorageError(what, got=record.url, do=do, code="unsent")
    typer.confirm(f"{what} Drop them?", abort=True)
