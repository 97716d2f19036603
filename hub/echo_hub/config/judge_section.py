"""Settings of reward components that a model computes: [reward.judges.NAME]."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from echo_hub.config.section import Section

PROMPT: Final = """Rate how well the answer below does what it is asked.

What was asked:
{prompt}

The answer:
{completion}

Think it over in a few sentences, then end with the rating from 0 (useless) to 10 (perfect): <score>RATING</score>"""
Bound = Annotated[float, Field(ge=-1e6, le=1e6)]


class LlmJudgeConfig(Section):
    """A judge that is a language model behind an OpenAI-compatible endpoint. It gives a verdict on each completion."""

    kind: Literal["llm"]
    url: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$", max_length=2_000)]
    """Address of the endpoint, including its /v1: http://localhost:8000/v1."""
    model: Annotated[str, Field(min_length=1, max_length=200)]
    """The model's name at the endpoint."""
    api_key_env: Annotated[str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,99})?$")] = ""
    """Name of the hub's environment variable that holds the endpoint's key; "" = the endpoint needs no key."""
    prompt: Annotated[str, Field(max_length=20_000)] = PROMPT
    """The question for the judge. {prompt}, {completion} and {answer} (the reference answer) are replaced by texts,
    each between unpredictable marks. The prompt must ask for <score>NUMBER</score>; the last one is the verdict."""
    lowest: Bound = 0.0
    """Verdict that gives the component the value 0."""
    highest: Bound = 10.0
    """Verdict that gives the component the value 1. A number outside lowest..highest does not count as a verdict."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 1_024
    """Largest number of tokens of an answer, including the judge's reasoning. A truncated answer has no verdict."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of completions that the endpoint judges at the same time. Other completions wait."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Longest time for one answer, in seconds."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of answers without a verdict for one completion, after which the completion is dropped."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> LlmJudgeConfig:
        if "{completion}" not in self.prompt:
            raise ValueError("prompt must contain {completion}: the judge must see it")
        if self.lowest >= self.highest:
            raise ValueError("lowest must be less than highest")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the component's value."""
        return 0.0, 1.0


class RewardModelConfig(Section):
    """A judge that is a sequence classifier with one logit. It runs in a separate process on the hub's machine."""

    kind: Literal["reward_model"]
    model: Annotated[str, Field(min_length=1, max_length=500)]
    """A directory in Hugging Face layout, or an id on a model hub."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Device of the classifier: auto, cpu, cuda, cuda:1, mps. The learner's device works if its memory holds both
    models."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of CPU threads of the classifier."""
    tokens_at_once: Annotated[int, Field(ge=1, le=2**24)] = 16_384
    """Largest number of tokens that the classifier computes in one batch, including padding. A longer completion is a
    batch by itself."""
    max_tokens: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Largest number of tokens of prompt and completion together. Longer completions get no score. 0 = the model's
    number of positions."""
    sigmoid: bool = True
    """If true, the component is the sigmoid of the logit, 0..1. If false, the component is the logit, clipped to
    lowest..highest."""
    lowest: Bound = -10.0
    """Lower bound of the logit, with sigmoid = false."""
    highest: Bound = 10.0
    """Upper bound of the logit, with sigmoid = false."""

    @model_validator(mode="after")
    def _has_bounds(self) -> RewardModelConfig:
        if self.lowest >= self.highest:
            raise ValueError("lowest must be less than highest")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the component's value."""
        return (0.0, 1.0) if self.sigmoid else (self.lowest, self.highest)


JudgeConfig = Annotated[LlmJudgeConfig | RewardModelConfig, Field(discriminator="kind")]
