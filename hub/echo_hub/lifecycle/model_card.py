"""Write README.md for an exported adapter or merged model: a model card as described at
huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from echo_hub.config.sections import HubConfig
from echo_hub.store.run_facts import RunFacts

_USE: Final = """## Use

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("THIS_DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
```
"""
_USE_MERGED: Final = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")
```
"""
_LOCAL: Final = """
The base model is a local directory, not a model of a model hub; `adapter_config.json` has its path at the export. If
it is elsewhere, pass its path:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE_DIRECTORY"), "THIS_DIRECTORY")
```

Before you share the adapter, name a base model that others can download: `echo-hub export RUN DIR --base owner/name`.
"""


def model_card(
    config: HubConfig,
    *,
    policy_version: int,
    lineage: Sequence[str],
    base_id: str | None,
    is_merged: bool = False,
    facts: RunFacts | None = None,
) -> str:
    """Return the text of the model card.

    `lineage` lists the origins of the run's initial adapter, nearest first; empty if the run began with the base model.
    `base_id` is the base's id on a model hub; None if the base is a directory. `is_merged` selects a card for a whole
    model instead of an adapter. `facts` is None if the run's database is not at hand.
    """
    name = _one_line(config.run.name)
    lines = [
        "---",
        *([f"base_model: {json.dumps(base_id)}"] if base_id is not None else []),
        f"library_name: {'transformers' if is_merged else 'peft'}",
        f"tags: [{'' if is_merged else 'lora, '}reinforcement-learning, echo]",
        "---",
        "",
        f"# {name}, version {policy_version}",
        "",
        f"{_what(config, base_id, is_merged=is_merged)}, trained by reinforcement learning with Echo on the task "
        f"`{_one_line(config.task.label)}`: version {policy_version} of the run {name}.",
        "",
    ]
    if lineage:
        lines += ["The run began with", "", *(f"- {_one_line(one)}" for one in lineage[:1])]
        lines += [f"  - which began with {_one_line(one)}" for one in lineage[1:]]
        lines.append("")
    if facts is not None and facts.rollouts:
        lines += ["## Training", "", *_training(facts), ""]
    lines.append(_USE_MERGED if is_merged else _USE if base_id is not None else _USE + _LOCAL)
    around = {"system prompt": config.task.system_prompt, "text behind each problem": config.task.prompt_suffix}
    asked = [f"- {what}: {json.dumps(text, ensure_ascii=False)}" for what, text in around.items() if text]
    if asked:
        lines += ["It was trained on prompts with", "", *asked, ""]
    return "\n".join(lines)


def _what(config: HubConfig, base_id: str | None, *, is_merged: bool) -> str:
    adapter = f"LoRA adapter of rank {config.training.lora_rank}{_layers(config.training.lora_targets)}"
    if not is_merged:
        return f"A {adapter}"
    return f"{'A language model' if base_id is None else f'The model {base_id}'} with a merged {adapter}"


def _training(facts: RunFacts) -> list[str]:
    nodes = f"{facts.num_nodes:,} {'machine' if facts.num_nodes == 1 else 'machines'}"
    lines = [f"The run so far: {facts.rollouts:,} rollouts with {facts.tokens:,} tokens, sampled by {nodes}."]
    if facts.evaluations:
        lines += ["", "Accuracy on held-out problems:", ""]
        lines += [f"- version {one.policy_version}: {one.text}" for one in facts.evaluations]
    return lines


def _layers(targets: str) -> str:
    return "" if targets == "all" else f" on {targets.replace(',', ', ')} layers"


def _one_line(text: str) -> str:
    plain = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#|" else sign for sign in plain)
