"""`echo-node doctor` on this machine, and on machines that lack something that a node needs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from echo_node import doctor
from echo_node.backends import registry
from echo_node.backends.gpu_cage import Fit, GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.doctor import Diagnosis, examine, lines_of
from echo_node.engine.fitting import place_of, settings_of
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.findings import Finding
from echo_node.host import hardware
from echo_node.host.hardware import Gpu
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_shared.cage.description import CageMode, Held
from echo_shared.cage.leeway import BY_NAME, SEALED
from echo_shared.errors import LocalProtocolError
from tests.small_disk import mounted, needs_mounts

Broken = Callable[..., None]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodePaths:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    return NodePaths.find(None)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """Return a function that replaces probed code that contains a given word by other code."""
    replacements: dict[str, str] = {}
    probe = doctor.failure_of

    def instead(code: str, **_: Any) -> str | None:
        return probe(next((other for word, other in replacements.items() if word in code), "pass"))

    monkeypatch.setattr(doctor, "failure_of", instead)
    return replacements.update


def of(diagnosis: Diagnosis, subject: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.subject == subject)


def test_this_machine_can_join(paths: NodePaths) -> None:
    diagnosis = examine(paths, None)
    assert diagnosis.can_join
    assert of(diagnosis, "llama_cpp on cpu").what.startswith("usable: ")
    assert of(diagnosis, "engine").what.startswith("llama_cpp on cpu (")
    assert of(diagnosis, "swarm").what.startswith("libtorrent works")
    assert not paths.data_dir.exists()
    assert diagnosis.as_json()["can_join"] is True
    text = "\n".join(lines_of(diagnosis))
    assert "echo-node join URL" in text


def test_an_installation_that_cannot_read_messages_cannot_join(
    paths: NodePaths, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise LocalProtocolError("Nothing can be read.", got="numpy 9", do="Install numpy 2.")

    monkeypatch.setattr(doctor, "check_codec", fail)
    diagnosis = examine(paths, None)
    found = of(diagnosis, "messages")
    assert (found.level, found.what, found.do) == ("problem", "Nothing can be read. (numpy 9)", "Install numpy 2.")
    assert not diagnosis.can_join


def test_an_engine_that_crashes_leaves_the_choice_to_the_user(paths: NodePaths, broken: Broken) -> None:
    broken(llama_cpp="raise SystemExit(139)")
    diagnosis = examine(paths, None)
    found = of(diagnosis, "llama_cpp on cpu")
    assert found.level == "warning" and "--force-reinstall" in found.do and sys.executable in found.do
    engine = of(diagnosis, "engine")
    assert engine.level == "problem" and "--backend torch" in engine.do
    assert not diagnosis.can_join


def test_without_any_engine_the_node_cannot_join(
    paths: NodePaths, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    monkeypatch.setattr(registry, "_is_present", lambda package: False)
    diagnosis = examine(paths, None)
    engine = of(diagnosis, "engine")
    assert engine.level == "problem" and "-m pip install " in engine.do
    assert not diagnosis.can_join


def test_a_driver_that_does_not_fit_torch_is_named(
    paths: NodePaths, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    gpu = hardware.Gpu(name="a GPU", memory_bytes=0)
    monkeypatch.setattr(hardware, "_cuda_gpus", lambda: (gpu,))
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    broken(cuda=f"raise RuntimeError({said!r})")
    diagnosis = examine(paths, None)
    found = of(diagnosis, "torch on cuda")
    assert found.level == "warning" and said in found.what and "driver" in found.do
    assert of(diagnosis, "GPU").what == "a GPU"


def test_a_torch_without_cuda_on_a_machine_with_a_gpu_is_named(
    paths: NodePaths, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: False)
    monkeypatch.setattr(hardware, "_cuda_gpus", lambda: (hardware.Gpu(name="a GPU", memory_bytes=2**33),))
    diagnosis = examine(paths, None)
    found = of(diagnosis, "torch on cuda")
    assert found.level == "warning" and "without CUDA" in found.what and "CUDA" in found.do
    unused = of(diagnosis, "unused GPU")
    assert unused.level == "warning" and "a GPU" in unused.what and "pytorch.org" in unused.what
    assert diagnosis.can_join


def test_missing_optional_parts_are_mentioned_without_alarm(paths: NodePaths, broken: Broken) -> None:
    broken(llama_supports_rpc="raise SystemExit(1)", swarm="import no_such_library")
    diagnosis = examine(paths, None)
    rpc, swarm = of(diagnosis, "several devices as one"), of(diagnosis, "swarm")
    assert rpc.level == "note" and "GGML_RPC=ON" in rpc.do
    assert swarm.level == "warning" and "pip install --upgrade libtorrent" in swarm.do
    assert diagnosis.can_join


def test_a_libtorrent_without_needed_features_is_found() -> None:
    trial = "from echo_shared.swarm.trial import main; main()"
    said = doctor.failure_of(f"import libtorrent; del libtorrent.torrent_info.layout; {trial}")
    assert said is not None and "no attribute 'layout'" in said


@pytest.mark.parametrize(
    ("machine", "macos", "has"),
    [("arm64", "14.0", True), ("arm64", "26.1", True), ("arm64", "13.7.8", False), ("x86_64", "15.2", False)],
)
def test_old_and_intel_macs_have_no_libtorrent(
    monkeypatch: pytest.MonkeyPatch, broken: Broken, machine: str, macos: str, has: bool
) -> None:
    broken(swarm="import no_such_library")
    monkeypatch.setattr(doctor.sys, "platform", "darwin")
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    assert ("pip install" in doctor._swarm().do) == has


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, paths: NodePaths, broken: Broken) -> None:
    (tmp_path / "file").touch()
    diagnosis = examine(NodePaths.find(tmp_path / "file" / "below"), None)
    assert of(diagnosis, "data directory").level == "problem" and "--data-dir" in of(diagnosis, "data directory").do


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@needs_mounts
def test_a_real_disk_without_room_is_a_problem_with_the_way_out(tmp_path: Path, broken: Broken) -> None:
    with mounted(tmp_path / "disk", 256 * 1024) as disk:
        disk.fill()
        diagnosis = examine(NodePaths.find(disk.directory), None)
    problem = of(diagnosis, "data directory")
    assert problem.level == "problem" and problem.do.startswith(f"Free some space on the disk of {disk.directory}")
    assert not diagnosis.can_join


def test_nothing_that_is_missing_is_called_ok(
    paths: NodePaths, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cuda_gpus", tuple)
    broken(llama_supports_rpc="raise SystemExit(1)")
    diagnosis = examine(paths, None)
    missing = ["GPU", "several devices as one", "speed", "hub"]
    assert {subject: of(diagnosis, subject).level for subject in missing} == dict.fromkeys(missing, "note")
    held = [finding for finding in diagnosis.findings if finding.subject == "held back"]
    assert held and diagnosis.can_join
    assert any(line.startswith("note     GPU ") for line in lines_of(diagnosis))


@pytest.mark.parametrize(
    ("free", "level"), [(0, "problem"), (2**20, "problem"), (2**28, "problem"), (2**30, "warning"), (2**36, "ok")]
)
def test_a_full_disk_is_a_problem(
    paths: NodePaths, broken: Broken, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=2**37, used=0, free=free))
    assert of(examine(paths, None), "disk").level == level


@pytest.mark.parametrize(("precision", "largest"), [("auto", "31.9"), ("q4_k_m", "25.5"), ("f32", "21.2")])
def test_the_space_for_a_base_includes_temporary_files(
    paths: NodePaths, broken: Broken, monkeypatch: pytest.MonkeyPatch, precision: str, largest: str
) -> None:
    """Fetching and converting a base needs temporary files. Of 64 GiB free space, a quarter GiB must stay free."""
    monkeypatch.setenv("ECHO_NODE_PRECISION", precision)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total=2**37, used=0, free=2**36))
    what = of(examine(paths, None), "disk").what
    assert what == f"64.0 of 128.0 GiB free, room for a base model of {largest}"


def test_wrong_settings_are_a_problem_and_the_rest_is_looked_at(paths: NodePaths, broken: Broken) -> None:
    paths.config_file.parent.mkdir(parents=True)
    paths.config_file.write_text("width = 'wide'\n")
    diagnosis = examine(paths, None)
    assert of(diagnosis, "settings").level == "problem" and "line 1" in of(diagnosis, "settings").what
    assert of(diagnosis, "engine").level == "ok"
    assert not diagnosis.can_join


def test_measured_speeds_are_shown(paths: NodePaths, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    Hubs(paths).save(HubRecord(url="http://127.0.0.1:1", hub_key_hex="ab" * 32, joined_at=1.0, run_id="run"))
    monkeypatch.setattr(doctor, "content_here", lambda _: "content")
    row = {"kind": "decode", "width": 8, "tokens": 10, "seconds": 1.0, "tokens_per_s": 77.0}
    place = place_of(BackendChoice(name="llama_cpp", device="cpu", reason=""), hardware.detect(), "content")
    SpeedBook(paths.speeds).remember(place, settings_of(NodeConfig()), Speeds.now([row]))
    assert "77 at width 8" in of(examine(paths, None), "speed").what


def test_each_chosen_device_is_shown(paths: NodePaths, broken: Broken, fake_gpus: dict[str, Gpu]) -> None:
    paths.config_file.parent.mkdir(parents=True)
    paths.config_file.write_text('devices = ["cuda:0", "cuda:1"]\n')
    del fake_gpus["cuda:1"]
    diagnosis = examine(paths, None)
    assert of(diagnosis, "cuda:0").level == "ok" and of(diagnosis, "cuda:0").what.startswith("Fake 4090, llama_cpp")
    assert of(diagnosis, "cuda:1").level == "problem" and "is not here" in of(diagnosis, "cuda:1").what
    paths.config_file.write_text('devices = "all"\n')
    assert "no GPU that the node could use" in of(examine(paths, None), "devices").what


# The hub


@pytest.fixture
async def answering() -> AsyncIterator[Callable[..., Any]]:
    runners: list[web.AppRunner] = []

    async def serve(status: int, text: str) -> str:
        async def health(_: web.Request) -> web.Response:
            return web.Response(status=status, text=text)

        application = web.Application()
        application.add_routes([web.get("/readyz", health)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "text", "level", "words"),
    [
        (200, '{"status": "ready"}', "ok", "answers"),
        (503, '{"status": "starting"}', "ok", "answers; it is still starting"),
        (503, '{"status": "failing"}', "warning", "reports a failure"),
        (200, "<html>hello</html>", "problem", "not like a hub"),
        (200, '{"status": "UP"}', "problem", "not like a hub"),
        (200, "[" * 60_000, "problem", "not like a hub"),
        (404, "", "problem", "status 404"),
        (500, '{"status": "ready"}', "problem", "status 500"),
    ],
)
async def test_a_hub_is_asked(
    answering: Callable[..., Any],
    paths: NodePaths,
    broken: Broken,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    text: str,
    level: str,
    words: str,
) -> None:
    # Requests to a hub on this machine must bypass the proxy.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    found = of(await asyncio.to_thread(examine, paths, await answering(status, text)), "hub")
    assert found.level == level and words in found.what and "\x1b" not in found.what
    assert found.do or level == "ok"


async def test_a_hub_without_tls_is_distinguished_from_an_untrusted_one(
    answering: Callable[..., Any], paths: NodePaths, broken: Broken
) -> None:
    url = await answering(200, '{"status": "ready"}')
    found = of(await asyncio.to_thread(examine, paths, url.replace("http://", "https://")), "hub")
    assert found.level == "problem" and "does not speak TLS" in found.what and found.do == f"Use {url}"


async def test_a_page_s_address_is_the_hub_s(answering: Callable[..., Any], paths: NodePaths, broken: Broken) -> None:
    url = await answering(200, '{"status": "ready"}')
    found = of(await asyncio.to_thread(examine, paths, f"{url}/leaderboard?sort=-trained#top"), "hub")
    assert (found.level, found.what) == ("ok", f"{url} answers")


def test_a_hub_that_does_not_answer_is_a_problem(paths: NodePaths, broken: Broken) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        found = of(examine(paths, f"http://127.0.0.1:{unused.getsockname()[1]}"), "hub")
    assert found.level == "problem" and "cannot be reached" in found.what


@pytest.mark.parametrize(
    ("url", "words"), [("http://10.0.0.1:1", "--insecure"), ("hub", "looks like"), ("http://127.0.0.1:x", "looks like")]
)
def test_an_address_that_join_would_refuse_is_a_problem(paths: NodePaths, broken: Broken, url: str, words: str) -> None:
    found = of(examine(paths, url), "hub")
    assert found.level == "problem" and words in found.do


def test_the_hub_that_was_joined_last_is_asked(paths: NodePaths, broken: Broken) -> None:
    Hubs(paths).save(HubRecord(url="http://127.0.0.1:1", hub_key_hex="ab" * 32, joined_at=1.0, run_name="a run"))
    diagnosis = examine(paths, None)
    assert of(diagnosis, "joined").what == "a run at http://127.0.0.1:1"
    assert of(diagnosis, "hub").level == "problem"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere less is held, or nothing")
def test_the_cage_is_tried_and_told() -> None:
    found = doctor._cage("auto")
    assert (found.level, found.what.partition(" (")[0]) == ("ok", "reading, writing, network, programs, processes")


@pytest.mark.parametrize(("mode", "level"), [("auto", "warning"), ("required", "problem")])
def test_a_missing_cage_is_a_problem_only_if_required(
    mode: CageMode, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_tried", lambda private: Held.to_nothing("this kernel has no Landlock"))
    found = doctor._cage(mode)
    assert (found.level, found.what) == (level, "none: this kernel has no Landlock")


def test_a_cage_that_is_switched_off_is_a_warning() -> None:
    found = doctor._cage("off")
    assert (found.level, found.what) == ("warning", "none: the settings turn it off")


def test_an_engine_that_works_only_uncaged_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine reads the test's directory, which the cage forbids."""
    (tmp_path / "private").write_text("x")
    code = f"open({str(tmp_path / 'private')!r})"
    monkeypatch.setattr(registry, "packages", lambda name: [f"sys; {code}"] if name == "llama_cpp" else [])
    choice = BackendChoice(name="torch", device="cpu", reason="test")
    cages = GpuCages(tmp_path / "cages.json")
    assert doctor._try(choice, "auto", cages) == (None, SEALED)
    choice = BackendChoice(name="llama_cpp", device="cpu", reason="test")
    failure, _ = doctor._try(choice, "auto", cages)
    assert failure is not None and "PermissionError" in failure and failure.endswith(doctor.UNCAGED_WORKS)
    assert doctor._try(choice, "off", cages) == (None, SEALED)


@pytest.mark.parametrize(("mode", "works"), [("auto", True), ("required", False)])
def test_a_gpu_that_needs_a_wider_cage_is_reported(
    mode: CageMode, works: bool, paths: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuCages, "find", lambda *_: Fit(leeway=BY_NAME["local sockets"]))
    monkeypatch.setattr(doctor, "failure_of", lambda *_: None)
    choice = BackendChoice(name="torch", device="cuda", reason="test")
    failure, leeway = doctor._try(choice, mode, GpuCages(paths.gpu_cages))
    found = doctor._engine(choice, failure, leeway, config_file=paths.config_file)
    assert (failure is None) == works and found.level == "warning"
    assert 'step "local sockets"' in found.what and ("usable: torch" in found.what) == works
