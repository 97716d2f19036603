"""The recipe sl_loop of the tinker cookbook in plain PyTorch and float32, with which a test compares the hub. Prints
its losses as a line of JSON.

Only data and rendering come from the cookbook. LoRA, loss and optimizer are written here, without Echo and PEFT. The
LoRA matrices A start with the same values as the hub's, drawn from the model's seed.

    python plain_torch.py BASE SEED RANK BATCH STEPS LEARNING_RATE
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from tinker_cookbook import model_info, renderers
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

NAME = "Qwen/Qwen3-8B"
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHA = 32


class Lora(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, layer: nn.Linear, rank: int, random: torch.Generator) -> None:
        super().__init__()
        limit = 1.0 / math.sqrt(layer.in_features)
        self.layer, self.scale = layer, ALPHA / rank
        self.a = nn.Parameter(torch.rand(rank, layer.in_features, generator=random) * (2 * limit) - limit)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = (inputs @ self.a.T) @ self.b.T
        result: Tensor = self.layer(inputs) + self.scale * added
        return result


def adapted(base: Path, seed: int, rank: int) -> tuple[Any, list[nn.Parameter]]:
    """Load the base in float32; return it with an adapter, and the adapter's parameters."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ADAPTED:
                setattr(parent, name, Lora(child, rank, random))
    return model, [one for one in model.parameters() if one.requires_grad]


def main(base: Path, seed: int, rank: int, batch: int, steps: int, learning_rate: float) -> list[float]:
    """Train; return the mean loss per token of each step, which the cookbook calls train_mean_nll."""
    model, parameters = adapted(base, seed, rank)
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(NAME), get_tokenizer(NAME))
    rows = datasets.load_dataset("HuggingFaceH4/no_robots")["train"]
    batches = len(rows) // batch
    rows = rows.shuffle(seed=0)
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(steps):
        total, weight = 0.0, 0.0
        for row in rows.select(range(step * batch, (step + 1) * batch)):
            datum = conversation_to_datum(
                row["messages"], renderer, 32_768, renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
            )
            inputs = torch.tensor([datum.model_input.to_ints()])
            targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
            weights = datum.loss_fn_inputs["weights"].to_torch().float()
            logprobs = torch.log_softmax(model(input_ids=inputs).logits[0].float(), dim=-1)
            loss = -(weights * logprobs.gather(1, targets[:, None])[:, 0]).sum()
            loss.backward()
            total, weight = total + loss.item(), weight + weights.sum().item()
        optimizer.param_groups[0]["lr"] = learning_rate * (1.0 - step / batches)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / weight)
    return losses


if __name__ == "__main__":
    _, base, seed, rank, batch, steps, learning_rate = sys.argv
    print(json.dumps(main(Path(base), int(seed), int(rank), int(batch), int(steps), float(learning_rate))))
