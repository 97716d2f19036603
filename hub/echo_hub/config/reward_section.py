"""Settings of a rollout's reward: a weighted sum of components."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, model_validator

from echo_hub.config.judge_section import JudgeConfig
from echo_hub.config.section import Section
from echo_hub.tasks.rewards import COMPONENT_NAME, SCORE

FORMAT: Final = "format"
TAGGED: Final = "tagged"
LENGTH: Final = "length"


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a valid regular expression: {error}") from error
    return pattern


class RewardConfig(Section):
    """Components of a rollout's reward, which is their weighted sum. The task's own reward is the component `score`.
    Your own task may add components, and the settings below add components to any task. An evaluation's accuracy uses
    `score` alone."""

    weights: dict[Annotated[str, Field(pattern=COMPONENT_NAME.pattern)], Annotated[float, Field(ge=-1000, le=1000)]] = (
        Field(default_factory=dict)
    )
    """Weight of each component by name, such as {score = 1.0, format = 0.2}. If a weight is missing, the task's weight
    counts. Without a weight from the task, `score` has weight 1 and other components weight 0: they are computed and
    shown, but earn nothing."""
    format: Annotated[str, Field(max_length=2_000), AfterValidator(_compiles)] = ""
    """Component `format`: 1 if this Python regular expression matches the whole completion without surrounding blanks
    (a dot matches any character), else 0. "" = no such component. If matching takes longer than task.scorer_timeout_s,
    it is stopped and the rollout is dropped. So avoid patterns like (a+)+."""
    tagged: Annotated[str, Field(pattern=r"^([A-Za-z][A-Za-z0-9_-]{0,31})?$")] = ""
    """Component `tagged`: if this is "answer", 1 if the completion has exactly one non-empty <answer>...</answer>, else
    0. "" = no such component."""
    length_least: Annotated[int, Field(ge=0, le=131_072)] = 0
    """Component `length`: 1 for completions from this number of tokens up to length_most. For shorter completions, it
    falls linearly to 0 at no tokens."""
    length_most: Annotated[int, Field(ge=0, le=131_072)] = 0
    """Component `length`: 1 for completions from length_least up to this number of tokens. For longer completions, it
    falls linearly to 0 at length_zero. 0 = no upper end."""
    length_zero: Annotated[int, Field(ge=0, le=131_072)] = 0
    """Component `length`: number of tokens, above length_most, from which the value is 0. 0 = twice length_most."""

    judges: dict[Annotated[str, Field(pattern=COMPONENT_NAME.pattern)], JudgeConfig] = Field(default_factory=dict)
    """Components from models, each in its own table [reward.judges.NAME]. With kind = "llm", a language model behind an
    OpenAI-compatible endpoint is asked (url, model, api_key_env, prompt). With kind = "reward_model", a sequence
    classifier runs (model, device). docs/tasks.md lists their settings. If a judge does not answer, rollouts wait for
    it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Components that the settings add and that depend only on a completion's text, not on the task."""
        chosen = {FORMAT: self.format, TAGGED: self.tagged, LENGTH: self.length_least or self.length_most}
        return tuple(name for name, is_there in chosen.items() if is_there)

    @model_validator(mode="after")
    def _lengths_rise(self) -> RewardConfig:
        if self.length_most and self.length_least > self.length_most:
            raise ValueError("reward.length_least must be at most reward.length_most")
        if self.length_zero and not self.length_most:
            raise ValueError("reward.length_most must be above 0 with reward.length_zero")
        if self.length_zero and self.length_zero <= self.length_most:
            raise ValueError("reward.length_zero must be more than reward.length_most")
        absent = {FORMAT, TAGGED, LENGTH} & self.weights.keys() - set(self.names)
        if FORMAT in absent:
            raise ValueError('reward.format must be a regular expression when reward.weights names "format"')
        if LENGTH in absent:
            raise ValueError('reward.length_most or length_least must be above 0 when reward.weights names "length"')
        if TAGGED in absent:
            raise ValueError('reward.tagged must be a tag, such as "answer", when reward.weights names "tagged"')
        if taken := self.judges.keys() & {SCORE, FORMAT, TAGGED, LENGTH}:
            raise ValueError(f"a judge cannot be called {', '.join(sorted(taken))}: that is another component")
        return self
