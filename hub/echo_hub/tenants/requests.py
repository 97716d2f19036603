"""Values of tenants' requests and results. Both APIs (`echo_hub.tinker`, `echo_hub.openai`) build and read them.

A *tenant* is the owner of an API token with the scope `use`. A *model* is one tenant's adapter with its gradient and
optimizer; its id is `SESSION:train:N`. A *sampler* draws by fixed weights; its id is `SESSION:sample:N`. Token ids go
in and out: the APIs convert them to and from text.

Dimensions: N positions of a datum, K targets of a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class LossFunction(StrEnum):
    """Losses of `forward_backward`. Each is a plain sum over all positions; `echo_hub.learner.models.losses` has the
    formulas."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledSpan:
    """Positions of a datum that were drawn by a `sample` request. They show which volunteers' nodes drew the trained
    tokens."""

    sequence_id: str
    offset: int
    """Position of the span's first token within the drawn sequence."""
    start: int
    """Position of the span's first token in the datum."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One training sequence."""

    input_ids: NDArray[np.int32]
    """Token ids [N]."""
    loss_inputs: Mapping[str, NDArray[np.float32] | NDArray[np.int64]]
    """Dense arrays by name, each [N] or, for `target_tokens` and `weights` of cross_entropy, [N, K]: target_tokens
    (int64), weights, logprobs, advantages, sequence_ratio_mask, clip_low_threshold, clip_high_threshold (float32)."""
    spans: tuple[SampledSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackward:
    """One forward and backward pass over data. It adds the gradient of the loss (a sum) to the model's gradient; with
    `forward_only`, the gradient stays as it is."""

    data: tuple[Datum, ...]
    loss: LossFunction
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Options of the loss, for example clip_low_threshold, clip_high_threshold, beta. An unknown one is refused."""
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """Result of `ForwardBackward`."""

    logprobs: tuple[NDArray[np.float32], ...]
    """For each datum, the log-probabilities [N] or [N, K] of its targets in nats, at temperature 1."""
    metrics: Mapping[str, float]
    """Metrics by name, in the form `name:reduction`. `loss:sum` is always present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Parameters of one AdamW step (decoupled weight decay)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 = not clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWish:
    """A client's settings for a new model's adapter. alpha is always 32, so the adapter's scale is 32 / rank."""

    rank: int = 32
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembed: bool = True
    """Accepted and ignored, with a note when the session starts: nodes' engines cannot adapt the unembedding."""


class WeightsKind(StrEnum):
    """Kinds of saved weights, as they stand in a path: `tinker://MODEL/KIND/NAME`."""

    TRAINING = "weights"
    """Adapter, optimizer state and step count: training can continue from these."""
    SAMPLER = "sampler_weights"
    """Adapter in the form in which it is published to nodes."""
    EXTERNAL = "external_weights"
    """Adapter in the file layout of PEFT, for download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWish:
    """Parameters of a `sample` request."""

    num_samples: int = 1
    max_tokens: int | None = None
    """Largest number of drawn tokens. None = up to the end of the model's context."""
    temperature: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] | None = None
    """Token ids that end a completion. None = the model's own end tokens. Empty = no token ends it, not even an end
    token. With other ids, end tokens still end a completion too."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion. The completion's last token is the one that completes a string."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    checked: bool = False
    """True = give only completions whose draws the hub has checked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One drawn completion."""

    sequence_id: str
    token_ids: NDArray[np.int32]
    """Token ids [T], the stop token included."""
    logprobs: NDArray[np.float32]
    """Log-probabilities [T] in nats of the drawn tokens, at the request's temperature."""
    finish: str
    """`stop` or `length`."""
    drawn_by: str = ""
    """Id of the node that drew the sample; empty = the hub drew it."""
    index: int = 0
    """Position among the samples of its request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens at temperature 1."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the prompt's N tokens, in nats [N]; NaN at position 0, because nothing predicts the first
    token."""
    topk_ids: NDArray[np.int32] | None = None
    """Ids of the k likeliest tokens at each position [N, k]; row 0 is all zeros. None = not asked for."""
    topk_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the tokens in `topk_ids` [N, k]; row 0 is all -99999. None = not asked for."""
    target_logprobs: NDArray[np.float32] | None = None
    """Log-probabilities of the ids that the client named for each position [N, k]; row 0 is NaN. None = not asked
    for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleResult:
    samples: tuple[Sample, ...]
    prompt_logprobs: PromptLogprobs | None = None
    policy_version: int = 0
    """Number of the adapter that drew; 0 = the base."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tokens and log-probabilities."""
        size = sum(sample.token_ids.nbytes + sample.logprobs.nbytes for sample in self.samples)
        prompt = self.prompt_logprobs
        if prompt is not None:
            size += prompt.logprobs.nbytes
            size += 0 if prompt.topk_ids is None else 2 * prompt.topk_ids.nbytes
        return size
