"""The command `echo-node`: lends this computer to a hub."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.logging import RichHandler

from echo_node.config import NodeConfig, load_config
from echo_node.host import control, service
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Flag, HubRecord, Hubs, Joining
from echo_node.host.paths import HOME_VARIABLE, Paths
from echo_node.host.signals import run_until_stopped
from echo_node.host.spool import Spool
from echo_node.lending.pairing import DEFAULT_PORT
from echo_node.panel import from_json, open_panel, rows
from echo_shared import key_file
from echo_shared.errors import ConfigError, ConnectError, EchoError, StorageError
from echo_shared.files import write_private
from echo_shared.identity import fingerprint

STOP_S: Final = 30.0
LOG_BYTES: Final = 2**20

app = typer.Typer(
    name="echo-node",
    help="Lends this computer to a hub that trains a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
id_app = typer.Typer(help="This node's identity.", no_args_is_help=True)
service_app = typer.Typer(help="Starts the node by itself when you log in.", no_args_is_help=True)
app.add_typer(id_app, name="id")
app.add_typer(service_app, name="service")

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where the node keeps its files.")]
Name = Annotated[str | None, typer.Option("--name", help="Shown on the hub's pages.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Sampling engine: auto, llama_cpp, torch, mlx or vllm.")]
With = Annotated[
    list[str] | None,
    typer.Option("--with", help="HOST:PORT#CODE of a machine that runs `echo-node lend`; may be repeated."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads of the engine; 0 = its own choice.")]
Precision = Annotated[
    str | None, typer.Option("--precision", help="Of the engine's weights: auto, f32, f16, bf16, q8_0, q4_k_m ...")
]
Width = Annotated[int | None, typer.Option("--width", help="Rollouts sampled at once; 0 = what suits the device.")]
SwarmPort = Annotated[int | None, typer.Option("--swarm-port", help="TCP port for other nodes; 0 = any free one.")]
MeshPort = Annotated[int | None, typer.Option("--mesh-port", help="Another, to hand on; 0 = any free one.")]
SwarmHost = Annotated[str | None, typer.Option("--swarm-host", help="Address for both; 127.0.0.1 keeps others out.")]
Cost = Annotated[
    float | None, typer.Option("--cost-per-hour", help="US dollars that this node asks for; 0 = it is a gift.")
]
Power = Annotated[float | None, typer.Option("--power-watts", help="What this machine draws while it works.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Do it without asking.")]


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="The hub's address, or one of its pages': https://hub.example.org")],
    name: Name = None,
    token: Annotated[str | None, typer.Option("--token", help="Invite token, where the hub asks for one.")] = None,
    backend: Backend = None,
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
    quiet: Quiet = False,
) -> None:
    """Join a hub and work for it until stopped."""
    paths = Paths.find(data_dir)
    flags = _given(
        name=name,
        backend=backend,
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
    config = _settings(paths, flags | _given(invite_token=token))
    address = HubAddress.parse(url, insecure=config.insecure)
    known = Hubs(paths).at(address.origin)
    joining = Joining(
        address=address,
        pinned=None if trust_new_key else known,
        invite_token=config.invite_token or (None if known is None else known.invite_token),
        flags=flags,
        patient=False,
    )
    _serve(paths, config, joining, quiet=quiet)


@app.command("run")
def run_command(
    name: Name = None,
    backend: Backend = None,
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
    """Work again for the hub that was joined last, as `join` was told to; what is given here counts for this time."""
    paths = Paths.find(data_dir)
    record = _last_hub(paths)
    flags = _given(
        name=name,
        backend=backend,
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
    config = _settings(paths, record.flags | flags)
    joining = Joining(
        address=HubAddress(origin=record.url),  # Checked when it was joined.
        pinned=record,
        invite_token=config.invite_token or record.invite_token,
        flags=record.flags,
        patient=True,
    )
    _serve(paths, config, joining, quiet=quiet)


@app.command()
def lend(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; left out: all of them.")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="TCP port; 0 = any free one.")] = DEFAULT_PORT,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 = one for each core.")] = 0,
    memory_limit: Annotated[
        float, typer.Option("--memory-limit", min=0, help="GiB to lend at most; 0 = all that is free.")
    ] = 0,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Lend this machine's GPU, or its CPU, to a node in your network, for a model too large for one machine."""
    from echo_node.lend import Helper, Lending

    paths = Paths.find(data_dir)
    _log_to(Console(), paths, file="lend.log", quiet=quiet)
    lending = Lending(host=host, port=port, threads=threads, memory_bytes=int(memory_limit * 2**30))
    run_until_stopped(Helper(paths, lending).run())


@app.command()
def status(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Say what the running node does."""
    answer = asyncio.run(control.ask(Paths.find(data_dir).control_file, "status"))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        for label, value in rows(from_json(answer)):
            typer.echo(f"{label:<10} {value}")


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="A hub to be joined; else the one that was joined last.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, what keeps it from joining, and how to mend it."""
    from echo_node.doctor import examine, lines_of

    diagnosis = examine(Paths.find(data_dir), url)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        typer.echo("\n".join(lines_of(diagnosis)))
        typer.echo("This node can join." if diagnosis.can_join else "This node cannot join: see the problems above.")
    if not diagnosis.can_join:
        raise typer.Exit(1)


@app.command()
def bench(
    backend: Annotated[str, typer.Option("--backend", help="Measure this engine only.")] = "auto",
    model: Annotated[Path | None, typer.Option("--model", help="A model to measure on, instead of the hub's.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=600, help="For each engine and device.")] = 15,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Measure how fast this machine samples with each engine, and choose by that from now on."""
    from echo_node.bench import Bench, Report, base_for, table_of, verdict
    from echo_node.host import hardware

    paths = Paths.find(data_dir)
    hub = Hubs(paths).last()
    config = _settings(paths, {} if hub is None else hub.flags)
    console, progress = Console(), Console(stderr=True)
    if asyncio.run(control.is_running(paths.control_file)):
        progress.print("A node runs here at the same time: what is measured now is slower than the machine is.")

    async def measure() -> Report:
        with base_for(paths, hub, model) as base:
            return await Bench(paths, config, hardware.detect(), base).run(
                backend=backend,
                seconds=seconds,
                begin=lambda choice: progress.print(
                    f"Measuring {choice.name} on {choice.device} on {base.title} ...", markup=False
                ),
            )

    report = run_until_stopped(measure())
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        console.print(table_of(report))
        console.print(verdict(report), markup=False)
    if report.chosen is None:
        raise typer.Exit(1)


@app.command()
def leave(data_dir: DataDir = None, force: Force = False) -> None:
    """Stop the node if it runs, and forget the hub and all that came from it."""
    paths = Paths.find(data_dir)
    record = _last_hub(paths)
    try:
        asyncio.run(control.ask(paths.control_file, "stop"))
    except ConnectError:
        typer.echo("No node is running.")
    with paths.lock(wait_s=STOP_S):
        hubs = Hubs(paths)
        waiting = _waiting_rollouts(hubs.directory(record) / "spool.db")
        if waiting and not force:
            _confirm_loss(waiting, record)
        hubs.forget(record)
    typer.echo(f"Left {record.run_name or 'the hub'} at {record.url}.")


@id_app.command("show")
def id_show(data_dir: DataDir = None) -> None:
    """Print who this node is."""
    me = key_file.load_or_create(Paths.find(data_dir).identity_key)
    typer.echo(f"node id      {me.node_id}")
    typer.echo(f"fingerprint  {fingerprint(me.public_key)}")


@id_app.command("export")
def id_export(file: Annotated[Path, typer.Argument(help="Where to write the key.")], data_dir: DataDir = None) -> None:
    """Write the node's secret key to a file, to move the node to another computer."""
    key = Paths.find(data_dir).identity_key
    me = key_file.load_or_create(key)
    if file.exists():
        raise ConfigError("The file is there already.", got=str(file), do="Choose another name.")
    _copy_key(key, file)
    typer.echo(f"{me.node_id} is in {file}. Whoever has this file can be this node.")


@id_app.command("import")
def id_import(
    file: Annotated[Path, typer.Argument(help="A key that `id export` wrote.")],
    data_dir: DataDir = None,
    force: Force = False,
) -> None:
    """Become the node whose key is in a file."""
    paths = Paths.find(data_dir)
    me = key_file.load(file)
    with paths.lock():
        if paths.identity_key.exists() and not force:
            mine = key_file.load(paths.identity_key)
            if mine.node_id != me.node_id:
                raise ConfigError(
                    "This node has an identity already.",
                    got=mine.node_id,
                    do="Replace it with: echo-node id import --force",
                )
        _copy_key(file, paths.identity_key)
    typer.echo(f"This node is now {me.node_id}.")


@service_app.command("install")
def service_install(data_dir: DataDir = None) -> None:
    """Start the node now and at every login."""
    paths = Paths.find(data_dir)
    record = _last_hub(paths)
    found = _service(paths)
    service.install(found)
    typer.echo(f"The node works for {record.url} from now on. Its service file: {found.path}")


@service_app.command("uninstall")
def service_uninstall(data_dir: DataDir = None) -> None:
    """Stop the service and remove it."""
    removed = service.uninstall(_service(Paths.find(data_dir)))
    typer.echo("The service is gone." if removed else "There was no service.")


@service_app.command("status")
def service_status(data_dir: DataDir = None) -> None:
    """Say what the system knows of the service."""
    typer.echo(service.status(_service(Paths.find(data_dir))))


def run() -> None:
    """The entry point: errors as text on standard error, exit status 1; 2 for wrong usage."""
    try:
        app()
    except EchoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from error
    except asyncio.CancelledError:
        raise SystemExit(130) from None


def _given(**flags: Flag | None) -> dict[str, Flag]:
    """The flags that were on the command line."""
    return {name: value for name, value in flags.items() if value is not None}


def _settings(paths: Paths, flags: Mapping[str, Flag]) -> NodeConfig:
    return load_config(paths.config_file if paths.config_file.exists() else None, flags)


def _serve(paths: Paths, config: NodeConfig, joining: Joining, *, quiet: bool) -> None:
    from echo_node.daemon import Daemon  # Its imports take longer than the other commands run.

    with paths.lock():
        me = key_file.load_or_create(paths.identity_key)
        console = Console()
        _log_to(console, paths, file="node.log", quiet=quiet)

        async def serve() -> None:
            with open_panel(console, quiet=quiet) as panel:
                await Daemon(paths=paths, config=config, me=me, joining=joining, panel=panel).run()

        run_until_stopped(serve())


def _log_to(console: Console, paths: Paths, *, file: str, quiet: bool) -> None:
    paths.logs.mkdir(parents=True, exist_ok=True)
    kept = RotatingFileHandler(paths.logs / file, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8")
    handlers: list[logging.Handler] = [kept]
    if sys.stdout is not None:  # A Windows logon task has none.
        shown: logging.Handler
        if console.is_terminal:
            shown = RichHandler(console=console, show_path=False, show_level=False)
            shown.setFormatter(logging.Formatter("%(message)s"))  # It shows the time itself.
        else:
            shown = logging.StreamHandler(sys.stdout)
        shown.setLevel(logging.WARNING if quiet else logging.INFO)
        handlers.append(shown)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    logging.getLogger("websockets").setLevel(logging.WARNING)


def _last_hub(paths: Paths) -> HubRecord:
    record = Hubs(paths).last()
    if record is None:
        raise ConfigError("This node has joined no hub yet.", got=str(paths.data_dir), do="echo-node join URL")
    return record


def _waiting_rollouts(spool_file: Path) -> int:
    if not spool_file.exists():
        return 0
    spool = Spool(spool_file)
    spool.open()
    try:
        return spool.counts()["sent"]
    finally:
        spool.close()


def _confirm_loss(waiting: int, record: HubRecord) -> None:
    what = f"{waiting} finished rollouts have not reached the hub yet."
    if not sys.stdin.isatty():
        do = "Let them reach it with: echo-node run. Or give them up with: echo-node leave --force"
        raise StorageError(what, got=record.url, do=do, code="unsent")
    typer.confirm(f"{what} Give them up?", abort=True)


def _copy_key(source: Path, target: Path) -> None:
    try:
        write_private(target, source.read_bytes())
    except OSError as error:
        raise StorageError("The key cannot be copied.", got=f"{target}: {error.strerror}") from error


def _service(paths: Paths) -> service.Service:
    home = os.environ.get(HOME_VARIABLE)
    return service.for_this_platform(paths.data_dir, {} if home is None else {HOME_VARIABLE: home})


if __name__ == "__main__":
    run()
