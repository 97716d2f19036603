"""Features only of the PyTorch engine; test_base has the rules for all engines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings
from echo_node.backends.frames import rollouts_from_frame, rollouts_to_frame
from echo_node.backends.torch_engine import TorchEngine
from echo_shared.errors import POLICY_UNUSABLE, BackendError, CodecError
from tests.families import make_tiny

WIDTH = 6
Opened = Callable[..., TorchEngine]
CPUINFO = Path("/proc/cpuinfo")
FLAGS = CPUINFO.read_text().split() if CPUINFO.exists() else []
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Make PyTorch compute as on a processor without instructions beyond AVX2."""
OPEN_ON = """
import sys
from pathlib import Path
from unittest import mock
import psutil
from echo_node.backends import torch_engine
from echo_node.backends.base import EngineSettings

base, memory_bytes = Path(sys.argv[1]), int(sys.argv[2])
torch_engine._F32_MODEL_BYTES = 0  # No model is small.
engine = torch_engine.TorchEngine()
with mock.patch.object(psutil, "virtual_memory", lambda: mock.Mock(total=memory_bytes)):
    engine.open(base, base, EngineSettings(width=2, threads=1))
print(engine._model.dtype)
"""


@pytest.fixture
def opened(base: Path, tmp_path: Path) -> Iterator[Opened]:
    engines: list[TorchEngine] = []

    def make(**settings: Any) -> TorchEngine:
        engines.append(TorchEngine())
        values = {"width": WIDTH, "threads": 1, "precision": "f32", **settings}
        engines[-1].open(base, tmp_path, EngineSettings(**values))
        engines[-1].set_policy(None)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def tokens(engine: TorchEngine, kit: Any, requests: list[Any]) -> dict[tuple[int, int], list[int]]:
    events = list(chain.from_iterable(engine.sample(iter(requests))))
    return {name: rollout.completion_ids.tolist() for name, rollout in kit.rollouts_of(events).items()}


def on_step(engine: TorchEngine, act: Callable[[], None]) -> Any:
    """Call `act` at each forward pass of the engine's model; the returned handle ends these calls."""
    return engine._model.register_forward_pre_hook(lambda *_: act())


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_routes_of_a_mixture_of_experts_reach_the_node(tmp_path: Path, kit: Any, precision: str) -> None:
    engine = TorchEngine()
    base = make_tiny("qwen3_moe", tmp_path / "base")
    engine.open(base, tmp_path, EngineSettings(width=WIDTH, threads=1, precision=precision))
    engine.set_policy(None)
    requests = [replace(request, returns_routes=True) for request in kit.make_requests(2)]
    finished = list(kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests))))).values())
    arrived = list(rollouts_from_frame(rollouts_to_frame(finished)))
    engine.close()
    assert len(arrived) == len(finished) > 2
    for rollout in arrived:
        count = len(rollout.completion_ids)
        assert len(rollout.routes) == (4 * count if count > 1 else 0), "two experts in each of two layers"


def test_a_policy_is_prepared_while_another_samples(
    opened: Opened, base: Path, make_adapter: Callable[..., Path], kit: Any
) -> None:
    engine = opened()
    requests = kit.make_requests(5)
    first, second = make_adapter(base, 1), make_adapter(base, 2, r=4, target_modules=["q_proj", "up_proj"])
    engine.set_policy(engine.prepare(first))
    of_first = tokens(engine, kit, requests)

    steps = engine.sample(iter(requests))
    events = [next(steps)]
    prepared: list[Any] = []
    thread = threading.Thread(target=lambda: prepared.append(engine.prepare(second)))
    thread.start()
    events += list(steps)
    thread.join()
    found = kit.rollouts_of(list(chain.from_iterable(events)))
    assert {name: rollout.completion_ids.tolist() for name, rollout in found.items()} == of_first

    engine.set_policy(prepared[0])
    of_second = tokens(engine, kit, requests)
    assert of_second != of_first
    engine.set_policy(None)
    prepared[0].free()
    assert tokens(engine, kit, requests) not in (of_first, of_second)
    engine.set_policy(engine.prepare(second))
    assert tokens(engine, kit, requests) == of_second


def test_swaps_keep_nothing(opened: Opened, base: Path, make_adapter: Callable[..., Path]) -> None:
    engine = opened()
    directory = make_adapter(base, 1)
    for _ in range(3):
        policy = engine.prepare(directory)
        engine.set_policy(policy)
    held = {id(tensor) for layer in engine._layers.values() for tensor in layer._update or ()}
    assert held == {id(tensor) for update in policy.updates.values() for tensor in update}


def test_little_memory_is_enough(opened: Opened, kit: Any) -> None:
    requests = kit.make_requests(5)
    expected = tokens(opened(), kit, requests)
    # Memory for 128 tokens; a token needs keys and values (2) of 4 layers and 2 heads of 32 numbers of 4 bytes.
    engine = opened(kv_cache_bytes=128 * 2 * 4 * 2 * 32 * 4)
    widths: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, __, arguments: widths.append(len(arguments["input_ids"])), with_kwargs=True
    )
    assert tokens(engine, kit, requests) == expected
    assert max(widths) == 4, "rows of the shortest prompts, which take 32 columns each"


def test_bfloat16_is_near_float32(opened: Opened, kit: Any) -> None:
    requests = kit.make_requests(6, group_size=6)
    exact, rough = (tokens(opened(precision=precision), kit, requests) for precision in ("f32", "bf16"))
    assert np.mean([exact[name][:1] == rough[name][:1] for name in exact]) > 0.8


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError("Unable to allocate 8.00 GiB for an array"),
        None,
    ],
)
def test_too_little_memory_has_its_code_and_leaves_the_engine_clean(
    opened: Opened, kit: Any, error: Exception | None
) -> None:
    """PyTorch reports a lack of memory by different errors. The engine's error must always have the code by which the
    node recognises a lack of memory. `error` None: PyTorch's own error, at an allocation that no machine can serve.
    """
    engine = opened()
    requests = kit.make_requests(4)
    expected = tokens(engine, kit, requests)

    def fail() -> None:
        if error is not None:
            raise error
        torch.empty(2**60)

    hook = on_step(engine, fail)
    with pytest.raises(BackendError) as raised:
        tokens(engine, kit, requests)
    assert raised.value.code == OUT_OF_MEMORY
    hook.remove()
    assert tokens(engine, kit, requests) == expected


def test_other_errors_are_raised_unchanged(opened: Opened, kit: Any) -> None:
    engine = opened()

    def fail() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    on_step(engine, fail)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        tokens(engine, kit, kit.make_requests(1))


def test_logits_that_are_no_numbers_are_an_error_and_leave_the_engine_clean(opened: Opened, kit: Any) -> None:
    engine = opened()
    requests = kit.make_requests(4)
    expected = tokens(engine, kit, requests)
    norm = engine._model.model.norm.weight
    kept = norm.clone()
    steps = engine.sample(iter(requests))
    next(steps)
    norm.fill_(float("nan"))
    with pytest.raises(BackendError, match="not finite"):
        list(steps)
    norm.copy_(kept)
    assert tokens(engine, kit, requests) == expected


@pytest.mark.parametrize("precision", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("factor", [1e4, 1e18])
def test_a_huge_adapter_fails_its_own_groups_and_leaves_the_engine_clean(
    opened: Opened,
    base: Path,
    make_adapter: Callable[..., Path],
    kit: Any,
    tmp_path: Path,
    precision: str,
    factor: float,
) -> None:
    """A tenant may train finite weights of any size. float16 overflows first; whatever overflows, the node works on."""
    engine = opened(precision=precision)
    requests = kit.make_requests(2)
    expected = tokens(engine, kit, requests)
    directory = shutil.copytree(make_adapter(base, 1), tmp_path / "huge")
    weights = load_file(directory / "adapter_model.safetensors")
    huge = {name: (weight.float() * factor).to(weight.dtype) for name, weight in weights.items() if weight.numel()}
    save_file(huge, directory / "adapter_model.safetensors")
    assert all(bool(torch.isfinite(weight).all()) for weight in huge.values())
    try:
        policy = engine.prepare(directory)
        engine.set_policy(policy)
        tokens(engine, kit, requests)
    except (BackendError, CodecError) as error:
        assert error.code == POLICY_UNUSABLE or isinstance(error, CodecError)
    engine.set_policy(None)
    assert tokens(engine, kit, requests) == expected


def test_a_cancel_without_work_is_harmless(opened: Opened, kit: Any) -> None:
    engine = opened()
    engine.cancel(1)
    assert len(tokens(engine, kit, kit.make_requests(2))) == 8


def test_a_model_that_cannot_be_loaded_is_reported(base: Path, tmp_path: Path) -> None:
    engine = TorchEngine()
    with pytest.raises(BackendError, match="weights are not here as safetensors"):
        engine.open(tmp_path, tmp_path, EngineSettings())
    with pytest.raises(BackendError, match="does not have this precision"):
        engine.open(base, tmp_path, EngineSettings(precision="q4_k_m"))
    with pytest.raises(BackendError, match="could not load"):
        engine.open(base, tmp_path, EngineSettings(device="nowhere"))
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="no CUDA device"):
            engine.open(base, tmp_path, EngineSettings(device="cuda:1"))
    engine.close()


def test_an_abandoned_run_does_not_disturb_the_next(opened: Opened, kit: Any) -> None:
    engine = opened()
    requests = kit.make_requests(4, group_size=WIDTH)
    abandoned = engine.sample(iter(requests))
    next(abandoned)
    steps = engine.sample(iter(requests))
    events = [next(steps)]
    abandoned.close()  # type: ignore[attr-defined]
    engine.cancel(requests[0].lease_id)
    events += list(steps)
    assert requests[0].lease_id not in {lease for lease, _ in kit.rollouts_of(list(chain.from_iterable(events[1:])))}


def test_small_models_are_exact_by_default(opened: Opened) -> None:
    assert opened(precision="auto")._model.dtype is torch.float32


def precision_of_a_large_model(base: Path, memory_bytes: int, **environment: str) -> str:
    """Return the precision that `auto` chooses for a large model, in a process with these environment variables."""
    command = [sys.executable, "-c", OPEN_ON, str(base), str(memory_bytes)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif("avx2" not in FLAGS, reason="this processor has no AVX2")
def test_a_large_model_is_exact_where_the_processor_does_not_multiply_bfloat16(base: Path) -> None:
    assert precision_of_a_large_model(base, 2**36, **AVX2_ALONE) == "torch.float32"


@pytest.mark.skipif("avx2" not in FLAGS, reason="this processor has no AVX2")
def test_a_model_that_does_not_fit_in_float32_is_of_16_bits_all_the_same(base: Path) -> None:
    stored_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert precision_of_a_large_model(base, 3 * stored_bytes, **AVX2_ALONE) == "torch.bfloat16"


@pytest.mark.skipif(not {"avx512_bf16", "amx_bf16"} & {*FLAGS}, reason="this processor does not multiply bfloat16")
def test_a_large_model_is_bfloat16_if_the_processor_multiplies_it(base: Path) -> None:
    assert precision_of_a_large_model(base, 2**36) == "torch.bfloat16"
