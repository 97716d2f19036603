"""`echo-hub`: the operator's commands."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.logging import RichHandler
from rich.text import Text

import echo_shared
from echo_hub.commands.action_commands import act, audit, tokens, undo
from echo_hub.commands.archive_command import archive
from echo_hub.commands.backup_commands import backup, restore
from echo_hub.commands.bundle_commands import bundle, check_bundle
from echo_hub.commands.chat_command import chat
from echo_hub.commands.compare_command import compare
from echo_hub.commands.credit_commands import credit, team
from echo_hub.commands.demo_settings import DemoBase, DemoTask, demo_precision, demo_settings, demo_task
from echo_hub.commands.export_commands import export, push
from echo_hub.commands.fork_command import fork
from echo_hub.commands.gateway_command import gateway
from echo_hub.commands.invite_commands import invite, invites, uninvite
from echo_hub.commands.log_commands import alert_test, events, log
from echo_hub.commands.new_task_command import new_task
from echo_hub.commands.nodes_commands import ban, nodes, pardon, unban
from echo_hub.commands.progress_line import errors, progress_line
from echo_hub.commands.rollouts_command import rollouts
from echo_hub.commands.sft_command import sft
from echo_hub.commands.tenants_command import tenants
from echo_hub.commands.try_task_command import EnvPythonOption, option_of, sessions_flags, try_task
from echo_hub.commands.until_stopped import run_until_stopped
from echo_hub.config.file import load_config, render_chosen, render_config
from echo_hub.learner.process import begun
from echo_hub.lifecycle.beside_hub import RunArgument, check_writable, store_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run, port_beside
from echo_hub.tasks.free_rewards import warning_of
from echo_shared.errors import ConfigError, EchoError
from echo_shared.files.utf8 import use_utf8, utf8_names
from echo_shared.process.importing import uncollected
from echo_shared.settings import without_secrets
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint

if TYPE_CHECKING:
    from echo_hub.config.sections import HubConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a language model by reinforcement learning, with rollouts from computers that people lend.",
)

HostOption = Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
PortOption = Annotated[int | None, typer.Option(min=0, max=65535, help="Port for everything: nodes, pages, files.")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the whole run.")]
ModeOption = Annotated[str | None, typer.Option(help="colocated, sequential or async.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Every sub-seed is a hash of this one.")]


def run() -> None:
    """Run the command line. An EchoError is printed as text, without a traceback."""
    use_utf8()
    try:
        with utf8_names():
            app()
    except EchoError as error:
        # Use Text, not markup: the message may contain brackets. Do not wrap: users copy paths and commands from it.
        errors.print(Text.assemble(("Error: ", "red"), str(error)), soft_wrap=True)
        sys.exit(1)


@app.callback()
def _common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details.")] = False,
) -> None:
    shown = RichHandler(console=errors, show_path=False, level=logging.INFO if verbose else logging.WARNING)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown])
    # The operator's page shows INFO lines, even without --verbose.
    logging.getLogger("echo_hub").setLevel(logging.INFO)


@app.command()
def init(
    run_directory: RunArgument,
    port: PortOption = None,
    host: HostOption = None,
    steps: StepsOption = None,
    mode: ModeOption = None,
    seed: SeedOption = None,
    beside: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Make it a run of the hub whose run this is: it takes that hub's key."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID", help="The base model, as model.base: an id on the model hub, a directory or builtin:tiny."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="As task.name; none = the run only works for tenants.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="One of task.options, its value as TOML; repeatable.")
    ] = None,
    env_python: EnvPythonOption = None,
) -> None:
    """Make a run directory: a commented config.toml and the hub's key.

    With --base or --task the file has only what differs from the defaults: settings that suit this base and this task,
    with their reasons. Without, it has every setting.
    """
    directory = RunDirectory(run_directory)
    if beside is not None and port is None:
        port = port_beside(RunDirectory(beside))
    flags = _flags(host=host, port=port, steps=steps, mode=mode, seed=seed)
    rendered = ""
    if base is None and task is None and not option:
        config = load_config(None, {**flags, **sessions_flags(env_python)})
    else:
        chosen_flags = {
            **flags,
            **_base_and_task(base, task, dict(map(option_of, option or ()))),
            **sessions_flags(env_python),
        }
        config, rendered = _suited(chosen_flags)
    make_run(directory, config, beside=None if beside is None else RunDirectory(beside), rendered=rendered)
    key = key_file.load(directory.key).public_key
    if warning := warning_of(config.task.name):
        typer.echo(f"Warning: {warning}", err=True)
    typer.echo(f"Made {directory.config} and the hub's key.\nKey fingerprint: {fingerprint(key)}")
    if rendered and config.trains:
        typer.echo(f"What the base can do so far: echo-hub try-task --config {directory.config} --sample 4")
    typer.echo(f"Next: edit the settings if you like, then: echo-hub serve {run_directory}")


@app.command()
def serve(
    run_directory: RunArgument,
    host: HostOption = None,
    port: PortOption = None,
    steps: StepsOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings that hold, secrets masked.")] = False,
) -> None:
    """Serve a run: lease work to nodes, train, publish, show the pages. A restarted hub resumes the run."""
    directory = RunDirectory(run_directory)
    directory.check()
    config = load_config(directory.config, _flags(host=host, port=port, steps=steps))
    if dry_run:
        typer.echo(render_config(without_secrets(config)))
        return
    directory.check_unlocked()  # Check early: if another hub already serves the run, do not start a learner process.

    async def serve_until_stopped() -> None:
        async with begun(config.learner, directory.root, trains=config.trains) as spawned:
            with uncollected():
                from echo_hub.commands.serve_line import ServeLine
                from echo_hub.serving.opening import open_hub

            async with open_hub(config, directory, spawned=spawned) as hub:
                typer.echo(f"Run          {config.run.name} ({directory.root})")
                typer.echo(f"Dashboard    {hub.dashboard_url}\nLeaderboard  {hub.url}/leaderboard")
                typer.echo(f"Key          {fingerprint(hub.key)}\nTo lend a machine: {hub.join_command}")
                if hub.tenant_urls:
                    typer.echo(
                        f"For tenants  {hub.tenant_urls}; a token: echo-hub act {directory.root} token NAME scope=use"
                    )
                showing = asyncio.create_task(ServeLine(hub.pages, terminal=errors, out=sys.stdout).run())
                try:
                    await hub.serve()
                finally:
                    showing.cancel()
                    await asyncio.wait([showing])

    run_until_stopped(serve_until_stopped())


@app.command()
def demo(
    task: Annotated[
        DemoTask | None,
        typer.Option(help="What is taught; default: arithmetic, or with --base smollm2 sums."),
    ] = None,
    base: Annotated[
        DemoBase | None,
        typer.Option(help="A built-in model, or the language model SmolLM2-135M-Instruct: a quarter of an hour."),
    ] = None,
    directory: Annotated[Path | None, typer.Option(help="Where the run goes; default: echo-demo/DATE-TIME.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up after the last step, until Ctrl-C.")] = False,
    steps: StepsOption = None,
    port: PortOption = 0,
    seed: SeedOption = None,
    mode: ModeOption = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="A node's backend; repeat it for each node. Default: llama_cpp, if installed, and torch."),
    ] = None,
    report_json: Annotated[Path | None, typer.Option("--json", help="Write the report there as well.")] = None,
) -> None:
    """Start a hub and two nodes on this machine, which train a built-in model in a few minutes, or a language model in
    a quarter of an hour.
    """
    check_writable(report_json)
    chosen_task = demo_task(task, base)
    run_directory = RunDirectory(directory or Path("echo-demo") / f"{datetime.now():%Y%m%d-%H%M%S}")
    flags = _flags(host=None, port=port, steps=steps, mode=mode, seed=seed)
    make_run(run_directory, load_config(None, demo_settings(chosen_task, flags)))
    config = load_config(run_directory.config, {})

    async def demo_until_stopped() -> None:
        async with begun(config.learner, run_directory.root) as spawned:
            with uncollected():
                from echo_hub.commands.demo import default_backends, missing_engine, run_demo

            chosen = tuple(backend or default_backends())
            if not backend and (line := missing_engine()) is not None:
                typer.echo(line)
            await run_demo(
                config,
                run_directory,
                backends=chosen,
                precision=demo_precision(chosen_task),
                gguf=chosen_task is DemoTask.SUMS,
                keep=keep,
                report_json=report_json,
                spawned=spawned,
            )

    run_until_stopped(demo_until_stopped())


@app.command(name="eval")
def evaluate(
    run_directory: RunArgument,
    version: Annotated[
        list[int] | None, typer.Option(min=0, help="Policy version, 0 = base; repeatable. Default: base and newest.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Held-out problems; default: the run's setting.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Completions a problem for mean@k; default: the run's setting.")
    ] = None,
    figures_json: Annotated[Path | None, typer.Option("--json", help="Write all figures there as well.")] = None,
) -> None:
    """Print the held-out accuracy of the base and of policy versions: greedy, and mean@k and pass@k with --samples. A
    few greedy answers of each version follow, solved and unsolved ones.

    With several versions, the last is compared with the first. A difference below two standard errors may be chance.

    Progress is printed on stderr.
    """
    from echo_hub.commands.answer_text import print_example
    from echo_hub.evaluation.work_count import WorkCount
    from echo_hub.lifecycle.export import evaluate_versions

    directory = RunDirectory(run_directory)
    directory.check()
    check_writable(figures_json)
    config = load_config(directory.config, {"evaluation": {"problems": problems, "samples": samples}})
    count = WorkCount(doing="Evaluating", units="completions")
    with progress_line(count):
        measured = run_until_stopped(
            evaluate_versions(config, directory, policy_versions=version, count=count), stopped="measure again"
        )
    if measured is None:
        return
    for result in measured.evaluations:
        label = "base" if result.policy_version == 0 else f"version {result.policy_version}"
        typer.echo(f"{label:<14} {result.text} of {result.num_problems} held-out problems")
    for one in measured.differences:
        typer.echo(f"{one.label}: {one.text}" if len(measured.differences) > 1 else one.text)
    for example in measured.examples:
        print_example(example)
    if figures_json is not None:
        figures_json.write_text(json.dumps(asdict(measured), indent=2) + "\n", encoding="utf-8")


for command in (
    *(nodes, ban, unban, pardon),
    *(invite, invites, uninvite, act, undo, audit, tokens),
    *(rollouts, archive, bundle, check_bundle, log, events, alert_test, backup, restore),
    tenants,
    *(try_task, new_task, compare, fork, sft, gateway, export, push, chat),
):
    app.command()(command)
app.add_typer(credit, name="credit")
app.add_typer(team, name="team")


@app.command()
def password(run_directory: RunArgument) -> None:
    """Set the password of the operator's pages, read from the terminal (twice) or from a pipe. Ends all sessions."""
    from echo_hub.dashboard.access.credentials import set_password

    directory = RunDirectory(run_directory)
    directory.check()
    if sys.stdin.isatty():
        given = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        given = sys.stdin.readline().rstrip("\r\n")
    set_password(directory.operator_password, given)
    typer.echo("The operator's pages ask for this password from now on, or for the token.")


@app.command()
def plan(
    run_directory: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The run's directory.")] = None,
    file: Annotated[Path | None, typer.Option(metavar="TOML", help="A described fleet in place of a run.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print an example of such a file, and end.")] = False,
    staleness: Annotated[int | None, typer.Option(min=0, max=1000, help="Another training.max_staleness.")] = None,
    publish_every: Annotated[int | None, typer.Option(min=1, help="Another training.publish_every.")] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="CLASS=N", help="N more of a class; repeatable.")] = None,
    target: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of what the learner could train.")] = 0.98,
    figures_json: Annotated[Path | None, typer.Option("--json", help="Write all figures there as well.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="SVG", help="Draw a few steps there.")] = None,
) -> None:
    """Estimate whether a fleet of nodes keeps the learner busy, and what would be needed: from a run's records, or for
    a fleet described in a file.
    """
    from echo_hub.commands.plan import EXAMPLE, changed, fleet_of_file, fleet_of_run, make_plan, write_json
    from echo_hub.commands.plan_picture import write_svg
    from echo_hub.commands.plan_text import plan_lines
    from echo_hub.store.actions import read_settings
    from echo_hub.views.live import with_stored

    if example:
        typer.echo(EXAMPLE, nl=False)
        return
    check_writable(figures_json)
    check_writable(picture)
    if file is not None and run_directory is None:
        fleet = fleet_of_file(file)
    elif run_directory is not None and file is None:
        directory = RunDirectory(run_directory)
        with store_of(directory) as store:
            fleet = fleet_of_run(store, with_stored(load_config(directory.config, {}), store.read(read_settings)))
    else:
        raise ConfigError("Plans are for a run's directory or for a fleet in a file.", do="Name one of the two.")
    planned = make_plan(changed(fleet, staleness=staleness, publish_every=publish_every, add=add or ()), target=target)
    typer.echo("\n".join(plan_lines(planned)))
    if figures_json is not None:
        write_json(planned, figures_json)
    if picture is not None:
        write_svg(planned, picture)


@app.command()
def learner(
    address: Annotated[str, typer.Option(help="HOST:PORT, the run's learner.address.")],
    host_rank: Annotated[int, typer.Option(min=1, help="Which host this is: 1 for the first beside the hub's.")],
    hosts: Annotated[int, typer.Option(min=2, help="The run's learner.hosts.")] = 2,
    processes: Annotated[int, typer.Option(min=1, help="The run's learner.processes.")] = 1,
    base: Annotated[str, typer.Option(help="The run's model.base, or its directory on this host.")] = "builtin:tiny",
) -> None:
    """Run this host's part of a learner on several hosts. The hub's run has the settings learner.hosts and
    learner.address.
    """
    from echo_hub.learner.launch import Launch, serve_host
    from echo_hub.run.base_files import resolve_base

    typer.echo(f"Host {host_rank} of {hosts} works for the learner at {address}, until Ctrl-C.")
    serve_host(
        Launch(
            processes=processes,
            hosts=hosts,
            host_rank=host_rank,
            address=address,
            base_dir=resolve_base(base),
        )
    )


@app.command()
def simulate(
    scenario_file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The scenario, TOML; default: all defaults.")
    ] = None,
    seed: SeedOption = None,
    steps: StepsOption = None,
    figures_json: Annotated[Path | None, typer.Option("--json", help="Write all figures there as well.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print the scenario that holds, each setting explained, and end.")
    ] = False,
) -> None:
    """Drive the hub's coordinator with simulated nodes in virtual time, to see if a pool of nodes is enough and what is
    wasted.
    """
    from echo_hub.simulator.report import table
    from echo_hub.simulator.scenario_file import load_scenario, render_scenario
    from echo_hub.simulator.simulation import simulate as simulate_run

    check_writable(figures_json)
    scenario = load_scenario(scenario_file, _flags(seed=seed, steps=steps))
    if example:
        typer.echo(render_scenario(scenario), nl=False)
        return
    report = simulate_run(scenario, time.process_time)
    for name, figure in table(report):
        typer.echo(f"{name:<24}{figure}")
    if figures_json is not None:
        figures_json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


@app.command()
def version() -> None:
    """Print the software's version."""
    typer.echo(f"echo-swarm {echo_shared.__version__}")


def _base_and_task(base: str | None, task: str | None, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return base and task as settings. Paths become absolute, so that the run can be served from any directory."""
    if base is not None and (path := Path(base).expanduser()).exists():
        # A file keeps its name: a link in the model hub's cache points to a file that is named by its hash.
        base = str(path.resolve() if path.is_dir() else path.absolute())
    for key in ("path", "heldout_path", "directory"):
        value = options.get(key)
        if isinstance(value, str) and value and Path(value).exists():
            options[key] = str(Path(value).resolve())
    return {"model": {"base": base}, "task": {"name": task, "options": options or None}}


def _suited(flags: dict[str, dict[str, Any]]) -> tuple[HubConfig, str]:
    """Return settings that suit the flags' base and task, and the text of a config.toml that has only these
    settings."""
    with uncollected():
        from echo_hub.commands.suited_settings import suited_settings
        from echo_hub.learner.device import resolve_device

    config, chosen = suited_settings(flags, has_gpu=resolve_device("auto").type == "cuda")
    reasons = {section: {key: reason for key, (_, reason) in keys.items()} for section, keys in chosen.items()}
    return config, render_chosen(config, reasons)


def _flags(
    *,
    host: str | None = None,
    port: int | None = None,
    steps: int | None = None,
    mode: str | None = None,
    seed: int | None = None,
) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "server": {"host": host, "port": port},
        "training": {"steps": steps},
        "run": {"mode": mode, "seed": seed},
    }
    return {
        name: {key: value for key, value in section.items() if value is not None} for name, section in sections.items()
    }


if __name__ == "__main__":
    run()
