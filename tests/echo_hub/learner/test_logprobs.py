from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echo_hub.learner import logprobs
from echo_hub.learner.head import Head
from echo_hub.learner.logprobs import intervals, screened_logprobs, selected_logprobs
from echo_shared.sampling import draws

N, H, V = 23, 8, 50
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(N, H, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(0, V, (N,), generator=GENERATOR)
WEIGHTS = torch.randn(N, generator=GENERATOR, dtype=torch.float64)


def make_head(
    dtype: torch.dtype = torch.float64, *, bias: bool = False, scale: float = 1.0, cap: float | None = None
) -> Head:
    torch.manual_seed(1)
    return Head(torch.nn.Linear(H, V, bias=bias, dtype=torch.float64).to(dtype).requires_grad_(False), scale, cap)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, V, V * 7, 10_000])
def test_chunks_give_the_full_softmax_and_its_gradient(chunk_elements: int, bias: bool) -> None:
    head = make_head(bias=bias)
    full_hidden = HIDDEN.clone().requires_grad_()
    full = (head(full_hidden) / 0.7).log_softmax(dim=-1)[torch.arange(N), IDS]
    (full * WEIGHTS).sum().backward()

    hidden = HIDDEN.clone().requires_grad_()
    chunked = selected_logprobs(hidden, head, IDS, temperature=0.7, chunk_elements=chunk_elements)
    (chunked * WEIGHTS).sum().backward()

    torch.testing.assert_close(chunked, full, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(hidden.grad, full_hidden.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 50, 1_024, 1_025, 3_000])
def test_tokens_sampled_with_u_are_inside_and_others_outside_as_by_hand(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    head = Head(torch.nn.Linear(H, vocabulary, bias=False, dtype=torch.float64).requires_grad_(False))
    logits = head(HIDDEN).numpy()
    uniforms = rng.random(N)
    drawn, _ = draws.draw(logits, uniforms, 0.7)
    u = torch.from_numpy(uniforms)
    for chunk_elements in (1, vocabulary * 7):
        settings = {"temperature": 0.7, "chunk_elements": chunk_elements}
        logprobs, outside, _ = screened_logprobs(HIDDEN, head, torch.from_numpy(drawn), u, **settings)
        torch.testing.assert_close(logprobs, selected_logprobs(HIDDEN, head, torch.from_numpy(drawn), **settings))
        assert float(outside.max()) < 1e-12
    claimed = rng.integers(0, vocabulary, N)
    cumulative = np.cumsum(np.exp(logits / 0.7), axis=1)
    cumulative /= cumulative[:, -1:]
    above = cumulative[np.arange(N), claimed]
    below = np.where(claimed == 0, 0.0, cumulative[np.arange(N), claimed - 1])
    expected = np.maximum(0, np.maximum(below - uniforms, uniforms - above))
    _, outside, _ = screened_logprobs(HIDDEN, head, torch.from_numpy(claimed), u, temperature=0.7)
    np.testing.assert_allclose(outside.numpy(), expected, atol=1e-12)


def test_the_distance_has_no_gradient_and_needs_a_u() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    uniforms = torch.full((N,), 0.5, dtype=torch.float64)
    uniforms[3] = torch.nan
    logprobs, outside, entropies = screened_logprobs(hidden, make_head(), IDS, uniforms, temperature=1.0)
    assert not outside.requires_grad and not entropies.requires_grad and logprobs.requires_grad
    assert outside.isnan().nonzero().tolist() == [[3]]
    (logprobs * WEIGHTS).sum().backward()
    plain = HIDDEN.clone().requires_grad_()
    (selected_logprobs(plain, make_head(), IDS, temperature=1.0) * WEIGHTS).sum().backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=0, atol=0)


@pytest.mark.parametrize("vocabulary", [1, 50, 3_000])
@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("grad", [False, True])
def test_the_entropy_is_that_of_the_whole_distribution(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, rows: int, grad: bool
) -> None:
    """Logits are computed in chunks of tokens, and in blocks of rows within a chunk; no choice of these sizes may
    change the entropy.
    """
    monkeypatch.setattr(logprobs, "EXPONENT_ELEMENTS", {"cpu": rows * vocabulary})
    torch.manual_seed(vocabulary)
    head = Head(torch.nn.Linear(H, vocabulary, bias=True, dtype=torch.float64).requires_grad_(False))
    expected = torch.distributions.Categorical(logits=head(HIDDEN) / 0.7).entropy()
    u, ids = torch.full((N,), torch.nan, dtype=torch.float64), IDS % vocabulary
    for chunk_elements in (1, vocabulary * 7, 10**6):
        found = screened_logprobs(
            HIDDEN.clone().requires_grad_(grad), head, ids, u, temperature=0.7, chunk_elements=chunk_elements
        )
        torch.testing.assert_close(found.entropies_N, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [2, 50, 3_000])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_the_entropys_gradient_equals_autograds_with_the_tokens(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, rows: int
) -> None:
    """Gradients of log-probabilities and entropies together must equal autograd's, for any sizes of chunks and
    blocks.
    """
    monkeypatch.setattr(logprobs, "EXPONENT_ELEMENTS", {"cpu": rows * vocabulary})
    generator = torch.Generator().manual_seed(vocabulary + rows)
    head = Head(torch.nn.Linear(H, vocabulary, bias=True, dtype=torch.float64).requires_grad_(False))
    u, ids = torch.full((N,), torch.nan, dtype=torch.float64), IDS % vocabulary
    for chunk_elements, scale in ((1, 1.0), (vocabulary * 7, 5.0), (10**6, 30.0)):
        given = scale * torch.randn(N, H, generator=generator, dtype=torch.float64)
        of_tokens, of_entropies = torch.randn(2, N, generator=generator, dtype=torch.float64)
        plain = given.clone().requires_grad_()
        logs = (head(plain) / 0.7).log_softmax(dim=-1)
        entropies = -(logs.exp() * logs).sum(dim=-1)
        (logs[torch.arange(N), ids] * of_tokens + entropies * of_entropies).sum().backward()
        hidden = given.clone().requires_grad_()
        found = screened_logprobs(
            hidden, head, ids, u, temperature=0.7, entropy_gradient=True, chunk_elements=chunk_elements
        )
        (found.logprobs_N * of_tokens + found.entropies_N * of_entropies).sum().backward()
        torch.testing.assert_close(found.entropies_N, entropies, atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("chunk_elements", [1, V * 7, 10_000])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (3.0, None), (1.0, 0.8), (4.0, 2.0), (1.0, 30.0)])
def test_scaled_and_capped_logits_have_autograds_gradient(chunk_elements: int, scale: float, cap: float | None) -> None:
    head = make_head(bias=True, scale=scale, cap=cap)
    u, (of_tokens, of_entropies) = (
        torch.full((N,), torch.nan, dtype=torch.float64),
        torch.stack([WEIGHTS, -(WEIGHTS**2)]),
    )
    plain = HIDDEN.clone().requires_grad_()
    logs = (head(plain) / 0.7).log_softmax(dim=-1)
    entropies = -(logs.exp() * logs).sum(dim=-1)
    of_each = logs[torch.arange(N), IDS]
    (of_each * of_tokens + entropies * of_entropies).sum().backward()
    hidden = HIDDEN.clone().requires_grad_()
    found = screened_logprobs(
        hidden, head, IDS, u, temperature=0.7, entropy_gradient=True, chunk_elements=chunk_elements
    )
    (found.logprobs_N * of_tokens + found.entropies_N * of_entropies).sum().backward()
    torch.testing.assert_close(found.logprobs_N, of_each, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found.entropies_N, entropies, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-11, rtol=1e-11)

    alone = HIDDEN.clone().requires_grad_()
    selected = selected_logprobs(alone, head, IDS, temperature=0.7, chunk_elements=chunk_elements)
    (expected,) = torch.autograd.grad((head(plain) / 0.7).log_softmax(dim=-1)[torch.arange(N), IDS].sum(), plain)
    (gradient,) = torch.autograd.grad(selected.sum(), alone)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 0.8)])
def test_intervals_are_those_of_scaled_and_capped_logits(scale: float, cap: float | None) -> None:
    head = make_head(scale=scale, cap=cap)
    below, found = intervals(HIDDEN, head, IDS, temperature=0.7)
    expected = draws.interval(head(HIDDEN).numpy(), IDS.numpy(), 0.7)
    torch.testing.assert_close(below, torch.from_numpy(expected[0]), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, torch.from_numpy(expected[1]), atol=1e-12, rtol=1e-12)


def test_a_capped_head_in_bfloat16_keeps_the_gradient_of_a_certain_token() -> None:
    exact, rounded = make_head(cap=5.0), make_head(torch.bfloat16, cap=5.0)
    gradients = []
    for head, given in ((exact, (20 * HIDDEN).bfloat16().double()), (rounded, (20 * HIDDEN).bfloat16())):
        hidden = given.requires_grad_()
        selected_logprobs(hidden, head, IDS, temperature=1.0).sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad.double())
    torch.testing.assert_close(gradients[1], gradients[0], atol=0.02 * float(gradients[0].abs().max()), rtol=0)


def test_the_tokens_gradient_is_bit_identical_with_the_entropys() -> None:
    gradients = []
    for entropy_gradient in (False, True):
        hidden = HIDDEN.float().requires_grad_()
        u = torch.full((N,), 0.5)
        found = screened_logprobs(
            hidden, make_head(torch.float32), IDS, u, temperature=0.7, entropy_gradient=entropy_gradient
        )
        assert found.entropies_N.requires_grad is entropy_gradient
        (found.logprobs_N * WEIGHTS.float()).sum().backward()
        gradients.append(hidden.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_the_gradient_of_the_entropy_is_finite_where_probabilities_vanish() -> None:
    u = torch.full((N,), 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        hidden = (1e4 * HIDDEN).to(dtype).requires_grad_()
        found = screened_logprobs(hidden, make_head(dtype), IDS, u, temperature=0.1, entropy_gradient=True)
        found.entropies_N.sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.isfinite().all() and float(hidden.grad.abs().max()) < 1e-2, "the tokens are certain"


def test_the_entropy_of_a_float32_head_is_float32_and_finite_for_any_logits() -> None:
    u = torch.full((N,), 0.5)
    for scale in (0.0, 1.0, 1e4):
        hidden, head = (scale * HIDDEN).float(), make_head(torch.float32)
        found = screened_logprobs(hidden, head, IDS, u, temperature=0.1).entropies_N
        assert found.dtype == torch.float32
        expected = torch.distributions.Categorical(logits=head(hidden).double() / 0.1).entropy()
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


def test_gradient_is_that_of_finite_differences() -> None:
    head = make_head()

    def logprobs(hidden: torch.Tensor) -> torch.Tensor:
        return selected_logprobs(hidden, head, IDS, temperature=0.7, chunk_elements=V * 7)

    assert torch.autograd.gradcheck(logprobs, HIDDEN.clone().requires_grad_())


def test_a_token_without_weight_has_no_gradient() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    weights = WEIGHTS.clone()
    weights[5] = 0
    (selected_logprobs(hidden, make_head(), IDS, temperature=1.0) * weights).sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad[5].any() and hidden.grad[4].all()


def test_logits_far_apart_stay_finite() -> None:
    hidden = (1e4 * HIDDEN).float().requires_grad_()
    logprobs = selected_logprobs(hidden, make_head(torch.float32), IDS, temperature=0.1)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert logprobs.isfinite().all() and hidden.grad.isfinite().all()


def test_in_bfloat16_a_certain_token_keeps_its_gradient() -> None:
    """Gradients here are p - 1. bfloat16 cannot represent a p so close to 1, so p must not be rounded to bfloat16."""
    head = make_head(torch.bfloat16)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[3] = 1.0
    hidden = torch.full((1, H), 1.5, dtype=torch.bfloat16).requires_grad_()
    selected_logprobs(hidden, head, torch.tensor([3]), temperature=1.0).sum().backward()
    rest = 49 / (49 + torch.tensor(12.0).exp())
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.float(), rest.expand(1, H), rtol=1e-2, atol=0)


@pytest.mark.parametrize("cast_elements", [1, H * 7, 10_000])
def test_in_bfloat16_logits_are_not_rounded(monkeypatch: pytest.MonkeyPatch, cast_elements: int) -> None:
    """Logits of a trained model are tens, where bfloat16 has steps of tenths; the computation must keep more digits."""
    monkeypatch.setattr("echo_hub.learner.logprobs.CAST_ELEMENTS", cast_elements)
    head, hidden = make_head(torch.bfloat16, bias=True), (40 * HIDDEN).bfloat16()
    assert head.bias is not None
    logits = hidden.double() @ head.weight.double().T + head.bias.double()
    exact = logits.log_softmax(dim=-1)[torch.arange(N), IDS]
    found = selected_logprobs(hidden, head, IDS, temperature=1.0, chunk_elements=V * 7)
    torch.testing.assert_close(found, exact.float(), atol=2e-5, rtol=1e-6)


def test_no_tokens_are_no_work() -> None:
    hidden = HIDDEN[:0].clone().requires_grad_()
    selected_logprobs(hidden, make_head(), IDS[:0], temperature=1.0).sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, H)


class _Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("tokens", [100, 1_000])
@pytest.mark.parametrize(("entropy", "cap"), [(False, None), (True, None), (True, 2.0)])
def test_memory_does_not_grow_with_tokens_times_vocabulary(tokens: int, entropy: bool, cap: float | None) -> None:
    vocabulary, chunk_elements = 5_000, 5_000 * 20
    head = Head(torch.nn.Linear(4, vocabulary, bias=False).requires_grad_(False), cap=cap)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.long)
    u = torch.full((tokens,), 0.5)
    with _Largest() as largest:
        found = screened_logprobs(
            hidden, head, ids, u, temperature=1.0, entropy_gradient=entropy, chunk_elements=chunk_elements
        )
        (found.logprobs_N + (found.entropies_N if entropy else 0)).sum().backward()
    assert largest.elements == (chunk_elements if cap is None else chunk_elements // 3 // vocabulary * vocabulary)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, V * 7, 10_000])
def test_intervals_equal_the_whole_softmaxs(monkeypatch: pytest.MonkeyPatch, chunk_elements: int, bias: bool) -> None:
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk_elements)
    head, ids = make_head(bias=bias), IDS.clone()
    ids[:2] = torch.tensor([0, V - 1])  # Both ends of the vocabulary.
    below, found = intervals(HIDDEN, head, ids, temperature=0.7)
    expected = draws.interval(head(HIDDEN).numpy(), ids.numpy(), 0.7)
    torch.testing.assert_close(below, torch.from_numpy(expected[0]), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, torch.from_numpy(expected[1]), atol=1e-12, rtol=1e-12)
    assert below[0] == 0.0 and float(below[1] + found[1].exp()) == pytest.approx(1.0)


@pytest.mark.parametrize("chunk_elements", [1, V * 7])
def test_greedy_choices_return_their_shortfall(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    """Greedy choices draw no random number. So their result is not an interval of cumulative probability, but the
    shortfall in nats from the most likely token.
    """
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", chunk_elements)
    head, greedy = make_head(), torch.arange(N) % 2 == 0
    below, found = intervals(HIDDEN, head, IDS, greedy, temperature=0.7)
    scaled = head(HIDDEN) / 0.7
    short = scaled.amax(dim=1) - scaled[torch.arange(N), IDS]
    plain, logs = intervals(HIDDEN, head, IDS, temperature=0.7)
    torch.testing.assert_close(below, torch.where(greedy, short, plain), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, logs)
    best, _ = intervals(HIDDEN, head, scaled.argmax(dim=1), torch.ones(N, dtype=torch.bool), temperature=0.7)
    assert not best.any()


def test_intervals_of_a_bfloat16_head_are_not_rounded() -> None:
    head, hidden = make_head(torch.bfloat16), (40 * HIDDEN).bfloat16()
    below, found = intervals(hidden, head, IDS, temperature=1.0)
    expected = draws.interval((hidden.double() @ head.weight.double().T).numpy(), IDS.numpy(), 1.0)
    torch.testing.assert_close(below, torch.from_numpy(expected[0]), atol=2e-5, rtol=0)
    torch.testing.assert_close(found, torch.from_numpy(expected[1]), atol=2e-5, rtol=1e-6)
