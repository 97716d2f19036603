"""`echo-node bench`: real measurements of this machine's engines, which the node uses later."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from echo_node.backends import registry
from echo_node.backends.gpu_cage import Fit, GpuCages
from echo_node.backends.registry import BackendChoice
from echo_node.bench import Base, Bench, BenchOutcome, BenchReport, base_for, table_of, verdict
from echo_node.config import NodeConfig
from echo_node.engine.fitting import place_of, settings_of
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from echo_node.host.artefact_files import content_here
from echo_node.host.base_forms import keep_one_form
from echo_node.host.hubs import HubRecord
from echo_node.host.paths import NodePaths
from echo_shared.cage.leeway import SEALED
from echo_shared.errors import ConfigError, StorageError

HUB = HubRecord(url="http://127.0.0.1:1", hub_key_hex="ab" * 32, joined_at=1.0, run_id="run", run_name="a run")
TORCH = BackendChoice(name="torch", device="cpu", reason="test")
CONFIG = NodeConfig(threads=1, width=2)


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    return NodePaths.find(tmp_path / "node")


@pytest.fixture
async def fetched(hub: Any, paths: NodePaths) -> HubRecord:
    """Return a hub whose base model is on this disk, as if fetched."""
    from echo_node.host.address import HubAddress
    from echo_node.net.fetcher import Fetcher, Source
    from echo_shared.swarm import SwarmSettings, open_swarm
    from tests.echo_node.net.test_fetcher import make_receiver

    swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
    source = Source(
        address=HubAddress.parse(hub.url, insecure=False),
        hub_key=hub.me.public_key,
        run_id=hub.run_id,
        tracker_path="/announce/x",
    )
    fetcher = Fetcher(swarm, make_receiver(), source, artefacts=paths.artefacts, carriers=paths.carriers)
    fetcher.set_keys(hub.run_keys)
    await fetcher.fetch(hub.welcome().base, None)
    await swarm.close()
    assert content_here(paths.base(hub.run_id)) == fetcher.base_content
    return HUB.model_copy(update={"run_id": hub.run_id})


def ignore(_: BackendChoice) -> None:
    pass


async def test_each_engine_is_measured_on_the_hubs_base_and_that_is_remembered(
    paths: NodePaths, fetched: HubRecord
) -> None:
    begun: list[BackendChoice] = []
    with base_for(paths, fetched, None) as base:
        report = await Bench(paths, CONFIG, hardware.detect(), base).run(
            backend="auto", seconds=1.0, begin=begun.append
        )
    assert report.base == "the base model of a run"
    survey = registry.survey(hardware.detect())
    usable = [one.choice for one in survey if one.missing is None and not one.on_request]
    assert begun == usable and {"llama_cpp", "torch"} <= {choice.name for choice in usable}
    for outcome in report.outcomes:
        if outcome.choice in usable:
            assert outcome.problem == "" and outcome.speeds is not None and set(outcome.speeds.decode) == {1, 2}
            place = place_of(outcome.choice, hardware.detect(), base.content)
            assert SpeedBook(paths.speeds).find(place, settings_of(CONFIG)) == outcome.speeds
    best = max(
        (outcome for outcome in report.outcomes if outcome.speeds),
        key=lambda outcome: outcome.speeds.best if outcome.speeds else 0.0,
    )
    assert report.chosen is not None and report.chosen.name == best.choice.name
    assert "measured the fastest" in report.chosen.reason and report.width == 2
    assert base.derived.is_dir()  # The files that the engine converted stay, for the node to use.


@pytest.mark.usefixtures("odd_worker")
async def test_an_engine_that_fails_gives_the_reason_and_the_others_continue(paths: NodePaths, tmp_path: Path) -> None:
    base = Base(title="nonsense", directory=tmp_path, derived=tmp_path / "derived", content="x")
    report = await Bench(paths, CONFIG, hardware.detect(), base).run(backend="auto", seconds=1.0, begin=ignore)
    assert report.chosen is None and len(report.outcomes) >= 2
    assert all(outcome.problem for outcome in report.outcomes)
    assert "No engine works" in verdict(report)
    slow = tuple(replace(outcome, speeds=Speeds.now(()), problem="It is too slow.") for outcome in report.outcomes)
    idle, busy = (replace(report, outcomes=slow, busy_cores=cores) for cores in (0.1, 999.0))
    assert verdict(idle).startswith("Engines work here") and "--seconds 4" in verdict(idle)
    assert verdict(busy).startswith("The machine is busy: programs wanted 999.0 of its")
    assert {"backend", "device", "problem"} <= set(report.as_json()["engines"][0])


@pytest.mark.usefixtures("odd_worker")
async def test_where_memory_is_short_less_width_is_tried(paths: NodePaths, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "max_position_embeddings": 64}')
    (tmp_path / "enough.json").write_text("20")
    base = Base(title="a model", directory=tmp_path, derived=tmp_path / "derived", content="x")
    bench = Bench(paths, NodeConfig(), hardware.detect(), base)
    report = await bench.run(backend="llama_cpp", seconds=0.3, begin=ignore)
    (outcome,) = (outcome for outcome in report.outcomes if outcome.choice.device == "cpu")
    assert outcome.speeds is not None and set(outcome.speeds.decode) == {1, 8, 16}


@pytest.mark.usefixtures("odd_worker", "fake_gpus")
async def test_each_chosen_device_is_measured_apart(paths: NodePaths, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "max_position_embeddings": 64}')
    base = Base(title="a model", directory=tmp_path, derived=tmp_path / "derived", content="x")
    config = NodeConfig(devices=("cuda:0", "cuda:1"), width=2, threads=2)
    report = await Bench(paths, config, hardware.detect(), base).run(backend="llama_cpp", seconds=0.3, begin=ignore)
    assert [one["device"] for one in report.as_json()["engines"]] == ["cuda:0", "cuda:1"]
    assert all(outcome.works for outcome in report.outcomes)
    assert report.chosen is not None and report.width == 2 + 2
    assert verdict(report).startswith(f"Chosen: {report.chosen.name} on cuda:0 and cuda:1, 4 rollouts at once")
    settings = settings_of(config, engines=2)
    assert settings.threads == 1, "the engines share the threads"
    for outcome in report.outcomes:
        assert outcome.choice.on is not None
        seen = hardware.detect().only([outcome.choice.on.gpu])
        assert SpeedBook(paths.speeds).find(place_of(outcome.choice, seen, "x"), settings) == outcome.speeds


async def test_a_single_engine_can_be_measured(paths: NodePaths, fetched: HubRecord) -> None:
    Widths(paths.widths).remember(place_of(TORCH, hardware.detect(), "base"), 2**33, 4)
    with base_for(paths, fetched, None) as base:
        bench = Bench(paths, CONFIG, hardware.detect(), base)
        report = await bench.run(backend="llama_cpp", seconds=0.5, begin=ignore)
        assert {outcome.choice.name for outcome in report.outcomes} == {"llama_cpp"}
        assert report.chosen is not None and "measured the fastest" not in report.chosen.reason
        with pytest.raises(ConfigError, match="no such backend"):
            await bench.run(backend="abacus", seconds=0.5, begin=ignore)
    # The limits on widths are forgotten: the node learns them again when it needs them.
    assert not paths.widths.exists()


async def test_an_engine_without_its_deleted_weights_has_not_failed(paths: NodePaths, fetched: HubRecord) -> None:
    with base_for(paths, fetched, None) as base:
        bench = Bench(paths, CONFIG, hardware.detect(), base)
        await bench.run(backend="llama_cpp", seconds=0.3, begin=ignore)
        (converted,) = base.derived.glob("*.gguf")
        keep_one_form(base.directory, base.derived, converted)
        report = await bench.run(backend="torch", seconds=0.3, begin=ignore)
        outcome = next(one for one in report.outcomes if one.choice.device == "cpu")
        assert outcome.speeds is None and "fetches them again" in outcome.problem
        place = place_of(outcome.choice, hardware.detect(), base.content)
        assert SpeedBook(paths.speeds).find(place, settings_of(CONFIG)) is None
        report = await bench.run(backend="llama_cpp", seconds=0.3, begin=ignore)
        assert any(one.speeds is not None and one.speeds.decode for one in report.outcomes)


def test_without_a_hub_the_model_is_random_and_gone_afterwards(paths: NodePaths) -> None:
    with base_for(paths, None, None) as base:
        assert base.title == "a random model"
        assert (base.directory / "model.safetensors").is_file()
    assert not base.directory.exists()
    assert list(paths.data_dir.iterdir()) == []


def test_a_base_that_is_not_here_or_was_changed_does_not_count(paths: NodePaths) -> None:
    with base_for(paths, HUB, None) as base:
        assert base.title == "a random model"


async def test_a_base_that_was_changed_does_not_count(paths: NodePaths, fetched: HubRecord) -> None:
    file = next(paths.base(fetched.run_id).glob("*.safetensors"))
    os.utime(file, ns=(0, 0))
    with base_for(paths, fetched, None) as base:
        assert base.title == "a random model"


def test_a_model_of_the_users(paths: NodePaths, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"), base_for(paths, None, tmp_path):
        pass
    (tmp_path / "config.json").write_text("{}")
    with base_for(paths, HUB, tmp_path) as base:
        first = base.content
        assert base.directory == tmp_path and not base.derived.is_relative_to(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{ }")
    with base_for(paths, None, tmp_path) as base:
        assert base.content != first


def test_a_data_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match="cannot be used"),
        base_for(NodePaths.find(tmp_path / "file" / "x"), None, None),
    ):
        pass


def report(problem: str = "") -> BenchReport:
    rows = [
        {"kind": kind, "width": width, "tokens": 10, "seconds": 1.0, "tokens_per_s": rate}
        for kind, width, rate in (("prefill", 1, 900.0), ("decode", 1, 5.0), ("decode", 64, 1_234.0))
    ]
    outcomes = [
        BenchOutcome(choice=TORCH, precision="auto", speeds=Speeds.now(rows)),
        BenchOutcome(
            choice=BackendChoice(name="llama_cpp", device="cpu", reason=""), precision="auto", problem=problem
        ),
    ]
    return BenchReport(
        base="[a] model", machine="m", outcomes=tuple(outcomes), chosen=TORCH, width=64, seconds=15.0, busy_cores=0.0
    )


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_can_be_read_on_narrow_terminals(columns: int) -> None:
    console = Console(width=columns, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(table_of(report("no '/checkout[cpu]'")))
    console.file.close()
    shown = console.export_text()
    for word in ("torch", "1,234", "w64", "900", "[a] model"):
        assert word in shown
    if columns == 200:
        assert "no '/checkout[cpu]'" in shown
    assert verdict(report()) == "Chosen: torch on cpu, 64 rollouts at once (test)."


@pytest.mark.usefixtures("odd_worker")
async def test_a_gpu_that_cannot_be_used_is_reported_in_the_verdict(
    paths: NodePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "max_position_embeddings": 64}')
    (tmp_path / "enough.json").write_text("64")
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(registry, "_llama_has_gpu", lambda: False)
    failed = Fit(leeway=SEALED, failure="cuInit failed with error 304")
    monkeypatch.setattr(
        GpuCages, "find", lambda _, choice, mode: failed if choice.device == "cuda" else Fit(leeway=SEALED)
    )
    gpu = hardware.Gpu(name="a GPU", memory_bytes=2**33)
    base = Base(title="a model", directory=tmp_path, derived=tmp_path / "derived", content="x")
    bench = Bench(paths, NodeConfig(), replace(hardware.detect(), cuda_gpus=(gpu,)), base)
    report = await bench.run(backend="torch", seconds=0.3, begin=ignore)
    assert report.chosen is not None and report.chosen.device == "cpu"
    told = (
        "The GPU (a GPU) is not used, only the processor: torch on cuda failed (The GPU cannot be used by torch. cuInit"
    )
    assert told in verdict(report) and told in report.as_json()["chosen"]["unused_gpu"]
