"""Inputs and options of each loss function, and checks of tenants' requests against them. Loads no torch.

Every request is checked as a whole before anything is computed. So a refused request changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, Datum, ForwardBackward, LossFunction

TARGETS: Final = "target_tokens"
WEIGHTS: Final = "weights"
LOGPROBS: Final = "logprobs"
ADVANTAGES: Final = "advantages"
RATIO_MASK: Final = "sequence_ratio_mask"
CLIP_LOW: Final = "clip_low_threshold"
CLIP_HIGH: Final = "clip_high_threshold"
BETA: Final = "beta"

MOST_TARGETS: Final = 1_024
"""Largest number of target tokens at one position of a datum."""
_SAMPLED: Final = (TARGETS, LOGPROBS, ADVANTAGES)
_BOUNDS: Final = (CLIP_LOW, CLIP_HIGH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The names of the inputs that a loss function needs or accepts, with its options."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Options and their defaults. NaN: the option has no default."""


LOSSES: Final[Mapping[LossFunction, LossInputs]] = {
    LossFunction.CROSS_ENTROPY: LossInputs(required=(TARGETS, WEIGHTS)),
    LossFunction.IMPORTANCE_SAMPLING: LossInputs(required=_SAMPLED, optional=(WEIGHTS,)),
    LossFunction.PPO: LossInputs(
        required=_SAMPLED, optional=(WEIGHTS, *_BOUNDS), defaults={CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
    ),
    LossFunction.CISPO: LossInputs(
        required=_SAMPLED, optional=(WEIGHTS, *_BOUNDS), defaults={CLIP_LOW: 0.0, CLIP_HIGH: 4.0}
    ),
    LossFunction.DRO: LossInputs(required=_SAMPLED, optional=(WEIGHTS,), defaults={BETA: math.nan}),
    LossFunction.GSPO: LossInputs(
        required=(*_SAMPLED, RATIO_MASK),
        optional=(WEIGHTS, *_BOUNDS),
        # GSPO (arXiv 2507.18071, section 5.1): left and right clipping ranges of 3e-4 and 4e-4.
        defaults={CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
    ),
}


def options(request: ForwardBackward) -> dict[str, float]:
    """Return all options of the request's loss: the given ones, and the defaults of the others. Raises Refusal."""
    known = LOSSES[request.loss].defaults
    found = dict(known)
    for name, value in request.config.items():
        if name not in known:
            raise _invalid(
                f"The loss {request.loss} has no option {name}.",
                got=f"{name} = {value}",
                do=f"Its options are: {', '.join(known) or 'none'}.",
                param=name,
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise _invalid(f"The option {name} is not a finite number.", got=repr(value), param=name)
        found[name] = float(value)
    for name, number in found.items():
        if math.isnan(number):
            raise _invalid(
                f"The loss {request.loss} needs the option {name}, which has no default.",
                do=f"Set {name} in loss_fn_config.",
                param=name,
            )
    if CLIP_LOW in found and found[CLIP_LOW] > found[CLIP_HIGH]:
        raise _invalid(
            f"{CLIP_LOW} is larger than {CLIP_HIGH}.",
            got=f"{found[CLIP_LOW]:g} and {found[CLIP_HIGH]:g}",
            do="Give bounds of the ratio, for example 0.8 and 1.2.",
            param=CLIP_LOW,
        )
    return found


def check_pass(request: ForwardBackward, *, vocab_size: int, context_tokens: int) -> None:
    """Check a request and all of its data. Raises Refusal for an invalid option, a request without data, or an invalid
    datum.
    """
    options(request)
    if not request.data:
        raise _invalid("A forward_backward request has no data.", do="Send at least one datum.", param="data")
    for number, datum in enumerate(request.data):
        try:
            _check_datum(datum, request.loss, vocab_size=vocab_size, context_tokens=context_tokens)
        except Refusal as refusal:
            refusal.got = f"datum {number}: {refusal.got}"
            raise


def check_ids(ids: NDArray[Any], name: str, *, vocab_size: int) -> None:
    """Raise Refusal for token ids that the model does not have."""
    if ids.dtype.kind != "i":
        raise _invalid(f"{name} is not an array of whole numbers.", got=str(ids.dtype), param=name)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise _invalid(
            f"{name} has a token id that the model does not have.",
            got=f"{wrong[0]}, the vocabulary has {vocab_size} ids",
            param=name,
        )


def check_prompt(ids: NDArray[Any], *, vocab_size: int, context_tokens: int) -> None:
    """Raise Refusal for a prompt that is empty, longer than `context_tokens`, or has an unknown token id."""
    if ids.ndim != 1 or not len(ids):
        raise _invalid("A prompt is empty.", got=f"shape {ids.shape}", do="Send at least one token.", param="prompt")
    if len(ids) > context_tokens:
        raise _too_long("The prompt", len(ids), context_tokens, param="prompt")
    check_ids(ids, "prompt", vocab_size=vocab_size)


def check_step(step: AdamStep) -> None:
    """Raise Refusal if a parameter of the step is outside the range that AdamW allows."""
    bounds = {
        "learning_rate": (0.0, math.inf),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, math.inf),
        "weight_decay": (0.0, math.inf),
        "grad_clip_norm": (0.0, math.inf),
    }
    for name, (low, high) in bounds.items():
        value = getattr(step, name)
        if not low <= value < high or (name == "eps" and value == 0):
            raise _invalid(
                f"The optimizer's {name} is out of range.",
                got=f"{value:g}",
                do=f"Use a value {'above' if name == 'eps' else 'from'} {low:g}"
                + (f" and below {high:g}." if high < math.inf else "."),
                param=name,
            )


def _check_datum(datum: Datum, loss: LossFunction, *, vocab_size: int, context_tokens: int) -> None:
    takes = LOSSES[loss]
    check_ids(datum.input_ids, "model_input", vocab_size=vocab_size)
    count = len(datum.input_ids)
    if not count:
        raise _invalid("A datum has no tokens.", got="0 tokens", param="model_input")
    if count > context_tokens:
        raise _too_long("A datum", count, context_tokens, param="model_input")
    for name in takes.required:
        if name not in datum.loss_inputs:
            raise _invalid(
                f"The loss {loss} needs the input {name}.",
                got=", ".join(sorted(datum.loss_inputs)) or "no inputs",
                param=name,
            )
    for name, values in datum.loss_inputs.items():
        if name not in (*takes.required, *takes.optional):
            raise _invalid(
                f"The loss {loss} has no input {name}.",
                got=name,
                do=f"Its inputs are: {', '.join((*takes.required, *takes.optional))}.",
                param=name,
            )
        _check_values(name, values, count, loss)
    check_ids(datum.loss_inputs[TARGETS], TARGETS, vocab_size=vocab_size)
    if WEIGHTS in datum.loss_inputs and datum.loss_inputs[WEIGHTS].shape != datum.loss_inputs[TARGETS].shape:
        raise _invalid(
            f"{WEIGHTS} and {TARGETS} have different shapes.",
            got=f"{datum.loss_inputs[WEIGHTS].shape} and {datum.loss_inputs[TARGETS].shape}",
            param=WEIGHTS,
        )
    if RATIO_MASK in datum.loss_inputs:
        _check_mask(datum)
    _check_bounds(datum)


def _check_values(name: str, values: NDArray[Any], count: int, loss: LossFunction) -> None:
    most = 2 if loss is LossFunction.CROSS_ENTROPY else 1
    if not 1 <= values.ndim <= most or len(values) != count:
        raise _invalid(
            f"{name} does not have one entry for each token of model_input.",
            got=f"shape {values.shape} for {count} tokens",
            param=name,
        )
    if values.ndim == 2 and not 1 <= values.shape[1] <= MOST_TARGETS:
        raise _invalid(
            f"{name} has too few or too many targets for each position.",
            got=f"{values.shape[1]}",
            do=f"Use 1 to {MOST_TARGETS}.",
            param=name,
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise _invalid(f"{name} has a value that is not finite.", got="NaN or infinity", param=name)
    if name != TARGETS and values.dtype.kind not in "fi":
        raise _invalid(f"{name} is not an array of numbers.", got=str(values.dtype), param=name)


def _check_mask(datum: Datum) -> None:
    mask = datum.loss_inputs[RATIO_MASK]
    if (mask < 0).any() or (not mask.any() and datum.loss_inputs[ADVANTAGES].any()):
        raise _invalid(
            f"{RATIO_MASK} selects no token, or has a negative value.",
            got=f"smallest {mask.min():g}, sum {mask.sum():g}",
            do="Set it to 1 at the sampled tokens and to 0 elsewhere.",
            param=RATIO_MASK,
        )


def _check_bounds(datum: Datum) -> None:
    if all(name in datum.loss_inputs for name in _BOUNDS):
        low, high = (datum.loss_inputs[name] for name in _BOUNDS)
        if (low > high).any():
            raise _invalid(f"{CLIP_LOW} is larger than {CLIP_HIGH}.", got="at some position", param=CLIP_LOW)


def _too_long(what: str, count: int, context_tokens: int, *, param: str) -> Refusal:
    return _invalid(
        f"{what} is longer than the model's context.",
        got=f"{count} tokens of {context_tokens}",
        do="Shorten it.",
        param=param,
    )


def _invalid(what: str, *, got: str | None = None, do: str | None = None, param: str) -> Refusal:
    return Refusal(RefusalKind.INVALID, what, got=got, do=do, param=param)
