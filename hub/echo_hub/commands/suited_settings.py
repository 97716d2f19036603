"""Choose settings for a base model and a task: what `echo-hub init --base MODEL --task NAME` writes.

The file lists only settings that differ from the defaults, and gives a reason for each. Lengths come from the task's
own problems, encoded with the base's tokenizer and chat template. Batch sizes depend on the base's number of weights
and on this machine. `echo-hub try-task --sample` measures what the base actually answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from safetensors import safe_open

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.config.training_sections import PLAIN_TOKENS
from echo_hub.run.base_files import BUILTIN, resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.thinking import OPEN
from echo_hub.sessions.kinds import SessionPlace, make_any_task
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.tasks.base import FileTask, Problem
from echo_hub.tasks.environments.base import Environment
from echo_hub.tasks.names import NO_TASK
from echo_shared.errors import ConfigError
from echo_shared.sampling.draws import derive_seed

SAMPLED: Final = 64
"""Number of the task's problems that are sampled to measure how long prompts and answers are."""
OPENED: Final = 4
"""Number of problems that are sampled from an environment with state. Each of them opens a session, which may take
seconds.
"""
TAGS: Final = "\nEnd with your answer as <answer>...</answer>."
_OF_ANSWER: Final = 4
"""Number of completion tokens for each token of the reference answer. It is above 1 because the model reasons before it
answers."""
_CHAT_TOKENS: Final = 96
"""Additional completion tokens, for the text that a chat model writes around its answer."""
_THINKING_TOKENS: Final = 1_024
_LEAST_TOKENS: Final = 16
_SMALL: Final = 1_000_000_000
"""A base model with fewer weights than this is expected to solve few problems."""
_RATES: Final = ((500_000_000, 1e-4), (3_000_000_000, 5e-5))
"""Pairs (number of weights, learning rate). A model gets the rate of the first pair whose number exceeds its own."""
_LARGE_RATE: Final = 2e-5
_ROLLOUTS, _ROLLOUTS_ON_CPU = 128, 64
"""Number of rollouts in a step: with a GPU, and without one."""
_SAVED_OF_HIDDEN, _SAVED_OF_INNER = 14, 4
"""Number of values that each layer keeps for each token until the backward pass: the first number times the hidden
size, plus the second times the inner size.
"""

Section = dict[str, Any]
Suited = dict[str, dict[str, tuple[Any, str]]]
"""Chosen settings: (value, reason) by section, then by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """Facts about a base model that are known without loading its weights."""

    num_weights: int
    activation_bytes: int
    """Bytes that the activations of one token take until the backward pass, in float32; 0 if the model's configuration
    does not tell.
    """
    is_chat: bool
    thinks: bool
    context_tokens: int


def suited_settings(flags: Mapping[str, Mapping[str, Any]], *, has_gpu: bool) -> tuple[HubConfig, Suited]:
    """Return two things: all settings, and those for config.toml with their reasons.

    `flags` are model.base, task.name and all other settings given by the user. Raises ConfigError if the base or the
    task cannot be used, or if they do not fit together.
    """
    if flags.get("task", {}).get("name") == NO_TASK:
        values = {"tinker": {"enabled": True}, "openai": {"enabled": True}}
        reason = "The run has no task of its own, and works for tenants. Turn off the interface that you do not offer."
        suited: Suited = {section: {"enabled": (True, reason)} for section in values}
        return load_config(None, _merged(values, flags)), suited
    given = load_config(None, flags)
    base_dir = resolve_base(given.model.base)
    codec = PromptCodec.load(base_dir)
    codec.check()
    facts = _facts(base_dir, codec)
    place = SessionPlace.of_run(given, codec, base_dir=base_dir, run_dir=None)
    task = make_any_task(given.task.name, given.task.options, place)
    try:
        number = OPENED if isinstance(task, Environment) else SAMPLED
        problems = [_sampled(task, given.task.name, each) for each in range(number)]
    finally:
        if isinstance(task, ProcessEnvironment):
            task.stop()
    if not facts.is_chat and given.model.base in BUILTIN:
        chosen: Suited = {}
    else:
        chosen = _chosen(given, facts, task, problems, codec, has_gpu=has_gpu)
    values = {section: {key: value for key, (value, _) in keys.items()} for section, keys in chosen.items()}
    config = load_config(None, _merged(values, flags))
    return config, chosen


def _merged(values: Mapping[str, Section], flags: Mapping[str, Mapping[str, Any]]) -> dict[str, Section]:
    given = {name: {key: value for key, value in keys.items() if value is not None} for name, keys in flags.items()}
    return {name: {**values.get(name, {}), **given.get(name, {})} for name in [*values, *given]}


def _chosen(
    given: HubConfig, facts: BaseFacts, task: Any, problems: Sequence[Problem], codec: PromptCodec, *, has_gpu: bool
) -> Suited:
    suffix = TAGS if facts.is_chat and _wants_tags(given) else ""
    words = codec.with_words(system_prompt=given.task.system_prompt, prompt_suffix=given.task.prompt_suffix or suffix)
    prompt_tokens = max(len(problem.prompt_ids or words.encode_prompt(problem.prompt)) for problem in problems)
    answers = [str(problem.metadata["answer"]) for problem in problems if problem.metadata.get("answer") is not None]
    answer_tokens = max((len(codec.encode_reply(answer)) for answer in answers), default=0)
    max_tokens = _max_tokens(given, facts, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    group_size = 16 if facts.num_weights < _SMALL else 8
    rollouts, work = (
        (_ROLLOUTS, "to sample on a few nodes") if has_gpu else (_ROLLOUTS_ON_CPU, "to train on without a GPU")
    )
    rate = next((rate for most, rate in _RATES if facts.num_weights < most), _LARGE_RATE)
    size = f"{facts.num_weights / 1e6:,.0f} million weights"
    chosen: Suited = {
        "model": {"base": (given.model.base, f"{'A chat model' if facts.is_chat else 'A model'} with {size}.")},
        "task": {
            "name": (given.task.name, "See its problems and rewards: echo-hub try-task --config RUN/config.toml"),
        },
        "sampling": {
            "max_tokens": (
                max_tokens,
                f"Prompts have up to {prompt_tokens} tokens and reference answers up to {answer_tokens}, of "
                f"{len(problems)} problems; the base's context has {facts.context_tokens}. To measure: echo-hub "
                "try-task --sample 4 --config RUN/config.toml",
            )
        },
        "training": {
            "group_size": (
                group_size,
                f"Only groups with differing rewards train the model. With {size} the base solves few problems: of "
                "those solved in 5 % of attempts, 34 % of groups of 8 are mixed, 56 % of groups of 16.",
            ),
            "groups_per_step": (
                rollouts // group_size,
                f"{rollouts} rollouts per step take minutes {work}. More make the gradient less noisy.",
            ),
            "learning_rate": (
                rate,
                f"For {size}: LoRA needs about ten times the rate of full fine-tuning, and larger models need less. "
                "The default is for the built-in models. Halve it if the reward falls again.",
            ),
        },
    }
    if suffix and not given.task.prompt_suffix:
        chosen["task"]["prompt_suffix"] = (suffix, "The task's scorer reads the answer in these tags.")
    if facts.thinks:
        reason = "The base's chat template has reasoning blocks, which are not scored."
        chosen["task"]["strip_thinking"] = (True, reason)
    chosen["evaluation"] = _evaluation(task, has_gpu=has_gpu)
    if not has_gpu:
        chosen["learner"] = _learner(facts, prompt_tokens + max_tokens)
    return chosen


def _wants_tags(given: HubConfig) -> bool:
    name, options = given.task.name, given.task.options
    return name.startswith("reasoning-gym:") or (name == "jsonl" and options.get("answer") == "exact")


def _max_tokens(given: HubConfig, facts: BaseFacts, *, prompt_tokens: int, answer_tokens: int) -> int:
    """Choose sampling.max_tokens. Raises ConfigError if the base's context is too short for the task's prompts."""
    around = (_CHAT_TOKENS if facts.is_chat else 0) + (_THINKING_TOKENS if facts.thinks else 0)
    wanted = max(_LEAST_TOKENS, _OF_ANSWER * answer_tokens + around)
    wanted = -(-wanted // 32) * 32
    room = facts.context_tokens - prompt_tokens
    if room < _LEAST_TOKENS:
        raise ConfigError(
            "The task's prompts leave no space for a reply in the base model's context.",
            got=f"a prompt of {prompt_tokens} tokens; the context of {given.model.base} has {facts.context_tokens}",
            do="Choose another base, or options that make shorter problems.",
        )
    return min(wanted, room)


def _evaluation(task: Any, *, has_gpu: bool) -> dict[str, tuple[Any, str]]:
    wanted = 256 if has_gpu else 64
    slow = "" if has_gpu else " Without a GPU the hub takes minutes for each evaluation."
    if isinstance(task, FileTask):
        limit = task.num_heldout or max(1, task.num_problems // 5)
        if limit < wanted:
            return {"problems": (limit, f"Of the file's {task.num_heldout or task.num_problems} problems.{slow}")}
    return {} if has_gpu else {"problems": (wanted, slow.strip())}


def _learner(facts: BaseFacts, longest: int) -> dict[str, tuple[Any, str]]:
    memory = psutil.virtual_memory().total
    chosen: dict[str, tuple[Any, str]] = {}
    width = 4
    if 2 * 4 * facts.num_weights > memory / 2:
        width = 2
        chosen["precision"] = (
            "bfloat16",
            "Learner and verifier each load the base: two float32 copies would take most of this machine's memory.",
        )
    if facts.activation_bytes:
        fitting = int(memory / 4 / (facts.activation_bytes * width / 4)) // 256 * 256
        tokens = max(fitting, longest, 256)
        if tokens < PLAIN_TOKENS:
            reason = (
                f"Activations take {facts.activation_bytes * width / 4e6:.1f} MB per token: this uses a quarter of "
            )
            chosen["micro_batch_tokens"] = (tokens, f"{reason}this machine's {memory / 1e9:.0f} GB.")
    return chosen


def _facts(base_dir: Path, codec: PromptCodec) -> BaseFacts:
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    layers, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
    inner = config.get("intermediate_size", 4 * hidden)
    saved = _SAVED_OF_HIDDEN * hidden + _SAVED_OF_INNER * inner
    templates = [base_dir / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    return BaseFacts(
        num_weights=sum(_num_weights(path) for path in sorted(base_dir.glob("*.safetensors"))),
        activation_bytes=4 * layers * saved,
        is_chat=codec.render_prompt("?") != "?",
        thinks=any(OPEN in path.read_text(encoding="utf-8") for path in templates if path.is_file()),
        context_tokens=codec.context_tokens,
    )


def _num_weights(path: Path) -> int:
    total = 0
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  # This is not a mapping.
            count = 1
            for size in file.get_slice(name).get_shape():
                count *= size
            total += count
    return total


def _sampled(task: Any, name: str, number: int) -> Problem:
    try:
        problem: Problem = task.sample(derive_seed(name, "suited settings", number))
    except ConfigError:
        raise
    except Exception as error:
        # The task is a plug-in, so show its author any exception of its sampler.
        raise ConfigError("The task cannot sample a problem.", got=repr(error), do="Fix its sample method.") from error
    return problem
