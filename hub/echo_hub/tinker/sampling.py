"""Handlers of sample requests, of outcomes and of cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, assert_never

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from echo_hub.tenants.outcomes import Failed, ModelCreated, Outcome, Pending, StepTaken, WeightsLoaded, WeightsSaved
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import PassResult, SampleResult, SamplingWish
from echo_hub.tinker.bodies import (
    MOST_PROMPT_BYTES,
    AskSample,
    FutureBody,
    FuturesBody,
    PromptChunks,
    SamplingParams,
    parse_json,
    read_json,
)
from echo_hub.tinker.results import forward_backward_output, payload_bytes, sample_response
from echo_hub.tinker.statuses import json_answer
from echo_hub.tinker.wire import Handle, TinkerWire, future, is_checked, unsupported

HOLD_S: Final = 30.0
"""Maximum number of seconds for which the hub waits before it answers a request for an outcome. The client gives up
after 45."""
INLINE_BYTES: Final = 256 * 1024
"""Size in bytes above which the hub first announces a result and sends it when asked again. This lets clients limit
parallel downloads."""
CLONE: Final = 1_000_000_000
"""Number of sequence numbers in the block that one sampler uses. A pickled copy of the sampler uses another block."""
MOST_STOPS: Final = 64
_MOST_STOP_CHARACTERS: Final = 256


class SamplingRoutes:
    """Handlers of sample requests and of cancellation."""

    def __init__(self, wire: TinkerWire) -> None:
        self._service = wire.service
        self._room = wire.room

    def routes(self) -> Iterator[tuple[str, str, Handle]]:
        """Yield (method, path below the prefix, handler)."""
        yield "POST", "/asample", self._sample
        yield "POST", "/cancel_future", self._cancel

    async def _sample(self, request: web.Request, tenant_id: str) -> web.Response:
        async with self._room.reading(tenant_id, request, MOST_PROMPT_BYTES) as raw:
            body = parse_json(raw, AskSample)
            prompt_ids = tokens_of(body.prompt)
            wish = sampling_wish(body, checked=is_checked(request))
        accepted = await self._service.sample(
            tenant_id, body.sampling_session_id, seq_id=body.seq_id, prompt_ids=prompt_ids, wish=wish
        )
        return future(accepted, sample_sequence_ids=accepted.sequence_ids)

    async def _cancel(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, FutureBody)
        await self._service.cancel(tenant_id, body.request_id)
        return json_answer({})


class RetrievalRoutes:
    """Handlers that wait for outcomes."""

    def __init__(self, wire: TinkerWire) -> None:
        self._service = wire.service

    def routes(self) -> Iterator[tuple[str, str, Handle]]:
        """Yield (method, path below the prefix, handler)."""
        yield "POST", "/retrieve_future", self._outcome
        yield "POST", "/retrieve_futures", self._finished

    async def _outcome(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, FutureBody)
        outcome = await self._service.outcome(tenant_id, body.request_id, wait_s=HOLD_S)
        if isinstance(outcome, (PassResult, SampleResult)):
            if body.allow_metadata_only and (size := payload_bytes(outcome)) > INLINE_BYTES:
                return json_answer({"status": "complete_metadata", "response_payload_size": size})
            message = (
                sample_response(outcome) if isinstance(outcome, SampleResult) else forward_backward_output(outcome)
            )
            return web.Response(body=message, content_type="application/x-protobuf")
        return json_answer(outcome_json(outcome, body.request_id))

    async def _finished(self, request: web.Request, tenant_id: str) -> web.Response:
        body = await read_json(request, FuturesBody, most=MOST_PROMPT_BYTES)
        if body.retrieved_request_ids:
            await self._service.retrieved(tenant_id, body.retrieved_request_ids)
        finished, cursor = await self._service.finished_samples(
            tenant_id,
            body.target.sampling_session_id,
            clone=body.target.cloned_sampler_id,
            cursor=body.prev_cursor,
            wait_s=HOLD_S if body.timeout is None else min(body.timeout, HOLD_S),
        )
        completions = [
            {"request_id": request_id, "state": "failed" if has_failed else "finished"}
            for request_id, has_failed in finished
        ]
        return json_answer({"completions": completions, "cursor": cursor})


def outcome_json(outcome: Outcome | Pending, request_id: str) -> dict[str, Any]:
    """Return the JSON answer of an outcome that is not a protobuf message."""
    match outcome:
        case Pending(reason=reason):
            state = (
                {"queue_state": "paused_capacity", "queue_state_reason": reason}
                if reason
                else {"queue_state": "active"}
            )
            return {"type": "try_again", "request_id": request_id, **state}
        case Failed(error=error, category=category):
            return {"error": error, "category": category}
        case ModelCreated(model_id=model_id):
            return {"type": "create_model", "model_id": model_id}
        case StepTaken(metrics=metrics):
            return {"metrics": dict(metrics)}
        case WeightsSaved(path=path, sampler_id=sampler_id):
            return {"path": path or None, "sampling_session_id": sampler_id or None}
        case WeightsLoaded(path=path, model_id=model_id):
            return {"type": "load_weights", "path": path, "model_id": model_id}
        case PassResult() | SampleResult():
            raise AssertionError("these outcomes are protobuf messages")
        case _:
            assert_never(outcome)


def tokens_of(prompt: PromptChunks) -> NDArray[np.int32]:
    """Return the token ids of all chunks. Raises Refusal for an empty prompt and for chunks without text."""
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise unsupported(
                f"prompt.chunks[{index}]",
                f"This hub takes text alone, and the prompt has a chunk of the type {chunk.type[:40]}.",
                "Leave images and audio out.",
            )
    ids: NDArray[np.int32] = np.fromiter((token for chunk in prompt.chunks for token in chunk.tokens), dtype=np.int32)
    if not len(ids):
        raise Refusal(RefusalKind.INVALID, "The prompt is empty.", do="Send at least one token.", param="prompt")
    return ids


def sampling_wish(body: AskSample, *, checked: bool) -> SamplingWish:
    """Return what the request asks for. Raises Refusal for options that this hub does not offer."""
    params = body.sampling_params
    _refuse_unsupported(body, params)
    stop_ids, stop_strings = _stops(params.stop)
    return SamplingWish(
        num_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        prompt_logprobs=bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        checked=checked,
    )


def _refuse_unsupported(body: AskSample, params: SamplingParams) -> None:
    options = {
        "top_p": (params.top_p != 1.0, "Use top_p=1: volunteers' draws are checked in the full distribution."),
        "top_k": (params.top_k > 0, "Use top_k=-1: volunteers' draws are checked in the full distribution."),
        "topk_sample_logprobs": (body.topk_sample_logprobs > 0, "Ask for topk_prompt_logprobs of the whole sequence."),
        "target_prompt_logprobs": (body.target_prompt_logprobs is not None, "Ask for topk_prompt_logprobs."),
        "prompt_alt_tokens_k": (body.prompt_alt_tokens_k > 0, "Leave it out."),
        "prompt_logprobs_last_n": (body.prompt_logprobs_last_n is not None, "Ask for prompt_logprobs of the prompt."),
    }
    for option, (is_given, do) in options.items():
        if is_given:
            raise unsupported(option, f"This hub does not offer {option}.", do)


def _stops(stop: str | list[str] | list[int] | None) -> tuple[frozenset[int] | None, tuple[str, ...]]:
    """Return the ids and the strings that end a completion. Raises Refusal."""
    if stop is None:
        return None, ()
    given = [stop] if isinstance(stop, str) else stop
    strings = tuple(one for one in given if isinstance(one, str))
    ids = frozenset(one for one in given if isinstance(one, int))
    if (
        len(given) > MOST_STOPS
        or any(not 0 < len(one) <= _MOST_STOP_CHARACTERS for one in strings)
        or min(ids, default=0) < 0
    ):
        raise Refusal(
            RefusalKind.INVALID,
            "The field stop is not valid.",
            do=f"Give at most {MOST_STOPS} token ids, or strings of 1 to {_MOST_STOP_CHARACTERS} characters.",
            param="sampling_params.stop",
        )
    return (None if strings else ids), strings
