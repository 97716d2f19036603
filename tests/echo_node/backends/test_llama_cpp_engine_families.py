"""llama.cpp computes the log-probabilities of transformers for every family of base models, with and without an
adapter, or the model is refused with a sentence that says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo_node.backends.base import EngineSettings
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_shared.delta.adapter import ATTENTION, FEED_FORWARD, is_adaptable, load_adapter
from echo_shared.errors import BackendError
from echo_shared.gguf.adapter_file import write_adapter
from echo_shared.gguf.hybrid_families import GatedDelta
from echo_shared.gguf.model_file import convert_model
from echo_shared.gguf.shape import ModelShape, read_shape
from echo_shared.gguf.summary import read_summary
from echo_shared.sampling.interface import GroupRequest, Prefix
from tests.families import FAILS, FAMILIES, FORMS, GGUF_FORMS, VOCABULARY, make_tiny
from tests.gguf_logits import logits_in, open_model

LENGTH = 150
"""Tokens of a test text: more than any window, chunk or original context of the models."""
REFUSED = {
    "exaone4_window": "sliding windows in a model of 2 layers, not 64",
    "gpt_oss": "YaRN with truncate: false",
    "granitemoehybrid_experts": "mamba_proj_bias",
    "lfm2_biased": "conv_bias",
    "qwen3_moe_window": "norm_topk_prob: false",
}
"""Families and forms (variants of a family) that llama.cpp does not compute like transformers, each with the reason in
the error.
"""
WHOLE = sorted({*FAMILIES, *FORMS, *GGUF_FORMS} - REFUSED.keys())

Array = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes the small random model of a given family or form (variant of a family), once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name) / name)
        return made[name]

    return make


def adapted_layers(base: Path, kit: Any) -> list[str]:
    """Return the names of all layers that an adapter may change in llama.cpp."""
    family = read_shape(base).family
    # For mixtures of experts, PEFT would also adapt the MLPs, which are experts.
    fixed = {*family.fixed, *(FEED_FORWARD if family.num_experts else ())}
    modules = kit.load_reference(base).named_modules()
    linears = [name for name, module in modules if type(module) is torch.nn.Linear]
    return [name for name in linears if is_adaptable(name) and name.rpartition(".")[2] not in fixed]


def bounds(shape: ModelShape) -> tuple[float, float, float]:
    """Return the permitted largest and mean difference of log-probabilities in float32, and the mean one in 8 bits."""
    if shape.family.rounds_activations:
        return 5e-3, 1e-4, 0.2  # Rounding to 16 bits may differ by one rounding step between the two libraries.
    if isinstance(shape.family, GatedDelta):
        return 1e-3, 2e-5, 0.5  # The recurrent states of a random model magnify rounding errors.
    return 1e-4, 1e-5, 0.2


def as_llama_cpp_rounds(model: Any) -> Any:
    """Return the model with GELU computed as llama.cpp does: from a table for 16-bit numbers."""
    for module in model.modules():
        if hasattr(module, "act_fn") and "GELU" in type(module.act_fn).__name__:
            module.act_fn = HalfGelu()
    return model


class HalfGelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, table))


def log_probabilities(logits: Array) -> Array:
    array: Array = torch.tensor(logits).log_softmax(-1).numpy()
    return array


@pytest.mark.parametrize("name", WHOLE)
def test_log_probabilities_equal_those_of_transformers(
    name: str, tiny: Callable[[str], Path], make_adapter: Callable[..., Path], kit: Any, tmp_path: Path
) -> None:
    base = tiny(name)
    shape = read_shape(base)
    length = min(LENGTH, shape.max_positions)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, length).tolist()
    exact = convert_model(base, tmp_path, "f32")
    adapter = make_adapter(base, 3, target_modules=adapted_layers(base, kit))
    write_adapter(load_adapter(adapter), shape, read_summary(exact).sizes, tmp_path / "adapter.gguf")
    llama = open_model(exact)
    bare = log_probabilities(logits_in(llama, ids))
    handle = llama.load_adapter(tmp_path / "adapter.gguf")
    llama.set_adapter(handle)
    adapted = log_probabilities(logits_in(llama, ids))
    llama.close()
    llama = open_model(convert_model(base, tmp_path, "q8_0"), exact=False)
    rounded = log_probabilities(logits_in(llama, ids))
    llama.close()
    expected, wanted = (
        log_probabilities(kit.reference_logits(as_llama_cpp_rounds(kit.load_reference(*which)), ids))
        for which in ((base,), (base, adapter))
    )
    assert np.abs(wanted - expected).mean() > 0.005, "the adapter changes too little to be tested"
    most, mean, in_8_bits = bounds(shape)
    for got, right in ((bare, expected), (adapted, wanted)):
        assert np.abs(got - right).max() < most
        assert np.abs(got - right).mean() < mean
    assert 0 < np.abs(rounded - expected).mean() < in_8_bits


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoehybrid", "lfm2", "deepseek_v2", "gpt_oss_plain", "phi3"])
def test_k_quants_of_experts_and_states(name: str, tiny: Callable[[str], Path], kit: Any, tmp_path: Path) -> None:
    base = tiny(name)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, LENGTH).tolist()
    llama = open_model(convert_model(base, tmp_path, "q4_k_m"), exact=False)
    rounded = log_probabilities(logits_in(llama, ids))
    llama.close()
    expected = log_probabilities(kit.reference_logits(kit.load_reference(base), ids))
    assert 0 < np.abs(rounded - expected).mean() < 0.6


@pytest.mark.parametrize(("name", "sentence"), REFUSED.items())
def test_what_llama_cpp_computes_otherwise_is_refused(name: str, sentence: str, tiny: Callable[[str], Path]) -> None:
    with pytest.raises(BackendError) as caught:
        read_shape(tiny(name))
    assert caught.value.code == "unsupported_model"
    assert sentence in str(caught.value)


def test_the_table_of_what_fails_is_true(tiny: Callable[[str], Path]) -> None:
    """The table FAILS must list every family that is refused, or whose attention adapters llama.cpp would ignore."""
    refused = REFUSED.keys() & FAMILIES.keys()
    ignored = {name for name in FAMILIES.keys() - refused if ATTENTION & read_shape(tiny(name)).family.fixed.keys()}
    assert FAILS["llama.cpp"].keys() == refused | ignored


KINDS_OF_MEMORY = ["olmo3", "qwen3_next", "qwen3_5", "granitemoehybrid", "lfm2", "deepseek_v2", "gpt_oss_plain"]
"""Families whose layers keep different things of a text: windows, states, convolutions, latent keys, and sinks."""


def sample(engine: LlamaCppEngine, kit: Any, requests: list[GroupRequest]) -> dict[Any, Any]:
    rollouts: dict[Any, Any] = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
    return rollouts


@pytest.mark.parametrize("name", [*KINDS_OF_MEMORY, "phi3_longrope"])
@pytest.mark.parametrize("width", [1, 4])
def test_the_engine_draws_what_a_slow_sampler_draws(
    name: str, width: int, tiny: Callable[[str], Path], kit: Any, tmp_path: Path
) -> None:
    """Whatever a layer keeps of a text must be copied and cut correctly, for groups with fewer and with more rollouts
    than the engine has slots.
    """
    base = tiny(name)
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=width, threads=1))
    requests = [
        dataclasses.replace(request, indices=tuple(range(1 + 3 * number % 7)), max_tokens=2 + 5 * number % 9)
        for number, request in enumerate(kit.make_requests(4))
    ]
    rollouts = sample(engine, kit, requests)
    engine.close()
    model = kit.load_reference(base)
    for request in requests:
        for index in request.indices:
            ids, logprobs = kit.reference_rollout(model, request, index)
            rollout = rollouts[request.lease_id, index]
            assert rollout.completion_ids.tolist() == ids
            np.testing.assert_allclose(rollout.behavior_logprobs, logprobs, atol=1e-3)


@pytest.mark.parametrize("name", KINDS_OF_MEMORY)
def test_rollouts_are_continued_cancelled_and_scored(
    name: str, tiny: Callable[[str], Path], kit: Any, tmp_path: Path
) -> None:
    base = tiny(name)
    engine = LlamaCppEngine()
    engine.open(base, tmp_path, EngineSettings(width=3, threads=1))
    wide, other = (
        dataclasses.replace(request, indices=tuple(range(5)), stop_ids=(), temperature=1.0)
        for request in kit.make_requests(4)[2:]
    )
    whole = sample(engine, kit, [wide, other])
    prefixes = tuple(
        Prefix(
            index=index,
            ids=whole[wide.lease_id, index].completion_ids[: 2 * index],
            logprobs=whole[wide.lease_id, index].behavior_logprobs[: 2 * index],
        )
        for index in (1, 4)
    )
    continued = sample(engine, kit, [dataclasses.replace(wide, prefixes=prefixes)])
    events: list[Any] = []
    for number, step in enumerate(engine.sample(iter([wide, other]))):
        events += step
        if number == 3:
            engine.cancel(wide.lease_id)
    left = kit.rollouts_of([event for event in events if event.lease_id == other.lease_id])
    for again in (continued, left):
        for which, rollout in again.items():
            assert rollout.completion_ids.tolist() == whole[which].completion_ids.tolist()
    assert (len(continued), len(left)) == (5, 5)
    rollout = whole[other.lease_id, 4]
    ids = np.concatenate([other.prompt_ids, rollout.completion_ids])
    _, logprobs = engine.score(ids, len(other.prompt_ids), 1.0)
    np.testing.assert_allclose(logprobs, rollout.behavior_logprobs, atol=1e-3)
    engine.close()
