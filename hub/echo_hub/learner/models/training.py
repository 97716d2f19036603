"""One tenant's model: its adapter, gradient and AdamW, and the passes and steps that change them.

A pass divides its data into micro-batches. Between two micro-batches, the process may work for another model. The pass
adds its gradient to the model's gradient only at its end, so a failed pass leaves the model's gradient unchanged. If
memory is too small, the pass restarts with micro-batches of half the size.

The optimizer is PyTorch's AdamW, with the parameters of each call. A step without any pass before has the gradient 0.

Dimensions: N positions of a micro-batch, M trained positions, K targets of a position.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner import determinism
from echo_hub.learner.logprobs import selected_logprobs, weighted_logprobs
from echo_hub.learner.models.adapters import AdapterSeat, LoraTensors
from echo_hub.learner.models.data import PackedRows, divided, halved
from echo_hub.learner.models.inputs import (
    ADVANTAGES,
    BETA,
    CLIP_HIGH,
    CLIP_LOW,
    LOGPROBS,
    TARGETS,
    WEIGHTS,
    check_step,
    options,
)
from echo_hub.learner.models.losses import SampledTokens, inputs_of, sequence_ratio, terms, trained_positions
from echo_hub.learner.packing import take
from echo_hub.learner.policy import Policy
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, Datum, ForwardBackward, LoraWish, LossFunction, PassResult
from echo_shared.errors import LearnerError
from echo_shared.process.out_of_memory import ran_out

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class TrainedModel:
    """A model's state. Its tensors are on the policy's device."""

    wish: LoraWish
    adapter: LoraTensors
    optimizer: torch.optim.AdamW
    steps: int = 0
    """Number of optimizer steps."""

    @classmethod
    def of(cls, wish: LoraWish, adapter: LoraTensors) -> TrainedModel:
        optimizer = torch.optim.AdamW(adapter.weights.values(), lr=0.0, fused=True)
        return cls(wish=wish, adapter=adapter, optimizer=optimizer)

    def drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, step: AdamStep) -> dict[str, float]:
        """Update the adapter by the gradient of all passes since the last step, and clear the gradient. Return the
        gradient's norm before clipping.
        """
        check_step(step)
        weights = list(self.adapter.weights.values())
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        norm = float(torch.nn.utils.clip_grad_norm_(weights, step.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            self.drop_gradient()
            raise _not_finite("The gradient", f"norm {norm}")
        (group,) = self.optimizer.param_groups
        group["lr"], group["betas"] = step.learning_rate, (step.beta1, step.beta2)
        group["eps"], group["weight_decay"] = step.eps, step.weight_decay
        self.optimizer.step()
        self.drop_gradient()
        self.steps += 1
        return {"grad_norm:mean": norm}


@dataclass(slots=True, kw_only=True)
class PassSizes:
    """Memory settings of all passes. A pass that runs out of memory changes them."""

    tokens: int
    """Largest number of tokens in a micro-batch."""
    may_checkpoint: bool = False
    """True if gradient checkpointing may be turned on, once a single datum does not fit without it."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Results of the micro-batches that a pass has computed."""

    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    loss: float = 0.0


class Pass:
    """One pass over the data of a request: forward only, or forward and backward."""

    def __init__(
        self, policy: Policy, seat: AdapterSeat, model: TrainedModel, request: ForwardBackward, sizes: PassSizes
    ) -> None:
        """The request must have passed `inputs.check_pass`."""
        self._policy = policy
        self._seat = seat
        self._model = model
        self._request = request
        self._sizes = sizes
        self._options = options(request)
        self._lengths = [len(datum.input_ids) for datum in request.data]

    def run(self) -> Iterator[PassResult | None]:
        """Compute one micro-batch before each item. Items are None; the last item is the result. Passes of other models
        may run between two items. Raises Refusal or LearnerError, and then leaves the model unchanged.
        """
        weights = list(self._model.adapter.weights.values())
        before = [weight.grad for weight in weights]
        try:
            found = _Found()
            yield from self._within_memory(weights, found)
            gradients = [weight.grad for weight in weights]
            self._check_finite(found, gradients)
        except BaseException:
            _set_gradients(weights, before)
            raise
        _set_gradients(weights, [_added(old, new) for old, new in zip(before, gradients, strict=True)])
        yield PassResult(logprobs=tuple(found.logprobs), metrics={"loss:sum": found.loss})

    def _within_memory(self, weights: Sequence[Tensor], found: _Found) -> Iterator[None]:
        while True:
            _set_gradients(weights, [None] * len(weights))
            found.logprobs, found.loss = [], 0.0
            broken_off = ""
            try:
                for rows in divided(self._lengths, self._sizes.tokens):
                    self._seat.hold(self._model.adapter)
                    self._compute([self._request.data[row] for row in rows], found)
                    yield None
                return
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                broken_off = str(error) or type(error).__name__
            # Free memory outside the handler: inside it, the traceback still refers to the failed attempt's tensors.
            tokens = halved(self._lengths, self._sizes.tokens)
            gc.collect()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()
            if tokens is not None:
                self._sizes.tokens = tokens
            elif self._sizes.may_checkpoint and not self._policy.checkpoints:
                self._policy.checkpoints = True
            else:
                raise LearnerError(
                    "The hub's device has too little memory for a single datum.",
                    got=broken_off,
                    do="Send shorter data.",
                )
            log.warning("out of memory, the pass restarts with %s: %s", self._sizes, broken_off)

    def _compute(self, data: Sequence[Datum], found: _Found) -> None:
        """Add the gradient of a micro-batch to the adapter's tensors, and its results to `found`."""
        batch = PackedRows.of([datum.input_ids for datum in data], self._policy.device)
        targets = [datum.loss_inputs[TARGETS] for datum in data]
        loss: Tensor | None
        with torch.set_grad_enabled(not self._request.forward_only), self._policy.autocast():
            states_NH = self._policy.predicting_states(batch)
            if any(of_datum.ndim == 2 for of_datum in targets):
                logprobs_NK, loss = self._of_several_targets(states_NH, data)
            else:
                logprobs_NK, loss = self._of_one_target(states_NH, data)
        logprobs = logprobs_NK.numpy(force=True).astype(np.float32)
        ends = np.cumsum(batch.lengths)[:-1]
        for of_datum, part in zip(targets, np.split(logprobs, ends), strict=True):
            found.logprobs.append(part[:, : of_datum.shape[1]].copy() if of_datum.ndim == 2 else part[:, 0].copy())
        if loss is not None:
            found.loss += loss.detach().cpu().double().sum().item()
            if loss.requires_grad:
                determinism.backward(loss.sum())

    def _of_several_targets(self, states_NH: Tensor, data: Sequence[Datum]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [N, K] and the terms [N] of a cross-entropy with K targets of a position."""
        device = self._policy.device
        most = max(datum.loss_inputs[TARGETS].shape[1] if datum.loss_inputs[TARGETS].ndim == 2 else 1 for datum in data)
        ids_NK, weights_NK = (
            torch.from_numpy(
                np.concatenate([_widened(datum.loss_inputs[name], most) for datum in data]).astype(dtype)
            ).to(device)
            for name, dtype in ((TARGETS, np.int64), (WEIGHTS, np.float32))
        )
        logprobs_NK, sums_N = weighted_logprobs(states_NH, self._policy.head, ids_NK, weights_NK)
        return logprobs_NK, -sums_N

    def _of_one_target(self, states_NH: Tensor, data: Sequence[Datum]) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities [N, 1] and the terms [M]; None without a trained position. Only trained
        positions need the gradient of their log-probability.
        """
        loss, device = self._request.loss, self._policy.device
        trained = np.concatenate([trained_positions(datum, loss) for datum in data])
        ids_N = torch.from_numpy(np.concatenate([datum.loss_inputs[TARGETS] for datum in data]).astype(np.int64))
        logprobs_N = torch.empty(len(trained), dtype=torch.float32, device=device)
        graph_M: Tensor | None = None
        for wanted in (True, False):
            places = torch.from_numpy(np.flatnonzero(trained == wanted)).to(device)
            if not len(places):
                continue
            chosen = states_NH if len(places) == len(trained) else take(states_NH, places)
            if not wanted:
                chosen = chosen.detach()
            of_chosen = selected_logprobs(chosen, self._policy.head, ids_N.to(device)[places], temperature=1.0)
            logprobs_N[places] = of_chosen.detach().float()
            graph_M = of_chosen if wanted else graph_M
        return logprobs_N[:, None], None if graph_M is None else self._terms(graph_M, logprobs_N, data, trained)

    def _terms(self, p_M: Tensor, logprobs_N: Tensor, data: Sequence[Datum], trained: NDArray[np.bool_]) -> Tensor:
        loss, device = self._request.loss, self._policy.device

        def given(name: str) -> Tensor:
            values = np.concatenate([inputs_of(datum, name, self._options) for datum in data])
            return torch.from_numpy(values[trained]).to(device)

        if loss is LossFunction.CROSS_ENTROPY:
            return -given(WEIGHTS) * p_M
        ratios = np.ones(len(trained), dtype=np.float32)
        if loss is LossFunction.GSPO:
            lengths = [len(datum.input_ids) for datum in data]
            parts = np.split(logprobs_N.numpy(force=True), np.cumsum(lengths)[:-1])
            each = [sequence_ratio(part, datum) for part, datum in zip(parts, data, strict=True)]
            ratios = np.repeat(each, lengths).astype(np.float32)
        tokens = SampledTokens(
            p=p_M,
            q=given(LOGPROBS),
            advantages=given(ADVANTAGES),
            weights=given(WEIGHTS),
            low=given(CLIP_LOW),
            high=given(CLIP_HIGH),
            ratios=torch.from_numpy(ratios[trained]).to(device),
            beta=self._options.get(BETA, 0.0),
        )
        return terms(loss, tokens)

    def _check_finite(self, found: _Found, gradients: Sequence[Tensor | None]) -> None:
        if not math.isfinite(found.loss):
            raise _not_finite("The loss", f"{self._request.loss}: {found.loss}")
        known = [gradient for gradient in gradients if gradient is not None]
        if known and not math.isfinite(float(torch.nn.utils.get_total_norm(known))):
            raise _not_finite("The gradient", str(self._request.loss))


def _widened(values: NDArray[Any], most: int) -> NDArray[Any]:
    """Return an input as an array [N, K]. Missing targets get 0, because a target of weight 0 adds nothing to
    the loss.
    """
    wide = values if values.ndim == 2 else values[:, None]
    return np.pad(wide, ((0, 0), (0, most - wide.shape[1])))


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)


def _set_gradients(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient


def _not_finite(what: str, got: str) -> Refusal:
    return Refusal(
        RefusalKind.INVALID,
        f"{what} is not finite.",
        got=got,
        do="Check logprobs, advantages and weights: they are too large, or far from the model's own log-probabilities.",
        param="loss_fn_inputs",
    )
