"""Settings of the task, of sampling, and of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from echo_hub.config.section import Section
from echo_hub.tasks.names import NO_TASK, check_name

_HUBS_OWN: Final = frozenset(
    (
        *("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("date_string", "strftime_now"),
        *("continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "unk_token", "pad_token"),
    )
)
"""Variables of chat templates that only the hub may set, so task.template_options must not contain them."""

Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")]
"""Name of a task in a mixture, or of an evaluation set. It becomes a part of the names of that task's or set's
metrics."""
Weight = Annotated[float, Field(ge=0, le=1e6)]
MAX_HELDOUT: Final = 100_000
"""Largest number of held-out problems of all evaluation sets together."""


class MixtureTask(Section):
    """One of several tasks of a run."""

    name: Annotated[str, AfterValidator(check_name)]
    """Name of the task, as in task.name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, as in task.options."""
    weight: Weight = 1.0
    """Share of the groups, relative to the sum of all weights; 0 = the task is evaluated, but never trained on."""
    system_prompt: str | None = None
    """System prompt of this task; default: task.system_prompt."""
    prompt_suffix: str | None = None
    """Text that is appended to this task's problems; default: task.prompt_suffix."""


class TaskConfig(Section):
    """Where problems and rewards come from."""

    name: Annotated[str, AfterValidator(check_name)] = "arithmetic"
    """Name of the task: arithmetic; worked (a written calculation before the answer); sums (questions in English);
    reasoning-gym:DATASET; jsonl, with options.path; environment:guess, environment:sokoban and environment:calculator
    (several turns); textarena:GAME (a game of the package textarena, see [sessions]); or python:MODULE:FUNCTION, your
    own function, which receives the options and returns a task or an environment. none: this run trains nothing itself,
    and only works for tenants (tinker.enabled, openai.enabled)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that the task gets unchanged."""
    system_prompt: str = ""
    """Text before every problem: in the chat template's system turn, or as plain text if the base has no chat
    template."""
    prompt_suffix: str = ""
    """Text after every problem, for example to request a form of the answer."""
    mixture: dict[Key, MixtureTask] = Field(default_factory=dict)
    """Several tasks in one run, instead of name and options: [task.mixture.KEY], with name, options, weight,
    system_prompt and prompt_suffix. Each task gets a share of the groups in proportion to its weight, within each
    thousand groups."""
    draws: Literal["epochs", "replacement"] = "epochs"
    """Order of problems from files. epochs: every problem once in a seeded order, then a new epoch in another order.
    replacement: each draw is independent."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the base's chat template, such as enable_thinking = false. Unknown variables are refused."""
    strip_thinking: bool = False
    """Remove <think>...</think> from a completion before it is scored. If </think> is missing, no text is left to
    score. Training still uses all tokens."""

    @field_validator("template_options")
    @classmethod
    def _are_the_templates_own(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := _HUBS_OWN & options.keys():
            raise ValueError(f"{', '.join(sorted(taken))} is set by the hub: remove the line")
        return options

    scorer_processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of processes that score rollouts."""
    scorer_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Longest time of a scorer call, in seconds. After this time the call is ended, and the rollout is dropped."""
    scorer_memory_mb: Annotated[int, Field(ge=64)] = 2048
    """Limit in MB on the memory that each process allocates during scoring; Linux only."""

    @model_validator(mode="after")
    def _is_one_or_several(self) -> TaskConfig:
        fields = type(self).model_fields
        if self.mixture and (self.name != fields["name"].default or self.options):
            raise ValueError("task.name and task.options must be left out where there is a [task.mixture.KEY]")
        if self.name == NO_TASK and self.options:
            raise ValueError(f'task.options must be left out with task.name = "{NO_TASK}"')
        if any(task.name == NO_TASK for task in self.mixture.values()):
            raise ValueError(f"a task of the mixture cannot be {NO_TASK}")
        if self.mixture and not any(task.weight for task in self.mixture.values()):
            raise ValueError("a weight in [task.mixture.KEY] must be more than 0, or there is nothing to train on")
        return self

    @property
    def members(self) -> dict[str, MixtureTask]:
        """Return the tasks of the run by key, with inherited values filled in. A single task has the key "". Empty if
        the run has no task."""
        if self.name == NO_TASK:
            return {}
        alone = {"": MixtureTask(name=self.name, options=self.options)}
        around = {"system_prompt": self.system_prompt, "prompt_suffix": self.prompt_suffix}
        return {
            key: task.model_copy(update={name: text for name, text in around.items() if getattr(task, name) is None})
            for key, task in (self.mixture or alone).items()
        }

    @property
    def label(self) -> str:
        """Name of the training tasks for people: the only task's name, or the mixture's keys."""
        return " + ".join(key for key, task in self.mixture.items() if task.weight) or self.name

    def alone(self, key: str) -> TaskConfig:
        """Return the settings of a run whose only task is the mixture's task `key`."""
        task = self.members[key]
        taken = {name: getattr(task, name) for name in ("name", "options", "system_prompt", "prompt_suffix")}
        return self.model_copy(update={**taken, "mixture": {}})


class SamplingConfig(Section):
    """How nodes sample completions."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Temperature of the softmax from which tokens are sampled. There is no top-k and no top-p."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 16
    """Largest number of tokens of a completion, including the stop token."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)] = ()
    """Texts that end a completion; special tokens are possible too. The token that completes one of these texts becomes
    the completion's last token. Nodes work with token ids, so they sample up to a stop token or max_tokens, and the hub
    cuts the received completion. Tokens after the cut count nowhere."""
    replay_routes: bool = True
    """With a mixture-of-experts base, nodes return which experts computed each token. Learner and verifier then use the
    same experts, so their probabilities differ less from the node's. This takes one byte for each expert of a token in
    each layer: 96 bytes a token for gpt-oss-20b. No effect on other bases."""


class EvaluationSet(Section):
    """One of several sets of held-out problems."""

    task: Annotated[str, Field(max_length=40)] = ""
    """Key of the task in the mixture that supplies the problems. Default: the task with the set's name, or the run's
    only task."""
    problems: Annotated[int, Field(ge=0, le=MAX_HELDOUT)] = 0
    """Number of held-out problems: the first ones of the task's held-out problems; 0 = evaluation.problems."""
    samples: Annotated[int, Field(ge=-1, le=1024)] = -1
    """Number of completions of each problem at the run's temperature, in addition to the greedy one; 0 = none, -1 =
    evaluation.samples."""
    weight: Weight = 1.0
    """Weight of this set in the run's accuracy, which is the weighted mean of all sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSet:
    """An evaluation set with all defaults filled in."""

    name: str
    """Name of the set; "" for the run's only set."""
    task: str
    """Key of the set's task."""
    problems: int
    samples: int
    weight: float
    first: int
    """Number of the set's first problem. The held-out problems of all sets are numbered consecutively."""

    @property
    def numbers(self) -> range:
        """Numbers of the set's held-out problems."""
        return range(self.first, self.first + self.problems)


class EvaluationConfig(Section):
    """Evaluation on problems that are never trained on."""

    problems: Annotated[int, Field(ge=1, le=MAX_HELDOUT)] = 256
    """Number of held-out problems; no training problem is among them. With a mixture of tasks: the number for each
    task.
    """
    sets: dict[Key, EvaluationSet] = Field(default_factory=dict)
    """Several sets with separate results: [evaluation.sets.NAME], with task (a key of the mixture), problems, samples
    and weight. Default: one set for each task of the mixture. The run's accuracy is the weighted mean of the sets."""
    every: Annotated[int, Field(ge=0)] = 0
    """Number of versions from one evaluation to the next; 0 = only the base and the last version are evaluated."""
    samples: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of completions of each problem at the run's temperature, for mean@k, in addition to the greedy one; 0 =
    none."""
    by: Literal["hub", "ray", "nodes"] = "hub"
    """Which machines sample the completions of evaluations. hub: the learner's own device, between two steps. ray: a
    separate process under a Ray actor in the cluster of [ray], during training. nodes: nodes, by leases. While training
    needs leases, evaluations get at most a quarter of them. After the last step, the hub samples the remaining
    evaluations if no node works."""

    def chosen(self, task: TaskConfig) -> tuple[ChosenSet, ...]:
        """Return the evaluation sets of a run with these tasks; none if the run has no task. Raises ValueError for an
        unknown task."""
        if not task.members:
            return ()
        sets = self.sets or {key: EvaluationSet(task=key) for key in task.members}
        found, first = list[ChosenSet](), 0
        for name, wanted in sets.items():
            key = wanted.task or (name if name in task.mixture else "")
            if key not in task.members:
                there_are = ", ".join(task.mixture) or "none, for there is no [task.mixture.KEY]"
                raise ValueError(f"evaluation.sets.{name}.task must be the key of a task of the mixture: {there_are}")
            problems = wanted.problems or self.problems
            samples = self.samples if wanted.samples < 0 else wanted.samples
            chosen = ChosenSet(
                name=name, task=key, problems=problems, samples=samples, weight=wanted.weight, first=first
            )
            found.append(chosen)
            first += problems
        if first > MAX_HELDOUT:
            raise ValueError(f"all evaluation sets together must have at most {MAX_HELDOUT} problems, not {first}")
        if not any(chosen.weight for chosen in found):
            raise ValueError("a weight in [evaluation.sets.NAME] must be more than 0: the run's accuracy is their mean")
        return tuple(found)
