from __future__ import annotations

import pytest
import torch

from echo_hub.learner.logprobs import selected_logprobs


@pytest.mark.parametrize("chunk_elements", [1, 50, 51 * 7, 10_000])
def test_chunks_give_the_full_softmax_and_its_gradient(chunk_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False).requires_grad_(False)
    hidden = torch.randn(23, 8, generator=generator)
    ids = torch.randint(0, 50, (23,), generator=generator)
    weights = torch.randn(23, generator=generator)

    full_hidden = hidden.clone().requires_grad_()
    full = (head(full_hidden) / 0.7).log_softmax(dim=-1)[torch.arange(23), ids]
    (full * weights).sum().backward()

    chunked_hidden = hidden.clone().requires_grad_()
    chunked = selected_logprobs(chunked_hidden, head, ids, temperature=0.7, chunk_elements=chunk_elements)
    (chunked * weights).sum().backward()

    assert full_hidden.grad is not None and chunked_hidden.grad is not None
    torch.testing.assert_close(chunked, full, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(chunked_hidden.grad, full_hidden.grad, atol=1e-6, rtol=1e-6)


def test_logits_of_a_chunk_are_all_that_is_kept() -> None:
    head = torch.nn.Linear(4, 64, bias=False).requires_grad_(False)
    hidden = torch.randn(32, 4, requires_grad=True)
    saved = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selected_logprobs(hidden, head, torch.zeros(32, dtype=torch.long), temperature=1.0, chunk_elements=64 * 8)
    assert max(saved, default=0) <= 64 * 8
