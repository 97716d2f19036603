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
from echo_shared.wire.messages import Fetched, Proof
from tests.echo_node.fake_sensors import FakeSensors
from tests.echo_node.test_daemon import Node, newest_status, ready_for
from tests.echo_node.test_daemon_bad_days import problems
from tests.echo_node.waiting import until
from tests.small_disk import mounted, needs_mounts

pytest.importorskip("llama_cpp")

MOST = 1.3
"""Limit on the size of all copies of a base model together, relative to the size of one."""
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
    shutil.rmtree(hub.carriers)  # From now on the base cannot be fetched again.
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
        disk.fill(leave_bytes=2 * size_of(base))  # Not enough: a part of this must stay free.
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
