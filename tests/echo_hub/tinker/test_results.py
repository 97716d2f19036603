"""Results as protobuf messages, read by the tinker SDK."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.tenants.requests import PassResult, PromptLogprobs, Sample, SampleResult
from echo_hub.tinker.results import forward_backward_output, payload_bytes, sample_response
from tests.doors import doors_python

SDK = Path(__file__).with_name("sdk_messages.py")


def sample(tokens: list[int], finish: str) -> Sample:
    return Sample(
        sequence_id="q",
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        finish=finish,
    )


SAMPLES = SampleResult(
    samples=(sample([7, 8], "stop"), sample([150_000], "length"), sample([], "length")),
    prompt_logprobs=PromptLogprobs(
        logprobs=np.array([np.nan, -1.5], np.float32),
        topk_ids=np.array([[0, 0], [4, 5]], np.int32),
        topk_logprobs=np.array([[-99999, -99999], [-1, -2]], np.float32),
    ),
)
LOGPROBS = ([1.0, 2.0], [3.0], [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], [7.0])
PASS = PassResult(
    logprobs=tuple(np.array(one, np.float32) for one in LOGPROBS), metrics={"loss:sum": -1.25, "tokens:sum": 9.0}
)


@pytest.fixture(scope="module")
def read() -> dict[str, Any]:
    """Return both messages as the tinker SDK reads them."""
    messages = {"sample": sample_response(SAMPLES).hex(), "pass": forward_backward_output(PASS).hex()}
    given = json.dumps(messages).encode()
    answer = subprocess.run([doors_python(), SDK, "decode"], input=given, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def test_the_sdk_reads_samples_and_prompt_logprobs(read):
    found = read["sample"]
    assert found["sequences"][:2] == [["stop", [7, 8], [0.0, -1.0]], ["length", [150_000], [0.0]]]
    assert found["sequences"][2][:2] == ["length", []]
    assert found["prompt_logprobs"] == [None, -1.5]
    assert found["topk"] == [[[0, 0], [4, 5]], [[-99999.0, -99999.0], [-1.0, -2.0]]]


def test_the_sdk_reads_logprobs_of_different_shapes(read):
    assert read["pass"] == {"outputs": list(LOGPROBS), "metrics": {"loss:sum": -1.25, "tokens:sum": 9.0}}


def test_the_size_of_a_message_is_known_before_it_is_written():
    assert payload_bytes(SAMPLES) == 24 + 8 + 32
    assert payload_bytes(PASS) == 40
