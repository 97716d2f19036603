"""Gradients of tenants' losses, compared with plain transformers, PEFT and PyTorch, on the built-in base in float32."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plain_losses import (
    ModelsBench,
    a_request,
    computed,
    largest_error,
    peft_of,
    reference,
    tiny_settings,
)
from echo_hub.tenants.requests import LossFunction


def gradient_differences(scratch: Path, seed: int) -> dict[str, float]:
    """Return, for each loss, the largest error of the gradient relative to the gradient's largest value."""
    bench = ModelsBench.of(tiny_settings())
    differences = {}
    for loss in LossFunction:
        model = bench.model(b_scale=0.3)
        request = a_request(bench, loss, seed=seed, count=8)
        _, _, expected = reference(peft_of(bench, model, scratch / loss), request)
        _, gradients = computed(bench, model, request)
        differences[str(loss)] = largest_error(gradients, expected)
    return differences
