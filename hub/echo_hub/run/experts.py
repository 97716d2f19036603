"""The experts of a mixture-of-experts base, from its config. Loads neither weights nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_hub.run.template_files import read_map
from echo_shared.wire.messages import NO_ROUTE

_COUNT: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_OF_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token")
_LAYERS: Final = ("num_hidden_layers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a base model. Completions may report which experts each token used (its route)."""

    count: int
    """Number of experts in one layer."""
    most_route_bytes: int
    """Largest size of one token's route (the list of experts that computed it), in bytes: experts of a token in one
    layer, times number of layers."""


def experts_in(directory: Path) -> Experts | None:
    """Return the experts of the base model in `directory`. Return None if the model has no experts, or more experts
    than one byte can number.
    """
    config = read_map(directory / "config.json")
    text = config.get("text_config")
    config = {**text, **config} if isinstance(text, dict) else config
    count, of_token, layers = (
        next((config[key] for key in keys if type(config.get(key)) is int), 0) for keys in (_COUNT, _OF_TOKEN, _LAYERS)
    )
    if not 1 < count <= NO_ROUTE or of_token < 1 or layers < 1:
        return None
    return Experts(count=count, most_route_bytes=of_token * layers)
