"""Emulation of an engine that computes with a GGUF file: the weights equal those of transformers' reader, and the
log-probabilities those of llama.cpp with that file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.logprobs import logits_in_chunks
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.run.base_files import resolve_base
from echo_hub.verify.emulation import Place, Symmetric, emulating, in_blocks
from echo_hub.verify.gguf_weights import GgufWeights
from echo_hub.verify.worker import Examiner, OfferedFile
from echo_node.backends.base import EngineSettings
from echo_shared.errors import LearnerError
from echo_shared.gguf.model_file import convert_model
from tests.gguf_files import write_gguf

pytest.importorskip("llama_cpp")

IDS = np.random.default_rng(3).integers(2, 90, 60).astype(np.int32)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_base("builtin:tiny")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Llama, with an output matrix of its own and fewer key heads than heads."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )
    directory = tmp_path_factory.mktemp("llama") / "base"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def settings_of(base: Path, precision: str = "float32") -> LearnerSettings:
    return LearnerSettings(
        base_dir=base,
        seed=3,
        temperature=1.0,
        max_tokens=16,
        stop_ids=(1,),
        training=TrainingConfig(lora_rank=4),
        learner=LearnerConfig(device="cpu", threads=1, precision=precision),
    )


def batch() -> MicroBatch:
    count = len(IDS) - 1
    rollout = WeightedRollout(
        completion_ids=IDS[1:],
        loss_mask=np.ones(count, bool),
        behavior_logprobs=np.zeros(count, np.float32),
        advantages=np.zeros(count),
        weight=0.0,
    )
    (found,) = build_micro_batches([WeightedGroup(prompt_ids=IDS[:1], rollouts=(rollout,))], micro_batch_tokens=1_000)
    return found


def logprobs(policy: Policy, engine: GgufWeights | str) -> Tensor:
    """Return the log-probabilities of IDS[1:] of an emulated engine."""

    def logits() -> Iterator[Tensor]:
        with emulating(engine, policy.base_storages):
            for _, part in logits_in_chunks(policy.states(batch()), policy.head):
                yield part.clone()

    of_all = torch.cat(list(logits())).double().log_softmax(dim=1)
    return of_all.gather(1, torch.from_numpy(IDS[1:].astype(np.int64))[:, None])[:, 0]


def llama_cpp_logprobs(file: Path, base: Path, directory: Path) -> Tensor:
    from echo_node.backends.llama_cpp_engine import LlamaCppEngine

    directory.mkdir()
    shutil.copyfile(file, directory / file.name)
    shutil.copyfile(base / "config.json", directory / "config.json")
    engine = LlamaCppEngine()
    engine.open(directory, directory.parent / "derived", EngineSettings(threads=1))
    try:
        return torch.from_numpy(np.array(engine.score(IDS, 1, 1.0)[1], np.float64))
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_1"])
@pytest.mark.parametrize("model", ["tiny", "llama"])
def test_the_weights_equal_those_of_transformers(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, kind: str
) -> None:
    """transformers reads the file independently: names, the order of rows, and dequantised values."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    base: Path = request.getfixturevalue(model)
    file = write_gguf(base, tmp_path / "m.gguf", kind)
    policy = Policy.load(settings_of(base))
    found = GgufWeights(file, policy.base_weights, base)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    expected = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=skeleton)["tensors"]
    checked = 0
    for name, weight in policy.base_weights.items():
        if weight.dim() < 2 or name not in expected:
            continue
        place = Place(weight.untyped_storage().data_ptr(), 0)
        whole = found.matrix(weight, place)
        torch.testing.assert_close(whole, torch.as_tensor(expected[name]), rtol=0, atol=0)
        some = weight[3:7]
        assert torch.equal(found.matrix(some, Place(place.address, some.storage_offset())), whole[3:7])
        checked += 1
    assert checked >= 15


FORMS = [
    ("tiny", "f32", 0.01),
    ("tiny", "q8_0", 1.2),
    ("tiny", "q4_0", 0.15),
    ("tiny", "q4_1", 0.25),
    ("llama", "f32", 0.01),
    ("llama", "q8_0", 1.2),
    ("llama", "q4_0", 0.25),
    ("llama", "q6_k", 0.6),
    ("llama", "q4_k_m", 0.25),
]
"""Model, form, and largest distance from llama.cpp as a share of that of the base's own weights. With 8 bits, inputs
are rounded as coarsely as weights, and differently by each kernel.
"""


@pytest.mark.parametrize(("model", "kind", "share"), FORMS)
def test_the_emulation_is_as_far_from_llama_cpp_as_its_kernels_round(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, kind: str, share: float
) -> None:
    base: Path = request.getfixturevalue(model)
    made = convert_model if "k" in kind else write_gguf
    file = made(base, tmp_path / "m.gguf", kind)
    policy = Policy.load(settings_of(base))
    real = llama_cpp_logprobs(file, base, tmp_path / "base")
    off = float((logprobs(policy, GgufWeights(file, policy.base_weights, base)) - real).abs().mean())
    exact = float((logprobs(policy, "f32") - real).abs().mean())
    print(model, kind, off, exact)
    assert off <= 1e-4 if kind == "f32" else off <= share * exact


def test_a_bfloat16_verifier_emulates_the_same(tiny: Path, tmp_path: Path) -> None:
    """A bfloat16 verifier multiplies the output matrix in slices. Only its norms are rounded."""
    file = write_gguf(tiny, tmp_path / "m.gguf", "q4_0")
    found = {}
    for precision in ("float32", "bfloat16"):
        policy = Policy.load(settings_of(tiny, precision))
        found[precision] = logprobs(policy, GgufWeights(file, policy.base_weights, tiny))
    off = (found["bfloat16"] - found["float32"]).abs().mean()
    policy = Policy.load(settings_of(tiny))
    assert off < 0.15 * (logprobs(policy, "f32") - found["float32"]).abs().mean()


def test_only_products_with_base_weights_use_the_file(tiny: Path, tmp_path: Path) -> None:
    policy = Policy.load(settings_of(tiny))
    weights = GgufWeights(write_gguf(tiny, tmp_path / "m.gguf", "q8_0"), policy.base_weights, tiny)
    layer = policy.base_weights["model.layers.1.mlp.up_proj.weight"]
    inputs, other = torch.randn(5, layer.shape[1]), torch.randn(7, layer.shape[1])
    with emulating(weights, policy.base_storages):
        product, unrelated = inputs @ layer.T, inputs @ other.T
        rows = torch.nn.functional.embedding(torch.tensor([[3, 5], [3, 8]]), policy.head.weight)
    place = Place(layer.untyped_storage().data_ptr(), 0)
    torch.testing.assert_close(product, in_blocks(inputs, Symmetric(8)) @ weights.matrix(layer, place).T)
    assert torch.equal(unrelated, inputs @ other.T)
    own = Place(policy.head.weight.untyped_storage().data_ptr(), 0)
    assert torch.equal(rows, weights.matrix(policy.head.weight, own)[torch.tensor([[3, 5], [3, 8]])])


def test_a_file_that_lacks_a_weight_is_refused(tiny: Path, llama: Path, tmp_path: Path) -> None:
    policy = Policy.load(settings_of(tiny))
    file = write_gguf(tiny, tmp_path / "m.gguf", "q8_0")
    more = {**policy.base_weights, "model.layers.4.mlp.up_proj.weight": torch.zeros(384, 128)}
    with pytest.raises(LearnerError, match="in a form that the emulation does not know") as caught:
        GgufWeights(file, more, tiny)
    assert "layers.4.mlp.up_proj" in str(caught.value.got)


def test_rows_in_an_unknown_order_are_refused(tiny: Path, tmp_path: Path) -> None:
    """If the order of a file's rows is unknown, nodes with the file are judged by default scales. A scale measured with
    mixed-up rows would be far too coarse."""
    policy = Policy.load(settings_of(tiny))
    file = write_gguf(tiny, tmp_path / "m.gguf", "q8_0")
    name = "model.layers.1.self_attn.q_proj.weight"
    odd = {**policy.base_weights, name: policy.base_weights[name].flip(0)}
    with pytest.raises(LearnerError, match="in an order that the emulation does not know") as caught:
        GgufWeights(file, odd, tiny)
    assert name in str(caught.value.got)


def test_the_verifier_measures_the_offered_file_alone(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "m.gguf", "q4_0")
    settings = settings_of(tiny)
    prompts = [np.random.default_rng(number).integers(2, 40, 4).astype(np.int32) for number in range(40)]
    gguf = OfferedFile("q4_0@3fa94c2e", str(file))
    examiner = Examiner(Policy.load(settings), settings, kept=1, gguf=gguf)
    measured = examiner.measure("q4_0@3fa94c2e", 0, {}, prompts)
    assert "evidence" in measured
    assert "not here" in examiner.measure("q4_0@00000000", 0, {}, prompts)["cannot"]
    alone = Examiner(Policy.load(settings), settings, kept=1)
    assert "not here" in alone.measure("q4_0@3fa94c2e", 0, {}, prompts)["cannot"]
