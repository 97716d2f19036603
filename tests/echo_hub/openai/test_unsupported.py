from __future__ import annotations

from typing import Any

import pytest

from echo_hub.openai.error_answers import UnsupportedOption, error_body
from echo_hub.openai.requests import ChatRequest, CompletionRequest, GenerateRequest
from echo_hub.tenants.refusal import Refusal

CHAT = {"model": "run", "messages": [{"role": "user", "content": "a"}]}
PROMPT = {"model": "run", "prompt": "a"}
IDS = {"model": "run", "token_ids": [1]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("top_p", 0.9),
        ("top_p", True),
        ("top_k", 20),
        ("top_k", 1),
        ("min_p", 0.1),
        ("logit_bias", {"5": 1}),
        ("best_of", 4),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("functions", [{}]),
        ("parallel_tool_calls", False),
        ("modalities", ["audio"]),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
        ("min_tokens", 1),
        ("top_logprobs", 1),
        ("mirostat_tau", 5.0),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
    ],
)
def test_options_that_would_change_samples_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedOption, match=repr(name)) as refused:
        ChatRequest.read({**CHAT, name: value})
    error = error_body(refused.value)["error"]
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported_parameter", "invalid_request_error")


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "b"), ("logprobs", 2), ("prompt_logprobs", 1)])
def test_completions_refuse_further_ones(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedOption, match=repr(name)):
        CompletionRequest.read({**PROMPT, name: value})


def test_generate_looks_into_its_sampling_params() -> None:
    with pytest.raises(UnsupportedOption, match="'top_p'"):
        GenerateRequest.read({**IDS, "sampling_params": {"top_p": 0.5}})
    with pytest.raises(UnsupportedOption, match="'features'"):
        GenerateRequest.read({**IDS, "features": {}})
    with pytest.raises(Refusal, match="not an object"):
        GenerateRequest.read({**IDS, "sampling_params": [1]})
    assert GenerateRequest.read({**IDS, "sampling_params": {"max_tokens": 3}}).max_tokens == 3


def test_values_that_change_nothing_and_harmless_options_are_accepted() -> None:
    harmless: dict[str, Any] = {
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "top_p": 1, "top_k": -1,
        "min_p": 0.0, "logit_bias": {}, "best_of": 1, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "reasoning_effort": None,
        "functions": None, "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "prompt_cache_key": "x", "safety_identifier": "y", "priority": 3, "cache_salt": "z", "seed": None, "stop": None,
        "max_tokens": None, "stream_options": None, "guided_json": None, "routed_experts_prompt_start": 4,
    }  # fmt: skip
    request = ChatRequest.read({**CHAT, **harmless})
    assert request.stop_strings == () and request.most_tokens is None and not request.reads_calls
    assert ChatRequest.read({**CHAT, "top_k": 0, "top_logprobs": 0, "logprobs": True}).logprobs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("max_tokens", 0),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop_token_ids", list(range(33))),
        ("stop_token_ids", [-1]),
        ("stream", 1),
        ("messages", []),
        ("messages", [{"role": "root", "content": "a"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [1] * 3_000),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {}}]),
        ("chat_template_kwargs", {str(number): 1 for number in range(40)}),
        ("model", ""),
        ("model", "a" * 513),
    ],
)
def test_invalid_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Refusal, match=name) as refused:
        ChatRequest.read({**CHAT, name: value})
    assert refused.value.param == name and len(str(refused.value)) < 600 and "constrained" not in str(refused.value)


def test_end_tokens_cannot_be_ignored_together_with_other_stop_tokens() -> None:
    with pytest.raises(UnsupportedOption, match="ignore_eos"):
        CompletionRequest.read({**PROMPT, "ignore_eos": True, "stop_token_ids": [3]})
