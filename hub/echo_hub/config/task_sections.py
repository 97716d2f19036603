"""What is learned, how it is sampled, and how it is evaluated."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator

from echo_hub.config.section import Section
from echo_hub.tasks.names import check_name

_HUBS_OWN: Final = frozenset(
    (
        *("messages", "conversations", "tools", "documents", "chat_template", "date_string", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "unk_token", "pad_token"),
    )
)
"""Variables of chat templates that are no options."""


class TaskConfig(Section):
    """Where problems and rewards come from."""

    name: Annotated[str, AfterValidator(check_name)] = "arithmetic"
    """arithmetic; worked, with working before the answer; reasoning-gym:DATASET with the name of any of its datasets;
    jsonl, with options.path; environment:guess, environment:sokoban and environment:calculator, of several turns; or
    python:MODULE:FUNCTION, a function of yours that is given the options and returns a task or an environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task as they are."""
    system_prompt: str = ""
    """Put before every problem: as the chat template's system turn, or as text where the base has no chat template."""
    prompt_suffix: str = ""
    """Put behind every problem's text as it is, to say what form an answer should have."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the base's chat template, such as enable_thinking = false. One that the template does not have is
    refused."""
    strip_thinking: bool = False
    """Of a completion, what it says in <think>...</think> is not scored, and a thought that is not closed leaves
    nothing to score. It is trained on like all that the model says."""

    @field_validator("template_options")
    @classmethod
    def _are_the_templates_own(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := _HUBS_OWN & options.keys():
            raise ValueError(f"{', '.join(sorted(taken))} is for the hub to say: remove the line")
        return options

    scorer_processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that scorers run in."""
    scorer_concurrency: Annotated[int, Field(ge=1, le=64)] = 64
    """Calls of a scorer that is `async def` which run at once in each of the processes; of any other, one does."""
    scorer_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A scorer that takes longer is ended, and the rollout is dropped."""
    scorer_memory_mb: Annotated[int, Field(ge=64)] = 2048
    """What each of the processes may allocate while it scores; on Linux alone."""


class SamplingConfig(Section):
    """How nodes sample."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the softmax that tokens are drawn from, without top-k or top-p."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 16
    """Tokens of a completion, the stop token included."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)] = ()
    """Texts, special tokens among them, that end a completion too: behind the token with which one of them is there.
    The hub cuts what comes in, for nodes know no texts: they draw on to a stop token or to max_tokens, and what is
    behind the cut counts nowhere."""


class EvaluationConfig(Section):
    """How well a version does on problems that are never trained on."""

    problems: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Held-out problems, disjoint from all training problems."""
    every: Annotated[int, Field(ge=0)] = 0
    """Versions between evaluations; 0 = only the base and the last version."""
    samples: Annotated[int, Field(ge=0, le=1024)] = 0
    """Completions of each problem at the run's temperature, for mean@k, beside the greedy one; 0 = none."""
    by: Literal["hub", "nodes"] = "hub"
    """Who generates: hub is the learner's own device, between two steps; nodes do it as leased work, for at most a
    quarter of what is leased while training wants it. After the last step the hub takes over if no node works any
    more."""
