"""`echo-hub` as an operator types it, except `serve`, which is tested in tests/end_to_end."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner, Result

import echo_shared
from echo_hub import main as main_module
from echo_hub.commands import progress_line
from echo_hub.config.file import load_config
from echo_hub.core.accounting.effects import StandingRecorded
from echo_hub.core.trust.standing import StandingRow, StandingState
from echo_hub.main import app
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.store.known_nodes import ban_nodes, read_banned_nodes
from echo_hub.store.standings import read_wanted_pardons
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, EchoError
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint
from tests.echo_hub.lifecycle.test_starting import adapter_of, made
from tests.echo_hub.written_books import write_books

FLAGS = {
    "init": {
        *("--base", "--task", "--option", "--port", "--host", "--steps", "--mode", "--seed", "--beside"),
        "--env-python",
    },
    "serve": {"--host", "--port", "--steps", "--dry-run"},
    "demo": {
        "--task",
        "--base",
        "--directory",
        "--keep",
        "--steps",
        "--port",
        "--seed",
        "--mode",
        "--backend",
        "--json",
    },
    "export": {
        *("--base", "--version", "--merged", "--dtype", "--gguf", "--ollama", "--push", "--public"),
    },
    "push": {"--public"},
    "chat": {
        *("--version", "--prompt", "--samples", "--temperature", "--max-tokens", "--seed", "--system", "--device"),
    },
    "eval": {"--version", "--problems", "--samples", "--json"},
    "nodes": set(),
    "ban": set(),
    "unban": set(),
    "pardon": set(),
    "invite": {"--keys", "--days"},
    "invites": {"--json"},
    "uninvite": {"--ban"},
    "credit": set(),
    "team": set(),
    "rollouts": {
        *("--step", "--group", "--node", "--version", "--state", "--drop", "--check", "--reward-min", "--reward-max"),
        *("--tokens-min", "--tokens-max", "--text", "--before", "--limit", "--json", "--parquet"),
    },
    "log": {"--lines", "--follow", "--level", "--json"},
    "events": {"--kind", "--severity", "--subject", "--before", "--limit", "--json"},
    "alert-test": set(),
    "act": {"--wait"},
    "undo": {"--wait"},
    "audit": {"--newest", "--json"},
    "tokens": {"--json"},
    "tenants": {"--json"},
    "try-task": {
        *("--sample", "--replies", "--option", "--config", "--base", "--count", "--seed", "--json", "--env-python")
    },
    "new-task": {"--directory"},
    "compare": {"--figure", "--json"},
    "fork": {"--at", "--set"},
    "sft": {
        *("--epochs", "--batch-tokens", "--learning-rate", "--heldout", "--seed", "--evaluate", "--anew", "--json"),
    },
    "gateway": {"--host", "--port", "--dry-run"},
    "archive": {"--before-step", "--delete", "--shrink", "--json"},
    "bundle": {"--step", "--named"},
    "check-bundle": {
        *("--share", "--seed", "--base", "--hub-key", "--device", "--precision", "--threads", "--option"),
        *("--run-task-code", "--no-step", "--json"),
    },
    "backup": set(),
    "restore": set(),
    "password": set(),
    "plan": {
        *("--file", "--example", "--staleness", "--publish-every", "--add", "--target", "--json", "--picture"),
    },
    "learner": {"--address", "--host-rank", "--hosts", "--processes", "--base"},
    "simulate": {"--seed", "--steps", "--json", "--example"},
    "version": set(),
}


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Restore the log level, which commands set for their whole process."""
    log = logging.getLogger("echo_hub")
    before = log.level
    yield
    log.setLevel(before)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: str | Path) -> EchoError:
    result = invoke(*arguments)
    assert isinstance(result.exception, EchoError), result
    return result.exception


def entered(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["echo-hub", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main_module.run()
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def run(tmp_path: Path) -> Path:
    said("init", tmp_path / "run", "--port", "0")
    return tmp_path / "run"


def test_commands_and_flags_are_these() -> None:
    command = typer.main.get_command(app)
    commands = command.commands  # type: ignore[attr-defined]
    found = {
        name: {option for parameter in each.params for option in parameter.opts if option.startswith("--")} - {"--help"}
        for name, each in commands.items()
    }
    assert found == FLAGS


def test_a_password_is_read_from_a_pipe(run: Path) -> None:
    result = CliRunner().invoke(app, ["password", str(run)], input="correct horse battery staple\n")
    assert result.exit_code == 0 and "correct horse" not in result.output
    assert (run / "operator.password").read_text().startswith("$argon2id$")
    kept = (run / "operator.password").read_bytes()
    with pytest.raises(ConfigError, match="5 characters"):
        CliRunner().invoke(app, ["password", str(run)], input="short\n", catch_exceptions=False)
    assert (run / "operator.password").read_bytes() == kept


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
@pytest.mark.parametrize("second", ["correct horse battery staple", "another horse"])
def test_at_a_terminal_a_password_is_asked_for_twice_and_never_shown(run: Path, second: str) -> None:
    import pty

    first, (ours, theirs) = "correct horse battery staple", pty.openpty()
    command = [sys.executable, "-m", "echo_hub.main", "password", str(run)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = ""
        for prompt, typed in (("Password: ", first), ("confirmation: ", second)):
            while not shown.endswith(prompt):
                shown += os.read(ours, 1).decode()
            os.write(ours, f"{typed}\n".encode())
        if second == first:
            assert process.wait(60) == 0
        else:
            while "do not match" not in shown:
                shown += os.read(ours, 1).decode()
            process.kill()
    os.close(ours)
    assert "horse" not in shown
    assert (run / "operator.password").exists() == (second == first)


def test_init_makes_a_run_that_load_config_reads(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    text = said("init", run, "--host", "::1", "--port", "99", "--steps", "7", "--mode", "sequential", "--seed", "5")
    config = load_config(run / "config.toml", {})
    assert (config.server.host, config.server.port, config.training.steps) == ("::1", 99, 7)
    assert (config.run.mode, config.run.seed) == ("sequential", 5)
    key = key_file.load(run / "hub.key")
    assert fingerprint(key.public_key) in text
    assert f"echo-hub serve {run}" in text.replace("\n", "")
    if sys.platform != "win32":
        assert (run / "hub.key").stat().st_mode & 0o077 == 0


def test_init_with_a_base_and_a_task_writes_fitting_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings files must be short, and contain absolute paths so that the run can be served from any directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_base("builtin:tiny"), tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[-1].content }}[reply]")
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    text = said("init", "run", "--base", "chat", "--task", "jsonl", "--option", "path=sums.jsonl", "--steps", "3")
    assert "try-task --config run/config.toml --sample" in text
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["model"] == {"base": str(tmp_path / "chat")}
    assert settings["task"]["options"] == {"path": str(tmp_path / "sums.jsonl")}
    assert settings["training"]["steps"] == 3 and "learning_rate" in settings["training"]
    assert sum(map(len, settings.values())) < 15
    held = tomllib.loads(said("serve", "run", "--dry-run"))
    assert held["sampling"]["max_tokens"] == settings["sampling"]["max_tokens"]


def test_init_does_not_change_a_run_and_keeps_a_key(run: Path) -> None:
    before = (run / "config.toml").read_bytes(), (run / "hub.key").read_bytes()
    assert "This directory already contains a run" in refusal("init", run).what
    assert ((run / "config.toml").read_bytes(), (run / "hub.key").read_bytes()) == before
    (run / "config.toml").unlink()
    said("init", run)
    assert (run / "hub.key").read_bytes() == before[1]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--mode", "fast"), "command line: run.mode = 'fast'"),
        (("--host", "x", "--steps", "3", "--mode", "async", "--seed", "x"), None),
        (("--port", "70000"), None),
        (("--steps", "0"), None),
        (("--speed", "9"), None),
        (("--task", "arithmatic"), "did you mean arithmetic"),
        (("--base", "builtin:huge"), "base model does not exist"),
        (("--task", "arithmetic", "--option", "digitz=2"), "digitz"),
    ],
)
def test_wrong_flags_make_no_run(tmp_path: Path, flags: tuple[str, ...], expected: str | None) -> None:
    result = invoke("init", tmp_path / "run", *flags)
    if expected is None:
        assert result.exit_code == 2
    else:
        assert isinstance(result.exception, ConfigError) and expected in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_init_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be created" in refusal("init", tmp_path / "file" / "run").what


def test_simulate_prints_figures_and_writes_them(tmp_path: Path) -> None:
    scenario, figures = tmp_path / "scenario.toml", tmp_path / "figures.json"
    scenario.write_text(said("simulate", "--example", "--steps", "6", "--seed", "3"))
    assert tomllib.loads(scenario.read_text())["run"]["seed"] == 3
    text = said("simulate", scenario, "--json", figures)
    assert "Learner utilisation" in text and "not finished" not in text
    assert json.loads(figures.read_text())["steps"] == 6


def test_a_wrong_scenario_is_not_simulated(tmp_path: Path) -> None:
    (tmp_path / "scenario.toml").write_text("[nodes]\nwidht = 1\n")
    assert "did you mean width?" in str(refusal("simulate", tmp_path / "scenario.toml"))
    assert "--seed" in invoke("simulate", "--seed", "-1").output
    assert "cannot be written there" in str(refusal("simulate", "--json", tmp_path / "none" / "f.json"))


def test_a_dry_run_prints_the_resolved_settings_and_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_HUB_TRAINING__GROUP_SIZE", "4")
    before = sorted(path.name for path in run.iterdir())
    settings = tomllib.loads(said("serve", run, "--dry-run", "--steps", "3", "--port", "81", "--host", "0.0.0.0"))
    assert (settings["training"]["steps"], settings["training"]["group_size"]) == (3, 4)
    assert (settings["server"]["port"], settings["server"]["host"]) == (81, "0.0.0.0")
    assert sorted(path.name for path in run.iterdir()) == before
    assert load_config(run / "config.toml", {}).server.port == 0


def test_a_plan_for_a_described_fleet(tmp_path: Path) -> None:
    fleet, figures, picture = tmp_path / "fleet.toml", tmp_path / "plan.json", tmp_path / "plan.svg"
    fleet.write_text(said("plan", "--example"))
    text = said("plan", "--file", fleet, "--json", figures, "--picture", picture)
    assert text.endswith("Add 8 nodes like laptop, or add 2 nodes like rented GPU.\n")
    assert json.loads(figures.read_text())["target"] == 0.98
    assert picture.read_text().startswith("<svg ")
    more = said("plan", "--file", fleet, "--add", "laptop=8", "--staleness", "3", "--target", "0.9")
    assert "The learner can train" in more.splitlines()[-1]


def test_a_plan_by_a_runs_books(run: Path) -> None:
    Store.open(RunDirectory(run).database_url).close()
    assert "has not trained a step yet" in refusal("plan", run).what
    store = Store.open(RunDirectory(run).database_url)
    write_books(store)
    store.close()
    assert "torch · RTX 4070" in said("plan", run)
    assert "the learner waits" in said("plan", run, "--staleness", "0").splitlines()[-1]


def test_a_plan_is_for_one_thing(run: Path, tmp_path: Path) -> None:
    assert "a run's directory or for a fleet" in refusal("plan").what
    assert "a run's directory or for a fleet" in refusal("plan", run, "--file", tmp_path / "fleet.toml").what
    assert "cannot be written there" in refusal("plan", run, "--picture", tmp_path / "none" / "plan.svg").what


@pytest.mark.parametrize("command", [("serve",), ("eval",), ("export", "out"), ("plan",)])
def test_commands_need_a_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *rest = command
    error = refusal(name, tmp_path / "nothing", *[tmp_path / each for each in rest])
    assert "not a run directory" in error.what and "echo-hub init" in (error.do or "")


def test_a_wrong_setting_names_its_line(run: Path) -> None:
    text = (run / "config.toml").read_text().replace("steps = 60", "steps = -60")
    (run / "config.toml").write_text(text)
    number = text.splitlines().index("steps = -60") + 1
    assert f"line {number}: training.steps = -60" in (refusal("serve", run).got or "")


def test_a_run_without_its_key_is_not_served(run: Path) -> None:
    (run / "hub.key").unlink()
    assert "identity key cannot be read" in refusal("serve", run).what


def test_a_second_hub_of_a_run_starts_no_learner(run: Path) -> None:
    with RunDirectory(run).locked():
        assert "is using this run directory" in refusal("serve", run).what
    assert not (run / "logs").exists(), "the other's learner has its log there"


def test_exporting_a_version(run: Path, tmp_path: Path) -> None:
    assert "no policy version yet" in refusal("export", run, tmp_path / "out").what
    (run / "adapters" / "v000002").mkdir(parents=True)
    (run / "adapters" / "v000002" / "adapter_config.json").write_text("{}")
    assert "Policy version 2" in said("export", run, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    assert "policy version does not exist" in refusal("export", run, tmp_path / "other", "--version", "1").what
    assert invoke("export", run, tmp_path / "other", "--version", "0").exit_code == 2
    assert "policy version does not exist" in refusal("eval", run, "--version", "7").what


def test_an_evaluation_tells_its_progress_and_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "PLAIN_S", 0.001)
    settings = {"sampling": {"max_tokens": 4}, "learner": {"threads": 1}, "task": {"scorer_processes": 1}}
    directory, config = made(tmp_path / "run", **settings)
    for version in (3, 7):
        adapter_of(config, directory.adapter(version), seed=version)
    figures_json = tmp_path / "figures.json"
    result = invoke("eval", directory.root, "--problems", "8", "--samples", "2", "--json", figures_json)
    assert result.exit_code == 0, result.output
    progress = result.stderr.splitlines()
    drawing = progress[progress.index("Evaluating: loading the model.") + 1 :]
    assert drawing and all(
        re.match(r"Evaluating: \d+ of 48 completions(, about .* left)?\.$", line) for line in drawing
    )
    printed = result.stdout.splitlines()
    assert [line.split(" solves ")[0] for line in printed[4:6]] == ["greedy: Version 7", "mean@2: Version 7"]
    assert "than the base (± " in printed[4] and printed[6:8] == ["", "Example of base"]
    figures = json.loads(figures_json.read_text())
    (base, _, newest, _), (greedy, _) = figures["evaluations"], figures["differences"]
    assert greedy["difference"] == pytest.approx(newest["accuracy"] - base["accuracy"])
    assert greedy["num_better"] + greedy["num_worse"] + greedy["num_equal"] == 8 and len(figures["examples"]) == 6


def test_the_version_is_the_softwares() -> None:
    assert said("version") == f"echo-swarm {echo_shared.__version__}\n"


def test_exit_statuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert entered(monkeypatch, "init", tmp_path / "run") == 0
    assert entered(monkeypatch, "dance") == 2
    assert entered(monkeypatch, "serve") == 2
    assert entered(monkeypatch, "--help") == 0
    capsys.readouterr()
    assert entered(monkeypatch, "init", tmp_path / "run") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "Error: This directory already contains a run."
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["[red]", "[/]", "[link=x]", "n" * 200])
def test_an_errors_text_is_printed_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Error texts go through a library that interprets brackets and breaks long lines; a command in them must stay
    unchanged and on one line.
    """
    assert entered(monkeypatch, "serve", tmp_path / name) == 1
    assert f"echo-hub init {tmp_path / name}\n" in capsys.readouterr().err


def test_the_help_names_every_command() -> None:
    text = said("--help")
    assert [name for name in FLAGS if re.search(rf"\b{name}\b", text) is None] == []


ALICE, BOB = "a" * 20, "b" * 20


@pytest.fixture
def serving(run: Path) -> Iterator[Store]:
    store = Store.open(RunDirectory(run).database_url)
    for node_id, name in ((ALICE, "alice's PC"), (BOB, "bob [red]")):
        store.node_seen(node_id=node_id, public_key=b"k" * 32, name=name, backend="torch", device="CPU", now=1e9)
    yield store
    store.close()


@pytest.mark.usefixtures("serving")
def test_nodes_are_listed_with_the_ids_that_ban_takes(run: Path) -> None:
    head, *rows = said("nodes", run).splitlines()
    titles = ["Id", "Name", "Engine", "Device", "Last", "seen", "Rollouts", "Standing", "Checked", "Banned", "Invite"]
    assert head.split() == titles
    assert [row.split()[0] for row in rows] == [ALICE, BOB]
    assert "alice's PC" in rows[0] and "bob [red]" in rows[1]
    assert all(re.search(r"torch +CPU +2001-09-0\d \d\d:46:40 +0", row) for row in rows)


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "<b>x</b>", "../../etc/passwd", "=1+1", "W" * 64, "$(reboot)"])
def test_a_hostile_name_is_shown_unchanged_on_its_nodes_line(run: Path, serving: Store, name: str) -> None:
    """The hub has removed control characters and text directions from the name (`echo_shared.wire.messages.fields`). No
    program may interpret the rest.
    """
    serving.node_seen(node_id="mallory", public_key=bytes(32), name=name, backend="[b]", device="[/b]", now=1.0)
    (line,) = (line for line in said("nodes", run).splitlines() if "mallory" in line)
    assert re.search(rf"mallory +{re.escape(name)} +\[b\] +\[/b\] ", line)


@pytest.mark.parametrize("command", [("nodes",), ("ban", ALICE), ("unban", ALICE)])
def test_a_run_that_was_never_served_has_no_nodes(run: Path, command: tuple[str, ...]) -> None:
    before = sorted(run.iterdir())
    error = refusal(command[0], run, *command[1:])
    assert error.what == "This run has not been served yet: it has no nodes."
    assert "echo-hub serve" in (error.do or "")
    assert sorted(run.iterdir()) == before, "and looking leaves nothing behind"


def test_an_empty_database_stays_empty(run: Path) -> None:
    (run / "echo.db").touch()
    before = sorted(run.iterdir())
    assert "not been served yet" in refusal("nodes", run).what
    assert sorted(run.iterdir()) == before and (run / "echo.db").stat().st_size == 0


def test_a_ban_reaches_a_hub_that_serves_and_can_be_lifted(run: Path, serving: Store) -> None:
    assert f"echo-hub unban {run} NODE" in said("ban", run, ALICE).replace("\n", "")
    assert serving.read(read_banned_nodes) == {ALICE}
    assert re.search(rf"{ALICE}.*since \d{{4}}-", said("nodes", run))
    said("ban", run, ALICE, BOB)
    assert serving.read(read_banned_nodes) == {ALICE, BOB}
    said("unban", run, ALICE)
    assert serving.read(read_banned_nodes) == {BOB}


def test_a_pardon_reaches_a_hub_that_serves(run: Path, serving: Store) -> None:
    row = StandingRow(node_id=ALICE, state=StandingState.QUARANTINED, reason="forged", num_checked=9, num_failed=1)
    serving.apply([StandingRecorded(row=row)], now=1.0)
    assert re.search(rf"{ALICE}.*quarantined: forged +9, 1 failed", said("nodes", run))
    assert ALICE in said("pardon", run, ALICE)
    assert serving.read(read_wanted_pardons) == {ALICE}
    assert refusal("pardon", run, ALICE, BOB).got == BOB, "a node that is not in quarantine needs no pardon"


@pytest.mark.parametrize("command", ["ban", "unban"])
def test_a_node_that_never_joined_cannot_be_banned(run: Path, serving: Store, command: str) -> None:
    serving.write(ban_nodes, [BOB], now=1.0)
    error = refusal(command, run, ALICE, BOB, "nobody")
    assert error.got == "nobody"
    assert serving.read(read_banned_nodes) == {BOB}, "nothing is done by halves"
    assert invoke(command, run).exit_code == 2


@pytest.mark.parametrize("command", [("nodes",), ("ban", ALICE), ("unban", ALICE)])
def test_nodes_belong_to_a_run(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "not a run directory" in refusal(command[0], tmp_path, *command[1:]).what
