"""Write README.md for an exported adapter or merged model: a model card as described at
huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.reward_curve import PICTURE, RewardPoint, few
from echo_hub.store.run_facts import RunFacts

CardKind = Literal["adapter", "merged", "gguf"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Facts about the training, from the run's database."""

    run: RunFacts
    curve: Sequence[RewardPoint] = ()

    @property
    def has_picture(self) -> bool:
        return len(self.curve) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCard:
    """Facts about a GGUF file for its model card."""

    file: str
    precision: str
    is_chat: bool
    """True if the file has a chat template."""
    temperature: float
    """Sampling temperature of the training."""
    ollama_name: str = ""
    """Name of the model in Ollama; "" if there is no Modelfile (Ollama's description of a model)."""
    notes: Sequence[str] = ()
    """Sentences about differences from the base model's own tokenizer."""


def model_card(
    config: HubConfig,
    *,
    policy_version: int,
    lineage: Sequence[str],
    base_id: str | None,
    kind: CardKind = "adapter",
    gguf: GgufCard | None = None,
    training: TrainingFacts | None = None,
) -> str:
    """Return the text of the model card.

    `lineage` lists the origins of the run's initial adapter, nearest first; empty if the run began with the base model.
    `base_id` is the base's id on a model hub; None if the base is a directory. `gguf` describes the GGUF file, for a
    card of kind "gguf". `training` is None if the run has no database yet.
    """
    name = _one_line(config.run.name)
    library, tags = {
        "adapter": ("peft", "lora, "),
        "merged": ("transformers", ""),
        "gguf": ("gguf", "gguf, llama.cpp, "),
    }[kind]
    lines = [
        "---",
        *([f"base_model: {json.dumps(base_id)}"] if base_id is not None else []),
        f"library_name: {library}",
        f"tags: [{tags}reinforcement-learning, echo]",
        "---",
        "",
        f"# {name}, version {policy_version}",
        "",
        f"{_what(config, base_id, is_merged=kind != 'adapter')}, trained by reinforcement learning with Echo on the "
        f"task `{_one_line(config.task.label)}`: version {policy_version} of the run {name}.",
        "",
    ]
    if lineage:
        lines += ["The run began with", "", *(f"- {_one_line(one)}" for one in lineage[:1])]
        lines += [f"  - which began with {_one_line(one)}" for one in lineage[1:]]
        lines.append("")
    if training is not None and training.run.rollouts:
        lines += ["## Training", "", *_training(training), ""]
    if gguf is not None:
        lines += _use_gguf(gguf)
    else:
        lines.append(_USE_MERGED if kind == "merged" else _USE if base_id is not None else _USE + _LOCAL)
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


def _use_gguf(card: GgufCard) -> Iterator[str]:
    yield "## Use"
    yield ""
    yield f"`{card.file}` has the weights in {card.precision}, the tokenizer{' and the chat template' * card.is_chat}."
    yield ""
    yield "```sh"
    if card.is_chat:
        yield f"llama-cli -m {card.file} --jinja --temp {card.temperature:g}"
    else:
        yield f'llama-cli -m {card.file} -no-cnv --temp {card.temperature:g} -p "PROMPT"'
    if card.ollama_name:
        yield f"ollama create {card.ollama_name} -f Modelfile && ollama run {card.ollama_name}"
    yield "```"
    yield ""
    for note in card.notes:
        yield note
        yield ""


def _training(training: TrainingFacts) -> list[str]:
    facts, curve = training.run, training.curve
    nodes = f"{facts.num_nodes:,} {'machine' if facts.num_nodes == 1 else 'machines'}"
    owners = f"{facts.num_owners:,} {'volunteer' if facts.num_owners == 1 else 'volunteers'}"
    lines = [
        f"The run so far: {facts.rollouts:,} rollouts with {facts.tokens:,} tokens, sampled by {nodes} of {owners}."
    ]
    if facts.evaluations:
        lines += ["", "Accuracy on held-out problems:", ""]
        lines += [f"- version {one.policy_version}: {one.text}" for one in facts.evaluations]
    if training.has_picture:
        lines += ["", "Mean reward of the rollouts that a step trained on, smoothed:", ""]
        lines += [f"![Mean reward by step]({PICTURE})", "", "| step | mean reward |", "|---:|---:|"]
        lines += [f"| {point.step:,} | {point.smoothed:.3f} |" for point in few(curve)]
    return lines


def _layers(targets: str) -> str:
    return "" if targets == "all" else f" on {targets.replace(',', ', ')} layers"


def _one_line(text: str) -> str:
    plain = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#|" else sign for sign in plain)
