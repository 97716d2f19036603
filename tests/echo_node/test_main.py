"""`echo-node` as a user types it, with real processes and real files."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import echo_shared
from benchmarks.harness.live_site import FOR_NODES
from echo_node import doctor
from echo_node.core.effects import SpoolRollout
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.spool import Spool
from echo_node.main import app
from echo_shared.errors import ConfigError, ConnectError, StorageError
from echo_shared.signing import key_file
from echo_shared.wire.messages import FinishReason, Goodbye, LeaseReturned, NodeStatus, Rollout

JOIN_FLAGS = {
    "--share",
    "--name",
    "--token",
    "--backend",
    "--device",
    "--data-dir",
    "--threads",
    "--precision",
    "--width",
    "--with",
    "--insecure",
    "--trust-new-key",
    "--swarm-port",
    "--swarm-host",
    "--mesh-port",
    "--cost-per-hour",
    "--power-watts",
    "--quiet",
    "--help",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def process(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "echo_node.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def joined(home: Path, url: str = "http://127.0.0.1:1") -> HubRecord:
    record = HubRecord(url=url, hub_key_hex="ab" * 32, joined_at=1.0, run_id="run", run_name="a run")
    Hubs(NodePaths.find(None)).save(record)
    return record


def test_the_flags_of_join_are_these() -> None:
    assert options("join") | {"--help"} == JOIN_FLAGS


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("config list", {"--json", "--data-dir"}),
        ("config get", {"--json", "--data-dir"}),
        ("config set", {"--json", "--data-dir"}),
        ("config unset", {"--json", "--data-dir"}),
        ("config path", {"--json"}),
        ("log", {"--lines", "--follow", "--json", "--data-dir"}),
        ("receipts list", {"--state", "--since", "--limit", "--offline", "--json", "--data-dir"}),
        ("receipts show", {"--offline", "--json", "--data-dir"}),
        ("receipts certificate", {"--out", "--json", "--data-dir"}),
        ("receipts verify", {"--hub-key", "--json", "--data-dir"}),
        ("bench", {"--backend", "--model", "--seconds", "--json", "--data-dir"}),
        ("doctor", {"--cage", "--json", "--data-dir"}),
    ],
)
def test_the_flags_of_viewing_and_setting_commands(command: str, flags: set[str]) -> None:
    assert options(command) == flags


def test_doctor_has_a_status_that_says_whether_the_node_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "failure_of", lambda code, **_: None)
    assert json.loads(invoke("doctor", "--json"))["can_join"] is True
    failing = CliRunner().invoke(app, ["doctor", "http://127.0.0.1:1"], catch_exceptions=False)
    assert failing.exit_code == 1
    assert "PROBLEM  hub" in failing.output and "This node cannot join" in failing.output


def test_bench_has_a_status_that_says_whether_an_engine_works(odd_worker: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "max_position_embeddings": 64}')
    arguments = ["bench", "--backend", "llama_cpp", "--model", str(tmp_path), "--seconds", "1"]
    shown = invoke(*arguments, "--json")
    assert json.loads(shown[shown.index("{") :])["chosen"]["backend"] == "llama_cpp"
    (tmp_path / "config.json").write_text("{}")
    failing = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert failing.exit_code == 1 and "No engine works" in failing.output


def test_the_commands_are_these() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == {
        "join",
        "run",
        "lend",
        "status",
        "leave",
        "bench",
        "doctor",
        "page",
        "tray",
        "pause",
        "resume",
        "finish",
        "log",
    }
    groups = {
        group.name: {command.name for command in group.typer_instance.registered_commands}
        for group in app.registered_groups
    }
    assert groups == {
        "config": {"get", "set", "unset", "list", "path"},
        "hubs": {"list", "share"},
        "id": {"show", "export", "import"},
        "receipts": {"list", "show", "certificate", "verify"},
        "service": {"install", "uninstall", "status"},
        "team": {"create", "join", "leave", "show"},
        "fleet": {"new", "code", "join", "leave", "pause", "resume", "count"},
    }


def test_hubs_have_shares(home: Path) -> None:
    joined(home)
    second = HubRecord(url="http://127.0.0.1:2", hub_key_hex="cd" * 32, joined_at=2.0, run_id="two", run_name="[b]two")
    Hubs(NodePaths.find(None)).save(second)
    assert [(one["url"], one["share"]) for one in json.loads(invoke("hubs", "list", "--json"))] == [
        ("http://127.0.0.1:2", None),
        ("http://127.0.0.1:1", None),
    ]
    assert "works only for the first one" in invoke("hubs", "list") and "[b]two" in invoke("hubs", "list")
    invoke("hubs", "share", "http://127.0.0.1:1", "1")
    assert invoke("hubs", "share", "http://127.0.0.1:2", "3").split() == [
        *("http://127.0.0.1:2", "75%"),
        *("http://127.0.0.1:1", "25%"),
    ]
    assert "75%" in invoke("hubs", "list")
    with pytest.raises(ConfigError, match="has not joined that hub"):
        invoke("hubs", "share", "http://127.0.0.1:3", "1")
    assert "Left [b]two" in invoke("leave", "http://127.0.0.1:2")
    assert [one["share"] for one in json.loads(invoke("hubs", "list", "--json"))] == [1.0]


def options(command: str) -> set[str]:
    import typer.main

    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    return {name for parameter in found.params for name in parameter.opts if name.startswith("--")}


def test_every_command_that_ends_by_itself_prints_json() -> None:
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    for group in app.registered_groups:
        commands += [f"{group.name} {command.name}" for command in group.typer_instance.registered_commands]
    without = {command for command in commands if "--json" not in options(command)}
    assert without == {"join", "run", "lend", "tray"}


def test_the_version_is_printed() -> None:
    assert invoke("--version") == f"echo-node {echo_shared.__version__}\n"


COMPLETE = """
eval "$(echo-node --show-completion)" && complete -p echo-node > /dev/null || exit 3
echo-node --install-completion > /dev/null && . ~/.bash_completions/echo-node.sh || exit 4
COMP_WORDS=(echo-node con) COMP_CWORD=1
_echo_node_completion echo-node && printf '%s ' "${COMPREPLY[@]}"
COMP_WORDS=(echo-node receipts list --state ev) COMP_CWORD=4
_echo_node_completion echo-node && printf '%s ' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "echo-node"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom echo_node.__main__ import run\n\nrun()\n")
    program.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", COMPLETE], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert (done.returncode, done.stdout.split()) == (0, ["config", "evaluated"]), done.stderr
    assert (tmp_path / ".bashrc").exists()


def test_the_page_needs_a_node_that_runs() -> None:
    with pytest.raises(ConnectError, match="No node is running here"):
        invoke("page", "--no-browser")


def test_a_pause_without_a_node_is_kept_for_the_next_one(home: Path) -> None:
    answer = json.loads(invoke("pause", "--for", "2h", "--json"))
    assert not answer["running"] and json.loads((home / "pause.json").read_text()) == {"until": answer["until"]}
    assert "No node is running here. A node that starts is paused until" in invoke("pause", "--for", "30m")
    assert "No longer paused. No node is running here" in invoke("resume")
    assert not (home / "pause.json").exists()
    assert json.loads(invoke("resume", "--json")) == {"running": False}
    with pytest.raises(ConfigError, match="not a length of time"):
        invoke("pause", "--for", "soon")
    with pytest.raises(ConnectError):
        invoke("finish")


def test_errors_are_text_on_standard_error_with_status_1() -> None:
    result = process("join", "ftp://hub")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "This is not the address of a hub."
    assert "Traceback" not in result.stderr and "do:" in result.stderr


def test_wrong_usage_has_status_2() -> None:
    assert process("join").returncode == 2
    for arguments in (["dance"], ["join", "http://127.0.0.1:1", "--threads", "many"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_wrong_setting_names_key_and_line(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("name = 'x'\nwidth = 'wide'\n")
    with pytest.raises(ConfigError) as caught:
        invoke("join", "http://127.0.0.1:1")
    assert f"{home / 'config.toml'}, line 2: width = 'wide'" in str(caught.value)


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="command line: backend = 'abacus'"):
        invoke("join", "http://127.0.0.1:1", "--backend", "abacus")


def test_helpers_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="not the address of a helper"):
        invoke("join", "http://127.0.0.1:1", "--with", "somewhere:port")
    with pytest.raises(ConfigError, match="its code is missing"):
        invoke("join", "http://127.0.0.1:1", "--with", "127.0.0.1:1", "--with", "192.168.1.7:50052")
    with pytest.raises(ConfigError, match=r"Only llama\.cpp"):
        invoke("join", "http://127.0.0.1:1", "--with", "127.0.0.1:1", "--backend", "torch")


def test_an_unreachable_hub_ends_join() -> None:
    pytest.importorskip("llama_cpp")
    result = process("join", "http://127.0.0.1:1", "--swarm-host", "127.0.0.1")
    assert result.returncode == 1
    assert "The hub cannot be reached." in result.stderr and "http://127.0.0.1:1" in result.stderr


def test_commands_that_need_a_hub_report_it() -> None:
    for command in (["run"], ["leave"], ["service", "install"]):
        with pytest.raises(ConfigError, match="joined no hub yet"):
            invoke(*command)


def test_status_without_a_daemon_reports_it() -> None:
    with pytest.raises(ConnectError, match="No node is running"):
        invoke("status")


def test_a_second_daemon_on_the_same_directory_is_refused(home: Path) -> None:
    with NodePaths.find(None).lock():
        result = process("join", "http://127.0.0.1:1")  # Use another process: the lock does not refuse its own process.
    assert result.returncode == 1 and "A node already runs on this data directory." in result.stderr


def test_the_identity_moves_from_one_node_to_another(home: Path, tmp_path: Path) -> None:
    shown = invoke("id", "show")
    me = key_file.load(home / "identity.key")
    assert me.node_id in shown
    assert me.node_id in invoke("id", "export", str(tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="exists already"):
        invoke("id", "export", str(tmp_path / "key.pem"))
    other = str(tmp_path / "other")
    assert me.node_id in invoke("id", "import", str(tmp_path / "key.pem"), "--data-dir", other)
    assert me.node_id in invoke("id", "show", "--data-dir", other)


def test_an_identity_is_not_lost_by_accident(tmp_path: Path) -> None:
    first = invoke("id", "show")
    key_file.load_or_create(tmp_path / "another.pem")
    with pytest.raises(ConfigError, match="already has an identity"):
        invoke("id", "import", str(tmp_path / "another.pem"))
    assert invoke("id", "show") == first
    invoke("id", "import", str(tmp_path / "another.pem"), "--force")
    assert invoke("id", "show") != first


def test_leaving_keeps_unsent_work_unless_forced(home: Path) -> None:
    record = joined(home)
    spool = Spool(Hubs(NodePaths.find(None)).directory(record) / "spool.db")
    spool.open()
    spool.begin_run("run")
    import numpy as np

    rollout = Rollout(
        rollout_id="1-0",
        lease_id=1,
        group_id=1,
        index=0,
        policy_version_start=0,
        policy_version_end=0,
        completion_ids=np.zeros(1, np.int32),
        behavior_logprobs=np.zeros(1, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.0,
    )
    spool.write([SpoolRollout(rollout=rollout)])
    spool.close()
    with pytest.raises(StorageError, match="1 finished rollouts have not reached the hub"):
        invoke("leave")
    assert Hubs(NodePaths.find(None)).last() == record
    assert "Left a run" in invoke("leave", "--force")
    assert Hubs(NodePaths.find(None)).last() is None


def test_leaving_forgets_the_hub_but_not_the_identity(home: Path) -> None:
    joined(home)
    before = invoke("id", "show")
    (home / "artefacts" / "run-base").mkdir(parents=True)
    invoke("leave")
    assert not (home / "artefacts" / "run-base").exists()
    assert invoke("id", "show") == before


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: str) -> "Process":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "echo_node.main",
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **FOR_NODES, "OMP_NUM_THREADS": "1"},
            )
        )

    async def end(self) -> tuple[int, str, str]:
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


def sampling_at(hub: Any, version: int) -> Any:
    return lambda: any(s.capacity > 0 and s.policy_version == version for s in hub.all(NodeStatus))


FLAGS = ("--swarm-host", "127.0.0.1", "--threads", "1", "--width", "4")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_join_works_until_told_to_stop(hub: Any, number: signal.Signals) -> None:
    pytest.importorskip("llama_cpp")
    node = await Process.start("join", hub.url, "--name", "n", *FLAGS)
    await hub.until(sampling_at(hub, 0))
    lease = await hub.lease(1, version=0)
    await hub.finished(lease)
    node.process.send_signal(number)
    status, out, err = await node.end()
    assert (status, err) == (0, "")
    assert "Connected to test run" in out and "pinned now" in out
    assert "4 rollouts, " in out and "Continue with: echo-node run" in out
    assert isinstance(hub.said[-1], Goodbye)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
async def test_a_killed_node_comes_back_with_run_and_leaves_for_good(hub: Any) -> None:
    pytest.importorskip("llama_cpp")
    hub.acknowledges = False
    node = await Process.start("join", hub.url, *FLAGS)
    await hub.until(sampling_at(hub, 0))
    done = await hub.lease(1, version=0)
    await hub.finished(done)
    node.process.kill()
    await node.end()
    hub.said.clear()
    hub.acknowledges = True
    node = await Process.start("run", *FLAGS)
    await hub.until(sampling_at(hub, 0))
    assert {r.rollout_id for r in hub.all(Rollout)} == {f"1-{i}" for i in done.indices}
    assert hub.all(LeaseReturned) == []
    shown = await Process.start("status", "--json")
    status, out, _ = await shown.end()
    assert status == 0
    assert json.loads(out)["hub"] == hub.url
    shown = await Process.start("page", "--no-browser")
    status, out, _ = await shown.end()
    assert status == 0 and re.search(r"http://127\.0\.0\.1:\d+/\S+/enter\?code=\S+", out)
    leaving = await Process.start("leave")
    status, out, err = await leaving.end()
    assert (status, err) == (0, "") and "Left test run" in out
    status, out, _ = await node.end()
    assert status == 0 and f"Join again with: echo-node join {hub.url}" in out and "echo-node run" not in out
    assert Hubs(NodePaths.find(None)).all() == []
