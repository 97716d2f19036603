"""One model divided among a node and helpers (processes that lend memory and GPUs): rollouts equal those of one
process, also after changes of policy, and a helper's failure is reported.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil
import pytest

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CageTerms
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.llama_cpp_rpc import Helpers, share_layers
from echo_node.backends.process import DIED, EngineChild
from echo_node.backends.registry import BackendChoice
from echo_node.lending.tunnel import LOOPBACK
from echo_shared.errors import BackendError, ConfigError
from echo_shared.process.supervised import ChildLimits

WIDTH = 6


class LendingProcess:
    def __init__(self, directory: Path) -> None:
        command = ("lend", "--host", LOOPBACK, "--port", "0", "--threads", "1", "--data-dir", str(directory))
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "echo_node.main", *command],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        said = ""
        while (found := re.search(r"--with ((\S+)#\S+)\n", said)) is None:
            line = self.process.stdout.readline()
            assert line, said
            said += line
        self.address, self.without_code = found[1], found[2]

    def device_server(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LendingProcess]]:
    with ExitStack() as stack:
        processes = []
        for name in ("one", "two"):
            processes.append(LendingProcess(tmp_path_factory.mktemp(name)))
            stack.callback(processes[-1].stop)
        yield processes


def sample_all(
    base: Path, derived: Path, adapters: list[Path], kit: Any, *, helpers: tuple[str, ...], precision: str
) -> dict[Any, tuple[list[int], list[float]]]:
    """Return rollouts of the base and of each adapter; the next adapter is prepared while one samples."""
    rollouts: dict[Any, tuple[list[int], list[float]]] = {}
    with closing(LlamaCppEngine()) as engine:
        settings = EngineSettings(width=WIDTH, threads=1, precision=precision, helpers=helpers)
        engine.open(base, derived, settings)
        present, version = None, 0
        for adapter in adapters:
            prepared: list[Any] = []
            preparing = threading.Thread(target=lambda a=adapter, p=prepared: p.append(engine.prepare(a)))
            preparing.start()
            for policy in (present, None):
                engine.set_policy(policy)
                requests = kit.make_requests(5, policy_version=version, first_lease=100 * version, max_tokens=8)
                events = list(chain.from_iterable(engine.sample(iter(requests))))
                for name, rollout in kit.rollouts_of(events).items():
                    rollouts[name] = rollout.completion_ids.tolist(), rollout.behavior_logprobs.tolist()
                version += 1
            preparing.join()
            if present is not None:
                present.free()
            (present,) = prepared
    return rollouts


@pytest.mark.parametrize(
    ("name", "precision", "num_helpers"),
    [
        ("qwen3", "f32", 1),
        ("qwen3", "f32", 2),
        ("qwen3", "q8_0", 2),
        ("qwen2", "f16", 1),
        ("qwen2", "q4_k_m", 2),
        ("llama3_rope", "f32", 2),
    ],
)
def test_split_and_whole_draw_the_same(
    name: str,
    precision: str,
    num_helpers: int,
    base_of: Callable[[str], Path],
    make_adapter: Callable[..., Path],
    lending: list[LendingProcess],
    kit: Any,
    tmp_path: Path,
) -> None:
    base = base_of(name)
    adapters = [make_adapter(base, 1), make_adapter(base, 2, r=4), make_adapter(base, 3)]
    helpers = tuple(helper.address for helper in lending[:num_helpers])
    whole = sample_all(base, tmp_path, adapters, kit, helpers=(), precision=precision)
    split = sample_all(base, tmp_path, adapters, kit, helpers=helpers, precision=precision)
    assert split == whole
    assert len(whole) == 2 * len(adapters) * 5 * 4


def test_an_adapter_may_be_freed_at_any_time(
    base: Path, make_adapter: Callable[..., Path], lending: list[LendingProcess], kit: Any, tmp_path: Path
) -> None:
    """A helper keeps the graph of its last computation, which points to the adapter's memory. When the node frees the
    adapter, the helper must delete the graph.
    """
    with closing(LlamaCppEngine()) as engine:
        settings = EngineSettings(width=WIDTH, threads=1, precision="f32", helpers=(lending[0].without_code,))
        engine.open(base, tmp_path, settings)
        spare = [engine.prepare(make_adapter(base, seed)) for seed in range(4)]
        requests = kit.make_requests(4, max_tokens=12)
        events = []
        for step in engine.sample(iter(requests)):
            events += step
            if spare:
                spare.pop().free()
        assert spare == []
        assert len(kit.rollouts_of(events)) == 16


async def start(base: Path, tmp_path: Path, helper: str) -> EngineChild:
    return await EngineChild.start(
        BackendChoice(name="llama_cpp", device="cpu", reason="test"),
        base_dir=base,
        derived_dir=tmp_path / "derived",
        log=tmp_path / "backend.log",
        settings=EngineSettings(width=WIDTH, threads=1, helpers=(helper,)),
        limits=ChildLimits(memory_bytes=8 * 2**30),
        cage=CageTerms(mode="required"),
    )


async def test_a_helper_dies_comes_back_and_is_gone(base: Path, kit: Any, tmp_path: Path) -> None:
    helper = LendingProcess(tmp_path / "helper")
    engine = await start(base, tmp_path, helper.address)
    for request in kit.make_requests(40, max_tokens=200):
        await engine.submit(request)
    events = engine.events()
    await anext(events)
    helper.device_server().send_signal(signal.SIGTERM)
    with pytest.raises(BackendError) as caught:
        async for _ in events:
            pass
    assert caught.value.code == DIED and "RPC server" in str(caught.value)
    await engine.stop()

    engine = await start(base, tmp_path, helper.address)
    await engine.submit(kit.make_requests(1)[0])
    await anext(engine.events())
    await engine.stop()

    helper.stop()
    with pytest.raises(BackendError, match="A helper cannot be reached") as caught:
        await start(base, tmp_path, helper.address)
    assert caught.value.code == "helper_away"


def test_another_version_of_llama_cpp_is_named(lending: list[LendingProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", "0.0.1")
    helpers = Helpers()
    with closing(helpers), pytest.raises(BackendError, match="another version") as caught:
        helpers.open([lending[0].address])
    assert caught.value.do is not None and "llama-cpp-python==0.0.1" in caught.value.do


def test_a_build_without_rpc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: False)
    helpers = Helpers()
    with closing(helpers), pytest.raises(BackendError, match="without RPC") as caught:
        helpers.open([f"{LOOPBACK}:1"])
    assert caught.value.do == registry.reinstall_llama_with_rpc()
    assert "GGML_RPC=ON" in caught.value.do and f"llama-cpp-python=={llama_cpp.__version__}" in caught.value.do


def test_models_that_cannot_be_spread_are_refused(base: Path, lending: list[LendingProcess], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the address"), closing(LlamaCppEngine()) as engine:
        engine.open(base, tmp_path, EngineSettings(threads=1, helpers=("nowhere:x",)))
    helpers = Helpers()
    with closing(helpers):
        helpers.open([helper.address for helper in lending])
        params = llama_cpp.llama_model_default_params()
        with pytest.raises(BackendError, match="does not fit into the memory"):
            helpers.place(params, num_layers=4, model_bytes=2**60, gpu=False)
        with pytest.raises(BackendError, match="fewer layers"):
            helpers.place(params, num_layers=2, model_bytes=1, gpu=False)


def test_layers_follow_the_free_memory() -> None:
    assert share_layers(28, [1, 1]) == [14, 14]
    assert share_layers(28, [3, 1]) == [21, 7]
    assert share_layers(28, [10**12, 1]) == [27, 1]
    assert share_layers(3, [5, 0, 0]) == [1, 1, 1]
    rng = np.random.default_rng(1)
    for _ in range(200):
        free = rng.integers(0, 2**40, rng.integers(1, 8)).tolist()
        layers = int(rng.integers(len(free), 100))
        counts = share_layers(layers, free)
        assert sum(counts) == layers and min(counts) >= 1
        exact = [1 + (layers - len(free)) * share / max(1, sum(free)) for share in free]
        assert all(abs(count - share) < 1 or sum(free) == 0 for count, share in zip(counts, exact, strict=True))
