"""Read the body of forward_backward, the protobuf message ForwardBackwardRequest.

Unsupported parts are refused by name: images, audio, unknown losses, unknown loss inputs, unknown fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import Datum, ForwardBackward, LossFunction, SampledSpan
from echo_hub.tinker.protobuf import (
    double_of,
    entry_of,
    fields,
    malformed,
    number_of,
    text_of,
    unknown_field,
    view_of,
)
from echo_hub.tinker.tensors import DenseRoom, read_tensor

CHUNK_BYTES: Final = 5_000_000
"""Size in bytes of the parts into which clients split their data. Clients only estimate it."""
MOST_BODY_BYTES: Final = 8_000_000
"""Maximum size of a body in bytes: larger than `CHUNK_BYTES`, because clients only estimate the size."""
MOST_DATA: Final = 1_024
MOST_PIECES: Final = 262_144
"""Maximum number of chunks and spans in one request. The limit keeps the time to decode a request at about a second."""
MOST_OPTIONS: Final = 32
MOST_TEXT_BYTES: Final = 256
"""Maximum length in bytes of ids, names and text options."""
_MODEL_ID: Final = "model_id"
_DATA: Final = 3
_OPTIONS: Final = (5, 7)
_REPEATED: Final = (_DATA, *_OPTIONS)
_MOST_HEAD_FIELDS: Final = 8 + MOST_DATA + 2 * MOST_OPTIONS
"""Maximum number of top-level fields that are read; a valid request has fewer."""
_OF_DATUM: Final = (1, 2, 3, 4)
LOSS_INPUTS: Final = frozenset(
    {
        "target_tokens",
        "weights",
        "logprobs",
        "advantages",
        "sequence_ratio_mask",
        "clip_low_threshold",
        "clip_high_threshold",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHead:
    """Identity of a forward_backward request: its model and its number (seq_id)."""

    model_id: str
    seq_id: int
    forward_only: bool


def read_head(body: bytes) -> TrainingHead:
    """Return the identity of the request without reading its data. Raises Refusal."""
    where = "ForwardBackwardRequest"
    model_id, seq_id, forward_only = "", 0, False
    all_fields = fields(memoryview(body), where, repeated=_REPEATED)
    # `read_request` refuses a request with more fields.
    for number, wire_type, value in islice(all_fields, _MOST_HEAD_FIELDS):
        if number == 1:
            model_id = text_of(value, wire_type, _MODEL_ID, most=MOST_TEXT_BYTES)
        elif number == 2:
            seq_id = number_of(value, wire_type, "seq_id")
        elif number == 6:
            forward_only = bool(number_of(value, wire_type, "forward_only"))
    if not model_id:
        raise malformed(_MODEL_ID, "no model")
    if not 0 < seq_id < 1 << 31:
        raise malformed("seq_id", str(seq_id))
    return TrainingHead(model_id=model_id, seq_id=seq_id, forward_only=forward_only)


def read_request(body: bytes) -> ForwardBackward:
    """Return the request. Raises Refusal."""
    loss, forward_only = "", False
    numbers: dict[str, float | str] = {}
    options: dict[str, float | str] = {}
    data: list[Datum] = []
    room, pieces = DenseRoom(), _Pieces()
    num_options = 0
    for number, wire_type, value in fields(memoryview(body), "ForwardBackwardRequest", repeated=_REPEATED):
        if number == _DATA:
            if len(data) == MOST_DATA:
                raise Refusal(
                    RefusalKind.TOO_LARGE,
                    "The field data has too many entries.",
                    got=f"more than {MOST_DATA}",
                    do="Split the data; the tinker SDK does so by itself.",
                    param="data",
                )
            where = f"data[{len(data)}]"
            data.append(_datum(view_of(value, wire_type, where), where, room, pieces))
        elif number == 4:
            loss = text_of(value, wire_type, "loss_fn", most=MOST_TEXT_BYTES)
        elif number in _OPTIONS:
            num_options += 1
            if num_options > MOST_OPTIONS:
                raise malformed("loss_fn_config", f"more than {MOST_OPTIONS} options")
            target = numbers if number == 5 else options
            name, option = _option(view_of(value, wire_type, "loss_fn_config"), is_tagged=number == 7)
            target[name] = option
        elif number == 6:
            forward_only = bool(number_of(value, wire_type, "forward_only"))
        elif number > 2:
            raise unknown_field("ForwardBackwardRequest", number)
    if not data:
        raise malformed("data", "no datum")
    return ForwardBackward(
        data=tuple(data), loss=loss_function(loss), config=options or numbers, forward_only=forward_only
    )


def loss_function(name: str) -> LossFunction:
    """Return the loss of this name. Raises Refusal if this hub does not have it."""
    try:
        return LossFunction(name)
    except ValueError:
        raise Refusal(
            RefusalKind.INVALID,
            f"This hub does not offer loss_fn={name[:40]}.",
            do=f"Use one of {', '.join(LossFunction)}; recipes take it as loss_fn=importance_sampling.",
            param="loss_fn",
        ) from None


def _option(message: memoryview, *, is_tagged: bool) -> tuple[str, float | str]:
    """Return name and value of a loss option. With `is_tagged`, the value is a message that holds a double or a text,
    else it is a bare double."""
    where = "loss_fn_config"
    name, found = entry_of(message, where, most=MOST_TEXT_BYTES)
    option: float | str = 0.0
    if found and not is_tagged:
        option = double_of(found[0][1], found[0][0], where)
    elif found:
        for number, wire_type, value in fields(view_of(found[0][1], found[0][0], where), where):
            if number == 1:
                option = double_of(value, wire_type, where)
            elif number == 2:
                option = text_of(value, wire_type, where, most=MOST_TEXT_BYTES)
            else:
                raise unknown_field(where, number)
    if isinstance(option, float) and not math.isfinite(option):
        raise malformed(f"{where}[{name}]", str(option))
    return name, option


@dataclass(slots=True)
class _Pieces:
    """Counter of the chunks and spans that were read for one request. Raises Refusal at the limit."""

    total: int = 0

    def add(self) -> None:
        self.total += 1
        if self.total > MOST_PIECES:
            raise Refusal(
                RefusalKind.TOO_LARGE,
                "The fields model_input and loss_fn_input_spans have too many chunks and spans.",
                got=f"more than {MOST_PIECES} in one request",
                do="Join chunks of text, or send fewer data in one request.",
                param="model_input",
            )


def _datum(message: memoryview, where: str, room: DenseRoom, pieces: _Pieces) -> Datum:
    tokens = bytearray()
    tensors: dict[str, memoryview] = {}
    of_inputs: list[tuple[bool, str, int, int]] = []
    of_losses: list[tuple[bool, str, int, int]] = []
    for number, wire_type, value in fields(message, where, repeated=_OF_DATUM):
        view = view_of(value, wire_type, where)
        if number != 2:
            pieces.add()
        if number == 1:
            tokens += _chunk(view, where)
        elif number == 2:
            name, found = entry_of(view, f"{where}.loss_fn_inputs", most=MOST_TEXT_BYTES)
            if name not in LOSS_INPUTS:
                raise Refusal(
                    RefusalKind.INVALID,
                    f"This hub does not know the loss input {name[:40]!r} of {where}.",
                    do=f"Send only {', '.join(sorted(LOSS_INPUTS))}.",
                    param=f"loss_fn_inputs[{name[:40]}]",
                )
            if name in tensors:
                raise malformed(f"{where}.loss_fn_inputs[{name}]", "two values")
            tensors[name] = view_of(found[0][1], found[0][0], where) if found else memoryview(b"")
        elif number in (3, 4):
            (of_inputs if number == 3 else of_losses).append(_span(view, where))
        else:
            raise unknown_field(where, number)
    if not tokens or len(tokens) % 4:
        raise malformed(f"{where}.model_input", f"{len(tokens)} bytes of tokens")
    input_ids: NDArray[np.int32] = np.frombuffer(bytes(tokens), dtype="<i4")
    if (input_ids < 0).any():
        raise malformed(f"{where}.model_input", "a negative token id")
    inputs = {
        name: _loss_input(tensor, name, len(input_ids), f"{where}.loss_fn_inputs[{name}]", room)
        for name, tensor in tensors.items()
    }
    return Datum(
        input_ids=input_ids,
        loss_inputs=inputs,
        spans=_sampled(of_losses or of_inputs, len(input_ids), where),
    )


def _chunk(message: memoryview, where: str) -> memoryview:
    """Return the bytes of a chunk's token ids."""
    found = memoryview(b"")
    for number, wire_type, value in fields(message, where):
        if number in (2, 3):
            kind = "images" if number == 2 else "audio"
            raise Refusal(
                RefusalKind.INVALID,
                f"This hub does not take {kind}, but {where}.model_input has a chunk of {kind}.",
                do="Send text alone.",
                param="model_input",
            )
        if number != 1:
            raise unknown_field(f"a chunk of {where}", number)
        for inner, inner_type, tokens in fields(view_of(value, wire_type, where), where):
            if inner != 1:
                raise unknown_field(f"a chunk of {where}", inner)
            found = view_of(tokens, inner_type, where)
    return found


def _loss_input(
    message: memoryview, name: str, num_positions: int, where: str, room: DenseRoom
) -> NDArray[np.float32] | NDArray[np.int64]:
    tensor = read_tensor(message, where, room)
    if len(tensor) != num_positions:
        raise malformed(where, f"{len(tensor)} positions for {num_positions} tokens of model_input")
    if name == "target_tokens":
        if tensor.dtype != np.int64:
            raise malformed(where, "numbers that are not integers")
        if (tensor < 0).any():
            raise malformed(where, "a negative token id")
        return tensor
    if not np.isfinite(tensor).all():
        raise malformed(where, "a number that is not finite")
    return tensor.astype(np.float32, copy=False)


def _span(message: memoryview, where: str) -> tuple[bool, str, int, int]:
    """Return (is sampled, sequence id, offset, length) of a ProvenanceSpan."""
    where = f"{where}.spans"
    sequence_id, offset, length, is_sampled = "", 0, 0, False
    for arm, wire_type, value in fields(message, where):
        if arm not in (1, 2):
            raise unknown_field(where, arm)
        is_sampled = arm == 2
        for number, inner_type, part in fields(view_of(value, wire_type, where), where):
            if number == 1:
                sequence_id = text_of(part, inner_type, where, most=MOST_TEXT_BYTES)
            elif number == 2:
                offset = number_of(part, inner_type, where)
            elif number == 3:
                length = number_of(part, inner_type, where)
            else:
                raise unknown_field(where, number)
    if offset < 0 or length < 0:
        raise malformed(where, f"offset {offset}, length {length}")
    return is_sampled, sequence_id, offset, length


def _sampled(spans: list[tuple[bool, str, int, int]], num_positions: int, where: str) -> tuple[SampledSpan, ...]:
    """Return the sampled spans. All spans, in order and without gaps, must cover the datum."""
    found, start = [], 0
    for is_sampled, sequence_id, offset, length in spans:
        if is_sampled and length:
            found.append(SampledSpan(sequence_id=sequence_id, offset=offset, start=start, length=length))
        start += length
    if spans and start != num_positions:
        raise malformed(f"{where}.spans", f"spans of {start} positions for {num_positions} tokens")
    return tuple(found)
