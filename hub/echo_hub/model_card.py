"""The README.md beside an exported adapter: a model card as huggingface.co/docs/hub/model-cards describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from echo_hub.config.sections import HubConfig


def model_card(config: HubConfig, *, policy_version: int, lineage: Sequence[str]) -> str:
    """`lineage`: where what the run began with comes from, the nearest first; nothing: it began with the base."""
    base, name = config.model.base, _one_line(config.run.name)
    is_of_a_hub = not base.startswith(("builtin:", "/", ".", "~"))
    lines = [
        "---",
        *([f"base_model: {json.dumps(base.partition('@')[0])}"] if is_of_a_hub else []),
        "library_name: peft",
        "tags: [lora, reinforcement-learning, echo]",
        "---",
        "",
        f"# {name}, version {policy_version}",
        "",
        f"A LoRA adapter of rank {config.training.lora_rank}{_layers(config.training.lora_targets)}, "
        "trained by reinforcement learning with Echo on the task "
        f"`{_one_line(config.task.name)}`: version {policy_version} of the run {name}.",
        "",
    ]
    if lineage:
        lines += ["The run began with", "", *(f"- {_one_line(one)}" for one in lineage[:1])]
        lines += [f"  - which began with {_one_line(one)}" for one in lineage[1:]]
        lines.append("")
    return "\n".join(lines)


def _layers(targets: str) -> str:
    """Which layers it is on, unless on all."""
    return "" if targets == "all" else f" on {targets.replace(',', ', ')} layers"


def _one_line(text: str) -> str:
    """Without what Markdown or YAML would take for more than text."""
    plain = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#|" else sign for sign in plain)
