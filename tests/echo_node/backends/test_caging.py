"""What an engine in its cage can do to the machine: each attempt is refused, and succeeds without the cage."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from echo_node.backends import process
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import NOT_CAGED, Terms, _with_doors, cage_engine
from echo_node.backends.process import EngineChild
from echo_node.backends.registry import BackendChoice
from echo_node.host.cage.description import GUARDS, CageMode, Held
from echo_shared.errors import BackendError
from echo_shared.supervised import Limits
from tests.echo_node.prying_worker import ATTEMPTS, LINUX

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its cage holds less, and was not tried")

NAMES = [*ATTEMPTS, *(LINUX if sys.platform == "linux" else ())]
REFUSED_BY_SOME = {
    "read_the_parents_memory": "Yama",
    "trace_the_parent": "Yama",
    "copy_the_parents_memory": "Yama",
    "queue_calls_past_the_filter": "kernel.io_uring_disabled",
    "watch_the_processor": "kernel.perf_event_paranoid",
    "mark_a_file": "a file system without marks",
}
"""What some systems refuse to everybody."""
OTHER_REFUSALS = {
    "clone_the_new_way": "OSError(38,",  # There is no such call.
    "link_a_file_to_where_it_writes": "OSError(18,",  # As if between two disks.
}
SECRET = ctypes.create_string_buffer(b"a secret")
ROOT = Path(__file__).resolve().parents[3]


def _listeners(stack: ExitStack, directory: Path) -> dict[str, object]:
    """What can be connected to, in one place each."""
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind(("127.0.0.1", 0))
    unix, datagrams = (stack.enter_context(socket.socket(socket.AF_UNIX, kind)) for kind in (1, 2))
    unix.bind(str(directory / "u"))
    unix.listen()
    datagrams.bind(str(directory / "d"))
    targets = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
    targets |= {"unix": str(directory / "u"), "unix_datagrams": str(directory / "d")}
    if sys.platform == "linux":
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0echo-{os.getpid()}-{directory.name}")
        abstract.listen()
        targets["abstract"] = f"echo-{os.getpid()}-{directory.name}"
    return targets


async def _run(directory: Path, targets: dict[str, object], mode: CageMode) -> tuple[Held, dict[str, str]]:
    base, derived, scratch = directory / "base", directory / "derived", directory / "scratch"
    for made in (base, derived, scratch):
        made.mkdir()
    (base / "weights").write_bytes(b"weights")
    for name in ("private", "victim", "doomed"):
        (scratch / name).write_bytes(b"private")
        targets[name] = str(scratch / name)
    targets |= {"base": str(base), "derived": str(derived), "scratch": str(scratch)}
    targets["address"] = ctypes.addressof(SECRET)
    (base / "targets.json").write_text(json.dumps(targets))
    engine = await EngineChild.start(
        BackendChoice(name="prying", device="cpu", reason="test"),
        base_dir=base,
        derived_dir=derived,
        log=directory / "log",
        settings=EngineSettings(),
        limits=Limits(),
        cage=Terms(mode=mode),
    )
    await engine.stop()
    assert (scratch / "victim").exists(), "attempts undo what they did"
    return engine.held, json.loads(engine.precision)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[CageMode, tuple[Held, dict[str, str]]]]:
    """Of all attempts, in a cage and without one."""
    modes: tuple[CageMode, ...] = ("required", "off")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(process, "WORKER", "tests.echo_node.prying_worker")
        found = {}
        for mode in modes:
            directory = tmp_path_factory.mktemp(mode)
            found[mode] = asyncio.run(_run(directory, _listeners(stack, directory), mode))
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_caged_engine_tries_is_refused(name: str, outcomes: dict[CageMode, tuple[Held, dict[str, str]]]) -> None:
    uncaged = outcomes["off"][1][name]
    if uncaged != "done" and name in REFUSED_BY_SOME:
        pytest.skip(f"refused without a cage as well, by {REFUSED_BY_SOME[name]}: {uncaged}")
    assert uncaged == "done"
    outcome = outcomes["required"][1][name]
    assert outcome.startswith(OTHER_REFUSALS.get(name, "PermissionError("))


def test_it_says_what_holds(outcomes: dict[CageMode, tuple[Held, dict[str, str]]]) -> None:
    assert outcomes["required"][0].holds == tuple(GUARDS)
    assert outcomes["off"][0] == Held.to_nothing("the settings say so")


def test_an_engine_that_starts_programs_has_no_cage_and_says_so(tmp_path: Path) -> None:
    """In this process, which would notice a cage."""
    caged = cage_engine("vllm", tmp_path, tmp_path, EngineSettings(device="cuda"), Terms())
    assert caged.held.lacks == dict.fromkeys(GUARDS, "vLLM compiles by programs that it starts")
    with pytest.raises(BackendError) as caught:
        cage_engine("vllm", tmp_path, tmp_path, EngineSettings(device="cuda"), Terms(mode="required"))
    assert caught.value.code == NOT_CAGED


def test_helpers_are_found_and_have_their_doors_before_there_is_a_cage(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(host: str, port: int, **_: object) -> list[object]:
        if host != "my-pc":
            raise socket.gaierror("nobody knows it")
        return [(socket.AF_INET6, 1, 6, "", ("::7", port, 0, 0)), (socket.AF_INET, 1, 6, "", ("192.0.2.7", port))]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    code = "A" * 43
    settings = EngineSettings(helpers=(f"my-pc:7#{code}", f"192.0.2.8:8#{code}", f"unknown:9#{code}"))
    found, ports = _with_doors(settings)
    doors = [socket.socket(fileno=door) for door in found.doors]
    try:
        assert found.helpers == (f"192.0.2.7:7#{code}", *settings.helpers[1:])
        assert ports == (7, 8, 9, *(door.getsockname()[1] for door in doors))
        assert all(door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for door in doors)
    finally:
        for door in doors:
            door.close()
    assert _with_doors(EngineSettings()) == (EngineSettings(), ())
