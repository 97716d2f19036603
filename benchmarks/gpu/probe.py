"""The speed of plain decoding, with which the sampler is compared: a CUDA graph of transformers' forward pass on a
static cache, and the seeded draw.

No rollout begins or ends, and no adapter is used. Without CUDA, the step is computed without a graph.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import StaticCache

from benchmarks.harness.models import timed
from echo_hub.learner.policy import Policy
from echo_shared.sampling import torch_draws
from echo_shared.sampling.torch_cache import cache_argument

COLUMNS: Final = 256
FIRST: Final = 100
"""Number of tokens that each sequence has when the measurement begins."""
STEPS: Final = 50
WARM_UP: Final = 3


@torch.inference_mode()
def tokens_per_s(policy: Policy, width: int) -> float:
    """Return the tokens drawn per second by `width` sequences at the same time."""
    model, device = policy.model, policy.device
    cache: Any = StaticCache(config=model.config, max_cache_len=COLUMNS)
    ids = torch.zeros((width, 1), dtype=torch.int64, device=device)
    positions = torch.full_like(ids, FIRST)
    mask = (torch.arange(COLUMNS, device=device) <= FIRST).expand(width, 1, 1, COLUMNS).contiguous()
    u_R = torch.rand(width, dtype=torch.float64, device=device)
    temperature_R = torch.ones_like(u_R)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        output = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument(cache),
        )
        return torch_draws.draw(output.logits[:, -1], u_R, temperature_R)

    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
    with model.disable_adapter(), autocast:
        for _ in range(WARM_UP):
            step()
        for layer in cache.layers:
            layer.cumulative_length.fill_(FIRST)
        repeat = _graph(step).replay if device.type == "cuda" else step

        def steps() -> None:
            for _ in range(STEPS):
                repeat()
            if device.type == "cuda":
                torch.cuda.synchronize()

        took_s, _ = timed(steps)
    return width * STEPS / took_s


def _graph(step: Any) -> Any:
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph
