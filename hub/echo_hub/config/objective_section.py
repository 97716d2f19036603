"""Settings of the training objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_hub.config.objective_defaults import NUMBERS, PUBLISHED, Advantage, Aggregation
from echo_hub.config.section import Section


class ObjectiveConfig(Section):
    """The function that a step minimises (docs/learner.md). The number 0, or the choice "published", means the value in
    the objective's own paper."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "decoupled_ppo", "two_sided", "sapo", "vespo"] = (
        "two_sided"
    )
    """Loss of a token, given the token's importance ratio and advantage. With grpo, dr_grpo, dapo and gspo, one token
    may outweigh a whole step if the node that sampled it claims a tiny probability."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower clip of the ratio, 1 - clip_low. The objectives cispo, aipo, sapo and vespo do not use it."""
    clip_high: Annotated[float, Field(ge=0)] = 0.0
    """Upper clip of the ratio, 1 + clip_high. The objectives cispo, aipo, sapo and vespo do not use it."""
    cap: Annotated[float, Field(ge=0)] = 0.0
    """Limit of a token's importance ratio, at least 1; 0 = the objective has none. cispo and aipo: largest weight of a
    token. decoupled_ppo: tokens with a larger ratio of proximal to behaviour policy are left out. two_sided: upper
    limit δ of the ratio of tokens with negative advantage, more than 1 + clip_high."""
    aggregation: Literal["published", "token_mean", "sequence_mean", "group_mean", "constant"] = "published"
    """How the losses of tokens become the step's loss. token_mean: mean over all tokens. sequence_mean: mean over
    rollouts of each rollout's mean. group_mean: mean over groups of each group's mean over tokens. constant: sum
    divided by a constant (number of rollouts times sampling.max_tokens)."""
    advantage: Literal["published", "mean", "mean_std", "batch_std", "leave_one_out"] = "published"
    """Advantage of a rollout. mean: its reward minus its group's mean. mean_std: the same, divided by the group's
    standard deviation. batch_std: divided by the step's standard deviation. leave_one_out: its reward minus the mean of
    the group's other rollouts."""
    old_policy: Literal["behavior", "proximal"] = "behavior"
    """Denominator of the ratio. behavior: the log-probabilities of the engine and version that sampled. proximal: the
    learner's own log-probabilities at the start of the step. The formulas of aipo and decoupled_ppo fix the
    denominator."""
    correction: Literal["none", "tis", "masked_is"] = "none"
    """With old_policy = "proximal", factor of a token's loss. none: 1. tis: the ratio of proximal to behaviour policy,
    at most correction_high. masked_is: the same ratio, but 0 outside correction_low .. correction_high."""
    correction_low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Lower bound of the ratio of proximal to behaviour policy, with correction = "masked_is"."""
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the ratio of proximal to behaviour policy, with correction = "tis" or "masked_is"."""
    sequence_veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop a rollout if the ratio of learner (at the start of the step) to behaviour policy is below this value for any
    of its tokens; 0 = off. 1e-4 is usual."""
    sequence_mask: Annotated[float, Field(ge=0)] = 0.0
    """If the learner gives a rollout a lower probability than the behaviour policy, by more than this number of nats
    per token, the rollout's tokens with negative advantage have no loss; 0 = off."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference policy; it needs a second forward pass. The effect of a token on
    the gradient does not grow above a probability ratio of e^3."""
    reference: Literal["base", "start"] = "base"
    """With kl_coefficient, the policy that training stays near. base: the base model. start: the adapter of
    model.start_from."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus: each nat of a token's entropy lowers the loss by this amount. With
    entropy_target, it is the initial coefficient."""
    entropy_target: Annotated[float, Field(ge=0)] = 0.0
    """Target of the mean entropy of a step's tokens, in nats per token. After a step below the target,
    entropy_coefficient rises by entropy_delta; after a step above the target, it falls, and the next loss has no bonus.
    0 = off: the coefficient is constant."""
    entropy_delta: Annotated[float, Field(gt=0)] = 0.005
    """With entropy_target, amount by which entropy_coefficient changes after each step."""
    entropy_max: Annotated[float, Field(gt=0)] = 0.1
    """With entropy_target, largest value that entropy_coefficient may reach."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Treatment of completions (with an environment: of any turn) that were truncated at sampling.max_tokens. keep:
    they are trained on. mask: they are left out of the loss and its denominator. penalty: the reward falls near the
    limit, by up to 1 (DAPO); with several turns, the length of the last turn counts."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """With overlong = "penalty", number of tokens before the limit at which the penalty begins."""
    selection: Literal["all", "shuffle_r1"] = "all"
    """Rollouts of a group that are trained on. all: every rollout. shuffle_r1: pair the rollout with the largest
    advantage with the one with the smallest, the second largest with the second smallest, and so on; then train on the
    half of the pairs whose advantages differ most."""
    shuffle_batches: Annotated[int, Field(ge=0, le=1024)] = 0
    """With selection = "shuffle_r1", number of sub-batches that are sampled from the step's pairs. A sub-batch contains
    a pair at most once, with probability proportional to the pair's advantages. A pair counts once for each draw. The
    number must be a multiple of training.updates_per_step, because the updates share the sub-batches. 0 = every kept
    pair counts once."""

    @property
    def trains_entropy(self) -> bool:
        """True if the loss of a step can include the entropy."""
        return self.entropy_coefficient > 0 or self.entropy_target > 0

    @property
    def chosen_aggregation(self) -> Aggregation:
        """Aggregation in use: the setting's choice; for the setting "published", the paper's choice."""
        return PUBLISHED[self.name].aggregation if self.aggregation == "published" else self.aggregation

    @property
    def chosen_advantage(self) -> Advantage:
        """Advantage in use: the setting's choice; for the setting "published", the paper's choice."""
        return PUBLISHED[self.name].advantage if self.advantage == "published" else self.advantage

    def resolved(self) -> ObjectiveConfig:
        """Return these settings with the paper's choices and numbers in place of "published" and 0."""
        paper = PUBLISHED[self.name]
        return self.model_copy(
            update={
                **{name: getattr(self, name) or number for name, number in paper.numbers.items()},
                "aggregation": self.chosen_aggregation,
                "advantage": self.chosen_advantage,
            }
        )

    @model_validator(mode="after")
    def _fits_together(self) -> ObjectiveConfig:
        paper = PUBLISHED[self.name]
        unused = [name for name in NUMBERS if getattr(self, name) and name not in paper.numbers]
        if unused:
            raise ValueError(f"{self.name} does not use {', '.join(unused)}: remove the line, or set it to 0")
        if self.old_policy == "proximal" and not paper.takes_old_policy:
            raise ValueError(f"the formula of {self.name} fixes the denominator of its ratios: remove old_policy")
        resolved = self.resolved()
        # The ratio of a token whose probability did not change is 1, except for rounding. So a cap below 1 would bound
        # nearly every token. decoupled_ppo leaves out tokens above its cap, so its cap must leave space for rounding.
        if "cap" in paper.numbers and (resolved.cap < 1 or (self.name == "decoupled_ppo" and resolved.cap == 1)):
            least = "cap > 1" if self.name == "decoupled_ppo" else "cap >= 1"
            raise ValueError(f"{self.name} needs {least}, got {resolved.cap}")
        if self.name == "two_sided" and resolved.cap <= 1 + resolved.clip_high:
            raise ValueError(f"two_sided needs cap > 1 + clip_high, got {resolved.cap} and {resolved.clip_high}")
        if self.correction != "none" and self.old_policy != "proximal":
            raise ValueError('correction needs old_policy = "proximal": the ratio to "behavior" corrects already')
        used = {"none": (), "tis": ("correction_high",), "masked_is": ("correction_low", "correction_high")}
        for name in ("correction_low", "correction_high"):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and name not in used[self.correction]:
                raise ValueError(f'correction = "{self.correction}" does not use {name}: remove the line')
        for name in ("entropy_delta", "entropy_max"):
            if not self.entropy_target and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs entropy_target > 0: without a target the coefficient stays as it is")
        if self.entropy_target and self.entropy_coefficient > self.entropy_max:
            raise ValueError(
                f"entropy_coefficient = {self.entropy_coefficient} is above entropy_max = {self.entropy_max}"
            )
        if self.shuffle_batches and self.selection != "shuffle_r1":
            raise ValueError(f'shuffle_batches = {self.shuffle_batches} needs selection = "shuffle_r1": it draws pairs')
        if (self.overlong == "penalty") != (self.overlong_buffer_tokens > 0):
            raise ValueError('overlong = "penalty" and overlong_buffer_tokens > 0 need each other')
        return self
