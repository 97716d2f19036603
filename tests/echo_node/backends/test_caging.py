"""An engine attacks the machine. In its cage (a sandbox) each attempt is refused; without the cage it succeeds, so the
attempt itself works.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from echo_node.backends import process
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import NOT_CAGED, CageTerms, _with_doors, cage_engine
from echo_node.backends.process import EngineChild
from echo_node.backends.registry import BackendChoice
from echo_shared.cage.description import CageMode, Held
from echo_shared.cage.guards import GUARDS
from echo_shared.cage.leeway import BY_NAME
from echo_shared.errors import BackendError
from echo_shared.process.supervised import ChildLimits
from tests.echo_node.prying_worker import ATTEMPTS, LINUX
from tests.homeless import USER, run_homeless

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
"""Attempts that some systems refuse without a cage too, each with the system's feature that refuses it."""
NO_SUCH_SOCKETS = "OSError(97,"
OTHER_REFUSALS = {
    "clone_the_new_way": "OSError(38,",  # ENOSYS, as from a kernel without this call.
    "link_a_file_to_where_it_writes": "OSError(18,",  # EXDEV, as between two disks.
}
SOCKETS = (
    *("connect_by_tcp", "send_by_udp", "listen", "connect_to_a_unix_socket", "connect_to_an_abstract_socket"),
    *("connect_a_sequenced_socket", "give_a_socket_a_file", "accept_a_connection", "talk_to_the_kernel"),
)
if sys.platform == "linux":
    OTHER_REFUSALS |= dict.fromkeys(SOCKETS, NO_SUCH_SOCKETS)
WITH_A_GPU = {
    "connect_a_sequenced_socket": "FileNotFoundError(",  # ENOENT, as if no process listened there.
    "give_a_socket_a_file": "PermissionError(",
    "accept_a_connection": "PermissionError(",
}
"""Errors in the cage for GPU engines that differ from the normal cage's, because NVIDIA's driver may listen on a
socket.
"""
SECRET = ctypes.create_string_buffer(b"a secret")
ROOT = Path(__file__).resolve().parents[3]


def _listeners(stack: ExitStack, directory: Path) -> dict[str, object]:
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind(("127.0.0.1", 0))
    unix, datagrams, sequenced = (stack.enter_context(socket.socket(socket.AF_UNIX, kind)) for kind in _kinds())
    unix.bind(str(directory / "u"))
    unix.listen()
    datagrams.bind(str(directory / "d"))
    targets = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
    targets |= {"unix": str(directory / "u"), "unix_datagrams": str(directory / "d")}
    if sys.platform == "linux":
        sequenced.bind(str(directory / "s"))
        sequenced.listen()
        targets["sequenced"] = str(directory / "s")
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0echo-{os.getpid()}-{directory.name}")
        abstract.listen()
        targets["abstract"] = f"echo-{os.getpid()}-{directory.name}"
    return targets


def _kinds() -> tuple[int, int, int]:
    """Return the types of local sockets to try; macOS has no sequenced sockets."""
    return (1, 2, 5) if sys.platform == "linux" else (1, 2, 1)


async def _run(directory: Path, targets: dict[str, object], mode: CageMode, device: str) -> tuple[Held, dict[str, str]]:
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
        BackendChoice(name="prying", device=device, reason="test"),
        base_dir=base,
        derived_dir=derived,
        log=directory / "log",
        settings=EngineSettings(),
        limits=ChildLimits(),
        cage=CageTerms(mode=mode, leeway=BY_NAME["listening socket"]),
    )
    await engine.stop()
    assert (scratch / "victim").exists(), "attempts undo their changes"
    return engine.held, json.loads(engine.precision)


Case = Literal["required", "off", "GPU"]
Outcomes = dict[Case, tuple[Held, dict[str, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Yield the results of an engine's attempts to break out: caged, uncaged, and caged for a GPU engine."""
    cases: tuple[Case, ...] = ("required", "off", "GPU")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(process, "WORKER", "tests.echo_node.prying_worker")
        found: Outcomes = {}
        for case in cases:
            directory = tmp_path_factory.mktemp(case)
            mode: CageMode = "off" if case == "off" else "required"
            device = "cuda" if case == "GPU" else "cpu"
            found[case] = asyncio.run(_run(directory, _listeners(stack, directory), mode, device))
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_a_caged_engines_attempts_are_refused(name: str, outcomes: Outcomes) -> None:
    uncaged = outcomes["off"][1][name]
    if uncaged != "done" and name in REFUSED_BY_SOME:
        pytest.skip(f"refused without a cage as well, by {REFUSED_BY_SOME[name]}: {uncaged}")
    assert uncaged == "done"
    expected = OTHER_REFUSALS.get(name, "PermissionError(")
    assert outcomes["required"][1][name].startswith(expected)
    assert outcomes["GPU"][1][name].startswith(WITH_A_GPU.get(name, expected))


def test_the_engine_reports_its_guards(outcomes: Outcomes) -> None:
    assert outcomes["required"][0].holds == outcomes["GPU"][0].holds == tuple(GUARDS)
    assert outcomes["off"][0] == Held.to_nothing("the settings turn it off")


def test_an_engine_that_starts_programs_has_no_cage_and_reports_it(tmp_path: Path) -> None:
    """vLLM starts compilers, which a cage forbids. The owner is told, and may refuse such engines."""
    caged = cage_engine("vllm", tmp_path, tmp_path, EngineSettings(device="cuda"), CageTerms())
    assert caged.held.lacks == dict.fromkeys(GUARDS, "vLLM starts programs that compile code")
    with pytest.raises(BackendError) as caught:
        cage_engine("vllm", tmp_path, tmp_path, EngineSettings(device="cuda"), CageTerms(mode="required"))
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


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's namespaces")
def test_an_engine_of_a_user_without_name_and_home_has_both(tmp_path: Path) -> None:
    """PyTorch's compiler needs the user's name, but the cage hides the system's list of users."""
    code = (
        "import getpass; from pathlib import Path; from echo_node.backends.caging import cage_trial\n"
        f"held = cage_trial('torch', 'cuda', {str(tmp_path)!r}, 'required', 'listening socket')\n"
        "from torch._inductor.runtime.cache_dir_utils import default_cache_dir\n"
        "print(getpass.getuser(), Path.home(), default_cache_dir(), len(held.lacks))"
    )
    said = run_homeless("-c", code)
    name = f"user-{USER}"
    assert said.stdout == f"{name} {tmp_path} {tmp_path}/torchinductor_{name} 0\n", said.stderr


LINKED = """
import sys
from pathlib import Path
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CageTerms, cage_engine
base = Path(sys.argv[1])
cage_engine("torch", base, base.with_name("derived"), EngineSettings(), CageTerms(mode="required"))
print((base / "config.json").read_text(), next(
    path.read_text() for name in ("a", "part/a", "model.safetensors") if (path := base / name).exists()
))
try:
    print(base.with_name("blobs").joinpath("private").read_text())
except PermissionError:
    print("refused")
"""


LAYOUTS: dict[str, dict[str, str]] = {
    "a cache's snapshot": {"base/config.json": "../blobs/config", "base/model.safetensors": "../blobs/weights"},
    "absolute": {"base/config.json": "{}/blobs/config", "base/model.safetensors": "{}/blobs/weights"},
    "a chain": {
        "middle": "blobs/weights",
        "base/config.json": "../blobs/config",
        "base/model.safetensors": "../middle",
    },
    "in a folder": {
        "base/config.json": "../blobs/config",
        "base/part/a": "../../blobs/weights",
        "base/part/loop": "..",
    },
    "a linked folder": {"base/config.json": "../blobs/config", "parts/a": "../blobs/weights", "base/part": "../parts"},
    "broken besides": {"base/config.json": "../blobs/config", "base/a": "../blobs/weights", "base/gone": "../nowhere"},
}


@pytest.mark.skipif(sys.platform != "linux", reason="in the cage of Linux")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_linked_from_a_models_directory_are_readable(layout: str, tmp_path: Path) -> None:
    """The caches of model hubs link a model's files to other directories. Linked files become readable; their
    neighbours must not.
    """
    (tmp_path / "blobs").mkdir()
    for name in ("config", "weights", "private"):
        (tmp_path / "blobs" / name).write_text(name)
    for name, target in LAYOUTS[layout].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target.format(tmp_path))
    base = tmp_path / "model"
    base.symlink_to("base")
    done = subprocess.run([sys.executable, "-c", LINKED, str(base)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "config weights\nrefused\n", done.stderr
