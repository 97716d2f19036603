from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from echo_hub.commands.log_commands import log
from echo_hub.config.file import load_config
from echo_hub.config.operation_sections import LogConfig
from echo_hub.main import app
from echo_hub.operation import webhook as webhook_module
from echo_hub.operation.log_lines import logged_to_file, path_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError
from echo_shared.records.run import RunEvent, Severity
from tests.echo_hub.operation.receivers import Hook, webhook

own = logging.getLogger("echo_hub.test")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def said(*arguments: str | Path) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    log = logging.getLogger("echo_hub")
    before = log.level
    yield
    log.setLevel(before)


def make(root: Path, **alerts: Any) -> Path:
    make_run(RunDirectory(root), load_config(None, {"alerts": alerts}))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = make(tmp_path / "run")
    with logged_to_file(LogConfig(level="debug"), root, secrets=()):
        own.debug("a detail")
        own.info("node \x1b[2J joined", extra={"event": "node_joined"})
        own.warning("the learner died")
        try:
            raise ValueError("bad")
        except ValueError:
            own.exception("it failed")
    return root


def test_the_log_is_printed_for_people(run: Path) -> None:
    detail, joined, died, failed, *traceback = said("log", run).splitlines()
    assert detail[4] == "-" and detail.endswith(" a detail")
    assert joined.endswith(" node ?[2J joined") and died.endswith(" WARNING: the learner died")
    assert failed.endswith(" ERROR: it failed") and traceback[-1] == "    ValueError: bad"
    assert said("log", run, "--lines", "2", "--level", "info").splitlines()[0] == died
    assert said("log", run, "-n", "0") == ""


def test_the_log_is_printed_for_programs(run: Path) -> None:
    found = [json.loads(line) for line in said("log", run, "--json", "--level", "warning").splitlines()]
    assert [(line["level"], line["message"]) for line in found] == [
        ("warning", "the learner died"),
        ("error", "it failed"),
    ]
    path_of(run).write_bytes(b'{"level": "info"\n[]\n{"level":"info","message":"whole"}\n')
    assert [json.loads(line)["message"] for line in said("log", run, "--json").splitlines()] == ["whole"]


def test_new_log_lines_are_followed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        """Ends a command that follows a log without end: the third sleep raises this exception."""

    looks = iter(range(3))

    def look(seconds: float) -> None:
        if next(looks, None) is None:
            raise Enough
        with logged_to_file(LogConfig(), run, secrets=()):
            own.info("and more")

    monkeypatch.setattr("echo_hub.commands.log_commands.time.sleep", look)
    with pytest.raises(Enough):
        log(run, lines=1, follow=True)
    assert capsys.readouterr().out.count("and more") == 3


def test_a_run_without_a_log_is_reported(tmp_path: Path) -> None:
    assert "No hub has written a log yet" in said("log", make(tmp_path / "new"))


@pytest.fixture
def happened(run: Path) -> Path:
    store = Store.open(RunDirectory(run).database_url)
    store.apply(
        [],
        1.0,
        [
            RunEvent(at=1e9, kind="node_joined", subject="n1", text="node [red] joined"),
            RunEvent(
                at=1e9, kind="learner_died", severity=Severity.WARNING, text="the learner died", data={"deaths": 1}
            ),
            RunEvent(at=1e9, kind="node_joined", subject="n2", text="node b joined"),
        ],
    )
    store.close()
    return run


def test_events_are_listed_the_newest_first(happened: Path) -> None:
    head, b, died, a = said("events", happened).splitlines()
    assert head.split() == ["Number", "Time", "Kind", "Severity", "Subject", "What"]
    assert "node [red] joined" in a and "learner_died" in died and " n2 " in b
    assert "--before 2" in said("events", happened, "--limit", "2")
    assert "node [red]" in said("events", happened, "--before", "2") and said("events", happened, "--subject", "n3")


def test_events_as_json(happened: Path) -> None:
    (died,) = json.loads(said("events", happened, "--severity", "warning", "--json"))["events"]
    assert (died["number"], died["kind"], died["data"], died["warning"]) == (2, "learner_died", {"deaths": 1}, True)
    joined = json.loads(said("events", happened, "--kind", "node_joined", "--json"))["events"]
    assert [event["subject"] for event in joined] == ["n2", "n1"]
    with pytest.raises(ConfigError, match="filter for events is invalid"):
        said("events", happened, "--severity", "loud")


@pytest.fixture
def hook() -> Iterator[Hook]:
    """Run a real alert receiver in a thread with its own event loop, because the command under test runs an event loop
    too.
    """
    made: list[Hook] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with webhook() as one:
            made.append(one)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(60)
    yield made[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_test_alert_arrives(tmp_path: Path, hook: Hook) -> None:
    run = make(tmp_path / "run", webhook_url=hook.url)
    assert said("alert-test", run) == "webhook: accepted\n"
    ((body, _),) = hook.got
    assert json.loads(body)["state"] == "test" and json.loads(body)["text"].startswith("[echo] This is a test")


def test_a_receiver_that_refuses_the_test_event_is_reported(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "FIRST_S", 0.001)
    hook.answers = [404]
    result = invoke("alert-test", make(tmp_path / "run", webhook_url=hook.url))
    assert result.exit_code == 1 and "status 404 from 127.0.0.1" in result.output
    assert "the-secret" not in result.output


def test_without_a_receiver_there_is_nothing_to_test(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sends no alerts"):
        said("alert-test", make(tmp_path / "run"))
