"""A whole node with a real engine keeps only one form of the base model on its disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from echo_node.config import BackendName
from echo_node.core.manners import MannersConfig
from echo_shared.artefacts.manifest import open_offer
from echo_shared.swarm import read_torrent
from echo_shared.wire.messages import Fetched, Proof
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import Node, newest_status, ready_for
from tests.echo_node.test_daemon_bad_days import problems
from tests.echo_node.waiting import until
from tests.gguf_files import write_gguf
from tests.small_disk import mounted, needs_mounts

pytest.importorskip("llama_cpp")

MOST = 1.3
"""Limit on the size of all copies of a base model on the node's disk together, relative to the size of one."""
OWN_BYTES = 300_000
"""Bytes allowed for the node's other files: spool, logs, keys."""
ENGINES: list[tuple[BackendName, str]] = [("torch", "bf16"), ("llama_cpp", "f16"), ("llama_cpp", "q8_0")]
MIB = 2**20


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Qwen3 of 4 MB in bfloat16."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
    )
    directory = tmp_path_factory.mktemp("base") / "base"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
async def hub(bare_hub: Any, base: Path) -> Any:
    await bare_hub.publish_base(base)
    return bare_hub


def node_with(data_dir: Path, engine: tuple[BackendName, str]) -> Node:
    node = Node(data_dir)
    node.backend, node.precision = engine
    node.manners = MannersConfig(priority="normal", min_free_disk_bytes=0)
    return node


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def weights_in(node: Node) -> list[str]:
    """Return the names of all files with the base model's weights, in any form, encrypted included."""
    kept = [path for path in node.paths.data_dir.rglob("*") if path.is_file() and path.stat().st_size > MIB]
    return sorted(path.name for path in kept)


async def work(hub: Any, node: Node, lease_id: int) -> None:
    hub.said.clear()
    async with node.running(hub.url, sensors=FakeSensors()):
        await hub.until(ready_for(hub, 0))
        await hub.finished(await hub.lease(lease_id, version=0))


@pytest.mark.parametrize("engine", ENGINES)
async def test_one_form_of_the_base_stays_and_suffices_for_a_restart(
    hub: Any, base: Path, tmp_path: Path, engine: tuple[BackendName, str]
) -> None:
    node = node_with(tmp_path / "node", engine)
    await work(hub, node, 1)
    first = hub.all(Fetched)
    assert len(weights_in(node)) == 1
    assert size_of(node.paths.data_dir) <= MOST * size_of(base) + OWN_BYTES
    shutil.rmtree(hub.carriers)  # Make another fetch of the base model impossible.
    await work(hub, node, 2)
    assert hub.all(Fetched) == first
    assert len(weights_in(node)) == 1


@pytest.mark.parametrize(
    ("before", "after"), [(ENGINES[1], ENGINES[0]), (ENGINES[1], ENGINES[2]), (ENGINES[0], ENGINES[1])]
)
async def test_another_engine_gets_its_own_form_of_the_base(
    hub: Any, base: Path, tmp_path: Path, before: tuple[BackendName, str], after: tuple[BackendName, str]
) -> None:
    await work(hub, node_with(tmp_path / "node", before), 1)
    node = node_with(tmp_path / "node", after)
    await work(hub, node, 2)
    assert [name.rpartition(".")[2] for name in weights_in(node)] == ["safetensors" if after[0] == "torch" else "gguf"]
    assert size_of(node.paths.data_dir) <= MOST * size_of(base) + OWN_BYTES


async def test_the_precision_stays_that_of_the_file_that_is_here(hub: Any, tmp_path: Path) -> None:
    await work(hub, node_with(tmp_path / "node", ("llama_cpp", "q8_0")), 1)
    shutil.rmtree(hub.carriers)
    await work(hub, node_with(tmp_path / "node", ("llama_cpp", "auto")), 2)
    status = newest_status(hub)
    assert status is not None and status.precision == "q8_0"


@needs_mounts
async def test_a_base_is_fetched_only_with_space_for_temporary_files(hub: Any, base: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 4 * size_of(base)) as disk:
        disk.fill(leave_bytes=2 * size_of(base))  # Too little: a part of it must stay free.
        node = node_with(disk.directory / "node", ("llama_cpp", "f16"))
        async with node.running(hub.url, sensors=FakeSensors()) as daemon:
            await hub.until(lambda: hub.all(Proof))
            await until(lambda: problems(daemon) == {"disk_full"})
            assert "does not fit on it" in daemon.snapshot().problems["disk_full"]
            assert weights_in(node) == []
            disk.empty()
            await hub.until(ready_for(hub, 0))
        assert len(weights_in(node)) == 1


@needs_mounts
async def test_a_disk_that_is_too_full_for_a_conversion_loses_nothing(hub: Any, base: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 4 * size_of(base)) as disk:
        await work(hub, node_with(disk.directory / "node", ("torch", "bf16")), 1)
        hub.said.clear()
        disk.fill(leave_bytes=size_of(base) // 2)
        node = node_with(disk.directory / "node", ("llama_cpp", "f16"))
        async with node.running(hub.url, sensors=FakeSensors()) as daemon:
            await hub.until(lambda: hub.all(Proof))
            await until(lambda: problems(daemon) == {"disk_full"})
            assert weights_in(node) == ["model.safetensors"]
            disk.empty()
            await hub.until(ready_for(hub, 0))
        assert [name.rpartition(".")[2] for name in weights_in(node)] == ["gguf"]


@pytest.fixture(scope="session")
def gguf_files(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make two GGUF files of the base, each in a directory as a hub offers it."""
    found = {}
    for kind in ("q8_0", "q4_0"):
        found[kind] = tmp_path_factory.mktemp("gguf") / kind
        write_gguf(base, found[kind] / f"base-{kind}.gguf", kind, tensors_each=0 if kind == "q8_0" else 30)
        shutil.rmtree(found[kind] / "exact")
        shutil.copyfile(base / "config.json", found[kind] / "config.json")
    return found


def node_bytes(node: Node) -> int:
    return size_of(node.paths.data_dir) - OWN_BYTES


def precision_of(hub: Any) -> str:
    status = newest_status(hub)
    assert status is not None
    return str(status.precision)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
async def test_llama_cpp_fetches_the_offered_file_and_nothing_else(
    hub: Any, gguf_files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    hub.gguf = await hub.offer(None, gguf_files[kind], gguf=True)
    node = node_with(tmp_path / "node", ("llama_cpp", "auto"))
    await work(hub, node, 1)
    (first,) = hub.all(Fetched)
    size = size_of(gguf_files[kind])
    assert first.info_hash == read_torrent(hub.gguf.torrent).info_hash
    assert size <= first.swarm_bytes + first.web_seed_bytes <= 1.2 * size + 100_000
    assert node_bytes(node) <= size and all(name.endswith(".gguf") for name in weights_in(node))
    content = open_offer(hub.gguf, hub.me.public_key).content
    assert precision_of(hub) == f"{kind}@{content[:8]}"
    shutil.rmtree(hub.carriers)  # Make another fetch of the file impossible.
    await work(hub, node, 2)
    assert hub.all(Fetched) == [first]


@pytest.mark.parametrize("engine", [("torch", "auto"), ("llama_cpp", "f16")])
async def test_an_engine_that_cannot_use_the_offered_file_fetches_the_weights(
    hub: Any, base: Path, gguf_files: dict[str, Path], tmp_path: Path, engine: tuple[BackendName, str]
) -> None:
    hub.gguf = await hub.offer(None, gguf_files["q8_0"], gguf=True)
    node = node_with(tmp_path / "node", engine)
    await work(hub, node, 1)
    assert [one.info_hash for one in hub.all(Fetched)] == [read_torrent(hub.offers[None].torrent).info_hash]
    assert "@" not in precision_of(hub)
    # Switch to llama.cpp, which fetches the GGUF file. The next `work` switches back, and fetches the weights again.
    await work(hub, node_with(tmp_path / "node", ("llama_cpp", "auto")), 2)
    assert precision_of(hub).startswith("q8_0@") and weights_in(node) == ["base-q8_0.gguf"]
    await work(hub, node, 3)
    assert "@" not in precision_of(hub) and len(weights_in(node)) == 1


async def test_another_file_of_a_restarted_hub_replaces_the_first(
    hub: Any, gguf_files: dict[str, Path], tmp_path: Path
) -> None:
    hub.gguf = await hub.offer(None, gguf_files["q8_0"], gguf=True)
    node = node_with(tmp_path / "node", ("llama_cpp", "auto"))
    async with node.running(hub.url, sensors=FakeSensors()):
        for lease_id, offered, weights in ((1, "q8_0", "q8_0@"), (2, "q4_0", "q4_0@"), (3, "", "f")):
            hub.said.clear()
            hub.gguf = await hub.offer(None, gguf_files[offered], gguf=True) if offered else None
            if lease_id > 1:
                await hub.close()
                await hub.open()
            await hub.until(lambda weights=weights: precision_is(hub, weights))
            await hub.until(ready_for(hub, 0))
            await hub.finished(await hub.lease(lease_id, version=0))
    assert len(weights_in(node)) == 1


def precision_is(hub: Any, beginning: str) -> bool:
    status = newest_status(hub)
    return status is not None and status.precision.startswith(beginning)
