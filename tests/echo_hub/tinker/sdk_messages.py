"""Encodes requests, and decodes results, with the tinker SDK itself. Run by the interpreter of build/doors.

python sdk_messages.py encode        prints JSON: name -> hex of a forward_backward body
python sdk_messages.py decode KIND   reads a result from standard input, prints it as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response


def body(data: list[Any], loss_fn: str = "cross_entropy", config: Any = None, seq_id: int = 3) -> str:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),
        model_id="s-1:train:0",
        seq_id=seq_id,
    )
    return forward_backward_request_to_proto(request).SerializeToString().hex()


def datum(tokens: list[list[int]], **inputs: Any) -> Any:
    return types.Datum(
        model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=chunk) for chunk in tokens]),
        loss_fn_inputs={name: types.TensorData.from_torch(torch.tensor(value)) for name, value in inputs.items()},
    )


def encode() -> dict[str, str]:
    sparse_weights = torch.zeros(4, 20)
    sparse_weights[1, 3] = 0.5
    sparse_weights[3, 7] = -2.0
    sparse_targets = torch.zeros(4, 20, dtype=torch.int64)
    sparse_targets[1, 3] = 11
    sparse_targets[3, 7] = 12
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={
            "weights": types.TensorData.from_torch_sparse(sparse_weights),
            "target_tokens": types.TensorData.from_torch_sparse(sparse_targets),
        },
    )
    spans = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor([0, 7, 8, 9])),
            "logprobs": types.TensorData.from_torch(torch.tensor([0.0, -1.0, -2.0, -3.0])),
            "advantages": types.TensorData.from_torch(torch.tensor([0.0, 1.0, 1.0, 1.0])),
        },
        model_input_spans=[
            tinker.PromptProvenanceSpan(sequence_id="q", length=2),
            tinker.SampledProvenanceSpan(sequence_id="q", length=2),
        ],
        loss_fn_input_spans=[
            tinker.PromptProvenanceSpan(sequence_id="q", offset=1, length=1),
            tinker.SampledProvenanceSpan(sequence_id="q", offset=0, length=3),
        ],
    )
    top_k = datum([[1, 2]], target_tokens=[[3, 4, 5], [6, 7, 8]], weights=[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    image = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=3)]),
        loss_fn_inputs={},
    )
    plain = datum([[1], [2, 3], [150_000]], target_tokens=[2, 3, 4, 5], weights=[0.0, 1.0, 1.0, -0.5])
    config = {"clip_low_threshold": 0.9, "name": "text"}
    return {
        "plain": body([plain]),
        "sparse": body([sparse]),
        "spans": body([spans], "ppo", config, seq_id=2**31 - 1),
        "top_k": body([top_k, plain]),
        "image": body([image]),
        "stable_reinforce": body([plain], "stable_reinforce", {"kl_coeff": 0.01}),
    }


def decode(kind: str, message: bytes) -> Any:
    if kind == "sample":
        found: Any = deserialize_proto_response(message, types.SampleResponse)
        topk = found.topk_prompt_logprobs_np
        return {
            "sequences": [[one.stop_reason, one.tokens, one.logprobs] for one in found.sequences],
            "prompt_logprobs": found.prompt_logprobs,
            "topk": None if topk is None else [topk.token_ids.tolist(), topk.logprobs.tolist()],
        }
    found = deserialize_proto_response(message, types.ForwardBackwardOutput)
    return {
        "outputs": [np.asarray(one["logprobs"].tolist()).tolist() for one in found.loss_fn_outputs],
        "metrics": found.metrics,
    }


if __name__ == "__main__":
    if sys.argv[1] == "encode":
        print(json.dumps(encode()))
    else:
        given = json.load(sys.stdin)
        print(json.dumps({kind: decode(kind, bytes.fromhex(message)) for kind, message in given.items()}))
