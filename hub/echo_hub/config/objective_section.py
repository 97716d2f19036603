"""What a step minimises."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_hub.config.objective_defaults import NUMBERS, PUBLISHED, Advantage, Aggregation
from echo_hub.config.section import Section


class ObjectiveConfig(Section):
    """What a step minimises (docs/learner.md). Where a number is 0 or a choice is "published", the objective's own
    paper decides."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "decoupled_ppo", "two_sided", "sapo", "vespo"] = (
        "two_sided"
    )
    """The loss of a token, given its importance ratio and its advantage. With grpo, dr_grpo, dapo and gspo a single
    token may outweigh a whole step, if who drew it claims that it was nearly impossible."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The ratio is clipped at 1 - clip_low below. Not for cispo, aipo, sapo and vespo."""
    clip_high: Annotated[float, Field(ge=0)] = 0.0
    """The ratio is clipped at 1 + clip_high above. Not for cispo, aipo, sapo and vespo."""
    cap: Annotated[float, Field(ge=0)] = 0.0
    """Largest ratio, at least 1: cispo's and aipo's weight of a token; decoupled_ppo's between the proximal and the
    behaviour policy, more than 1, beyond which a token is left out; two_sided's delta, more than 1 + clip_high."""
    temperature_positive: Annotated[float, Field(ge=0)] = 0.0
    """sapo's gate for tokens of positive advantage: the higher, the sooner it closes away from a ratio of 1."""
    temperature_negative: Annotated[float, Field(ge=0)] = 0.0
    """The same for tokens of negative advantage."""
    shape_positive: Annotated[float, Field(ge=0)] = 0.0
    """vespo's weight of a rollout of ratio W with positive advantage, W^shape exp(rate (1 - W))."""
    rate_positive: Annotated[float, Field(ge=0)] = 0.0
    """The rate in it: the higher, the less a rollout counts that has become likelier."""
    shape_negative: Annotated[float, Field(ge=0)] = 0.0
    """As shape_positive, with negative advantage: the higher, the less a rollout counts that has become unlikelier."""
    rate_negative: Annotated[float, Field(ge=0)] = 0.0
    """As rate_positive, with negative advantage."""
    aggregation: Literal["published", "token_mean", "sequence_mean", "group_mean", "constant"] = "published"
    """How the losses of a step's tokens become one: mean over all tokens, over rollouts of their means, over groups of
    their token means, or the sum over a constant (rollouts times sampling.max_tokens)."""
    advantage: Literal["published", "mean", "mean_std", "batch_std", "leave_one_out"] = "published"
    """A rollout's reward less its group's mean, as it is, over the group's or the whole step's standard deviation; or
    less the mean of the group's others."""
    old_policy: Literal["behavior", "proximal"] = "behavior"
    """What the ratio is taken against: the engine's log-probabilities of the version that sampled, or the learner's own
    at the start of the step. aipo's and decoupled_ppo's formulas say it themselves."""
    correction: Literal["none", "tis", "masked_is"] = "none"
    """With old_policy = "proximal", what a token's loss is multiplied by: 1, or the ratio between the proximal and the
    behaviour policy, truncated at correction_high, or 0 instead of it outside correction_low .. correction_high."""
    correction_low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """masked_is only."""
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """tis and masked_is."""
    sequence_veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A rollout with a token whose ratio between the learner at the start of the step and the behaviour policy is below
    this is left out; 0 = off. 1e-4 is usual."""
    sequence_mask: Annotated[float, Field(ge=0)] = 0.0
    """Tokens of negative advantage have no loss in a rollout that the learner finds less likely than the behaviour
    policy did by more than this, in nats a token; 0 = off."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the reference; costs a second forward pass. A token that the reference finds more
    than e^3 times likelier pulls no harder than one at that bound."""
    reference: Literal["base", "start"] = "base"
    """With kl_coefficient, what the policy is held to: the base model, or what model.start_from named."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """What each nat of a token's entropy takes from its loss, always; with entropy_target at first."""
    entropy_target: Annotated[float, Field(ge=0)] = 0.0
    """Nats per token, as the step figure `entropy` has them: each step that follows one below raises the coefficient by
    entropy_delta, one above lowers it; it counts only up to the target. 0 = off: the coefficient stays."""
    entropy_delta: Annotated[float, Field(gt=0)] = 0.005
    """With entropy_target."""
    entropy_max: Annotated[float, Field(gt=0)] = 0.1
    """With entropy_target: the coefficient is never above."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Completions (with an environment: any turn) that were cut off at sampling.max_tokens: trained on as they are; or
    left out of the loss and of its denominator; or, like all of nearly that length (of several turns the last one's),
    with a reward that is the smaller the longer they are, down to one less (DAPO)."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """With overlong = "penalty": how many tokens before the limit the penalty begins."""
    selection: Literal["all", "shuffle_r1"] = "all"
    """Which rollouts of a group are trained on: all, or the most unlike pairs by advantage, half of them."""
    shuffle_batches: Annotated[int, Field(ge=0, le=1024)] = 0
    """With selection = "shuffle_r1": the step's pairs are drawn anew in so many sub-batches, a pair at most once in
    each, by chances in proportion to its advantages: it counts as often as it is drawn, or not at all. Each of the
    step's training.updates_per_step, of which this is a multiple, has sub-batches of its own. 0 = every kept pair
    counts once."""

    @property
    def trains_entropy(self) -> bool:
        """Whether the entropy is in the loss, of some steps at least."""
        return self.entropy_coefficient > 0 or self.entropy_target > 0

    @property
    def chosen_aggregation(self) -> Aggregation:
        """The paper's own where the setting is "published"."""
        return PUBLISHED[self.name].aggregation if self.aggregation == "published" else self.aggregation

    @property
    def chosen_advantage(self) -> Advantage:
        """The paper's own where the setting is "published"."""
        return PUBLISHED[self.name].advantage if self.advantage == "published" else self.advantage

    def resolved(self) -> ObjectiveConfig:
        """These settings with the paper's own choices and numbers in place of "published" and 0."""
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
            raise ValueError(f"{self.name} says itself what its ratios are taken against: remove old_policy")
        resolved = self.resolved()
        # The ratio of a token that nothing has moved is 1, but for rounding.
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
