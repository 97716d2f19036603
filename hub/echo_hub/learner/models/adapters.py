"""LoRA adapters of any rank on one loaded base: create, read and write adapters, and exchange the active adapter.

An adapter keeps tensors of its own rank. To change the adapter, the tensors of PEFT's layers are exchanged for those of
the other adapter: nothing is copied or padded. A layer that an adapter lacks computes with the bare base.

Dimensions: R rank, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from echo_hub.learner.policy import Policy
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import LoraWish
from echo_shared.delta.adapter import (
    ATTENTION,
    CONFIG_FILE,
    FEED_FORWARD,
    MAX_RANK,
    WEIGHTS_FILE,
    load_adapter,
    lora_scaling,
    plain_name,
)
from echo_shared.errors import CodecError, LearnerError
from echo_shared.sampling.draws import derive_seed

ALPHA: Final = 32
"""Alpha, the LoRA scaling constant, of every tenant's adapter, whatever its rank."""
_NAME: Final = "default"
"""PEFT's name of the only adapter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraTensors:
    """An adapter: A [R, I] and B [O, R] of each adapted layer, by PEFT's names, and the factor of B A."""

    weights: Mapping[str, nn.Parameter]
    scaling: float

    def halves(self, layer: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        """Return A and B of a layer; None if the adapter lacks it."""
        a, b = _names(layer)
        return (self.weights[a], self.weights[b]) if a in self.weights else None


class AdapterSeat:
    """The exchangeable adapter of a policy. `hold` replaces the adapter with which the policy computes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._layers: dict[str, Any] = {
            name: module for name, module in policy.model.named_modules() if isinstance(module, LoraLayer)
        }
        self._held: LoraTensors | None = None
        self.hold(None)

    def hold(self, adapter: LoraTensors | None) -> None:
        """Compute with this adapter from now on; None stands for the base model alone."""
        if adapter is self._held and adapter is not None:
            return
        for name, layer in self._layers.items():
            halves = None if adapter is None else adapter.halves(name)
            if layer.disable_adapters is not (halves is None):
                layer.enable_adapters(halves is not None)
            if adapter is not None and halves is not None:
                layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight = halves
                layer.scaling[_NAME] = adapter.scaling
        self._held = adapter
        self._policy.parameters = {} if adapter is None else dict(adapter.weights)

    def fresh(self, wish: LoraWish) -> LoraTensors:
        """Return a new adapter that changes nothing yet: A is random, as in PEFT, and B is 0. The same seed gives the
        same tensors, on every device. Raises Refusal if the adapter would have no layer.
        """
        if not 1 <= wish.rank <= MAX_RANK:
            raise Refusal(
                RefusalKind.INVALID,
                "The adapter's rank is out of range.",
                got=str(wish.rank),
                do=f"Use 1 to {MAX_RANK}.",
                param="rank",
            )
        assert wish.seed is not None, "the caller chooses it"
        generator = torch.Generator().manual_seed(derive_seed("lora", wish.seed) % 2**63)
        wanted = (ATTENTION if wish.attention else frozenset()) | (FEED_FORWARD if wish.mlp else frozenset())
        weights: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            if name.rpartition(".")[2] not in wanted:
                continue
            # PEFT's own initialisation: kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(I).
            limit = 1.0 / math.sqrt(layer.in_features)
            a_RI = torch.rand(wish.rank, layer.in_features, generator=generator).mul_(2 * limit).sub_(limit)
            b_OR = torch.zeros(layer.out_features, wish.rank)
            weights |= zip(_names(name), (self._parameter(a_RI), self._parameter(b_OR)), strict=True)
        if not weights:
            raise Refusal(
                RefusalKind.INVALID,
                "The adapter would have no layer.",
                got=f"train_attn = {wish.attention}, train_mlp = {wish.mlp}",
                do="Train attention, feed-forward layers, or both.",
                param="lora_config",
            )
        return LoraTensors(weights=weights, scaling=ALPHA / wish.rank)

    def of_weights(self, weights: Mapping[str, Tensor], *, scaling: float, trained: bool) -> LoraTensors:
        """Return an adapter of these weights. Raises LearnerError if they do not fit the base."""
        expected = {name: layer for layer in self._layers for name in _names(layer)}
        for name, weight in weights.items():
            layer = self._layers.get(expected.get(name, ""))
            if layer is None or self._fits(layer, name, weight, weights):
                continue
            raise _foreign(f"{name} has shape {tuple(weight.shape)}")
        if unknown := sorted(set(weights) - set(expected)):
            raise _foreign(f"the base has no layer for {unknown[0]}")
        dtype = torch.float32 if trained else self._base_dtype
        parameters = {name: self._parameter(weight.to(dtype), trained=trained) for name, weight in weights.items()}
        return LoraTensors(weights=parameters, scaling=scaling)

    def read(self, directory: Path) -> LoraTensors:
        """Read a published adapter to draw with, in PEFT's layout: a tenant's or the run's. Raises LearnerError."""
        try:
            load_adapter(directory)
            config = json.loads((directory / CONFIG_FILE).read_bytes())
            tensors = load((directory / WEIGHTS_FILE).read_bytes())
        except (CodecError, OSError, SafetensorError) as error:
            got = error.brief if isinstance(error, CodecError) else str(error)
            raise LearnerError("An adapter cannot be read.", got=f"{directory}: {got}") from error
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            raise _foreign("its layers have different ranks or scales")
        scaling = lora_scaling(config["r"], config["lora_alpha"], rslora=bool(config.get("use_rslora")))
        weights = {plain_name(name): weight for name, weight in tensors.items()}
        return self.of_weights(weights, scaling=scaling, trained=False)

    def write(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """Write the weights of a tenant's adapter in PEFT's layout. Equal weights give equal bytes."""
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
        (directory / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        targets = sorted({name.split(".")[-3] for name in weights})
        rank = next(len(weight) for name, weight in weights.items() if ".lora_A." in name)
        own = {"r": rank, "lora_alpha": ALPHA, "use_rslora": False, "target_modules": targets}
        config = {**self._policy.model.peft_config[_NAME].to_dict(), "inference_mode": True, **own}
        config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def published(self, adapter: LoraTensors) -> dict[str, Tensor]:
        """Return the weights in the precision in which versions are published."""
        return self._policy.published(adapter.weights)

    @property
    def _base_dtype(self) -> torch.dtype:
        return torch.float32 if self._policy.is_float32 else torch.bfloat16

    def _parameter(self, values: Tensor, *, trained: bool = True) -> nn.Parameter:
        return nn.Parameter(values.to(self._policy.device), requires_grad=trained)

    @staticmethod
    def _fits(layer: Any, name: str, weight: Tensor, weights: Mapping[str, Tensor]) -> bool:
        is_a = name.endswith(".lora_A.weight")
        other = name.replace(".lora_A.", ".lora_B.") if is_a else name.replace(".lora_B.", ".lora_A.")
        if weight.ndim != 2 or other not in weights or weights[other].ndim != 2:
            return False
        if is_a:
            return bool(weight.shape[1] == layer.in_features and weights[other].shape[1] == len(weight))
        return bool(len(weight) == layer.out_features)


def _names(layer: str) -> tuple[str, str]:
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def _foreign(got: str) -> LearnerError:
    return LearnerError(
        "An adapter does not fit the base model.", got=got, do="Use the base model of the adapter's training."
    )
