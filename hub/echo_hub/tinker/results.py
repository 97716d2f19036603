"""Write results as protobuf messages: SampleResponse and ForwardBackwardOutput.

Letters: N positions, K targets of a position.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from echo_hub.tenants.requests import PassResult, PromptLogprobs, Sample, SampleResult
from echo_hub.tinker.protobuf import put_bytes, put_double, put_number

_LENGTH = 1
_FLOAT32 = 1


def sample_response(result: SampleResult) -> bytes:
    """Return the message SampleResponse."""
    out = bytearray()
    for sample in result.samples:
        put_bytes(out, 1, _sequence(sample))
    prompt = result.prompt_logprobs
    if prompt is not None:
        put_bytes(out, 2, prompt.logprobs.astype("<f4", copy=False).tobytes())
        if prompt.topk_ids is not None and prompt.topk_logprobs is not None:
            put_bytes(out, 3, _topk(prompt))
    return bytes(out)


def _sequence(sample: Sample) -> bytearray:
    out = bytearray()
    put_number(out, 1, _LENGTH if sample.finish == "length" else 0)
    put_bytes(out, 2, sample.token_ids.astype("<i4", copy=False).tobytes())
    put_bytes(out, 3, sample.logprobs.astype("<f4", copy=False).tobytes())
    return out


def _topk(prompt: PromptLogprobs) -> bytearray:
    assert prompt.topk_ids is not None and prompt.topk_logprobs is not None
    out = bytearray()
    put_bytes(out, 1, prompt.topk_ids.astype("<i4", copy=False).tobytes())
    put_bytes(out, 2, prompt.topk_logprobs.astype("<f4", copy=False).tobytes())
    put_number(out, 3, prompt.topk_ids.shape[1])
    put_number(out, 4, prompt.topk_ids.shape[0])
    return out


def forward_backward_output(result: PassResult) -> bytes:
    """Return the message ForwardBackwardOutput. Consecutive data share one record if the shapes of their
    log-probabilities are equal except in the first dimension."""
    out = bytearray()
    put_bytes(out, 1, b"ArrayRecord")
    for trailing, group in groupby(result.logprobs, key=lambda logprobs: logprobs.shape[1:]):
        arrays = tuple(group)
        offsets = np.cumsum([0, *(4 * array.size for array in arrays)], dtype="<i8")
        tensor = bytearray()
        put_bytes(tensor, 1, b"".join(array.astype("<f4", copy=False).tobytes() for array in arrays))
        put_bytes(tensor, 2, offsets.tobytes())
        put_number(tensor, 3, _FLOAT32)
        for size in trailing:
            put_number(tensor, 4, size)
        entry = bytearray()
        put_bytes(entry, 1, b"logprobs")
        put_bytes(entry, 2, tensor)
        record = bytearray()
        put_bytes(record, 2, entry)
        put_number(record, 3, len(arrays))
        put_bytes(out, 2, record)
    for name, value in result.metrics.items():
        entry = bytearray()
        put_bytes(entry, 1, name.encode())
        put_double(entry, 2, value)
        put_bytes(out, 3, entry)
    return bytes(out)


def payload_bytes(result: PassResult | SampleResult) -> int:
    """Return about how many bytes the message has, without writing it."""
    if isinstance(result, PassResult):
        return sum(logprobs.nbytes for logprobs in result.logprobs)
    return result.num_bytes
