"""Table of the figures (numbers) that describe a training step, shared by learner, pages, Prometheus and TensorBoard.

To add a figure, add a `StepFigure` to `STEP_FIGURES` and a value under its key to the result of
`echo_hub.learner.step.train_step`. Mean reward, staleness and the number of rollouts are not in the table, because the
hub's own database has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["", "s", "share", "tokens", "tokens/s", "nats/token"]
Colour = Literal["speed", "speed-faint", "staleness", "accuracy"]
Better = Literal["higher", "lower", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigure:
    """One number that describes a training step. Older steps may lack it."""

    key: str
    """Key in a step's metrics and in the pages' JSON. TensorBoard prefixes it with `train/`."""
    label: str
    """Label in the chart's legend."""
    about: str
    """Description for Prometheus and the operator's page, one sentence."""
    unit: Unit = ""
    prometheus: str | None = None
    """Metric name at /metrics; None: not exported under its own name."""
    largest: bool = False
    """True: when a chart point covers several steps, it shows their maximum instead of their mean."""
    chart: str | None = None
    """Key of the chart that shows the figure as a line; None: no chart shows it."""
    colour: Colour = "speed"
    column: str = ""
    """Column heading in the table of newest steps; empty: no column."""
    better: Better = ""
    """Direction in which the value improves; empty: neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A small chart of the learner. Its lines are the figures whose `chart` is this chart's key; the last one is drawn
    on top.
    """

    key: str
    title: str
    about: str
    """A sentence that explains the chart."""
    axis: str
    """Label of the vertical axis, with its unit."""
    logarithmic: bool = False


RATIO_MAX: Final = StepFigure(
    key="ratio_max",
    label="max",
    about="Largest importance ratio of trained tokens.",
    prometheus="echo_learner_importance_ratio_max",
    largest=True,
    chart="ratio",
    colour="speed-faint",
)
RATIO_MEAN: Final = StepFigure(
    key="ratio_mean",
    label="mean",
    about="Mean importance ratio of trained tokens.",
    prometheus="echo_learner_importance_ratio_mean",
    chart="ratio",
)
BASE_KL: Final = StepFigure(
    key="base_kl",
    label="base model",
    about="KL divergence from objective.reference, nats per token; only if the objective has a term for it.",
    unit="nats/token",
    prometheus="echo_learner_base_kl",
    chart="kl",
    colour="accuracy",
)
MISMATCH_KL: Final = StepFigure(
    key="mismatch_kl",
    label="engine and learner",
    better="lower",
    about="KL divergence between the nodes' sampling and the learner's own probabilities, nats per token.",
    unit="nats/token",
    prometheus="echo_learner_mismatch_kl",
    chart="kl",
    column="Mismatch KL",
)
GRAD_NORM: Final = StepFigure(
    key="grad_norm",
    label="before clipping",
    about="Gradient norm before clipping; the mean if a step has several updates.",
    prometheus="echo_learner_grad_norm",
    chart="norm",
    column="Gradient norm",
)
ENTROPY: Final = StepFigure(
    key="entropy",
    label="trained tokens",
    about="Entropy of the learner's distribution at each trained token, mean, nats per token.",
    unit="nats/token",
    prometheus="echo_learner_entropy",
    chart="entropy",
    column="Entropy",
)
ENTROPY_COEFFICIENT: Final = StepFigure(
    key="entropy_weight",
    label="weight of the entropy",
    about="Weight of the entropy in the newest step's loss; only if the objective rewards entropy.",
    prometheus="echo_learner_entropy_weight",
)
REWARD_STD: Final = StepFigure(
    key="reward_std",
    label="whole batch",
    about="Standard deviation of the rewards of the newest step's rollouts.",
    prometheus="echo_learner_reward_std",
    chart="reward_std",
    colour="speed-faint",
)
REWARD_STD_WITHIN: Final = StepFigure(
    key="reward_std_within",
    label="within a group",
    about="Standard deviation of the rewards within a group, mean over the newest step's groups.",
    prometheus="echo_learner_reward_std_within_groups",
    chart="reward_std",
)
COMPLETION_LENGTH_MAX: Final = StepFigure(
    key="completion_length_max",
    label="longest",
    about="Sampled tokens of the newest step's longest completion.",
    unit="tokens",
    prometheus="echo_learner_completion_length_max",
    largest=True,
    chart="length",
    colour="speed-faint",
)
COMPLETION_LENGTH: Final = StepFigure(
    key="completion_length",
    label="mean",
    about="Sampled tokens of a completion, mean over the newest step's rollouts.",
    unit="tokens",
    prometheus="echo_learner_completion_length_mean",
    chart="length",
    column="Length",
)
SHARE_TRUNCATED: Final = StepFigure(
    key="share_truncated",
    label="rollouts cut off",
    about="Share of rollouts cut off by length, 0..1.",
    unit="share",
    prometheus="echo_learner_share_truncated",
    chart="shares",
    colour="accuracy",
)
SHARE_MIXED: Final = StepFigure(
    key="share_mixed",
    label="rollouts of several versions",
    about="Share of rollouts drawn by more than one policy version, 0..1.",
    unit="share",
    prometheus="echo_learner_share_mixed",
)
TOKEN_STALENESS: Final = StepFigure(
    key="token_staleness",
    label="tokens' staleness",
    about="Steps from the version that drew a token to the one trained, mean over the newest step's sampled tokens.",
    prometheus="echo_learner_token_staleness_mean",
)
SHARE_WITHOUT_ADVANTAGE: Final = StepFigure(
    key="share_without_advantage",
    label="groups without advantage",
    about="Share of groups whose rewards were all equal, 0..1.",
    unit="share",
    prometheus="echo_learner_share_without_advantage",
    chart="shares",
    colour="staleness",
)
CLIP_FRACTION: Final = StepFigure(
    key="clip_fraction",
    label="tokens clipped",
    about="Share of trained tokens that were clipped, 0..1.",
    unit="share",
    prometheus="echo_learner_clip_fraction",
    chart="shares",
)
EVAL_S: Final = StepFigure(
    key="eval_s",
    label="evaluation before it",
    about="Time spent on evaluations between the two newest steps.",
    unit="s",
    prometheus="echo_learner_eval_seconds",
    chart="seconds",
    colour="accuracy",
)
GAP_S: Final = StepFigure(
    key="gap_s",
    label="between steps",
    about="Time from the end of the previous step to the newest one's start, evaluations and sampling included.",
    unit="s",
    prometheus="echo_learner_gap_seconds",
    chart="seconds",
    colour="staleness",
)
SECONDS: Final = StepFigure(
    key="seconds",
    label="training",
    better="lower",
    about="Duration of the newest step, without waiting.",
    unit="s",
    prometheus="echo_learner_train_seconds",
    chart="seconds",
    column="Training",
)
TOKENS_PER_S: Final = StepFigure(
    key="tokens_per_s",
    label="while training",
    better="higher",
    about="Tokens that received a gradient, per second of training.",
    unit="tokens/s",
    prometheus="echo_learner_tokens_per_second",
    chart="tokens",
)
LOSS: Final = StepFigure(key="loss", label="loss", about="Loss of the newest step.", prometheus="echo_learner_loss")
LEARNING_RATE: Final = StepFigure(
    key="learning_rate_used",
    label="learning rate",
    about="The optimizer's learning rate of the newest step.",
    prometheus="echo_learner_learning_rate",
)
UPDATED: Final = StepFigure(
    key="updated",
    label="updates",
    about="Optimizer updates made: none without a gradient, nor with one that is not finite or held back.",
    prometheus="echo_learner_updates",
)
HELD_BACK: Final = StepFigure(
    key="held_back",
    label="updates held back",
    about="Optimizer updates skipped because the gradient norm was not finite or far above the run's history.",
    prometheus="echo_learner_updates_held_back",
    largest=True,
)
GROUPS_LEFT_OUT: Final = StepFigure(
    key="groups_left_out",
    label="groups left out",
    about="Groups of the newest step excluded because no honest engine could have produced one of their rollouts.",
    prometheus="echo_learner_groups_left_out",
    largest=True,
)
FITTED_TOKENS: Final = StepFigure(
    key="fitted_tokens",
    label="micro-batch",
    about="Largest number of tokens in one forward and backward pass of the newest step.",
    unit="tokens",
    prometheus="echo_learner_micro_batch_tokens",
)
OUT_OF_MEMORY: Final = StepFigure(
    key="out_of_memory",
    label="out of memory",
    about="Restarts of the newest step in smaller parts because its device ran out of memory.",
    prometheus="echo_learner_out_of_memory",
    largest=True,
)
GROUPS_WITHOUT_ADVANTAGE: Final = StepFigure(
    key="groups_without_advantage",
    label="groups without advantage",
    about="Groups whose rewards were all equal.",
    prometheus="echo_learner_groups_without_advantage",
)
ROLLOUTS_MASKED: Final = StepFigure(
    key="rollouts_masked",
    label="rollouts masked",
    about="Rollouts excluded because they were cut off by length.",
    prometheus="echo_learner_rollouts_masked",
)
ROLLOUTS_UNSELECTED: Final = StepFigure(
    key="rollouts_unselected",
    label="rollouts not selected",
    about="Rollouts excluded by the objective's selection.",
    prometheus="echo_learner_rollouts_unselected",
)
ROLLOUTS_VETOED: Final = StepFigure(
    key="rollouts_vetoed",
    label="rollouts vetoed",
    about="Rollouts excluded by objective.sequence_veto, or with tokens masked by objective.sequence_mask.",
    prometheus="echo_learner_rollouts_vetoed",
)
CORRECTION_WEIGHT: Final = StepFigure(
    key="correction_weight",
    label="correction's weight",
    about="Mean correction weight of a trained token; only with a correction.",
    prometheus="echo_learner_correction_weight",
)
CORRECTION_SHARE: Final = StepFigure(
    key="correction_share",
    label="tokens corrected",
    about="Share of trained tokens truncated or masked by the correction, 0..1.",
    unit="share",
    prometheus="echo_learner_correction_share",
)
COMPLETION_TOKENS: Final = StepFigure(
    key="completion_tokens",
    label="sampled tokens",
    about="Sampled tokens of the newest step's batch.",
    unit="tokens",
    prometheus="echo_learner_completion_tokens",
)
COMPUTED_TOKENS: Final = StepFigure(
    key="computed_tokens",
    label="trained tokens",
    about="Tokens of the newest step that received a gradient.",
    unit="tokens",
    prometheus="echo_learner_computed_tokens",
)
TRAIN_S: Final = StepFigure(
    key="train_s", label="training", about="Part of SECONDS that the learner itself measured.", unit="s"
)

STEP_FIGURES: tuple[StepFigure, ...] = (
    *(RATIO_MAX, RATIO_MEAN, BASE_KL, SHARE_TRUNCATED, SHARE_WITHOUT_ADVANTAGE, CLIP_FRACTION, EVAL_S, GAP_S, SECONDS),
    *(TOKENS_PER_S, GRAD_NORM, MISMATCH_KL, LOSS, LEARNING_RATE, UPDATED, GROUPS_WITHOUT_ADVANTAGE, ROLLOUTS_MASKED),
    *(ROLLOUTS_UNSELECTED, ROLLOUTS_VETOED, CORRECTION_WEIGHT, CORRECTION_SHARE, COMPLETION_TOKENS, COMPUTED_TOKENS),
    *(SHARE_MIXED, TOKEN_STALENESS, HELD_BACK, GROUPS_LEFT_OUT, FITTED_TOKENS, OUT_OF_MEMORY),
    *(ENTROPY, ENTROPY_COEFFICIENT, REWARD_STD, REWARD_STD_WITHIN, COMPLETION_LENGTH_MAX, COMPLETION_LENGTH),
    TRAIN_S,
)
"""All figures, in the order in which charts draw them as lines and the table shows them as columns."""

CHARTS: tuple[Chart, ...] = (
    Chart(
        key="entropy",
        title="Entropy",
        about="How undecided the model is at a token. Near 0, it always says the same and explores nothing new; a rise "
        "means that it forgets what it was sure of.",
        axis="entropy, nats/token",
    ),
    Chart(
        key="reward_std",
        title="Spread of rewards",
        about="Standard deviation of the rollouts' rewards. GRPO learns only from differences within a group.",
        axis="reward",
    ),
    Chart(
        key="length",
        title="Completion length",
        about="Sampled tokens of the trained completions. A steady rise up to the limit means that the model no longer "
        "ends by itself.",
        axis="tokens",
    ),
    Chart(
        key="ratio",
        title="Importance ratio",
        about="How much likelier a trained token is under the learner than under its own policy. Near 1 is near "
        "on-policy; a single large value suggests forgery.",
        axis="ratio",
        logarithmic=True,
    ),
    Chart(
        key="kl",
        title="Divergence",
        about="Distance of the nodes' engines from the learner's probabilities; small if only numerics differ.",
        axis="KL, nats/token",
    ),
    Chart(
        key="norm",
        title="Gradient norm",
        about="Size of the change that each step requests; a sudden rise precedes a collapse of the run.",
        axis="norm",
    ),
    Chart(
        key="shares",
        title="Unused for training",
        about="Tokens whose ratio was clipped, groups whose rewards are all equal, and rollouts cut off by length.",
        axis="share",
    ),
    Chart(
        key="seconds",
        title="Where a step's time goes",
        about="Training time of the learner, and the time between two trainings.",
        axis="time, s",
    ),
    Chart(
        key="tokens",
        title="Training speed",
        about="Tokens that the learner trains on, per second of training.",
        axis="tokens/s",
    ),
)
"""All charts, in their order on the operator's page."""


def lines_of(chart: Chart) -> tuple[StepFigure, ...]:
    """Return the figures that the chart draws, the last one on top."""
    return tuple(figure for figure in STEP_FIGURES if figure.chart == chart.key)


def figures_of(metrics: Mapping[str, float], *, lasted_s: float) -> dict[str, float | None]:
    """Return all figures by key, from a step's metrics and values derived from them; None: the step lacks the figure.

    `lasted_s`: seconds from the plan of the step to its end, on the hub's clock. It replaces the training time for
    steps of older databases without metrics.
    """
    seconds = metrics.get(TRAIN_S.key, lasted_s)
    derived = {SECONDS.key: seconds}
    if COMPUTED_TOKENS.key in metrics and seconds > 0:
        derived[TOKENS_PER_S.key] = metrics[COMPUTED_TOKENS.key] / seconds
    known = {**metrics, **derived}
    return {figure.key: known.get(figure.key) for figure in STEP_FIGURES}
