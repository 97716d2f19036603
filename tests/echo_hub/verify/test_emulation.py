"""Emulation of engines with few bits per weight: rounding formats computed by hand, and a small model's forward
pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.verify.emulation import BLOCK, SUPERBLOCK, Affine, Symmetric, emulating, in_blocks, with_mantissa
from tests.echo_hub.verify.conftest import Versions
from tests.families import FAMILIES


def weights(*modules: torch.nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for module in modules for parameter in module.parameters()}


def linear(inputs: int, outputs: int = 8, *, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(inputs)
    return torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (BLOCK - len(values))])


# --- formats


def test_eight_bits_by_hand() -> None:
    """Scale 1, because the largest value is 127: values are rounded to integers."""
    found = in_blocks(block(127.0, -3.4, 0.6, -0.4), Symmetric(8))
    assert found[:4].tolist() == [127.0, -3.0, 1.0, 0.0] and found.shape == (BLOCK,)


def test_the_scale_is_of_half_precision() -> None:
    """The scale 1 / 127 is .0078740, but .0078735 in float16, so 127 scales are .99994 instead of 1."""
    scale = float(np.float16(1.0 / 127.0))
    found = in_blocks(block(1.0, 0.5), Symmetric(8))
    assert found[0] == pytest.approx(127 * scale, rel=1e-6) and found[0] != 1.0
    assert found[1] == pytest.approx(64 * scale, rel=1e-6), ".5 is 63.5 scales and a little more"


def test_four_bits_by_hand() -> None:
    """Scale 1, because the largest value is 7; four bits can hold -8 to 7."""
    found = in_blocks(block(7.0, -7.0, 2.6, -0.4), Symmetric(4))
    assert found[:4].tolist() == [7.0, -7.0, 3.0, 0.0]


def test_an_affine_block_by_hand() -> None:
    """From -1 to 14 are 15 steps of 1. The lowest value is exact, and 0 is one of the steps."""
    found = in_blocks(block(14.0, -1.0, 5.4, 5.6), Affine(4))
    assert found[:5].tolist() == [14.0, -1.0, 5.0, 6.0, 0.0]


def test_a_block_of_one_value_is_unchanged() -> None:
    same = torch.full((BLOCK,), 0.5)
    assert torch.equal(in_blocks(same, Affine(4)), same) and torch.equal(in_blocks(same * 0, Affine(5)), same * 0)
    assert torch.equal(in_blocks(same * 0, Symmetric(8)), same * 0)


@pytest.mark.parametrize("rounding", [Symmetric(8), Symmetric(4), Affine(5)])
def test_each_block_has_its_own_scale(rounding) -> None:
    small, large = torch.randn(BLOCK) / 100, torch.randn(BLOCK)
    found = in_blocks(torch.cat([small, large]), rounding)
    assert torch.equal(found[:BLOCK], in_blocks(small, rounding))
    assert torch.equal(found[BLOCK:], in_blocks(large, rounding))


@pytest.mark.parametrize("size", [1, 31, 33, 40, 100])
@pytest.mark.parametrize("rounding", [Symmetric(8), Symmetric(4), Affine(5)])
def test_sizes_that_are_not_a_multiple_of_a_block(size: int, rounding) -> None:
    """Zeros that fill the last block must not appear in the result."""
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    found = in_blocks(values, rounding)
    padded = torch.nn.functional.pad(values, (0, -size % BLOCK))
    assert found.shape == values.shape
    assert torch.equal(found, in_blocks(padded, rounding)[:, :size])


@pytest.mark.parametrize(("bits", "error"), [(8, 1 / 127), (6, 1 / 31), (5, 1 / 15), (4, 1 / 7)])
def test_no_value_is_off_by_more_than_half_a_step(bits: int, error: float) -> None:
    values = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(bits))
    off = (in_blocks(values, Symmetric(bits)) - values).abs()
    assert (off <= values.abs().amax(dim=1, keepdim=True) * (error / 2 + 1e-3)).all()
    assert off.max() > values.abs().max() * error / 4


def test_the_largest_values_stay_finite() -> None:
    """Values above 8 million have a block scale beyond the range of float16."""
    for rounding in (Symmetric(8), Symmetric(4), Affine(4)):
        assert in_blocks(block(1e7, -1e7, 1.0), rounding).isfinite().all()


# --- products


@pytest.mark.parametrize("size", [BLOCK, 40, SUPERBLOCK, 3 * SUPERBLOCK])
@pytest.mark.parametrize(
    ("precision", "packed", "packed_whole"),
    [
        ("q8_0", Symmetric(8), Symmetric(8)),
        ("q6_k", Symmetric(8), Symmetric(6)),
        ("q5_k_m", Affine(5), Affine(5)),
        ("q4_k_m", Symmetric(5), Affine(4)),
        ("q4_0", Symmetric(4), Symmetric(4)),
        ("made-up", Symmetric(4), Symmetric(4)),
    ],
)
def test_a_layers_rounding_equals_hand_computed_values(size: int, precision: str, packed, packed_whole) -> None:
    """Weights are rounded to the format and inputs to 8 bits. K-quants need whole superblocks; layers of other sizes
    use a simpler format.
    """
    layer, inputs = linear(size), torch.randn(5, size)
    with emulating(precision, weights(layer)):
        found = layer(inputs)
    rounding = packed_whole if size % SUPERBLOCK == 0 else packed
    expected = in_blocks(inputs, Symmetric(8)) @ in_blocks(layer.weight, rounding).T
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert not torch.equal(found, layer(inputs))


def test_a_bias_is_not_rounded() -> None:
    layer, inputs = linear(64, bias=True), torch.randn(5, 64)
    with emulating("q8_0", weights(layer)):
        found = layer(inputs)
    expected = in_blocks(inputs, Symmetric(8)) @ in_blocks(layer.weight, Symmetric(8)).T + layer.bias
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_weights_of_experts_are_rounded(family: str) -> None:
    """Both families hold all experts of a layer in one tensor; gpt-oss holds it transposed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval().requires_grad_(False)
    experts = model.base_model.layers[0].mlp.experts
    inputs = torch.randn(6, 64)
    chosen, shares = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0], [1, 2]]), torch.full((6, 2), 0.5)
    with emulating("q8_0", weights(experts)):
        found = experts(inputs, chosen, shares)
    plain = experts(inputs, chosen, shares)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).data
        given = weight.mT if family == "gpt_oss" else weight
        rounded = in_blocks(given, Symmetric(8))
        getattr(experts, name).data = (rounded.mT if family == "gpt_oss" else rounded).contiguous()
    experts.config._experts_implementation = "eager"
    expected = experts(in_blocks(inputs, Symmetric(8)), chosen, shares)
    # The emulation also rounds the inputs of the second product, to 8 bits.
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert (found - expected).abs().mean() < 0.7 * (found - plain).abs().mean()


def test_products_of_other_matrices_are_not_rounded() -> None:
    """Only products with base weights are quantised; those of adapters and attention are not."""
    one, other = torch.randn(4, 64), torch.randn(64, 4)
    with emulating("q4_0", weights(linear(64))):
        assert torch.equal(one @ other, torch.mm(one, other))
    assert torch.equal(one @ other, torch.mm(one, other))


def test_a_mantissa_by_hand() -> None:
    """With a mantissa of 7 bits, the step between 1 and 2 is 2**-7: 1 + 3 * 2**-9 becomes 1 + 2**-7, and 1 + 2**-9
    becomes 1; half a step is rounded away from 0. The range stays that of float32.
    """
    step = 2.0**-7
    values = torch.tensor([1.0, 1.0 + 0.75 * step, 1.0 + 0.25 * step, -1.0 - 0.5 * step, 2.0 - 0.1 * step, 0.0, 3e38])
    found = with_mantissa(values, 7)
    assert found[:6].tolist() == [1.0, 1.0 + step, 1.0, -1.0 - step, 2.0, 0.0]
    assert found[6].isfinite() and with_mantissa(torch.tensor([65_519.0]), 10).item() == 65_504.0


@pytest.mark.parametrize(("precision", "bits", "dtype"), [("f16", 10, torch.float16), ("bf16", 7, torch.bfloat16)])
def test_half_precision_rounds_every_result(precision: str, bits: int, dtype: torch.dtype) -> None:
    """Results must equal those of tensors of that precision, except for ties."""
    layer, inputs = linear(64), torch.randn(5, 64)
    with emulating(precision, weights(layer)):
        product = layer(inputs)
        found = product * 3.0
    assert torch.equal(product, with_mantissa(layer(inputs), bits)) and torch.equal(
        found, with_mantissa(product * 3.0, bits)
    )
    assert torch.equal(product, layer(inputs).to(dtype).float()) and found.dtype is torch.float32


def test_half_precision_keeps_its_range() -> None:
    """Models in half precision compute sums of squares in float32, so large values must not overflow."""
    layer = linear(64)
    for precision in ("f16", "bf16"):
        with emulating(precision, weights(layer)):
            found = torch.full((2, 64), 1e30) + 0.0
        assert torch.allclose(found, torch.tensor(1e30), rtol=1e-2)


def test_f32_of_a_bfloat16_layer_is_exact() -> None:
    layer, inputs = linear(64).bfloat16(), torch.randn(5, 64)
    with emulating("f32", weights(layer)), torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(inputs)
    torch.testing.assert_close(found.float(), inputs @ layer.weight.float().T, atol=1e-5, rtol=1e-5)


def test_code_outside_the_block_is_not_rounded() -> None:
    layer, inputs = linear(64), torch.randn(5, 64)
    before = layer(inputs)
    kept = layer.weight.clone()
    for precision in ("q4_0", "f16", "bf16", "f32"):
        with emulating(precision, weights(layer)):
            layer(inputs)
        assert torch.equal(layer(inputs), before) and torch.equal(layer.weight, kept)


def test_an_error_ends_the_emulation() -> None:
    layer, inputs = linear(64), torch.randn(5, 64)
    with pytest.raises(ZeroDivisionError), emulating("q4_0", weights(layer)):
        raise ZeroDivisionError
    assert torch.equal(layer(inputs), inputs @ layer.weight.T)


def test_two_layers_in_sequence_keep_their_weights() -> None:
    """The emulation keeps a layer's packed weights for the next product, but must not use them for another layer."""
    first, second, inputs = linear(64, 64), linear(64, 64), torch.randn(5, 64)
    second.weight.mul_(2.0)
    with emulating("q8_0", weights(first, second)):
        found = [layer(inputs) for layer in (first, second, first, first)]
    for layer, one in zip((first, second, first, first), found, strict=True):
        expected = in_blocks(inputs, Symmetric(8)) @ in_blocks(layer.weight, Symmetric(8)).T
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


def test_parts_of_a_weight_are_rounded_like_the_whole() -> None:
    """Output layers are computed a few rows at a time, which must not change their rounding."""
    layer, inputs = linear(64, 12), torch.randn(5, 64)
    with emulating("q4_0", weights(layer)):
        whole = inputs @ layer.weight.T
        parts = torch.cat([inputs @ layer.weight[start : start + 4].T for start in (0, 4, 8)], dim=1)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)


# --- a model


def held_in(versions: Versions, precision: str) -> Policy:
    learner = LearnerConfig(device="cpu", threads=1, precision=precision)
    return Policy.load(versions.settings.model_copy(update={"learner": learner}))


def batches(tokens: int) -> list[MicroBatch]:
    """Return two prompts with three completions each, in one forward pass or, with few `tokens`, row by row."""
    rng = np.random.default_rng(4)
    groups = [
        WeightedGroup(
            prompt_ids=rng.integers(2, 40, 4).astype(np.int32),
            rollouts=tuple(
                WeightedRollout(
                    completion_ids=rng.integers(2, 40, 5 + number).astype(np.int32),
                    loss_mask=np.ones(5 + number, bool),
                    behavior_logprobs=np.zeros(5 + number, np.float32),
                    advantages=np.zeros(5 + number),
                    weight=0.0,
                )
                for number in range(3)
            ),
        )
        for _ in range(2)
    ]
    return list(build_micro_batches(groups, micro_batch_tokens=tokens))


def with_adapter(policy: Policy, versions: Versions, version: int) -> Policy:
    policy.set_adapter(policy.read_adapter(versions.directory.adapter(version)))
    return policy


@pytest.mark.parametrize("packs_up_to", [0, 10**6])
@pytest.mark.parametrize("version", [1, 3])
def test_f32_of_a_bfloat16_policy_equals_the_float32_policy(versions: Versions, version: int, packs_up_to: int) -> None:
    """Policies held in bfloat16 must compute in float32 for the format f32, packed or row by row, and with an
    adapter.
    """
    coarse = with_adapter(held_in(versions, "bfloat16"), versions, version)
    exact = with_adapter(held_in(versions, "float32"), versions, version)
    with torch.no_grad():
        for name, parameter in coarse.model.named_parameters():
            exact.model.get_parameter(name).copy_(parameter)
    coarse._packs_up_to = exact._packs_up_to = packs_up_to
    for batch in batches(10_000):
        with emulating("f32", coarse.base_storages):
            found = coarse.states(batch)
        expected = exact.states(batch)
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5)
        off = (coarse.states(batch).float() - expected).abs().max()
        assert float(off) > 1e-3, "bfloat16 itself deviates more"


@pytest.mark.parametrize("precision", ["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"])
def test_a_pass_outside_of_the_block_is_as_before(versions: Versions, precision: str) -> None:
    policy = with_adapter(held_in(versions, "float32"), versions, 2)
    (batch,) = batches(10_000)
    before = policy.states(batch)
    with emulating(precision, policy.base_storages):
        inside = policy.states(batch)
    assert torch.equal(policy.states(batch), before)
    assert inside.isfinite().all() and torch.equal(inside, before) == (precision == "f32")


def test_few_bits_are_farther_off_than_many(versions: Versions) -> None:
    policy = with_adapter(held_in(versions, "float32"), versions, 1)
    (batch,) = batches(10_000)
    exact, off = policy.states(batch), {}
    for precision in ("f16", "bf16", "q8_0", "q4_0"):
        with emulating(precision, policy.base_storages):
            off[precision] = float((policy.states(batch) - exact).square().mean())
    assert off["f16"] < off["bf16"] < off["q8_0"] < off["q4_0"]


def test_the_adapter_itself_is_not_packed(versions: Versions) -> None:
    """Engines keep adapters in float32 or half precision, so adapters are not quantised."""
    policy = held_in(versions, "float32")
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters.values()}
    assert own and not own & policy.base_storages
    assert policy.head.weight.untyped_storage().data_ptr() in policy.base_storages
