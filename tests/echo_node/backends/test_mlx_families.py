"""mlx-lm computes what transformers computes, for every family in its table, with every variant of the family's
settings that it accepts.

Everything is compared in float32: log-probabilities of a whole text, of rows in a batch, and the engine's draws.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("mlx_lm", reason="MLX is not installed: make env")

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.learner.lora import targets
from echo_node.backends import mlx_families
from echo_node.backends.base import EngineSettings
from echo_node.backends.mlx_engine import MlxEngine
from echo_node.backends.mlx_model import MlxModel, round_up
from echo_shared.errors import BackendError
from echo_shared.sampling.interface import Prefix
from tests.families import FAILS, FAMILIES, VOCABULARY, make_of_config
from tests.families import FORMS as OTHER_FORMS

_TOLERANCE: Final = 1e-4
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_ROPES: Final[dict[str, dict[str, Any]]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": _YARN,
}
_HALF_SLIDING: Final = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_UNSCALED: Final = {"rope_type": "default", "rope_theta": 10_000.0}
_CALM: Final = {"initializer_range": 0.1}
"""Smaller random weights: with the usual ones, transformers' float32 differs from its float64 by 1.3e-4 in these
families.
"""
_OWN: Final[dict[str, dict[str, Any]]] = {"qwen3_next": _CALM, "qwen3_5": _CALM}
"""Settings of the tested models that differ from those in tests/families.py, by family."""
_REFUSED: Final = {"gemma3_capped": "gemma3_text with final_logit_softcapping = 2.0"}
FORMS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **{name: (name, _OWN.get(name, {})) for name in FAMILIES},
    **{name: (name, {}) for name in OTHER_FORMS if name not in _REFUSED},
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, **_HALF_SLIDING}),
    "qwen3_moe, scores of the chosen": (
        "qwen3_moe",
        {"norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": [0]},
    ),
    "qwen3_next, scores of all": ("qwen3_next", {**_CALM, "norm_topk_prob": False}),
    "qwen3_5, tied": ("qwen3_5", {**_CALM, "tie_word_embeddings": True}),
    "gemma2, heads alone": ("gemma2", {"num_key_value_heads": 4}),
    "gemma3, odd size": ("gemma3", {"hidden_size": 96, "num_hidden_layers": 4, **_HALF_SLIDING}),
    "smollm3, untied": ("smollm3", {"tie_word_embeddings": False}),
    "granitemoehybrid, positions": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "granitemoehybrid, attention alone": ("granitemoehybrid", {"layer_types": ["full_attention"] * 2}),
    "gpt_oss, whole frequencies": ("gpt_oss", {"rope_parameters": _YARN}),
    "deepseek_v2, yarn": ("deepseek_v2", {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.5}}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "n_routed_experts": 8,
            "routed_scaling_factor": 2.0,
        },
    ),
    "lfm2, adjusted": ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "olmo3, yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {**_YARN, "attention_factor": 1.1386294361119891},
            }
        },
    ),
    "gemma3, linear": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": _UNSCALED, "full_attention": _ROPES["linear"]}},
    ),
}
FORMS["gemma3, odd size"][1]["layer_types"] = ["sliding_attention", "full_attention"] * 2
ROPE_FORMS: Final = [
    (name, kind)
    for name in FAMILIES
    for kind in mlx_families.FAMILIES[FAMILIES[name]().model_type].ropes
    if kind in _ROPES and name not in ("gemma3", "olmo3", "gpt_oss", "deepseek_v2")
]


@pytest.fixture(scope="module")
def form_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a model of a family with other settings, once."""

    @functools.cache
    def make(name: str) -> Path:
        family, changes = FORMS[name]
        return make_of_config(changed(family, changes), tmp_path_factory.mktemp("form"))

    return make


def changed(family: str, changes: dict[str, Any]) -> Any:
    config = {**FAMILIES, **OTHER_FORMS}[family]()
    return type(config).from_dict({**config.to_dict(), **changes})


@pytest.fixture
def adapter_of(make_adapter: Callable[..., Path], kit: Any) -> Callable[[Path], Path]:
    """Return a function that makes an adapter on the layers that a learner adapts."""

    def make(base: Path) -> Path:
        return make_adapter(base, 1, target_modules=targets(kit.load_reference(base), TrainingConfig()))

    return make


def open_model(base: Path, precision: str = "f32") -> MlxModel:
    model = MlxModel()
    model.open(base, device="cpu", precision=precision)
    return model


def ids_of(length: int) -> NDArray[np.int32]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).astype(np.int32)


def logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    every = logits.astype(np.float64)
    every -= every.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = every - np.log(np.exp(every).sum(axis=-1, keepdims=True))
    return found


def differences(model: MlxModel, reference: Any, kit: Any) -> Iterator[float]:
    """Yield the largest difference of log-probabilities for a whole text, then for rows fed token by token."""
    text = ids_of(70)
    mine = np.concatenate([logits.copy() for logits, _ in model.logits_before(text, 1)])
    yield np.abs(logprobs(mine) - logprobs(kit.reference_logits(reference, text)[:-1])).max()
    prompts = [ids_of(length) for length in (1, 2, 12, 12, 40)]
    model.reserve(len(prompts), round_up(64), kept_rows=0)
    for row, prompt in enumerate(model.prefill(prompts)):
        model.put(prompt, [row])
    for more in range(3):
        fed = [np.append(prompt, ids_of(9)[:more]) for prompt in prompts]
        tokens = np.array([ids[-1] for ids in fed], np.int32)
        rows = model.step(tokens, np.array([len(ids) - 1 for ids in fed], np.int32))
        for ids, row in zip(fed, rows, strict=True):
            yield np.abs(logprobs(row) - logprobs(kit.reference_logits(reference, ids)[-1])).max()


@pytest.mark.parametrize("name", FORMS)
def test_logprobs_equal_transformers(
    name: str, form_of: Callable[..., Path], adapter_of: Callable[[Path], Path], kit: Any
) -> None:
    base = form_of(name)
    model = open_model(base)
    for adapter in (None, adapter_of(base)):
        model.set_policy(None if adapter is None else model.read_policy(adapter))
        assert max(differences(model, kit.load_reference(base, adapter), kit)) < _TOLERANCE


@pytest.mark.parametrize(("name", "kind"), ROPE_FORMS)
def test_kinds_of_positions(name: str, kind: str, tmp_path: Path, kit: Any) -> None:
    base = make_of_config(changed(name, {"rope_parameters": _ROPES[kind]}), tmp_path)
    assert max(differences(open_model(base), kit.load_reference(base), kit)) < _TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_the_references(
    name: str, form_of: Callable[..., Path], adapter_of: Callable[[Path], Path], kit: Any
) -> None:
    base = form_of(name)
    engine = MlxEngine()
    engine.open(base, base, EngineSettings(width=3, precision="f32"))
    for adapter in (None, adapter_of(base)):
        engine.set_policy(None if adapter is None else engine.prepare(adapter))
        reference = kit.load_reference(base, adapter)
        # Draw ten tokens, more than the sliding windows of 8 tokens.
        requests = [replace(request, stop_ids=()) for request in kit.make_requests(2, group_size=2, max_tokens=10)]
        expected = {
            (request.lease_id, index): kit.reference_rollout(reference, request, index)
            for request in requests
            for index in request.indices
        }
        # Add the second group again; its first rollout continues from a prefix that another node has drawn.
        index = requests[1].indices[0]
        ids, drawn = expected[1, index]
        prefix = Prefix(index=index, ids=np.array(ids[:4], np.int32), logprobs=np.array(drawn[:4], np.float32))
        requests.append(replace(requests[1], lease_id=2, prefixes=(prefix,)))
        rollouts = kit.rollouts_of(list(chain.from_iterable(engine.sample(iter(requests)))))
        assert len(rollouts) == 6
        for (lease, index), rollout in rollouts.items():
            ids, drawn = expected[min(lease, 1), index]
            assert rollout.completion_ids.tolist() == ids
            np.testing.assert_allclose(rollout.behavior_logprobs, drawn, atol=_TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "granitemoehybrid", "gpt_oss", "deepseek_v2", "lfm2"])
def test_eight_bits_stay_close(name: str, form_of: Callable[..., Path]) -> None:
    text = ids_of(40)
    exact, rounded = (
        np.concatenate([logits.copy() for logits, _ in open_model(form_of(name), precision).logits_before(text, 1)])
        for precision in ("f32", "q8_0")
    )
    assert 0 < np.abs(logprobs(exact) - logprobs(rounded)).mean() < 0.15


def test_experts_in_16_bits_need_a_gpu(form_of: Callable[..., Path]) -> None:
    with pytest.raises(BackendError, match="only in f32, q8_0 and q4_0"):
        open_model(form_of("qwen3_moe"), "bf16")


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("llama", {"hidden_act": "gelu"}, "llama with hidden_act = 'gelu'"),
        ("llama", {"rope_parameters": {**_YARN, "rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
        ("qwen3", {"rope_parameters": {**_YARN, "attention_factor": 2.0}}, "attention_factor in rope_parameters"),
        ("qwen3", {"rope_parameters": {**_YARN, "mscale": 2.0}}, "mscale in rope_parameters"),
        ("qwen3_moe", {"rope_parameters": _YARN}, "qwen3_moe with rope_type = 'yarn'"),
        ("qwen2", {"rope_parameters": {**_UNSCALED, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping = None"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": _UNSCALED, "full_attention": {**_UNSCALED, "rope_theta": 5.0}}},
            "rope_parameters of sliding layers",
        ),
        ("cohere2", {"head_dim": 32}, "cohere2 with head_dim = 32"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized already"),
    ],
)
def test_what_is_not_proven_is_refused(name: str, changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES[name]().to_dict(), **changes}))
    with pytest.raises(BackendError) as caught:
        mlx_families.read_form(tmp_path)
    assert caught.value.code == "unsupported_model" and complaint in str(caught.value)


@pytest.mark.parametrize("name", _REFUSED)
def test_forms_that_mlx_lm_computes_otherwise_are_refused(name: str, tmp_path: Path) -> None:
    OTHER_FORMS[name]().save_pretrained(tmp_path)
    with pytest.raises(BackendError) as caught:
        mlx_families.read_form(tmp_path)
    assert caught.value.code == "unsupported_model" and _REFUSED[name] in str(caught.value)


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(BackendError, match=r"models of the type gpt2") as caught:
        mlx_families.read_form(tmp_path)
    assert caught.value.code == "unsupported_model"


def test_each_row_of_the_table_is_compared() -> None:
    assert {FAMILIES[name]().model_type for name in FAMILIES} == set(mlx_families.FAMILIES)
    assert not FAILS["MLX"]


def test_older_forms_of_the_settings_are_read(tmp_path: Path) -> None:
    """Published models have rope_theta and rope_scaling at the top level."""
    config = FAMILIES["llama"]().to_dict()
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = mlx_families.read_form(tmp_path).args
    assert args.rope_theta == 500.0 and args.rope_scaling["type"] == "llama3" and args.rope_scaling["factor"] == 8.0
